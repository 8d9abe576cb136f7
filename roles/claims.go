package roles

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"troupe/bus"
	"troupe/nodes/evidence"
	"troupe/placement"
	"troupe/roles/registry"
)

// claimBackoff paces attempts to say again what this process holds.
var claimBackoff = bus.Backoff{First: 100 * time.Millisecond, Most: 2 * time.Second}

// runClaims says again what this process holds whenever the connection or its lease is back: the head may have started with an older or
// an empty store. It costs a few requests when nothing was lost.
func (rt *Runtime) runClaims() {
	upCh, stop := rt.bus.Connections()
	defer stop()
	for {
		select {
		case <-rt.ctx.Done():
			return
		case up := <-upCh:
			rt.unclaimed.Store(true)
			if !up {
				continue
			}
		case <-rt.claimCh:
		}
		ctx, cancel := context.WithTimeout(rt.ctx, evidence.Unclaimed)
		err := bus.Retry(ctx, claimBackoff, func() error { return rt.claimAll(ctx) })
		cancel()
		rt.unclaimed.Store(false)
		if err != nil && rt.ctx.Err() == nil {
			rt.log.Warn("roles: the head has not taken everything that this process holds", "error", err)
		}
	}
}

// claimAgain makes runClaims say again what this process holds. Until then a missing record is no evidence.
func (rt *Runtime) claimAgain() {
	rt.unclaimed.Store(true)
	select {
	case rt.claimCh <- struct{}{}:
	default:
	}
}

// claimAll writes the records that the registry lacks, and confirms the reservations.
func (rt *Runtime) claimAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*registryTimeout)
	defer cancel()
	reg, err := rt.registry(ctx)
	if err != nil {
		return err
	}
	rt.mu.Lock()
	clusters := make([]*Cluster, 0, len(rt.clusters))
	for c := range rt.clusters {
		clusters = append(clusters, c)
	}
	var holds []registry.DriverReservation
	for _, h := range rt.holds {
		holds = append(holds, h)
	}
	rt.mu.Unlock()
	errs := []error{rt.endGhosts(ctx, reg, clusters)}
	var held []placement.ReservationRef
	for _, h := range holds {
		if err := reg.CreateReservation(ctx, h); err != nil && !errors.Is(err, bus.ErrExists) {
			errs = append(errs, err)
		}
	}
	for _, c := range clusters {
		if !c.claims() {
			continue
		}
		errs = append(errs, c.claim(ctx, reg))
		for _, r := range c.Record().Reservations {
			held = append(held, placement.ReservationRef{ID: r.ID, Token: r.Token})
		}
	}
	if rt.services.used() {
		client, err := rt.placement()
		if err == nil {
			held, err = client.Claim(ctx, held)
		}
		for _, h := range held {
			if !slices.ContainsFunc(clusters, func(c *Cluster) bool { return c.claims() && c.holds(h) }) {
				continue // its role has ended meanwhile
			}
			rt.log.Warn("roles: the placement service does not have a reservation of this process, and cannot restore it", "reservation", h.ID)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// endGhosts ends the roles and reservations of this process that it has ended before: an older store has their records again.
func (rt *Runtime) endGhosts(ctx context.Context, reg registry.Registry, clusters []*Cluster) error {
	const why = "its driver has ended it before, and an older record of it was restored"
	ended := map[string]bool{} // by incarnation
	for _, rec := range rt.createdRoles.all() {
		ended[rec.Incarnation] = !rec.Detached && !slices.ContainsFunc(clusters, func(c *Cluster) bool { return c.to.Incarnation == rec.Incarnation })
	}
	all, err := reg.List(ctx)
	errs := []error{err}
	for _, rec := range all {
		if rec.Owner == rt.ep.Session() && ended[rec.Incarnation] && rec.State != registry.RoleStarting {
			rt.emitEnd(rec.Name, "the role ends: "+why)
			errs = append(errs, rt.endRole(ctx, rec))
		}
	}
	holds, err := reg.DriverReservations(ctx)
	errs = append(errs, err)
	for _, h := range holds {
		rt.mu.Lock()
		_, held := rt.holds[h.ID]
		rt.mu.Unlock()
		if h.Owner == rt.ep.Session() && !held {
			rt.emitEnd("", fmt.Sprintf("reservation %s ends: %s", h.ID, why))
			errs = append(errs, rt.releaseDriverReservation(ctx, h))
		}
	}
	return errors.Join(errs...)
}

// claims reports whether this process speaks for the role: it created it, or uses a detached one, and knows it to run.
func (c *Cluster) claims() bool {
	rec := c.Record()
	return !c.life.isOver() && (c.origin == created || c.origin == attached && rec.Detached) && (rec.State == registry.RoleReady || rec.State == registry.RoleRestarting)
}

func (c *Cluster) holds(h placement.ReservationRef) bool {
	return slices.ContainsFunc(c.Record().Reservations, func(r registry.ReservationRef) bool { return r.ID == h.ID && r.Token == h.Token })
}

// claim writes what the registry lacks of a role. Its workers must run: the end of a role by another process removes the record last.
func (c *Cluster) claim(ctx context.Context, reg registry.Registry) error {
	if !c.liveness.beating(2 * evidence.WorkerBeat) {
		return bus.Errorf(bus.CodeUnavailable, "not all workers of role %s have been heard of since the connection is back", c.Name())
	}
	claimed, err := reg.Claim(ctx, c.Record())
	if err != nil || !claimed || c.life.isOver() {
		return err
	}
	c.rt.log.Warn("roles: the registry had lost a role that runs; it is written again", "role", c.Name())
	c.output.emit(eventClaimed, nil, "", "the registry had lost the role or had an older record of it; "+c.rt.cfg.Name+" has written it again")
	c.replayer.again(c.replayer.storeReplay)
	return c.workforce.putStartParams(ctx)
}

// beating reports whether every worker that has not ended has sent a heartbeat within a time, and one at least has.
func (l *liveness) beating(within time.Duration) bool {
	away, _ := l.cluster.gate.Away() // ranks that are restarted
	ranks, _ := l.cluster.life.ranks()
	l.mu.Lock()
	defer l.mu.Unlock()
	some := false
	for rank, k := range ranks {
		sign := l.signLocked(rank)
		switch {
		case k.State.Over() || slices.Contains(away, rank):
		case time.Since(sign.at) > within || sign.State == "": // expected since then, or never heard
			return false
		default:
			some = true
		}
	}
	return some
}
