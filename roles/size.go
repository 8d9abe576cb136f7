package roles

import (
	"context"
	"errors"
	"fmt"

	"troupe/bus"
	"troupe/dispatch"
	"troupe/placement"
	"troupe/roles/registry"
)

// applyMesh applies the mesh of the record; pending calls keep the one they were sent with.
func (c *Cluster) applyMesh(rec registry.RoleRecord) {
	c.liveness.resize(rec.World)
	c.shape.Store(&dispatch.Group{
		Endpoint: c.rt.ep, To: c.to, Mesh: rec.Mesh, MeshName: defaultMesh, Ordered: rec.Ordered, GensFunc: c.liveness.generations, Gate: &c.gate,
	})
	c.liveness.notifyChanged()
}

// Grow adds n workers to a role of processes, with a reservation of their own, as its last ranks: more data-parallel
// replicas. Its other workers are not affected. Attached drivers see the new size with the first heartbeat of a new
// worker.
func (c *Cluster) Grow(ctx context.Context, n int) error {
	mesh, err := c.resized(n)
	if err != nil {
		return err
	}
	if err := c.lockDestroy(ctx); err != nil {
		return err
	}
	defer func() { <-c.destroyCh }()
	ctx, cancel := context.WithTimeout(ctx, c.spec.StartTimeout)
	defer cancel()
	first := c.Record().World
	if err := c.reserveMore(ctx, n); err != nil {
		return err
	}
	rec := c.Record()
	rec.World, rec.Mesh = first+n, mesh // for the assignments of the new workers
	c.liveness.resize(rec.World)
	ranks := rec.AllRanks()[first:]
	for _, rank := range ranks {
		c.liveness.expect(rank, rec.Placements[rank].Gen)
	}
	if err = c.launch(ctx, ranks, rec); err == nil {
		err = c.awaitReady(ctx, ranks)
	}
	if err == nil {
		err = c.probe(ctx, ranks, mesh)
	}
	if err == nil {
		err = c.edit(ctx, func(r *registry.RoleRecord) { r.World, r.Mesh = rec.World, mesh })
	}
	if err != nil {
		c.removeFrom(context.WithoutCancel(ctx), first)
		return err
	}
	c.applyMesh(rec)
	c.liveness.expectAll()
	return nil
}

// Shrink stops the last n workers of a role of processes; running calls may finish within the spec's grace.
func (c *Cluster) Shrink(ctx context.Context, n int) error {
	if n <= 0 {
		return bus.Errorf(bus.CodeInvalid, "role %s: shrink by %d workers: the number must be positive", c.Name(), n)
	}
	mesh, err := c.resized(-n)
	if err != nil {
		return err
	}
	if err := c.lockDestroy(ctx); err != nil {
		return err
	}
	defer func() { <-c.destroyCh }()
	if err := c.edit(ctx, func(r *registry.RoleRecord) { r.World, r.Mesh = mesh.World(), mesh }); err != nil {
		return err
	}
	rec := c.Record()
	c.applyMesh(rec) // no new call goes to the removed ranks
	leaving := rec.PlacedRanks()[rec.World:]
	for _, rank := range leaving {
		c.liveness.retire(rank)
	}
	err = c.stopProcesses(ctx, leaving, c.spec.StopGrace, stopInOrder)
	c.removeFrom(ctx, rec.World)
	return err
}

// resized is the mesh of the role with n more workers.
func (c *Cluster) resized(n int) (dispatch.Mesh, error) {
	rec := c.Record()
	replica := rec.Mesh.TP * rec.Mesh.CP
	refuse := func(why string, args ...any) (dispatch.Mesh, error) {
		return rec.Mesh, bus.Errorf(bus.CodeInvalid, "role %s cannot be resized: "+why, append([]any{c.Name()}, args...)...)
	}
	switch {
	case !rec.Process:
		return refuse("its workers are goroutines of its driver's process")
	case c.origin != created:
		return refuse("another driver created it, and has the start parameters of its workers")
	case rec.State == registry.RoleRestarting:
		return refuse("workers are being restarted; wait until it is ready")
	case rec.Ordered:
		return refuse("it is ordered, and the size of a sequencer is fixed")
	case rec.Mesh.PP > 1:
		return refuse("with %d pipeline stages its ranks would have to be renumbered", rec.Mesh.PP)
	case n%replica != 0:
		return refuse("a replica has %d workers (tp × cp), and %d is not a multiple", replica, n)
	case rec.World+n < 1:
		return refuse("it has %d workers and would have none; destroy it instead", rec.World)
	}
	mesh := rec.Mesh
	mesh.DP = 0
	return mesh.Resolve(rec.World + n)
}

// reserveMore reserves for more workers and records their placements. The role's size is unchanged until they are
// ready.
func (c *Cluster) reserveMore(ctx context.Context, n int) error {
	client, err := c.rt.placement()
	if err != nil {
		return err
	}
	rec := c.Record()
	request := c.spec.Process.request(rec)
	if request.Mapping != nil && len(request.Mapping.Devices) > 0 {
		return bus.Errorf(bus.CodeInvalid, "role %s has an exact device mapping without devices for more workers", c.Name())
	}
	request.ID = fmt.Sprintf("%s-%d", rec.ReservationID(), rec.Generations+1)
	request.FirstRank, request.Mapping = rec.World, nil
	bundle := placement.Bundle{}
	if len(request.Bundles) > 0 {
		bundle = request.Bundles[len(request.Bundles)-1]
	}
	request.Bundles = placement.Repeat(n, bundle)
	got, err := c.reserveOne(ctx, client, request)
	if err != nil {
		return err
	}
	held := registry.ReservationRef{ID: got.ID, Token: got.Token, Over: got.SharesWith}
	err = c.edit(ctx, func(r *registry.RoleRecord) {
		r.Generations++
		placements := placementsOf(r.Name, got.Workers)
		for i := range placements {
			placements[i].Gen, placements[i].Reservation = r.Generations, len(r.Reservations)
		}
		r.Reservations = append(r.Reservations, held)
		r.Placements = append(r.Placements[:r.World], placements...)
	})
	if err == nil {
		return nil
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	return errors.Join(err, release(last, client, []registry.ReservationRef{held})) // it is not in the record
}

// removeFrom kills the workers from one rank on, releases reservations that only they used, and removes them from the
// record.
func (c *Cluster) removeFrom(ctx context.Context, first int) {
	rec := c.Record()
	ranks := rec.PlacedRanks()[first:]
	for _, rank := range ranks {
		c.liveness.retire(rank)
	}
	ctx, cancel := context.WithTimeout(ctx, killGrace+agentTimeout+releaseTimeout)
	defer cancel()
	err := c.killProcesses(ctx, ranks, rec, killGrace)
	held := 0
	for _, s := range rec.Placements[:first] {
		held = max(held, s.Reservation+1)
	}
	if err == nil {
		var client *placement.Client
		if client, err = c.rt.placement(); err == nil {
			err = release(ctx, client, rec.Reservations[held:])
		}
	}
	if err == nil {
		err = c.edit(ctx, func(r *registry.RoleRecord) {
			r.Placements, r.Reservations = r.Placements[:first], r.Reservations[:held]
		})
	}
	if err != nil { // they stay in the record and end with the role
		c.rt.log.Warn("roles: some removed workers may still run", "role", c.Name(), "error", err)
	}
}

// retired reports whether a rank is no longer in the role.
func (c *Cluster) retired(rank int) bool { return rank >= c.WorldSize() }

// grewElsewhere reads the record, because another process may have grown the role.
func (c *Cluster) grewElsewhere(rank int) {
	if c.origin != created && rank < registry.MaxWorld {
		c.rt.spawn(func() { c.reloadRecord() })
	}
}

// stoppedElsewhere handles a worker that has stopped in order: the role is destroyed, smaller, or restarted by another
// process.
func (c *Cluster) stoppedElsewhere(l loss) {
	if c.isOver() || c.origin == created && c.retired(l.rank) {
		return // handled with an earlier worker
	}
	rec, ok := c.reloadRecord()
	switch {
	case ok && l.rank >= rec.World:
		c.liveness.retire(l.rank)
		return
	case ok && rec.State == registry.RoleFailed && c.origin != created:
		c.endedElsewhere(rec.Failure(), rec.Failure())
		return
	case ok && (rec.State == registry.RoleRestarting || len(stillLost(rec, []loss{l})) == 0):
		c.restartChanged()
		return
	}
	if c.origin != created {
		c.endedElsewhere(c.errDestroyed(), nil)
	} else if c.end(c.errDestroyed()) && c.isStarted() {
		c.cleanUp(func(ctx context.Context) error { return c.destroy(ctx, c.spec.StopGrace, stopInOrder) })
	}
}

// reloadRecord reads and applies the record.
func (c *Cluster) reloadRecord() (registry.RoleRecord, bool) {
	ctx, cancel := context.WithTimeout(c.rt.ctx, registryTimeout)
	defer cancel()
	reg, err := c.rt.registry(ctx)
	if err != nil {
		return registry.RoleRecord{}, false
	}
	rec, err := reg.Read(ctx, c.Name())
	if err != nil || rec.Incarnation != c.to.Incarnation || rec.State == registry.RoleStopping {
		return rec, false
	}
	c.mu.Lock()
	same := c.rec.Mesh == rec.Mesh
	c.rec = rec
	c.mu.Unlock()
	if !same {
		c.liveness.resize(rec.World)
		c.liveness.applyPlacements(rec.Placements)
		c.applyMesh(rec)
		c.liveness.expectAll()
	}
	return rec, true
}
