package roles

import (
	"context"
	"fmt"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/nodes"
	"troupe/nodes/evidence"
	"troupe/placement"
	"troupe/roles/registry"
)

const (
	orphanGrace = 500 * time.Millisecond // for running calls of a role whose driver is dead, and between the signals after it
	reapAgain   = 5 * time.Second        // before an incomplete pass is repeated
)

// watchBackoff paces attempts to watch the leases again.
var watchBackoff = bus.Backoff{First: time.Second, Most: reapAgain}

// runOrphanReaper destroys the owned roles of drivers whose lease has ended. Every driver and every Local of the namespace runs
// it; doing it twice is harmless. The watch only wakes the loop; the registry says what to do.
func (rt *Runtime) runOrphanReaper() {
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
		if wait := rt.reapOrphans(); wait > 0 {
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
			events, err = reg.WatchDrivers(rt.ctx)
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

// reapOrphans destroys every role whose driver is known to be dead, and returns the wait until the next pass; zero: none is
// needed.
func (rt *Runtime) reapOrphans() time.Duration {
	ctx, cancel := context.WithTimeout(rt.ctx, 3*closeTimeout)
	defer cancel()
	reg, err := rt.registry(ctx)
	if err != nil {
		return reapAgain
	}
	all, err := reg.List(ctx)
	if err != nil && rt.ctx.Err() == nil {
		rt.log.Warn("roles: reading a part of the registry failed", "error", err)
	}
	judged := map[registry.Owned]evidence.Verdict{}
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
		v, known := judged[rec.Owned()]
		if !known {
			v = rt.judgeDriver(ctx, reg, rec.Owned())
			judged[rec.Owned()] = v
		}
		if rec.Detached {
			if v != (evidence.Verdict{}) {
				rt.monitorRole(rec)
			}
			continue
		}
		if !v.Dead {
			if v.Wait > 0 {
				look(min(v.Wait, reapAgain)) // the death may be proved meanwhile
			}
			continue
		}
		group.Go(bus.Guard(func() {
			rt.log.Warn("roles: the driver is dead; destroying its role", "role", rec.Name, "driver", rec.By, "why", v.Why)
			rt.emitEnd(rec.Name, fmt.Sprintf("the role ends: its driver %s is dead: %s", rec.By, v.Why))
			if err := rt.endRole(ctx, rec); err != nil && ctx.Err() == nil {
				rt.log.Warn("roles: destroying a dead driver's role failed", "role", rec.Name, "error", err)
				look(reapAgain)
			}
		}))
	}
	group.Wait()
	if wait := rt.reapReservations(ctx, reg); wait > 0 {
		look(wait)
	}
	if err != nil && rt.ctx.Err() == nil {
		look(reapAgain)
	}
	return again
}

// judgeDriver decides whether a driver is dead. This process holds a lease itself then: what prevents renewals is noticed here too.
func (rt *Runtime) judgeDriver(ctx context.Context, reg registry.Registry, o registry.Owned) evidence.Verdict {
	v := reg.JudgeDriver(ctx, o, 0) // dead already if its end was seen
	if v.Wait > 0 && rt.ensureLease(ctx) == nil {
		return reg.JudgeDriver(ctx, o, rt.uptime.Heard())
	}
	return v
}

// emitEnd says why something of a dead driver ends.
func (rt *Runtime) emitEnd(role, text string) {
	if err := nodes.Emit(rt.bus, nodes.Event{Kind: eventOrphaned, Namespace: rt.cfg.Namespace, Role: role, Text: text}); err != nil {
		rt.log.Debug("roles: publishing an event failed", "kind", eventOrphaned, "error", err)
	}
}

// reapReservations releases the reservations of drivers that are known to be dead, after the roles that share their devices.
func (rt *Runtime) reapReservations(ctx context.Context, reg registry.Registry) (again time.Duration) {
	holds, err := reg.DriverReservations(ctx)
	if err != nil {
		return reapAgain
	}
	for _, h := range holds {
		v := rt.judgeDriver(ctx, reg, h.Owned())
		wait := min(v.Wait, reapAgain)
		if v.Dead {
			rt.log.Warn("roles: the driver is dead; releasing its reservation", "reservation", h.ID, "driver", h.By, "why", v.Why)
			rt.emitEnd("", fmt.Sprintf("reservation %s ends: its driver %s is dead: %s", h.ID, h.By, v.Why))
			if err := rt.releaseDriverReservation(ctx, h); err != nil && ctx.Err() == nil {
				rt.log.Warn("roles: releasing a dead driver's reservation failed", "reservation", h.ID, "error", err)
				wait = reapAgain
			}
		}
		if wait > 0 && (again == 0 || wait < again) {
			again = wait
		}
	}
	return again
}

// MonitorRoles monitors the roles of the namespace whose policy restarts workers, also while their drivers live: a driver
// may be disconnected. A head calls it periodically; it may be repeated.
func (rt *Runtime) MonitorRoles(ctx context.Context) error {
	reg, err := rt.registry(ctx)
	if err != nil {
		return err
	}
	all, err := reg.List(ctx)
	for _, rec := range all {
		if rec.NeedsMonitor(reg.DriverAlive(ctx, rec.Owner)) {
			rt.monitorRole(rec)
		}
	}
	return err
}

// monitorRole monitors a role of processes until it ends.
func (rt *Runtime) monitorRole(rec registry.RoleRecord) {
	if !rec.NeedsMonitor(false) {
		return
	}
	c, err := rt.newMonitor(rec)
	switch {
	case c == nil && err == nil: // there is one
	case err != nil && rt.ctx.Err() == nil:
		rt.log.Warn("roles: monitoring a role failed", "role", rec.Name, "error", err)
	case err != nil:
	case rec.State == registry.RoleRestarting:
		c.holdRestarting(rec, nil)
		c.restartChanged()
	case rec.State == registry.RoleFailed: // its driver died before it stopped the workers
		c.end(rec.Failure())
		rt.spawn(func() { c.killFailed(); c.release() })
	}
}

// newMonitor makes the cluster that monitors a role; nil: there is one. Two of them would restart the same workers, each anew
// whenever it sees the restart of the other.
func (rt *Runtime) newMonitor(rec registry.RoleRecord) (*Cluster, error) {
	rt.monitorMu.Lock()
	defer rt.monitorMu.Unlock()
	rt.mu.Lock()
	for c := range rt.clusters {
		if c.to == rec.Address() && c.origin == followed {
			rt.mu.Unlock()
			return nil, nil
		}
	}
	rt.mu.Unlock()
	return rt.newCluster(rec, followed, Spec{}.withDefaults())
}

// EndRole destroys a role by its record, also one whose start was interrupted: for a service whose earlier process has created it.
func (rt *Runtime) EndRole(ctx context.Context, rec registry.RoleRecord) error {
	return rt.endRole(ctx, rec)
}

// endRole destroys a role whose driver is dead or closes. Its workers may run elsewhere, or have died with the driver.
func (rt *Runtime) endRole(ctx context.Context, rec registry.RoleRecord) error {
	c, err := rt.newCluster(rec, ending, Spec{StopGrace: orphanGrace})
	if err != nil {
		return err
	}
	defer c.release()
	if rt.killing.Load() {
		return c.Kill(ctx)
	}
	return c.destroy(ctx, orphanGrace, stopSoon)
}

// confirmReservations tells the placement service which of its unconfirmed reservations are in use: by a role whose
// driver lives or that is detached, or by a live driver itself. The service drops the others unless workers run on
// them. A head calls it every few seconds; without unconfirmed reservations it costs one request.
func confirmReservations(ctx context.Context, b *bus.Bus) error {
	client, err := placement.NewClient(b, "")
	if err != nil {
		return err
	}
	defer client.Close()
	if status, err := client.Ledger(ctx); err != nil || status.Unconfirmed == 0 {
		return err
	}
	list, err := client.List(ctx)
	if err != nil {
		return err
	}
	reg, err := registry.Open(ctx, b, "")
	if err != nil {
		return err
	}
	var held []placement.ReservationRef
	for _, r := range list.Records {
		if r.Unconfirmed == "" || r.Namespace == "" {
			continue
		}
		if stands, err := reg.Of(r.Namespace).ReservationInUse(ctx, r.ID); err != nil {
			return err
		} else if stands {
			held = append(held, placement.ReservationRef{ID: r.ID, Token: r.Token})
		}
	}
	if len(held) == 0 {
		return nil
	}
	_, err = client.Confirm(ctx, held)
	return err
}
