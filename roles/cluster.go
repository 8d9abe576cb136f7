package roles

import (
	"context"
	"errors"
	"sync"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/dispatch"
)

// Cluster is the running workers of one role, as a driver holds them. It is safe for concurrent use, and it can be
// given to a call as an argument: the other side receives its Handle.
type Cluster struct {
	rt    *Runtime
	spec  Spec
	group *dispatch.Group
	life  *life

	mu      sync.Mutex // guards what follows
	rec     Record
	rev     uint64
	workers []*actors.Worker // those that run here; nil for a role we are attached to
	ended   error            // why no call can be made any more
}

// Name is the role's name.
func (c *Cluster) Name() string { return c.group.To.Role }

// WorldSize is how many workers there are; DPSize, TPSize, PPSize and CPSize are the sizes of the mesh.
func (c *Cluster) WorldSize() int { return c.group.Mesh.World() }
func (c *Cluster) DPSize() int    { return c.group.Mesh.DP }
func (c *Cluster) TPSize() int    { return c.group.Mesh.TP }
func (c *Cluster) PPSize() int    { return c.group.Mesh.PP }
func (c *Cluster) CPSize() int    { return c.group.Mesh.CP }

// RankInfo is a rank's place in the mesh.
func (c *Cluster) RankInfo(rank int) (dispatch.RankInfo, error) { return c.group.Mesh.Info(rank) }

// Record is what the registry says of the role, as far as this driver knows.
func (c *Cluster) Record() Record {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rec
}

// Health is what was last heard of each worker.
func (c *Cluster) Health() []actors.Beat {
	beats, _ := c.life.states()
	return beats
}

// start makes the workers and waits until each hears every subject.
func (c *Cluster) start(ctx context.Context, config bus.Raw) error {
	specs := make([]actors.WorkerSpec, c.rec.World)
	for rank := range specs {
		specs[rank] = actors.WorkerSpec{
			Address: c.group.To, Class: c.spec.Class, Rank: rank, World: c.rec.World, Config: config, Ordered: c.spec.Ordered,
			QueueLimit: c.spec.QueueLimit, PanicFails: c.spec.PanicFails,
			Slices: []actors.Slice{{Mesh: defaultMesh, N: c.rec.Mesh.Coord(rank).DP}},
		}
	}
	workers, err := c.rt.local.start(ctx, c.spec, specs)
	c.mu.Lock()
	c.workers = workers
	c.mu.Unlock()
	if err != nil {
		return err
	}
	if err := c.barrier(ctx); err != nil {
		return err
	}
	return c.setState(ctx, RoleReady, nil)
}

func (c *Cluster) setState(ctx context.Context, s RoleState, cause error) error {
	c.mu.Lock()
	rec, rev := c.rec, c.rev
	c.mu.Unlock()
	rec.State, rec.Since = s, time.Now()
	if cause != nil {
		rec.Cause = cause.Error()
	}
	reg, err := c.rt.registry(ctx)
	if err == nil {
		rev, err = reg.put(ctx, rec, rev)
	}
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rec, c.rev = rec, rev
	return nil
}

// barrier proves that every worker hears every subject the role uses. A flush or a key would not: interest travels
// slower than either.
func (c *Cluster) barrier(ctx context.Context) error {
	world := c.rec.World
	all := make([]int, world)
	ranks := make([]bus.Part, world)
	slices := make([]bus.Part, c.rec.Mesh.DP)
	for rank := range all {
		all[rank] = rank
		ranks[rank] = bus.Part{Scope: bus.OneRank(rank), Ranks: []int{rank}}
		dp := c.rec.Mesh.Coord(rank).DP
		slices[dp].Scope = bus.DPSlice(defaultMesh, dp)
		slices[dp].Ranks = append(slices[dp].Ranks, rank)
	}
	role := []bus.Part{{Scope: bus.Everyone(), Ranks: all}}
	probes := []bus.Call{{Parts: role}, {Parts: ranks}, {Parts: slices}, {Parts: role, Control: true}, {Parts: ranks, Control: true}}
	for _, p := range probes {
		p.To, p.Method, p.World, p.FailFast = c.group.To, actors.VerbProbe, world, true
		p.Ordered, p.AskAfter = c.rec.Ordered && !p.Control, 100*time.Millisecond
		g, err := c.rt.ep.Scatter(ctx, p)
		if err != nil {
			return err
		}
		<-g.Done()
		for _, a := range g.Answers() {
			if a.Err != nil {
				return bus.Errorf(bus.CodeOf(a.Err), "role %s: the start barrier: %w", c.rec.Name, a.Err)
			}
		}
	}
	return nil
}

// workerLost fails what waits for a worker that is gone. If it failed, the whole role has: the others' calls fail
// because of it, and an owner takes the rest down.
func (c *Cluster) workerLost(rank int, gen uint32, why *bus.Error, failed bool) {
	c.rt.ep.Lost(c.group.To, rank, gen, why)
	if !failed {
		c.end(bus.Errorf(bus.CodeNotFound, "role %s has been taken down", c.Name()))
		return
	}
	if !c.end(why) {
		return
	}
	because := bus.Errorf(bus.CodeWorkerLost, "the role failed because of rank %d: %s", rank, why.Message).WithCause(why)
	for r := range c.group.Mesh.World() {
		if r != rank {
			c.rt.ep.Lost(c.group.To, r, ^uint32(0), because)
		}
	}
	if c.owned() {
		c.rt.group.Go(func() { c.fail(why) })
	}
}

// end notes why no call can be made any more; it reports false if that was known.
func (c *Cluster) end(why error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	first := c.ended == nil
	if first {
		c.ended = why
	}
	return first
}

func (c *Cluster) owned() bool { return c.rec.Owner == c.rt.ep.Session() }

// fail writes the cause into the registry and stops what is left of the role.
func (c *Cluster) fail(why error) {
	ctx, cancel := context.WithTimeout(context.Background(), lastActs)
	defer cancel()
	err := errors.Join(c.setState(ctx, RoleFailed, why), c.stopWorkers(ctx, 0))
	if err != nil && c.rt.ctx.Err() == nil {
		c.rt.log.Warn("roles: a failed role was not taken down in order", "role", c.Name(), "error", err)
	}
}

// Destroy takes the role down: every worker is stopped, rank 0 last, running calls may finish within the grace of the
// spec, and then the name is free. Anybody who is attached may destroy a role. It may be called more than once.
func (c *Cluster) Destroy(ctx context.Context) error {
	err := c.setState(ctx, RoleStopping, nil) // others may have written in between: it goes anyway
	if errors.Is(err, bus.ErrConflict) || errors.Is(err, bus.ErrNotFound) {
		err = nil
	}
	return errors.Join(err, c.takeDown(ctx, c.spec.StopGrace))
}

// Close lets go of the role: an owned one that is not detached is destroyed, the others stay.
func (c *Cluster) Close(ctx context.Context) error {
	if c.owned() && !c.Record().Detached {
		return c.Destroy(ctx)
	}
	c.release()
	return nil
}

func (c *Cluster) release() {
	c.end(bus.Errorf(bus.CodeClosed, "this handle of role %s is closed", c.Name()))
	c.life.stop()
	c.rt.ep.Forget(c.group.To)
	c.rt.mu.Lock()
	defer c.rt.mu.Unlock()
	delete(c.rt.clusters, c)
}

func (c *Cluster) takeDown(ctx context.Context, grace time.Duration) error {
	c.end(bus.Errorf(bus.CodeNotFound, "role %s has been taken down", c.Name()))
	err := c.stopWorkers(ctx, grace)
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastActs)
	defer cancel()
	reg, regErr := c.rt.registry(last)
	if regErr == nil {
		regErr = reg.remove(last, c.Record())
	}
	c.release()
	return errors.Join(err, regErr)
}

// stopWorkers stops all ranks at once, but rank 0 after the others: it often holds what they need to end in order.
func (c *Cluster) stopWorkers(ctx context.Context, grace time.Duration) error {
	var others []int
	for r := 1; r < c.rec.World; r++ {
		others = append(others, r)
	}
	return errors.Join(c.stopRanks(ctx, others, grace), c.stopRanks(ctx, []int{0}, grace))
}

func (c *Cluster) stopRanks(ctx context.Context, ranks []int, grace time.Duration) error {
	c.mu.Lock()
	workers := c.workers
	c.mu.Unlock()
	if len(ranks) == 0 {
		return nil
	}
	if workers == nil {
		return c.stopRemote(ctx, ranks, grace)
	}
	graceCtx, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	errs := make([]error, len(ranks))
	var group sync.WaitGroup
	for i, r := range ranks {
		if workers[r] != nil {
			group.Go(func() { errs[i] = workers[r].Stop(graceCtx) })
		}
	}
	group.Wait()
	return errors.Join(errs...)
}

// stopRemote asks workers elsewhere to stop, and waits for their last words.
func (c *Cluster) stopRemote(ctx context.Context, ranks []int, grace time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, grace+lastActs)
	defer cancel()
	f, err := c.group.Go(ctx, dispatch.Call{
		Method: actors.VerbStop, Args: []any{actors.StopRequest{Grace: grace}}, Ranks: ranks, Control: true, CollectAll: true, NoCollect: true,
	})
	if err != nil {
		return err
	}
	if err := f.Wait(ctx); err != nil && !errors.Is(err, bus.ErrWorkerLost) {
		return err
	}
	for {
		states, changed := c.life.states()
		left := 0
		for _, r := range ranks {
			if !states[r].State.Over() {
				left++
			}
		}
		if left == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return bus.Errorf(bus.CodeTimedOut, "role %s: %d of %d workers have not said that they stopped", c.Name(), left, len(ranks))
		}
	}
}
