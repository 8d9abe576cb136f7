package roles

import (
	"context"
	"errors"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/roles/registry"
)

// regainBackoff paces attempts to regain a lost lease.
var regainBackoff = bus.Backoff{First: 100 * time.Millisecond, Most: 2 * time.Second}

// acquireLease acquires the lease that says that this driver lives.
func (rt *Runtime) acquireLease(ctx context.Context) error {
	reg, err := rt.registry(ctx)
	if err != nil {
		return err
	}
	lease, err := reg.AcquireLease(ctx, rt.ep.Session(), rt.cfg.Name, rt.cfg.Lease, rt.worker)
	if err != nil {
		return err
	}
	rt.announce()
	rt.mu.Lock()
	defer rt.mu.Unlock()
	rt.lease = lease
	return nil
}

// announce tells the agents of this host that this driver lives.
func (rt *Runtime) announce() {
	registry.Announce(rt.bus, rt.cfg.Namespace, rt.ep.Session(), rt.cfg.Name, rt.worker)
}

// ensureLease acquires a lease for this runtime: before it judges drivers by theirs, because what prevents renewals, such as a
// full disk of the server, is then noticed here too; and before it creates roles. Drivers have one anyway; runtimes of workers
// acquire one on first use, and count the server's uptime from there.
func (rt *Runtime) ensureLease(ctx context.Context) error {
	rt.leaseMu.Lock()
	defer rt.leaseMu.Unlock()
	if rt.currentLease() != nil {
		return nil
	}
	if err := rt.acquireLease(ctx); err != nil {
		return err
	}
	rt.uptime.Restart()
	rt.spawn(rt.maintainLease)
	rt.spawn(rt.runClaims)
	return nil
}

func (rt *Runtime) currentLease() *kv.Lease {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	return rt.lease
}

// maintainLease regains the lease whenever it is lost, which happens when the server was unreachable for too long, and announces the
// driver to its host.
func (rt *Runtime) maintainLease() {
	announce := time.NewTicker(registry.AnnounceEvery)
	defer announce.Stop()
	for {
		select {
		case <-rt.ctx.Done():
			return
		case <-announce.C:
			rt.announce()
			continue
		case <-rt.currentLease().Lost():
		}
		if errors.Is(rt.currentLease().Err(), bus.ErrClosed) {
			return // the bus was closed, or the lease released by Close
		}
		rt.log.Warn("roles: the driver's lease is lost; regaining it", "error", rt.currentLease().Err())
		rt.uptime.Block(true) // other drivers may have been unable to renew theirs too
		if !rt.regainLease() {
			return
		}
		rt.uptime.Block(false)
		rt.claimAgain()
	}
}

// awaitLease returns when the runtime has its lease, after at most limit: others would take what it creates without one for a dead driver's.
func (rt *Runtime) awaitLease(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return bus.Retry(ctx, bus.Backoff{}, func() error {
		err := rt.currentLease().Err()
		if errors.Is(err, bus.ErrClosed) {
			return bus.Permanent(err)
		}
		return err
	})
}

// regainLease regains the lease; false: the runtime has ended.
func (rt *Runtime) regainLease() bool {
	return bus.Retry(rt.ctx, regainBackoff, func() error {
		err := rt.currentLease().Regain(rt.ctx)
		if errors.Is(err, bus.ErrConflict) { // expired
			err = rt.acquireLease(rt.ctx)
		}
		return err
	}) == nil
}
