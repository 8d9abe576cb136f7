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
	"troupe/roles/registry"
)

// failureSpread is how long the failure of a worker may take to reach all clusters of its role.
const failureSpread = 50 * time.Millisecond

// answersTransit is how long answers of a stopped worker may be in transit.
const answersTransit = 300 * time.Millisecond

// Cluster is a driver's handle on the running workers of one role. It is safe for concurrent use, and it can be an
// argument of a call, alone or inside another value: the method receives its Handle.
type Cluster struct {
	rt       *Runtime
	origin   origin
	spec     Spec // of a role created elsewhere, only StopGrace
	to       bus.Address
	liveness *liveness
	shape    atomic.Pointer[dispatch.Group] // current layout of the ranks; see size.go
	gate     dispatch.Gate                  // holds calls to ranks that are being restarted

	destroyCh chan struct{} // holds one: a lock of destroying and resizing the role

	mu          sync.Mutex // guards what follows
	rec         registry.RoleRecord
	workers     []*actors.Worker // goroutines of this process
	program     nodes.Program    // of worker processes
	startParams *startParams     // start parameters of worker processes; nil: created elsewhere and not needed yet
	recovery    recovery         // restarts of lost workers
	replayCache replayCache      // calls that are replayed on restarted workers
	output      *roleOutput      // nil: output is not shown
	started     bool             // the start is complete: the first observer of a failure destroys the role, not start
	startedCh   chan struct{}    // closed when a start in the background is complete; nil: the role was not created with Begin
	startErr    *bus.Error       // of that start
	ended       *bus.Error       // why calls are refused; nil: they are not
	failed      *bus.Error       // ended, if a worker's failure is the reason
	destroyed   bool             // the role is destroyed and its name is free
	finishing   bool             // an interrupted destroy is being repeated
}

// origin is how a runtime obtained a role.
type origin uint8

const (
	created  origin = iota // created here: destroyed with the runtime unless detached
	attached               // attached by name
	opened                 // opened from a handle and shared in the process, until the role ends
	followed               // monitored by a Local or a head, because its driver may be gone
	ending                 // destroyed here, because its driver or the worker that created it has ended
)

// Name is the role's name.
func (c *Cluster) Name() string { return c.to.Role }

func (c *Cluster) group() *dispatch.Group { return c.shape.Load() }
func (c *Cluster) mesh() dispatch.Mesh    { return c.group().Mesh }

// WorldSize is the number of workers; DPSize, TPSize, PPSize and CPSize are the sizes of the mesh.
func (c *Cluster) WorldSize() int { return c.mesh().World() }
func (c *Cluster) DPSize() int    { return c.mesh().DP }
func (c *Cluster) TPSize() int    { return c.mesh().TP }
func (c *Cluster) PPSize() int    { return c.mesh().PP }
func (c *Cluster) CPSize() int    { return c.mesh().CP }

// RankInfo is a rank's coordinates in the mesh.
func (c *Cluster) RankInfo(rank int) (dispatch.RankInfo, error) { return c.mesh().Info(rank) }

// Record is the role's registry entry as last read by this process.
func (c *Cluster) Record() registry.RoleRecord {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rec
}

// Health is the last heartbeat of each worker.
func (c *Cluster) Health() []actors.Heartbeat {
	beats, _ := c.liveness.states()
	return beats
}

// start starts the workers and waits until each receives on every subject.
func (c *Cluster) start(ctx context.Context, config wire.Raw) error {
	var err error
	if c.spec.Process != nil {
		err = c.startProcesses(ctx, config)
	} else {
		err = c.startLocal(ctx, config)
	}
	if err == nil {
		err = c.barrier(ctx, c.Record().AllRanks())
	}
	if err == nil && c.spec.Process != nil {
		err = c.readMethods(ctx)
	}
	if err == nil {
		c.liveness.expectAll()
		err = c.step(ctx, registry.RoleReady, "")
	}
	if err == nil && c.spec.Detached && c.spec.Process == nil {
		err = c.rt.local.follow(c.Record())
	}
	if err = c.startResult(err); err == nil {
		c.emit(eventRole, nil, "", fmt.Sprintf("%d workers of class %s, for %s", c.WorldSize(), c.Record().Class, c.rt.cfg.Name))
	}
	return err
}

// startResult is the result of a start.
func (c *Cluster) startResult(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failed != nil { // the failure of a worker is the cause
		if c.startedCh != nil {
			return c.failed
		}
		return c.failed.Unwrap()
	}
	if err == nil && c.ended != nil {
		return c.ended
	}
	c.started = err == nil
	return err
}

// startLocal starts workers as goroutines of this process.
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

// step changes the role's state in the registry.
func (c *Cluster) step(ctx context.Context, to registry.RoleState, cause string) error {
	reg, err := c.rt.registry(ctx)
	if err != nil {
		return err
	}
	rec, err := reg.Step(ctx, c.Record(), to, cause)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rec = rec
	return nil
}

// barrier proves that the workers receive on every subject of the role. A flush or a key would not: interest propagates
// more slowly than either.
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
		p.Ordered, p.AskAfter, p.Gens = c.group().Ordered && !p.Control, 100*time.Millisecond, c.liveness.generations()
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

// workerLost handles a lost worker: it fails the calls that wait for the worker, and holds later ones while the worker
// is replaced. If the worker failed, the calls to other ranks fail too. The creator of the role stops the other
// workers; of a detached role, whose driver may be gone, every cluster does, if certain: the worker or its agent
// reported the failure.
func (c *Cluster) workerLost(l loss, certain bool) {
	if l.failed && c.origin == opened && !c.Record().Process { // the handle may lack the policy
		c.failCalls(l)
		c.rt.spawn(func() {
			c.reloadRecord()
			c.handleLoss(l, certain)
		})
		return
	}
	c.handleLoss(l, certain)
}

// restartable reports whether lost workers are replaced.
func (c *Cluster) restartable() bool {
	return c.Record().ReplacesWorkers() && (c.origin != created || c.isStarted())
}

func (c *Cluster) handleLoss(l loss, certain bool) {
	if l.failed && c.restartable() {
		siblings := c.siblings()
		for _, s := range append(siblings, c) {
			if s.restartable() {
				s.holdCalls(l)
			}
		}
		defer func() {
			for _, s := range siblings {
				if s.restartable() {
					s.handleFailure(l)
				}
			}
		}()
	}
	c.failCalls(l)
	if l.failed && c.handleFailure(l) {
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
		if c.end(c.errDestroyed()) && c.isStarted() {
			c.rt.spawn(func() {
				c.cleanUp(func(ctx context.Context) error { return c.destroy(ctx, c.spec.StopGrace, stopInOrder) })
			})
		}
		return
	}
	c.failWith(l, certain)
}

// failWith fails the role because of one worker.
func (c *Cluster) failWith(l loss, certain bool) {
	because := bus.Errorf(bus.CodeWorkerLost, "the role failed because of rank %d: %s", l.rank, l.why.Message).WithCause(l.why)
	because.Node, because.Stack, because.Details = l.why.Node, l.why.Stack, l.why.Details
	if c.isStarting() {
		because = startError(l.why)
	}
	if !c.endAs(because, because) {
		return
	}
	c.failPending()
	c.reportFailure(l, "the role fails")
	if c.isStarted() || c.origin == followed && c.Record().Process || certain && c.origin != opened && c.Record().Detached {
		c.rt.spawn(func() {
			c.cleanUp(func(ctx context.Context) error { return c.fail(ctx, l.why) })
			if c.Record().Process {
				c.killFailed()
			}
		})
	}
}

// failCalls fails the calls that wait for a lost worker. A worker that stopped in order has answered every call before;
// answers in transit get a moment to arrive.
func (c *Cluster) failCalls(l loss) {
	lose := func() { c.rt.ep.Lost(c.to, l.rank, l.gen, l.why) }
	if l.failed || l.killed {
		lose()
	} else {
		time.AfterFunc(answersTransit, bus.Guard(lose))
	}
}

// failKilled fails pending and later calls of a role that is being killed.
func (c *Cluster) failKilled() {
	why := bus.Errorf(bus.CodeWorkerLost, "role %s was killed by %s", c.Name(), c.rt.cfg.Name)
	c.end(why)
	for rank := range c.WorldSize() {
		c.rt.ep.Lost(c.to, rank, ^uint32(0), why)
	}
}

func (c *Cluster) errDestroyed() *bus.Error {
	return bus.Errorf(bus.CodeNotFound, "role %s has been destroyed", c.Name())
}

// cleanUp runs do in the background and logs its error.
func (c *Cluster) cleanUp(do func(context.Context) error) {
	ctx, cancel := context.WithTimeout(c.rt.ctx, c.spec.StopGrace+closeTimeout)
	defer cancel()
	if err := do(ctx); err != nil && c.rt.ctx.Err() == nil {
		c.rt.log.Warn("roles: cleaning up a role failed", "role", c.Name(), "error", err)
	}
}

// fail writes the cause into the registry and stops the other workers. The name stays taken, so that later drivers find
// the cause.
func (c *Cluster) fail(ctx context.Context, why error) error {
	err := c.step(ctx, registry.RoleFailed, why.Error())
	spread := time.After(failureSpread)
	if err == nil { // of several processes that see the failure one stores the timeline
		c.storeFailureTimeline(ctx, why)
	}
	if errors.Is(err, bus.ErrConflict) || errors.Is(err, bus.ErrNotFound) {
		err = nil // another process is destroying it, or has
	}
	select { // callers of these workers receive the cause before the workers stop
	case <-spread:
	case <-ctx.Done():
	}
	return errors.Join(err, c.stopWorkers(ctx, 0, stopInOrder))
}

// failPending fails every pending call to a failed role.
func (c *Cluster) failPending() {
	if failed := c.failure(); failed != nil {
		for rank := range c.WorldSize() {
			c.rt.ep.Lost(c.to, rank, ^uint32(0), failed)
		}
	}
}

func (c *Cluster) isStarted() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.started
}

func (c *Cluster) failure() *bus.Error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.failed
}

// end sets the error of later calls; false: it was set before.
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
		c.liveness.notifyChanged()
	}
	if first && c.origin == opened {
		c.rt.unshare(c)
	}
	return first
}

// Destroy stops every worker, rank 0 last, and frees the name. Running calls may finish within the grace of the spec.
// Any attached driver may destroy a role. It may be called more than once.
func (c *Cluster) Destroy(ctx context.Context) error {
	return c.destroy(ctx, c.spec.StopGrace, stopInOrder)
}

// Kill ends the role at once: every worker process gets SIGKILL, and pending calls fail with the cause. When it returns the name
// and the devices are free. Any attached driver may kill a role. Workers that are goroutines are only told to stop.
func (c *Cluster) Kill(ctx context.Context) error { return c.destroy(ctx, 0, stopNow) }

// KillRanks kills the processes of some ranks with SIGKILL, and returns when their agents have seen them exit. What happens next is the
// role's policy for a worker that failed: with Ignore the other ranks continue.
func (c *Cluster) KillRanks(ctx context.Context, ranks ...int) error {
	rec := c.Record()
	if !rec.Process {
		return bus.Errorf(bus.CodeInvalid, "role %s: its workers are goroutines, which cannot be killed", c.Name())
	}
	for _, rank := range ranks {
		if rank < 0 || rank >= rec.World {
			return bus.Errorf(bus.CodeInvalid, "role %s has no rank %d: it has %d workers", c.Name(), rank, rec.World)
		}
	}
	order, groups := launchTargets(rec, ranks)
	var errs []error
	for _, at := range order {
		ids := make([]nodes.WorkerID, len(groups[at]))
		for i, rank := range groups[at] {
			ids[i] = rec.WorkerID(rank)
		}
		_, err := c.rt.agents().Evict(ctx, at.node, ids, 0, "killed by "+c.rt.cfg.Name) // a stop on request would be the end of the role
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Close releases the cluster: a role that was created here and is not detached is destroyed, others stay. A cluster
// opened from a handle is shared and stays open.
func (c *Cluster) Close(ctx context.Context) error {
	switch {
	case c.origin == created && !c.Record().Detached:
		return c.Destroy(ctx)
	case c.origin != opened:
		err := c.flushReplays(ctx)
		c.release()
		return err
	}
	return nil
}

// closeWithRuntime is Close at the end of the runtime. A detached role stays: its workers are processes, or run in a Local that is
// not the runtime's own.
func (c *Cluster) closeWithRuntime(ctx context.Context) error {
	defer c.release()
	switch rec := c.Record(); {
	case c.origin == created && !rec.Detached && c.rt.killing.Load():
		return c.Kill(ctx)
	case c.origin == created && !rec.Detached && rec.Owner != c.rt.ep.Session(): // it ends with the run
		return nil
	case c.origin == created && !rec.Detached && c.rt.driver != "":
		return c.destroy(ctx, min(c.spec.StopGrace, orphanGrace), stopSoon)
	case c.origin == created && !rec.Detached:
		return c.Destroy(ctx)
	}
	return c.flushReplays(ctx)
}

// release ends the monitoring of the role and refuses calls.
func (c *Cluster) release() {
	c.end(bus.Errorf(bus.CodeClosed, "this handle of role %s is closed", c.Name()))
	c.liveness.stop()
	c.endOutput(c.rt.ctx)
	c.mu.Lock()
	gone := c.destroyed
	c.mu.Unlock()
	if gone {
		c.rt.ep.Forget(c.to) // only of an ended role: the order of calls to a live one must continue
	}
	c.rt.mu.Lock()
	defer c.rt.mu.Unlock()
	delete(c.rt.clusters, c)
}

// destroy stops all workers and frees the name. If that was interrupted, because the head or an agent is unreachable,
// the runtime of the driver repeats it: no other process does so while the driver lives.
func (c *Cluster) destroy(ctx context.Context, grace time.Duration, manner stopManner) error {
	err := c.tryDestroy(ctx, grace, manner)
	c.mu.Lock()
	begin := !c.destroyed && !c.finishing && c.origin == created && c.ended != nil
	c.finishing = c.finishing || begin
	c.mu.Unlock()
	if begin {
		c.rt.spawn(c.finishDestroy)
	}
	return err
}

// finishDestroy repeats an interrupted destroy until the name is free or the runtime ends.
func (c *Cluster) finishDestroy() {
	_ = bus.Retry(c.rt.ctx, destroyBackoff, func() error { // it ends with the runtime; the lease ends then, and others finish
		ctx, cancel := context.WithTimeout(c.rt.ctx, closeTimeout)
		defer cancel()
		err := c.tryDestroy(ctx, 0, stopInOrder)
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.destroyed {
			return nil
		}
		return err
	})
	c.mu.Lock()
	defer c.mu.Unlock()
	c.finishing = false
}

// tryDestroy is one attempt to destroy the role; one caller at a time.
func (c *Cluster) tryDestroy(ctx context.Context, grace time.Duration, manner stopManner) error {
	if err := c.lockDestroy(ctx); err != nil {
		return err
	}
	defer func() { <-c.destroyCh }()
	c.mu.Lock()
	gone := c.destroyed
	c.mu.Unlock()
	if gone {
		return nil
	}
	if manner == stopNow {
		c.failKilled()
	}
	c.end(c.errDestroyed())
	patience := registryTimeout
	if c.markStopping(ctx) != nil {
		patience /= 10 // the server was unreachable for a full timeout already
	}
	c.liveness.resize(len(c.Record().Placements)) // another process may have grown it
	err := c.stopWorkers(ctx, grace, manner)
	if c.Record().Process {
		if formerErr := c.killReplaced(context.WithoutCancel(ctx)); formerErr != nil { // the head kills orphan processes
			c.rt.log.Warn("roles: some replaced workers may still run", "role", c.Name(), "error", formerErr)
		}
		c.endOutput(ctx)
		if releaseErr := c.releaseReservations(ctx); releaseErr != nil {
			return errors.Join(err, releaseErr) // the record stays, so that the reservations can be found
		}
	}
	if removeErr := c.remove(ctx, patience); removeErr != nil {
		return errors.Join(err, removeErr)
	}
	c.mu.Lock()
	c.destroyed = true
	c.mu.Unlock()
	c.emit(eventGone, nil, "", "the role is destroyed")
	c.release()
	return err
}

// destroyBackoff paces the repetitions of an interrupted destroy.
var destroyBackoff = bus.Backoff{First: time.Second, Most: 10 * time.Second}

// markStopping sets the state stopping in the registry. It only returns the error of an unreachable server.
func (c *Cluster) markStopping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, registryTimeout)
	defer cancel()
	err := c.step(ctx, registry.RoleStopping, "")
	if errors.Is(err, bus.ErrUnavailable) {
		return err
	}
	if errors.Is(err, bus.ErrConflict) { // another process is destroying it; the record lists what to stop
		if rec, err := c.readRecord(); err == nil {
			c.setRecord(rec)
		}
	}
	return nil
}

// lockDestroy waits while another goroutine destroys or resizes the role. A free turn is taken even if ctx has ended.
func (c *Cluster) lockDestroy(ctx context.Context) error {
	select {
	case c.destroyCh <- struct{}{}:
		return nil
	default:
	}
	select {
	case c.destroyCh <- struct{}{}:
		return nil
	case <-ctx.Done():
		return bus.Errorf(bus.CodeOf(ctx.Err()), "role %s is being destroyed or resized: %w", c.Name(), ctx.Err())
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
	if rec := c.Record(); rec.ReplacesWorkers() { // before the record, so that a role without a record has no other keys
		if err := reg.DeleteRestartKeys(ctx, rec.Name); err != nil {
			return err
		}
	}
	return reg.Remove(ctx, c.Record())
}

// stopWorkers stops all ranks concurrently, and rank 0 after the others, which may need it to stop.
func (c *Cluster) stopWorkers(ctx context.Context, grace time.Duration, manner stopManner) error {
	ranks := c.Record().PlacedRanks()
	stop := c.stopRemote
	switch rec := c.Record(); {
	case rec.Process && len(rec.Placements) == 0:
		return nil // none was started
	case rec.Process && manner == stopNow:
		return c.killProcesses(ctx, ranks, rec, 0)
	case rec.Process:
		stop = func(ctx context.Context, ranks []int, grace time.Duration) error {
			return c.stopProcesses(ctx, ranks, grace, manner)
		}
	case c.origin == created:
		stop = c.stopLocal
	}
	return errors.Join(stop(ctx, ranks[1:], grace), stop(ctx, ranks[:1], grace))
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

// stopWorker stops a worker of this process. An earlier failure of the worker is no error.
func stopWorker(ctx context.Context, w *actors.Worker) error {
	err := w.Stop(ctx)
	if state, _ := w.State(); state == actors.Failed {
		return nil
	}
	return err
}

// stopRemote asks workers of other processes to stop, and waits until each has reported its end or is lost.
func (c *Cluster) stopRemote(ctx context.Context, ranks []int, grace time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, grace+closeTimeout)
	defer cancel()
	left, _ := c.liveness.notOver(ranks)
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
		if left, changedCh = c.liveness.notOver(left); len(left) == 0 {
			return nil
		}
		select {
		case <-changedCh:
		case <-ctx.Done():
			return bus.Errorf(bus.CodeTimedOut, "role %s: %d of %d workers have not reported that they stopped", c.Name(), len(left), len(ranks))
		}
	}
}
