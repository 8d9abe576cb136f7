package registry

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/nodes/evidence"
)

// exitSeen is the proof of a driver whose process this host, or the agent of the worker, has seen end.
const exitSeen = "its process has exited"

// leaseEnder ends the leases of drivers that are known to be dead. One goroutine owns it.
type leaseEnder struct {
	log    *slog.Logger
	proofs []proof
}

// proof is the key of a driver that is known to be dead.
type proof struct {
	lease *kv.Lease
	until time.Time
}

// end writes the proof that a driver is dead, and ends its lease of that revision. False: it may be tried again. A lease that was renewed
// meanwhile stays.
func (e *leaseEnder) end(ctx context.Context, reg Registry, session, name string, revision uint64, why string) bool {
	e.log.Warn("roles: a driver died; ending its lease", "driver", name, "namespace", reg.namespace, "why", why)
	e.writeProof(ctx, reg, session, why)
	ctx, cancel := context.WithTimeout(ctx, operationTimeout)
	defer cancel()
	err := reg.leases.Delete(ctx, reg.key(driverKey(session)), revision)
	if err != nil && !errors.Is(err, bus.ErrConflict) && ctx.Err() == nil {
		e.log.Warn("roles: ending the lease of a dead driver failed; retrying", "driver", name, "error", err)
	}
	return err == nil
}

// writeProof writes the proof: with it, a missing lease needs no grace period. The proof is a lease too, so that it ends
// with this process at the latest.
func (e *leaseEnder) writeProof(ctx context.Context, reg Registry, session, why string) {
	ctx, cancel := context.WithTimeout(ctx, operationTimeout)
	defer cancel()
	lease, err := reg.leases.Lease(ctx, reg.key(proofKey(session)), []byte(why), evidence.DriverProof)
	if err == nil {
		e.proofs = append(e.proofs, proof{lease, time.Now().Add(evidence.DriverProof)})
	} else if !errors.Is(err, bus.ErrExists) { // another watch may have written it
		e.log.Debug("roles: writing the proof of a driver's death failed; its roles end later", "session", session, "error", err)
	}
}

// dropProofs releases expired proofs; at the zero time all.
func (e *leaseEnder) dropProofs(now time.Time) {
	for len(e.proofs) > 0 && (now.IsZero() || now.After(e.proofs[0].until)) {
		ctx, cancel := context.WithTimeout(context.Background(), operationTimeout)
		_ = e.proofs[0].lease.Release(ctx) // otherwise it expires
		cancel()
		e.proofs = e.proofs[1:]
	}
}
