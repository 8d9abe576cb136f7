package roles

import (
	"context"
	"errors"
	"fmt"

	"troupe/bus"
	"troupe/dispatch"
	"troupe/placement"
)

// takeShape lays the ranks out as the record says; calls that are under way keep the shape they were sent in.
func (c *Cluster) takeShape(rec Record) {
	c.life.makeRoom(rec.World)
	c.shape.Store(&dispatch.Group{
		Endpoint: c.rt.ep, To: c.to, Mesh: rec.Mesh, MeshName: defaultMesh, Ordered: rec.Ordered, GensFunc: c.life.generations, Gate: &c.gate,
	})
}

// Grow adds n workers to a role of processes, with a reservation of their own, as its last ranks: more data-parallel
// replicas. Its other workers do not notice. Those who are attached see the new size when the first newcomer beats.
func (c *Cluster) Grow(ctx context.Context, n int) error {
	mesh, err := c.resized(n)
	if err != nil {
		return err
	}
	if err := c.takeTurn(ctx); err != nil {
		return err
	}
	defer func() { <-c.downCh }()
	ctx, cancel := context.WithTimeout(ctx, c.spec.StartTimeout)
	defer cancel()
	first := c.Record().World
	if err := c.reserveMore(ctx, n); err != nil {
		return err
	}
	rec := c.Record()
	rec.World, rec.Mesh = first+n, mesh // as the newcomers are to see it
	c.life.makeRoom(rec.World)
	ranks := rec.allRanks()[first:]
	for _, rank := range ranks {
		c.life.renew(rank, rec.Seats[rank].Gen)
	}
	if err = c.launch(ctx, ranks, rec); err == nil {
		err = c.awaitReady(ctx, ranks)
	}
	if err == nil {
		err = c.probe(ctx, ranks, mesh)
	}
	if err == nil {
		err = c.edit(ctx, func(r *Record) { r.World, r.Mesh = rec.World, mesh })
	}
	if err != nil {
		c.retireFrom(context.WithoutCancel(ctx), first)
		return err
	}
	c.takeShape(rec)
	c.life.expectAll()
	return nil
}

// Shrink takes the last n workers of a role of processes down; running calls may finish within the spec's grace.
func (c *Cluster) Shrink(ctx context.Context, n int) error {
	if n <= 0 {
		return bus.Errorf(bus.CodeInvalid, "role %s: shrink by %d workers: give one or more", c.Name(), n)
	}
	mesh, err := c.resized(-n)
	if err != nil {
		return err
	}
	if err := c.takeTurn(ctx); err != nil {
		return err
	}
	defer func() { <-c.downCh }()
	if err := c.edit(ctx, func(r *Record) { r.World, r.Mesh = mesh.World(), mesh }); err != nil {
		return err
	}
	rec := c.Record()
	c.takeShape(rec) // no new call goes to those that leave
	leaving := rec.seated()[rec.World:]
	for _, rank := range leaving {
		c.life.retire(rank)
	}
	err = c.stopProcesses(ctx, leaving, c.spec.StopGrace)
	c.retireFrom(ctx, rec.World)
	return err
}

// resized is the mesh of the role with n workers more.
func (c *Cluster) resized(n int) (dispatch.Mesh, error) {
	rec := c.Record()
	replica := rec.Mesh.TP * rec.Mesh.CP
	refuse := func(why string, args ...any) (dispatch.Mesh, error) {
		return rec.Mesh, bus.Errorf(bus.CodeInvalid, "role %s cannot be resized: "+why, append([]any{c.Name()}, args...)...)
	}
	switch {
	case !rec.Process:
		return refuse("its workers are goroutines of its driver's process")
	case c.tie != created:
		return refuse("this driver has not created it, and does not know what its workers were started with")
	case rec.State == RoleRestarting:
		return refuse("workers of it are being restarted; wait until it is ready")
	case rec.Ordered:
		return refuse("it is ordered, and a sequencer has one size")
	case rec.Mesh.PP > 1:
		return refuse("with %d pipeline stages its ranks would have to be numbered anew", rec.Mesh.PP)
	case n%replica != 0:
		return refuse("a replica has %d workers (tp × cp), and %d is no multiple of that", replica, n)
	case rec.World+n < 1:
		return refuse("it has %d workers and would have none; destroy it instead", rec.World)
	}
	mesh := rec.Mesh
	mesh.DP = 0
	return mesh.Resolve(rec.World + n)
}

// reserveMore holds what more workers need and notes their seats in the registry. The role's size is what it was until
// they are ready.
func (c *Cluster) reserveMore(ctx context.Context, n int) error {
	client, err := c.rt.placement()
	if err != nil {
		return err
	}
	rec := c.Record()
	request := c.spec.Process.request(rec)
	if request.Mapping != nil && len(request.Mapping.Devices) > 0 {
		return bus.Errorf(bus.CodeInvalid, "role %s has an exact mapping of devices, which names none for more workers", c.Name())
	}
	request.ID = fmt.Sprintf("%s-%d", reservationID(rec), rec.Gens+1)
	request.FirstRank, request.Mapping = rec.World, nil
	bundle := placement.Bundle{}
	if len(request.Bundles) > 0 {
		bundle = request.Bundles[len(request.Bundles)-1]
	}
	request.Bundles = placement.Repeat(n, bundle)
	got, err := c.reserveAs(ctx, client, request)
	if err != nil {
		return err
	}
	held := Held{ID: got.ID, Token: got.Token, Over: got.SharesWith}
	err = c.edit(ctx, func(r *Record) {
		r.Gens++
		seats := seatsOf(r.Name, got.Workers)
		for i := range seats {
			seats[i].Gen, seats[i].Held = r.Gens, len(r.Held)
		}
		r.Held = append(r.Held, held)
		r.Seats = append(r.Seats[:r.World], seats...)
	})
	if err == nil {
		return nil
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseActs)
	defer cancel()
	return errors.Join(err, release(last, client, []Held{held})) // nobody who ends the role would find it
}

// retireFrom ends what is left of the workers from one rank on, gives back what only they were on, and forgets them.
func (c *Cluster) retireFrom(ctx context.Context, first int) {
	rec := c.Record()
	ranks := rec.seated()[first:]
	for _, rank := range ranks {
		c.life.retire(rank)
	}
	ctx, cancel := context.WithTimeout(ctx, killGrace+agentAnswer+releaseActs)
	defer cancel()
	err := c.endProcesses(ctx, ranks, rec)
	held := 0
	for _, s := range rec.Seats[:first] {
		held = max(held, s.Held+1)
	}
	if err == nil {
		var client *placement.Client
		if client, err = c.rt.placement(); err == nil {
			err = release(ctx, client, rec.Held[held:])
		}
	}
	if err == nil {
		err = c.edit(ctx, func(r *Record) { r.Seats, r.Held = r.Seats[:first], r.Held[:held] })
	}
	if err != nil { // the record still knows them, and they go with the role
		c.rt.log.Warn("roles: workers that left a role are not all gone", "role", c.Name(), "error", err)
	}
}

// retired reports whether a rank is none of the role's any more.
func (c *Cluster) retired(rank int) bool { return rank >= c.WorldSize() }

// grewElsewhere takes in that the role has more ranks than were known here, if it has.
func (c *Cluster) grewElsewhere(rank int) {
	if c.tie != created && rank < maxWorld {
		c.rt.spawn(func() { c.reread() })
	}
}

// stoppedElsewhere takes in that a worker has stopped in order: the role has been taken down, has become smaller, or is
// restarted by another process.
func (c *Cluster) stoppedElsewhere(l loss) {
	if c.isOver() || c.tie == created && c.retired(l.rank) {
		return // another of its workers was the first
	}
	rec, ok := c.reread()
	switch {
	case ok && l.rank >= rec.World:
		c.life.retire(l.rank)
		return
	case ok && rec.State == RoleFailed && c.tie != created:
		c.overElsewhere(rec.failure(), rec.failure())
		return
	case ok && (rec.State == RoleRestarting || len(stillLost(rec, []loss{l})) == 0):
		c.restartNews()
		return
	}
	if c.tie != created {
		c.overElsewhere(c.takenDown(), nil)
	} else if c.end(c.takenDown()) && c.isUp() {
		c.cleanUp(func(ctx context.Context) error { return c.takeDown(ctx, c.spec.StopGrace) })
	}
}

// reread takes in the record as it is now.
func (c *Cluster) reread() (Record, bool) {
	ctx, cancel := context.WithTimeout(c.rt.ctx, registryActs)
	defer cancel()
	reg, err := c.rt.registry(ctx)
	if err != nil {
		return Record{}, false
	}
	rec, _, err := reg.read(ctx, c.Name())
	if err != nil || rec.Incarnation != c.to.Incarnation || rec.State == RoleStopping {
		return rec, false
	}
	c.mu.Lock()
	same := c.rec.Mesh == rec.Mesh
	c.rec = rec
	c.mu.Unlock()
	if !same {
		c.life.makeRoom(rec.World)
		c.life.adopt(rec.Seats)
		c.takeShape(rec)
		c.life.expectAll()
	}
	return rec, true
}
