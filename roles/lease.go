package roles

import (
	"context"
	"errors"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
)

// retakeBackoff paces attempts to regain a lost lease.
var retakeBackoff = bus.Backoff{First: 100 * time.Millisecond, Most: 2 * time.Second}

// takeLease acquires the lease that says that this driver lives.
func (rt *Runtime) takeLease(ctx context.Context) error {
	reg, err := rt.registry(ctx)
	if err != nil {
		return err
	}
	lease, err := reg.leases.Lease(ctx, reg.key(driverKey(rt.ep.Session())), rt.leaseValue(), rt.cfg.Lease)
	if err != nil {
		return err
	}
	rt.mu.Lock()
	defer rt.mu.Unlock()
	rt.lease = lease
	return nil
}

// witness acquires a lease for this runtime before it judges drivers by theirs: what prevents renewals, such as a full
// disk of the server, is then noticed here too. Drivers have one anyway; runtimes of workers acquire one on first use,
// and count the server's uptime from there.
func (rt *Runtime) witness(ctx context.Context) error {
	if rt.currentLease() != nil {
		return nil
	}
	if err := rt.takeLease(ctx); err != nil {
		return err
	}
	rt.reach.restart()
	rt.spawn(rt.keepLease)
	return nil
}

func (rt *Runtime) currentLease() *kv.Lease {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	return rt.lease
}

// keepLease regains the lease whenever it is lost, which happens when the server was unreachable for too long.
func (rt *Runtime) keepLease() {
	for {
		select {
		case <-rt.ctx.Done():
			return
		case <-rt.currentLease().Lost():
		}
		if errors.Is(rt.currentLease().Err(), bus.ErrClosed) {
			return // the bus was closed, or the lease released by Close
		}
		rt.log.Warn("roles: the driver's lease is lost; regaining it", "error", rt.currentLease().Err())
		rt.reach.block(true) // other drivers may have been unable to renew theirs too
		if !rt.retake() {
			return
		}
		rt.reach.block(false)
	}
}

// retake regains the lease; false: the runtime has ended.
func (rt *Runtime) retake() bool {
	return bus.Retry(rt.ctx, retakeBackoff, func() error {
		err := rt.currentLease().Regain(rt.ctx)
		if errors.Is(err, bus.ErrConflict) { // expired
			err = rt.takeLease(rt.ctx)
		}
		return err
	}) == nil
}
