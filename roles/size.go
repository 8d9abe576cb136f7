package roles

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/placement"
	"troupe/roles/life"
	"troupe/roles/registry"
)

var errRestarting = errors.New("workers are being restarted")

// sizer changes the size of a role.
type sizer struct{ c *Cluster }

// applyMesh applies the mesh of the record; pending calls keep the one they were sent with.
func (z *sizer) applyMesh(rec registry.RoleRecord) {
	old := z.c.shape.Swap(&dispatch.Group{
		Endpoint: z.c.rt.ep, To: z.c.to, Mesh: rec.Mesh, MeshName: defaultMesh, Ordered: rec.Ordered, GensFunc: z.c.life.generations, Gate: &z.c.gate,
		Listed: rec.Process && !rec.Ordered,
	})
	if old != nil {
		old.Retire()
	}
}

// Resize gives a role of processes so many replicas, by adding or removing the last ones; a replica has the ranks of one
// data-parallel index. No call fails because of it, in whichever process it is made: ranks that are added have been called with the
// last arguments of the methods declared Replay before they take calls, and ranks that are removed finish their calls first, for as
// long as ctx permits. It waits while workers are being restarted, and returns when the size is the wanted one. The driver that
// created the role does it; others ask that driver.
func (c *Cluster) Resize(ctx context.Context, replicas int) error {
	return c.settled(ctx, func() error {
		return c.sizer.resizeTo(ctx, "", func(rec registry.RoleRecord) int { return replicas * replicaSize(rec) })
	})
}

// settled repeats do while workers are being restarted.
func (c *Cluster) settled(ctx context.Context, do func() error) error {
	for {
		err := do()
		_, recovers := c.life.recovers(0)
		if !errors.Is(err, errRestarting) && !(recovers && errors.Is(err, bus.ErrConflict)) {
			return err
		}
		if err := c.WaitReady(ctx); err != nil {
			return err
		}
	}
}

// Grow adds n workers to a role of processes, as Resize does.
func (c *Cluster) Grow(ctx context.Context, n int) error {
	return c.sizer.resizeTo(ctx, "", func(rec registry.RoleRecord) int { return rec.World + n })
}

// Shrink stops the last n workers of a role of processes, as Resize does.
func (c *Cluster) Shrink(ctx context.Context, n int) error {
	if n <= 0 {
		return bus.Errorf(bus.CodeInvalid, "role %s: shrink by %d workers: the number must be positive", c.Name(), n)
	}
	return c.sizer.resizeTo(ctx, "", func(rec registry.RoleRecord) int { return rec.World - n })
}

// resizeTo gives the role another size, which somebody has asked for.
func (z *sizer) resizeTo(ctx context.Context, why string, size func(registry.RoleRecord) int) error {
	rec := z.c.Record()
	if rec.Process && z.c.origin != created {
		return z.c.members.ask(ctx, ownerRequest{World: size(rec), Reason: why})
	}
	if mesh, err := z.resized(size(rec) - rec.World); err == nil {
		if err := z.checkRange(mesh.DP); err != nil {
			return err
		}
		z.c.scaler.wanted.Store(int32(mesh.DP))
	}
	return z.changeSize(ctx, why, size)
}

// changeSize gives the role another size; one caller at a time.
func (z *sizer) changeSize(ctx context.Context, why string, size func(registry.RoleRecord) int) error {
	if err := z.c.ender.lockDestroy(ctx); err != nil {
		return err
	}
	defer func() { <-z.c.ender.destroyCh }()
	rec := z.c.Record()
	n := size(rec) - rec.World
	mesh, err := z.resized(n)
	switch {
	case err != nil || n == 0:
		return err
	case n > 0:
		return z.grow(ctx, n, why, z.reserveAll)
	}
	return z.shrink(ctx, mesh, why)
}

// sized is the cause of an epoch that begins with another size.
func sized(mesh dispatch.Mesh, why string) string {
	return fmt.Sprintf("resized to %d replicas%s", mesh.DP, because(why))
}

func because(why string) string {
	if why == "" {
		return ""
	}
	return ": " + why
}

// grow adds n workers as the last ranks, or those of them for which it can reserve. Other processes are told of the new size.
func (z *sizer) grow(ctx context.Context, n int, why string, reserve func(ctx context.Context, n int) (int, error)) error {
	c := z.c
	ctx, cancel := context.WithTimeout(ctx, c.spec.StartTimeout)
	defer cancel()
	first := c.Record().World
	ranks := registry.RoleRecord{World: first + n}.AllRanks()[first:]
	if err := z.checkReplays(ctx, ranks); err != nil {
		return err
	}
	n, err := reserve(ctx, n)
	if err != nil || n == 0 {
		return err
	}
	ranks = ranks[:n]
	mesh, err := z.resized(n)
	if err != nil {
		z.removeFrom(context.WithoutCancel(ctx), first)
		return err
	}
	rec := c.Record()
	rec.World, rec.Mesh = first+n, mesh // for the assignments of the new workers
	for _, rank := range ranks {
		c.life.feed(life.Event{Kind: life.Expect, Rank: rank, Gen: rec.Placements[rank].Gen})
	}
	err = c.workforce.launch(ctx, ranks, rec)
	if err == nil {
		err = c.workforce.awaitReady(ctx, ranks)
	}
	if err == nil {
		err = c.starter.probe(ctx, ranks, mesh)
	}
	if err == nil {
		err = c.replayer.replayOnAdded(ctx, ranks, replayPasses)
	}
	if err == nil {
		err = c.record.edit(ctx, func(r *registry.RoleRecord) { r.World, r.Mesh = rec.World, mesh; r.NextEpoch(sized(mesh, why)) })
	}
	if err != nil {
		z.removeFrom(context.WithoutCancel(ctx), first)
		return err
	}
	z.resize(c.Record())
	c.liveness.expectAll()
	z.announceSize(ranks)
	c.output.emit(eventResize, nil, "", fmt.Sprintf("%d workers, %d more%s", rec.World, n, because(why)))
	c.rt.audit(actionResized, rec, nil, fmt.Sprintf("%d workers, %d more%s", rec.World, n, because(why)), "")
	c.replayer.replayLate(ranks) // calls that ended after the others were repeated
	return nil
}

// shrink removes the last ranks, to the size of the mesh.
func (z *sizer) shrink(ctx context.Context, mesh dispatch.Mesh, why string) error {
	c := z.c
	if err := c.record.edit(ctx, func(r *registry.RoleRecord) {
		r.World, r.Mesh = mesh.World(), mesh
		r.NextEpoch(sized(mesh, why))
	}); err != nil {
		return err
	}
	rec := c.Record()
	return z.leave(ctx, rec, rec.PlacedRanks()[rec.World:], why)
}

// leave ends the workers beyond the size of the record, which is new. Those that live finish their calls first, for as long as ctx permits.
func (z *sizer) leave(ctx context.Context, rec registry.RoleRecord, live []int, why string) error {
	c := z.c
	z.resize(rec) // no new call goes to the removed ranks
	leaving := rec.PlacedRanks()[rec.World:]
	z.announceSize(leaving)
	c.output.emit(eventResize, nil, "", fmt.Sprintf("%d workers, %d fewer%s", rec.World, len(leaving), because(why)))
	c.rt.audit(actionResized, rec, nil, fmt.Sprintf("%d workers, %d fewer%s", rec.World, len(leaving), because(why)), "")
	z.drain(ctx, live)
	ctx = context.WithoutCancel(ctx)
	for _, rank := range leaving {
		c.life.feed(life.Event{Kind: life.Remove, Rank: rank})
	}
	var err error
	if len(live) > 0 {
		err = c.workforce.stopProcesses(ctx, live, c.spec.StopGrace, stopInOrder)
	}
	z.removeFrom(ctx, rec.World)
	return err
}

const (
	drainPoll  = 20 * time.Millisecond  // interval of asking leaving ranks for their calls
	drainQuiet = 250 * time.Millisecond // how long they must have had none: processes that have not been told may call them
)

// drain returns when ranks that leave have finished their calls and get no new ones, or ctx has ended.
func (z *sizer) drain(ctx context.Context, leaving []int) {
	quietSince, before := time.Time{}, uint64(0)
	for ctx.Err() == nil && len(leaving) > 0 {
		switch busy, done := z.load(ctx, leaving); {
		case busy || done != before:
			quietSince, before = time.Time{}, done
		case quietSince.IsZero():
			quietSince = time.Now()
		case time.Since(quietSince) > drainQuiet:
			return
		}
		select {
		case <-time.After(drainPoll):
		case <-ctx.Done():
		}
	}
}

// load reports whether some of the ranks run calls, or have some in their queues, and how many they have ended. A lost rank has none.
func (z *sizer) load(ctx context.Context, ranks []int) (busy bool, done uint64) {
	parts := make([]calls.Part, len(ranks))
	for i, rank := range ranks {
		parts[i] = calls.Part{Scope: calls.OneRank(rank), Ranks: []int{rank}}
	}
	g, err := z.c.rt.ep.Scatter(ctx, calls.Call{
		To: z.c.to, Method: actors.VerbInfo, Control: true, World: slices.Max(ranks) + 1, Parts: parts, Gens: z.c.life.generations(), Timeout: agentProbe,
	})
	if err != nil {
		return false, 0
	}
	<-g.Done() // ends with its timeout
	for _, a := range g.Arrived() {
		var info actors.Info
		switch {
		case errors.Is(a.Err, bus.ErrTimedOut):
			busy = true
		case a.Err == nil && wire.Unmarshal(a.Body, &info) == nil:
			busy, done = busy || len(info.Calls) > 0, done+info.Done
		}
	}
	return busy, done
}

// announceSize makes other clusters of the role read the record, in this process and in others.
func (z *sizer) announceSize(ranks []int) {
	for _, s := range z.c.performer.siblings() {
		s.restartChanged()
	}
	z.c.recovery.announce(ranks, 0, stateResized)
}

// checkReplays refuses ranks whose arguments of replayed calls are unknown. Earlier ranks of these numbers are forgotten.
func (z *sizer) checkReplays(ctx context.Context, ranks []int) error {
	err := z.c.replayer.forgetRanks(ctx, ranks[0])
	if err == nil {
		_, err = z.c.replayer.missingCalls(ctx, ranks)
	}
	if err != nil {
		return bus.Errorf(bus.CodeOf(err), "role %s cannot be resized: %w", z.c.Name(), err)
	}
	return nil
}

// resized is the mesh of the role with n more workers.
func (z *sizer) resized(n int) (dispatch.Mesh, error) {
	rec := z.c.Record()
	replica := rec.Mesh.TP * rec.Mesh.CP
	refuse := func(why string, args ...any) (dispatch.Mesh, error) {
		return rec.Mesh, bus.Errorf(bus.CodeInvalid, "role %s cannot be resized: "+why, append([]any{z.c.Name()}, args...)...)
	}
	switch {
	case !rec.Process:
		return refuse("its workers are goroutines of its driver's process")
	case rec.State == registry.RoleRestarting:
		return rec.Mesh, bus.Errorf(bus.CodeRefused, "role %s cannot be resized: %w; wait until it is ready", z.c.Name(), errRestarting)
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

// reserveAll reserves for n more workers, and waits until they fit.
func (z *sizer) reserveAll(ctx context.Context, n int) (int, error) {
	reserve := func(client *placement.Client, ctx context.Context, request placement.Request) (placement.Record, error) {
		return z.c.workforce.reserveOne(ctx, client, request)
	}
	return n, z.reserveMore(ctx, z.c.Record().World, n, 0, reserve)
}

// reserveMore reserves for n more workers from a rank on, of a lower priority than the others, and records their placements. The role's size
// is unchanged until they are ready.
func (z *sizer) reserveMore(ctx context.Context, first, n, lower int, reserve reserver) error {
	client, err := z.c.rt.placement()
	if err != nil {
		return err
	}
	rec := z.c.Record()
	request := z.c.spec.Process.request(rec)
	if request.Mapping != nil && len(request.Mapping.Devices) > 0 {
		return bus.Errorf(bus.CodeInvalid, "role %s has an exact device mapping without devices for more workers", z.c.Name())
	}
	request.ID = fmt.Sprintf("%s-%d", rec.ReservationID(), rec.Generations+1)
	request.FirstRank, request.Mapping = first, nil
	request.Priority -= lower
	bundle := placement.Bundle{}
	if len(request.Bundles) > 0 {
		bundle = request.Bundles[len(request.Bundles)-1]
	}
	request.Bundles = placement.Repeat(n, bundle)
	got, err := reserve(client, ctx, request)
	if err != nil {
		return err
	}
	held := registry.ReservationRef{ID: got.ID, Token: got.Token, Over: got.SharesWith}
	err = z.c.record.edit(ctx, func(r *registry.RoleRecord) {
		r.Generations++
		placements := placementsOf(r.Name, got.Workers)
		for i := range placements {
			placements[i].Gen, placements[i].Reservation = r.Generations, len(r.Reservations)
		}
		r.Reservations = append(r.Reservations, held)
		r.Placements = append(r.Placements[:first], placements...)
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
func (z *sizer) removeFrom(ctx context.Context, first int) {
	rec := z.c.Record()
	ranks := rec.PlacedRanks()[first:]
	for _, rank := range ranks {
		z.c.life.feed(life.Event{Kind: life.Remove, Rank: rank})
	}
	ctx, cancel := context.WithTimeout(ctx, killGrace+agentTimeout+releaseTimeout)
	defer cancel()
	err := z.c.workforce.killProcesses(ctx, ranks, rec, killGrace)
	for _, rank := range ranks {
		gone := bus.Errorf(bus.CodeWorkerLost, "rank %d has left the role, and the time for its calls was over", rank)
		z.c.rt.ep.Lost(z.c.to, rank, rec.Placements[rank].Gen, bus.AsError(gone))
	}
	held := 0
	for _, s := range rec.Placements[:first] {
		held = max(held, s.Reservation+1)
	}
	held = min(held, len(rec.Reservations)) // a restart has released them
	if err == nil {
		var client *placement.Client
		if client, err = z.c.rt.placement(); err == nil {
			err = release(ctx, client, rec.Reservations[held:])
		}
	}
	if err == nil {
		err = z.c.record.edit(ctx, func(r *registry.RoleRecord) {
			r.Placements, r.Reservations = r.Placements[:first], r.Reservations[:held]
		})
	}
	if err != nil { // they stay in the record and end with the role
		z.c.rt.log.Warn("roles: some removed workers may still run", "role", z.c.Name(), "error", err)
	}
}

// resize applies a new size that this process has written.
func (z *sizer) resize(rec registry.RoleRecord) {
	z.applyMesh(rec)
	z.c.life.feed(life.Event{Kind: life.Resize, World: rec.World, Epoch: rec.Epoch})
}
