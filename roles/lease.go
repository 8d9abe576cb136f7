package roles

import (
	"context"
	"errors"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
)

const (
	retakePause = 100 * time.Millisecond // between attempts to take a lost lease back, doubled up to
	retakeMost  = 2 * time.Second        // this
)

// takeLease is how others know that this driver lives.
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

// witness makes sure that this runtime holds a lease of its own while it judges others by theirs: what keeps a driver from
// renewing its lease, such as a full disk under the server, is then noticed here too. Drivers have one anyway; the workers' own
// runtimes take one when there is something to judge, and count the time from there.
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

// keepLease takes the lease back whenever it is lost, which is when the server could not be reached in time: nobody else
// wants it, and those who look for it wait for us.
func (rt *Runtime) keepLease() {
	for {
		select {
		case <-rt.ctx.Done():
			return
		case <-rt.currentLease().Lost():
		}
		if errors.Is(rt.currentLease().Err(), bus.ErrClosed) {
			return // with the bus, or released by Close
		}
		rt.log.Warn("roles: the driver's lease is lost; taking it back", "error", rt.currentLease().Err())
		rt.reach.block(true) // what kept us from renewing ours may have kept others from renewing theirs
		if !rt.retake() {
			return
		}
		rt.reach.block(false)
	}
}

// retake tries until the lease is ours again; it reports false when the runtime has ended.
func (rt *Runtime) retake() bool {
	for wait := retakePause; ; wait = min(2*wait, retakeMost) {
		err := rt.currentLease().Regain(rt.ctx)
		if errors.Is(err, bus.ErrConflict) { // it has expired
			err = rt.takeLease(rt.ctx)
		}
		if err == nil {
			return true
		}
		select {
		case <-rt.ctx.Done():
			return false
		case <-time.After(wait):
		}
	}
}
