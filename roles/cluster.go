package roles

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/nodes"
)

// newsSpread is how long the news that a worker failed may take to whoever is attached to its role.
const newsSpread = 50 * time.Millisecond

// answersArrive is how long the answers of a worker that has stopped may take.
const answersArrive = 300 * time.Millisecond

// Cluster is the running workers of one role, as a driver holds them. It is safe for concurrent use, and it can be
// given to a call as an argument, alone or inside another value: the other side receives its Handle.
type Cluster struct {
	rt    *Runtime
	tie   tie
	spec  Spec // of a role that was not created here, only StopGrace
	to    bus.Address
	life  *life
	shape atomic.Pointer[dispatch.Group] // how its ranks are laid out now; see size.go
	gate  dispatch.Gate                  // keeps calls back while their ranks are being restarted

	downCh chan struct{} // holds one: whoever takes the role down

	mu      sync.Mutex // guards what follows
	rec     Record
	workers []*actors.Worker // those that run here
	program nodes.Program    // of those that are processes, and
	recipe  *recipe          // all that they are started with; nil: it was not created here, and has not been needed
	mending mending          // of those that are restarted
	keeping keeping          // the calls that are replayed on those
	output  *output          // what they print, if it is shown here
	up      bool             // it has started here, and whoever sees it end takes it down; before, start does
	ended   *bus.Error       // why no call can be made any more
	failed  *bus.Error       // the same, if a worker's failure is why
	gone    bool             // the role has been taken down and its name is free
}

// tie is how a runtime came by a role.
type tie uint8

const (
	created  tie = iota // its workers were started here, and it ends with the runtime unless it is detached
	attached            // by name
	opened              // from a handle; all who open it share the one cluster, until the role ends
	followed            // by the process of its workers, until it ends: its driver may be gone
)

// Name is the role's name.
func (c *Cluster) Name() string { return c.to.Role }

func (c *Cluster) group() *dispatch.Group { return c.shape.Load() }
func (c *Cluster) mesh() dispatch.Mesh    { return c.group().Mesh }

// WorldSize is how many workers there are; DPSize, TPSize, PPSize and CPSize are the sizes of the mesh.
func (c *Cluster) WorldSize() int { return c.mesh().World() }
func (c *Cluster) DPSize() int    { return c.mesh().DP }
func (c *Cluster) TPSize() int    { return c.mesh().TP }
func (c *Cluster) PPSize() int    { return c.mesh().PP }
func (c *Cluster) CPSize() int    { return c.mesh().CP }

// RankInfo is a rank's place in the mesh.
func (c *Cluster) RankInfo(rank int) (dispatch.RankInfo, error) { return c.mesh().Info(rank) }

// Record is what the registry said of the role when this driver last had to do with it there.
func (c *Cluster) Record() Record {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rec
}

// Health is what was last heard of each worker.
func (c *Cluster) Health() []actors.Heartbeat {
	beats, _ := c.life.states()
	return beats
}

// start makes the workers and waits until each hears every subject.
func (c *Cluster) start(ctx context.Context, config wire.Raw) error {
	var err error
	if c.spec.Process != nil {
		err = c.startProcesses(ctx, config)
	} else {
		err = c.startLocal(ctx, config)
	}
	if err == nil {
		err = c.barrier(ctx, c.Record().allRanks())
	}
	if err == nil && c.spec.Process != nil {
		err = c.learn(ctx)
	}
	if err == nil {
		c.life.expectAll()
		err = c.step(ctx, RoleReady, "")
	}
	if err == nil && c.spec.Detached && c.spec.Process == nil {
		err = c.rt.local.follow(c.Record())
	}
	if err = c.begun(err); err == nil {
		c.emit(eventRole, nil, "", fmt.Sprintf("%d workers of class %s, for %s", c.WorldSize(), c.Record().Class, c.rt.cfg.Name))
	}
	return err
}

// begun is what a start has come to.
func (c *Cluster) begun(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failed != nil { // a worker that failed meanwhile is why
		return c.failed.Unwrap()
	}
	if err == nil && c.ended != nil {
		return c.ended
	}
	c.up = err == nil
	return err
}

// startLocal makes workers that are goroutines of this process.
func (c *Cluster) startLocal(ctx context.Context, config wire.Raw) error {
	specs := make([]actors.WorkerSpec, c.WorldSize())
	for rank := range specs {
		specs[rank] = actors.WorkerSpec{
			Address: c.to, Class: c.spec.Class, Rank: rank, World: len(specs), Config: config, Ordered: c.spec.Ordered,
			QueueLimit: c.spec.QueueLimit, PanicFails: c.spec.PanicFails,
			Slices: []actors.Slice{{Mesh: defaultMesh, N: c.mesh().Coord(rank).DP}},
		}
	}
	workers, err := c.rt.local.start(ctx, c.spec, specs)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.workers = workers
	return err
}

// step takes the role to another state in the registry.
func (c *Cluster) step(ctx context.Context, to RoleState, cause string) error {
	reg, err := c.rt.registry(ctx)
	if err != nil {
		return err
	}
	rec, err := reg.step(ctx, c.Record(), to, cause)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rec = rec
	return nil
}

// barrier proves that the workers hear every subject that the role uses with them. A flush or a key would not: interest
// travels slower than either.
func (c *Cluster) barrier(ctx context.Context, among []int) error {
	return c.probe(ctx, among, c.mesh())
}

func (c *Cluster) probe(ctx context.Context, among []int, mesh dispatch.Mesh) error {
	world := mesh.World()
	some := len(among) < world
	ranks := make([]bus.Part, 0, len(among))
	byDP := map[int][]int{}
	for _, rank := range among {
		ranks = append(ranks, bus.Part{Scope: bus.OneRank(rank), Ranks: []int{rank}})
		dp := mesh.Coord(rank).DP
		byDP[dp] = append(byDP[dp], rank)
	}
	slices := make([]bus.Part, 0, len(byDP))
	for dp, members := range byDP {
		slices = append(slices, bus.Part{Scope: bus.DPSlice(defaultMesh, dp), Ranks: members, Some: some})
	}
	role := []bus.Part{{Scope: bus.Everyone(), Ranks: among, Some: some}}
	probes := []bus.Call{{Parts: role}, {Parts: ranks}, {Parts: slices}, {Parts: role, Control: true}, {Parts: ranks, Control: true}}
	for _, p := range probes {
		p.To, p.Method, p.World, p.FailFast = c.to, actors.VerbProbe, world, true
		p.Ordered, p.AskAfter, p.Gens = c.group().Ordered && !p.Control, 100*time.Millisecond, c.life.generations()
		g, err := c.rt.ep.Scatter(ctx, p)
		if err != nil {
			return err
		}
		<-g.Done()
		for _, a := range g.Arrived() {
			if a.Err != nil {
				return bus.Errorf(bus.CodeOf(a.Err), "role %s: the start barrier: %w", c.Name(), a.Err)
			}
		}
	}
	return nil
}

// workerLost fails what waits for a worker that is gone, and keeps back what is called while another takes its place. If it failed, the whole role has: the others' calls fail
// because of it. A role ends as a unit, so whoever created it takes the rest down; of a detached role, whose driver may
// be gone, anybody who follows it does, if it is certain because the worker itself has said so.
func (c *Cluster) workerLost(l loss, certain bool) {
	if l.failed && c.tie == opened && !c.Record().Process { // its handle may come from a peer that does not say more
		c.failCalls(l)
		c.rt.spawn(func() {
			c.reread()
			c.workerGone(l, certain)
		})
		return
	}
	c.workerGone(l, certain)
}

// restartable reports whether workers that are lost now are replaced.
func (c *Cluster) restartable() bool { return c.Record().restarts() && (c.tie != created || c.isUp()) }

func (c *Cluster) workerGone(l loss, certain bool) {
	if l.failed && c.restartable() {
		siblings := c.siblings()
		for _, s := range append(siblings, c) {
			if s.restartable() {
				s.hold(l)
			}
		}
		defer func() {
			for _, s := range siblings {
				if s.restartable() {
					s.mend(l)
				}
			}
		}()
	}
	c.failCalls(l)
	if l.failed && c.mend(l) {
		return
	}
	if !l.failed && c.Record().Process {
		c.rt.spawn(func() { c.stoppedElsewhere(l) })
		return
	}
	if !l.failed {
		if c.retired(l.rank) {
			return
		}
		if c.end(c.takenDown()) && c.isUp() {
			c.rt.spawn(func() { c.cleanUp(func(ctx context.Context) error { return c.takeDown(ctx, c.spec.StopGrace) }) })
		}
		return
	}
	c.failWith(l, certain)
}

// failWith fails the role because of one of its workers.
func (c *Cluster) failWith(l loss, certain bool) {
	because := bus.Errorf(bus.CodeWorkerLost, "the role failed because of rank %d: %s", l.rank, l.why.Message).WithCause(l.why)
	because.Node, because.Stack, because.Details = l.why.Node, l.why.Stack, l.why.Details
	if !c.endAs(because, because) {
		return
	}
	c.failPending()
	c.tell(l, "the role fails")
	if c.isUp() || c.tie == followed && c.Record().Process || certain && c.tie != opened && c.Record().Detached {
		c.rt.spawn(func() {
			c.cleanUp(func(ctx context.Context) error { return c.fail(ctx, l.why) })
			if c.Record().Process {
				c.endFailed()
			}
		})
	}
}

// failCalls fails what waits for a worker that is gone. One that stopped in order has answered every call it got first;
// what is on its way here, or in our inbox, gets a moment to arrive.
func (c *Cluster) failCalls(l loss) {
	lose := func() { c.rt.ep.Lost(c.to, l.rank, l.gen, l.why) }
	if l.failed {
		lose()
	} else {
		time.AfterFunc(answersArrive, bus.Guard(lose))
	}
}

func (c *Cluster) takenDown() *bus.Error {
	return bus.Errorf(bus.CodeNotFound, "role %s has been taken down", c.Name())
}

// cleanUp does in the background what nobody waits for.
func (c *Cluster) cleanUp(do func(context.Context) error) {
	ctx, cancel := context.WithTimeout(c.rt.ctx, c.spec.StopGrace+lastActs)
	defer cancel()
	if err := do(ctx); err != nil && c.rt.ctx.Err() == nil {
		c.rt.log.Warn("roles: what was left of a role was not taken down in order", "role", c.Name(), "error", err)
	}
}

// fail writes the cause into the registry and stops what is left of the role. Its name stays held, so that whoever looks
// finds out why.
func (c *Cluster) fail(ctx context.Context, why error) error {
	err := c.step(ctx, RoleFailed, why.Error())
	if errors.Is(err, bus.ErrConflict) || errors.Is(err, bus.ErrNotFound) {
		err = nil // somebody is taking it down, or has
	}
	select { // others who wait for these workers hear first why they end
	case <-time.After(newsSpread):
	case <-ctx.Done():
	}
	return errors.Join(err, c.stopWorkers(ctx, 0))
}

// failPending fails every call that waits for any rank of a role that has failed.
func (c *Cluster) failPending() {
	if failed := c.failure(); failed != nil {
		for rank := range c.WorldSize() {
			c.rt.ep.Lost(c.to, rank, ^uint32(0), failed)
		}
	}
}

func (c *Cluster) isUp() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.up
}

func (c *Cluster) failure() *bus.Error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.failed
}

// end notes why no call can be made any more; it reports false if that was known.
func (c *Cluster) end(why *bus.Error) bool { return c.endAs(why, nil) }

func (c *Cluster) endAs(why, failed *bus.Error) bool {
	c.mu.Lock()
	first := c.ended == nil
	if first {
		c.ended, c.failed = why, failed
	}
	c.mu.Unlock()
	if first {
		c.gate.End(why)
	}
	if first && c.tie == opened {
		c.rt.unshare(c)
	}
	return first
}

// Destroy takes the role down: every worker is stopped, rank 0 last, running calls may finish within the grace of the
// spec, and then the name is free. Anybody who is attached may destroy a role. It may be called more than once.
func (c *Cluster) Destroy(ctx context.Context) error { return c.takeDown(ctx, c.spec.StopGrace) }

// Close lets go of the role: one that was created here and is not detached is destroyed, the others stay. A cluster that
// was opened from a handle is shared and stays open too.
func (c *Cluster) Close(ctx context.Context) error {
	switch {
	case c.tie == created && !c.Record().Detached:
		return c.Destroy(ctx)
	case c.tie != opened:
		err := c.settleReplays(ctx)
		c.release()
		return err
	}
	return nil
}

// leave is Close at the end of the runtime. A detached role stays: its workers are processes, or run in a Local that is not
// the runtime's own.
func (c *Cluster) leave(ctx context.Context) error {
	defer c.release()
	if c.tie == created && !c.Record().Detached {
		return c.Destroy(ctx)
	}
	return c.settleReplays(ctx)
}

// release ends this hold of the role.
func (c *Cluster) release() {
	c.end(bus.Errorf(bus.CodeClosed, "this handle of role %s is closed", c.Name()))
	c.life.stop()
	c.endOutput(c.rt.ctx)
	c.mu.Lock()
	gone := c.gone
	c.mu.Unlock()
	if gone {
		c.rt.ep.Forget(c.to) // not of a role that lives: the order of our calls must go on where it was
	}
	c.rt.mu.Lock()
	defer c.rt.mu.Unlock()
	delete(c.rt.clusters, c)
}

// takeDown ends the role, whoever is left of it, and frees its name. One does it at a time.
func (c *Cluster) takeDown(ctx context.Context, grace time.Duration) error {
	if err := c.takeTurn(ctx); err != nil {
		return err
	}
	defer func() { <-c.downCh }()
	c.mu.Lock()
	gone := c.gone
	c.mu.Unlock()
	if gone {
		return nil
	}
	c.end(c.takenDown())
	patience := registryActs
	if c.markStopping(ctx) != nil {
		patience /= 10 // it has been waited for already
	}
	c.life.makeRoom(len(c.Record().Seats)) // it may have grown elsewhere
	err := c.stopWorkers(ctx, grace)
	if c.Record().Process {
		if formerErr := c.endFormer(context.WithoutCancel(ctx)); formerErr != nil { // the head ends what no role knows
			c.rt.log.Warn("roles: workers that were replaced have not all ended", "role", c.Name(), "error", formerErr)
		}
		c.endOutput(ctx)
		if releaseErr := c.giveBack(ctx); releaseErr != nil {
			return errors.Join(err, releaseErr) // the record stays, and with it the way to what is still held
		}
	}
	if removeErr := c.remove(ctx, patience); removeErr != nil {
		return errors.Join(err, removeErr)
	}
	c.mu.Lock()
	c.gone = true
	c.mu.Unlock()
	c.emit(eventGone, nil, "", "it has been taken down")
	c.release()
	return err
}

// markStopping tells those who look. Its error is that the server cannot be reached; any other is harmless here.
func (c *Cluster) markStopping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, registryActs)
	defer cancel()
	err := c.step(ctx, RoleStopping, "")
	if errors.Is(err, bus.ErrUnavailable) {
		return err
	}
	if errors.Is(err, bus.ErrConflict) { // somebody else is at it; what there is to end is in the record
		if rec, err := c.look(); err == nil {
			c.setRecord(rec)
		}
	}
	return nil
}

// takeTurn waits while somebody else takes the role down. A turn that is free is had even if ctx has ended.
func (c *Cluster) takeTurn(ctx context.Context) error {
	select {
	case c.downCh <- struct{}{}:
		return nil
	default:
	}
	select {
	case c.downCh <- struct{}{}:
		return nil
	case <-ctx.Done():
		return bus.Errorf(bus.CodeOf(ctx.Err()), "role %s is still being taken down: %w", c.Name(), ctx.Err())
	}
}

// remove frees the name.
func (c *Cluster) remove(ctx context.Context, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	reg, err := c.rt.registry(ctx)
	if err != nil {
		return err
	}
	if rec := c.Record(); rec.restarts() { // before the record, so that nothing is left of a role without one
		if err := errors.Join(reg.forget(ctx, reg.key(recipeKey(rec.Name))), reg.forget(ctx, reg.key(replayKey(rec.Name)))); err != nil {
			return err
		}
	}
	return reg.remove(ctx, c.Record())
}

// stopWorkers stops all ranks at once, but rank 0 after the others: it often holds what they need to end in order.
func (c *Cluster) stopWorkers(ctx context.Context, grace time.Duration) error {
	others := c.Record().seated()[1:]
	stop := c.stopRemote
	switch rec := c.Record(); {
	case rec.Process && len(rec.Seats) == 0:
		return nil // none was started
	case rec.Process:
		stop = c.stopProcesses
	case c.tie == created:
		stop = c.stopLocal
	}
	return errors.Join(stop(ctx, others, grace), stop(ctx, []int{0}, grace))
}

func (c *Cluster) stopLocal(ctx context.Context, ranks []int, grace time.Duration) error {
	c.mu.Lock()
	workers := c.workers
	c.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	errs := make([]error, len(ranks))
	var group sync.WaitGroup
	for i, r := range ranks {
		if r < len(workers) && workers[r] != nil {
			group.Go(bus.Guard(func() { errs[i] = stopWorker(ctx, workers[r]) }))
		}
	}
	group.Wait()
	return errors.Join(errs...)
}

// stopWorker stops one that runs here. Why it had failed before is known, and no error of the stopping.
func stopWorker(ctx context.Context, w *actors.Worker) error {
	err := w.Stop(ctx)
	if state, _ := w.State(); state == actors.Failed {
		return nil
	}
	return err
}

// stopRemote asks workers elsewhere to stop, and waits until each has said its last words or is known to be gone.
func (c *Cluster) stopRemote(ctx context.Context, ranks []int, grace time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, grace+lastActs)
	defer cancel()
	left, _ := c.life.notOver(ranks)
	if len(left) == 0 {
		return nil
	}
	f, err := c.send(ctx, dispatch.Call{
		Method: actors.VerbStop, Args: []any{actors.StopRequest{Grace: grace}}, Ranks: left, Control: true, CollectAll: true, NoCollect: true,
	})
	if err != nil {
		return err
	}
	<-f.Done() // ends with ctx
	left = left[:0]
	for _, a := range f.Answers() {
		if errors.Is(a.Err, bus.ErrClosed) {
			return a.Err
		}
		if !errors.Is(a.Err, bus.ErrWorkerLost) {
			left = append(left, a.Rank)
		}
	}
	for {
		var changedCh <-chan struct{}
		if left, changedCh = c.life.notOver(left); len(left) == 0 {
			return nil
		}
		select {
		case <-changedCh:
		case <-ctx.Done():
			return bus.Errorf(bus.CodeTimedOut, "role %s: %d of %d workers have not said that they stopped", c.Name(), len(left), len(ranks))
		}
	}
}
