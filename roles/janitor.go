package roles

import (
	"context"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
)

const (
	sweepGrace = time.Second     // for running calls of a role whose driver is dead
	sweepAgain = 5 * time.Second // before an incomplete pass is repeated
)

// janitor destroys the owned roles of drivers whose lease has ended. Every driver and every Local of the namespace runs
// it; doing it twice is harmless. The watch only wakes the loop; the registry says what to do.
func (rt *Runtime) janitor() {
	wakeCh := make(chan struct{}, 1)
	rt.spawn(func() { rt.watchDrivers(wakeCh) })
	again := time.NewTimer(0)
	defer again.Stop()
	for {
		select {
		case <-rt.ctx.Done():
			return
		case <-wakeCh:
		case <-again.C:
		}
		if wait := rt.sweep(); wait > 0 {
			again.Reset(wait)
		}
	}
}

// watchDrivers wakes the loop when a lease has ended, and after each interruption of the watch.
func (rt *Runtime) watchDrivers(wakeCh chan<- struct{}) {
	for waits := watchBackoff.Start(); rt.ctx.Err() == nil; {
		var events <-chan kv.Event
		reg, err := rt.registry(rt.ctx)
		if err == nil {
			events, err = reg.leases.Watch(rt.ctx, reg.key("driver"))
		}
		if err == nil {
			waits.Reset()
			for ev := range events {
				if ev.Kind != kv.EventPut {
					select {
					case wakeCh <- struct{}{}:
					default:
					}
				}
			}
		} else if rt.ctx.Err() == nil {
			rt.log.Warn("roles: watching the leases of drivers failed; retrying", "error", err)
		}
		_ = waits.Wait(rt.ctx) // the loop checks the context
	}
}

// sweep destroys every role whose driver is known to be dead, and returns the wait until the next pass; zero: none is
// needed.
func (rt *Runtime) sweep() time.Duration {
	ctx, cancel := context.WithTimeout(rt.ctx, 3*lastActs)
	defer cancel()
	reg, err := rt.registry(ctx)
	if err != nil {
		return sweepAgain
	}
	all, err := reg.list(ctx)
	if err != nil && rt.ctx.Err() == nil {
		rt.log.Warn("roles: reading a part of the registry failed", "error", err)
	}
	alive := map[string]bool{}
	var group sync.WaitGroup
	var mu sync.Mutex
	var again time.Duration
	look := func(d time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		if again == 0 || d < again {
			again = d
		}
	}
	for _, rec := range all {
		if _, known := alive[rec.Owner]; !known {
			alive[rec.Owner] = reg.alive(ctx, rec.Owner)
		}
		if alive[rec.Owner] {
			continue
		}
		if rec.Detached {
			rt.watchOver(rec)
			continue
		}
		if !reg.gone(ctx, rec.Owner) {
			left := sweepAgain
			if rt.witness(ctx) == nil {
				left = min(left, rt.reach.missing(rec.Lease))
			}
			if left > 0 {
				look(left) // the death may be proved meanwhile
				continue
			}
		}
		group.Go(bus.Guard(func() {
			rt.log.Warn("roles: the driver is dead; destroying its role", "role", rec.Name, "driver", rec.By)
			if err := rt.sweepRole(ctx, rec); err != nil && ctx.Err() == nil {
				rt.log.Warn("roles: destroying a dead driver's role failed", "role", rec.Name, "error", err)
				look(sweepAgain)
			}
		}))
	}
	group.Wait()
	if wait := rt.sweepHolds(ctx, reg); wait > 0 {
		look(wait)
	}
	if err != nil && rt.ctx.Err() == nil {
		look(sweepAgain)
	}
	return again
}

// sweepHolds releases the reservations of drivers that are known to be dead, after the roles that share their devices.
func (rt *Runtime) sweepHolds(ctx context.Context, reg registry) (again time.Duration) {
	holds, err := reg.holds(ctx)
	if err != nil {
		return sweepAgain
	}
	for _, h := range holds {
		if reg.alive(ctx, h.Owner) {
			continue
		}
		wait := sweepAgain
		if rt.witness(ctx) == nil {
			wait = min(wait, rt.reach.missing(h.Lease))
		}
		if wait == 0 || reg.gone(ctx, h.Owner) {
			wait = 0
			rt.log.Warn("roles: the driver is dead; releasing its reservation", "reservation", h.ID, "driver", h.By)
			if err := rt.sweepHold(ctx, h); err != nil && ctx.Err() == nil {
				rt.log.Warn("roles: releasing a dead driver's reservation failed", "reservation", h.ID, "error", err)
				wait = sweepAgain
			}
		}
		if wait > 0 && (again == 0 || wait < again) {
			again = wait
		}
	}
	return again
}

// needsWatch reports whether a process other than the driver monitors the role: to restart its workers when the driver
// cannot, or, if the driver of a detached role is dead, to record a failure and stop the other workers.
func (rec Record) needsWatch(driverLives bool) bool {
	switch {
	case !rec.Process:
		return false
	case rec.State == RoleReady || rec.State == RoleRestarting:
		return rec.restarts() || rec.Detached && !driverLives
	case rec.State == RoleFailed:
		return rec.Detached && !driverLives && len(rec.Held) > 0
	}
	return false
}

// WatchOver monitors the roles of the namespace whose policy restarts workers, also while their drivers live: a driver
// may be disconnected. A head calls it periodically; it may be repeated.
func (rt *Runtime) WatchOver(ctx context.Context) error {
	reg, err := rt.registry(ctx)
	if err != nil {
		return err
	}
	all, err := reg.list(ctx)
	for _, rec := range all {
		if rec.needsWatch(reg.alive(ctx, rec.Owner)) {
			rt.watchOver(rec)
		}
	}
	return err
}

// watchOver monitors a role of processes until it ends.
func (rt *Runtime) watchOver(rec Record) {
	if !rec.needsWatch(false) {
		return
	}
	rt.mu.Lock()
	for c := range rt.clusters {
		if c.to == rec.Address() && c.tie == followed {
			rt.mu.Unlock()
			return
		}
	}
	rt.mu.Unlock()
	c, err := rt.newCluster(rec, followed, Spec{}.withDefaults())
	switch {
	case err != nil && rt.ctx.Err() == nil:
		rt.log.Warn("roles: monitoring a role failed", "role", rec.Name, "error", err)
	case err != nil:
	case rec.State == RoleRestarting:
		c.holdFor(rec, nil)
		c.restartNews()
	case rec.State == RoleFailed: // its driver died before it stopped the workers
		c.end(rec.failure())
		rt.spawn(func() { c.endFailed(); c.release() })
	}
}

// sweepRole destroys a role whose driver is dead. Its workers may run elsewhere, or have died with the driver.
func (rt *Runtime) sweepRole(ctx context.Context, rec Record) error {
	c, err := rt.newCluster(rec, attached, Spec{StopGrace: sweepGrace})
	if err != nil {
		return err
	}
	defer c.release()
	return c.Destroy(ctx)
}
