package registry

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/nodes"
	"troupe/nodes/evidence"
)

func driverKey(session string) string { return "driver." + session }

// proofKey is the key of the proof that a driver is dead, beside its lease.
func proofKey(session string) string { return "gone." + session }

// AcquireLease acquires the lease that says that this process lives: a driver, or a worker that has created roles.
func (g Registry) AcquireLease(ctx context.Context, session, name string, lifetime time.Duration, worker *nodes.WorkerID) (*kv.Lease, error) {
	p := thisProcess(name, worker)
	p.Lease = lifetime
	value, err := json.Marshal(p)
	if err != nil {
		value = []byte(name) // a name that JSON cannot encode
	}
	return g.leases.Lease(ctx, g.key(driverKey(session)), value, lifetime)
}

// WatchDrivers sends the changes of the drivers' leases, until ctx ends or the watch is interrupted.
func (g Registry) WatchDrivers(ctx context.Context) (<-chan kv.Event, error) {
	return g.leases.Watch(ctx, g.key("driver"))
}

// DriverAlive reports whether a driver's lease exists; true if unknown.
func (g Registry) DriverAlive(ctx context.Context, session string) bool {
	_, err := g.leases.Get(ctx, g.key(driverKey(session)))
	return !errors.Is(err, bus.ErrNotFound)
}

// Owned is what ends with a driver: a role or a reservation.
type Owned struct {
	Driver string        // its session
	Lease  time.Duration // of the driver
	Since  time.Time     // of the entry
}

// JudgeDriver decides whether the driver that owns something is dead. heard is Uptime.Heard. A missing lease of a driver that lived before
// the leases were lost, as after a restore, is only the end of the driver if it has not come back for evidence.Unclaimed.
func (g Registry) JudgeDriver(ctx context.Context, o Owned, heard time.Duration) evidence.Verdict {
	if g.DriverAlive(ctx, o.Driver) {
		return evidence.Verdict{}
	}
	signs, limit := evidence.Signs{Heard: heard, Silence: math.MaxInt64}, cmp.Or(o.Lease, evidence.DriverLease)
	if proof, err := g.leases.Get(ctx, g.key(proofKey(o.Driver))); err == nil {
		signs.Exit = cmp.Or(string(proof.Value), "it is known to have ended")
	} else if made, err := g.leases.Created(ctx); err != nil || o.Since.Before(made) {
		limit = max(limit, evidence.Unclaimed)
	}
	v := evidence.Judge(signs, evidence.Limits{Silence: limit})
	if v.Dead && signs.Exit == "" {
		v.Why = fmt.Sprintf("it has had no lease for %v", limit)
	}
	return v
}

// DriverLease is the lease of a driver as an observer sees it.
type DriverLease struct {
	Namespace string
	Session   string
	Driver    string // for display
	Lifetime  time.Duration
	Remaining time.Duration // unless it is renewed
}

// DriverLeases lists the leases of the drivers of all namespaces, for tools of operators.
func DriverLeases(ctx context.Context, b *bus.Bus) ([]DriverLease, error) {
	reg, err := Open(ctx, b, "")
	if err != nil {
		return nil, err
	}
	held, err := reg.leases.Leases(ctx)
	if err != nil {
		return nil, err
	}
	var out []DriverLease
	for _, l := range held {
		namespace, rest, _ := strings.Cut(l.Key, ".")
		kind, session, _ := strings.Cut(rest, ".")
		if kind == "driver" {
			out = append(out, DriverLease{Namespace: namespace, Session: session, Driver: cmp.Or(readDriverProcess(l.Value).Name, session), Lifetime: l.Lifetime, Remaining: l.Remaining})
		}
	}
	return out, nil
}
