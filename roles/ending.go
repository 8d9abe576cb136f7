package roles

import (
	"context"
	"errors"
	"sync"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/dispatch"
	"troupe/roles/life"
	"troupe/roles/registry"
)

// destroyBackoff paces the repetitions of an interrupted destroy.
var destroyBackoff = bus.Backoff{First: time.Second, Most: 10 * time.Second}

// killBackoff paces requests to the agents of a failed role's workers.
var killBackoff = bus.Backoff{First: 500 * time.Millisecond, Most: 15 * time.Second}

// ender ends a role: in order, at once, or because a worker has failed.
type ender struct {
	c         *Cluster
	destroyCh chan struct{} // holds one: a lock of destroying and resizing the role
}

// closeWithRuntime is Close at the end of the runtime. A detached role stays: its workers are processes, or run in a Local that is
// not the runtime's own.
func (e *ender) closeWithRuntime(ctx context.Context) error {
	defer e.release()
	switch rec := e.c.Record(); {
	case e.c.origin == created && !rec.Detached && e.c.rt.killing.Load():
		return e.c.Kill(ctx)
	case e.c.origin == created && !rec.Detached && rec.Owner != e.c.rt.ep.Session(): // it ends with the run
		return nil
	case e.c.origin == created && !rec.Detached && e.c.rt.driver != "":
		return e.destroy(ctx, min(e.c.spec.StopGrace, orphanGrace), stopSoon)
	case e.c.origin == created && !rec.Detached:
		return e.c.Destroy(ctx)
	}
	return e.c.replayer.flushReplays(ctx)
}

// release ends the monitoring of the role and refuses calls.
func (e *ender) release() {
	e.c.life.feed(life.Event{Kind: life.Close, Why: bus.Errorf(bus.CodeClosed, "this handle of role %s is closed", e.c.Name())})
	e.c.liveness.stop()
	e.c.output.endOutput(e.c.rt.ctx)
	if e.c.life.state() == life.Gone {
		e.c.rt.ep.Forget(e.c.to) // only of an ended role: the order of calls to a live one must continue
	}
	e.c.rt.mu.Lock()
	defer e.c.rt.mu.Unlock()
	delete(e.c.rt.clusters, e.c)
}

// releaseSoon releases an ended role when its workers have reported their end, or after a timeout.
func (e *ender) releaseSoon() {
	defer e.release()
	ctx, cancel := context.WithTimeout(e.c.rt.ctx, closeTimeout)
	defer cancel()
	_ = e.awaitOver(ctx, e.c.Record().AllRanks())
}

// awaitOver returns when the workers of some ranks have ended, or the ranks that have not when ctx has ended.
func (e *ender) awaitOver(ctx context.Context, ranks []int) []int {
	for {
		left, changedCh := e.c.life.notOver(ranks)
		if len(left) == 0 {
			return nil
		}
		select {
		case <-changedCh:
		case <-ctx.Done():
			return left
		}
	}
}

// destroy stops all workers and frees the name. If that was interrupted, because the head or an agent is unreachable,
// the runtime of the driver repeats it: no other process does so while the driver lives.
func (e *ender) destroy(ctx context.Context, grace time.Duration, manner stopManner) error {
	err := e.tryDestroy(ctx, grace, manner)
	if e.c.life.state() != life.Gone {
		e.c.life.feed(life.Event{Kind: life.Interrupted})
	}
	return err
}

// finishDestroy repeats an interrupted destroy until the name is free or the runtime ends.
func (e *ender) finishDestroy() {
	_ = bus.Retry(e.c.rt.ctx, destroyBackoff, func() error { // it ends with the runtime; the lease ends then, and others finish
		ctx, cancel := context.WithTimeout(e.c.rt.ctx, closeTimeout)
		defer cancel()
		if err := e.tryDestroy(ctx, 0, stopInOrder); e.c.life.state() != life.Gone {
			return err
		}
		return nil
	})
}

// tryDestroy is one attempt to destroy the role; one caller at a time.
func (e *ender) tryDestroy(ctx context.Context, grace time.Duration, manner stopManner) error {
	e.c.scaler.stop()
	if err := e.lockDestroy(ctx); err != nil {
		return err
	}
	defer func() { <-e.destroyCh }()
	if e.c.life.state() == life.Gone {
		return nil
	}
	if manner == stopNow {
		why := bus.Errorf(bus.CodeWorkerLost, "role %s was killed by %s", e.c.Name(), e.c.rt.cfg.Name)
		e.c.end(why)
		e.c.performer.failAll(why)
	}
	e.c.end(nil)
	patience := registryTimeout
	if e.markStopping(ctx) != nil {
		patience /= 10 // the server was unreachable for a full timeout already
	}
	err := e.stopWorkers(ctx, grace, manner)
	if e.c.Record().Process {
		if formerErr := e.c.workforce.killReplaced(context.WithoutCancel(ctx)); formerErr != nil { // the head kills orphan processes
			e.c.rt.log.Warn("roles: some replaced workers may still run", "role", e.c.Name(), "error", formerErr)
		}
		e.c.output.endOutput(ctx)
		if releaseErr := e.c.workforce.releaseReservations(ctx); releaseErr != nil {
			return errors.Join(err, releaseErr) // the record stays, so that the reservations can be found
		}
	}
	if removeErr := e.remove(ctx, patience); removeErr != nil {
		return errors.Join(err, removeErr)
	}
	e.c.life.feed(life.Event{Kind: life.Destroyed})
	e.c.output.emit(eventGone, nil, "", "the role is destroyed")
	e.c.rt.audit(actionDestroyed, e.c.Record(), nil, e.manner(manner), "")
	e.release()
	return err
}

// manner says how the role was destroyed here.
func (e *ender) manner(m stopManner) string {
	switch {
	case e.c.origin == ending:
		return "nobody owned it any more"
	case m == stopNow:
		return "killed"
	}
	return "stopped in order"
}

// markStopping sets the state stopping in the registry. It only returns the error of an unreachable server.
func (e *ender) markStopping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, registryTimeout)
	defer cancel()
	err := e.c.record.step(ctx, registry.RoleStopping, "")
	if errors.Is(err, bus.ErrUnavailable) {
		return err
	}
	if errors.Is(err, bus.ErrConflict) { // another process is destroying it; the record lists what to stop
		if rec, _ := e.c.record.readRecord(); rec.Incarnation == e.c.to.Incarnation {
			e.c.record.setRecord(rec)
		}
	}
	return nil
}

// lockDestroy waits while another goroutine destroys or resizes the role. A free turn is taken even if ctx has ended.
func (e *ender) lockDestroy(ctx context.Context) error {
	select {
	case e.destroyCh <- struct{}{}:
		return nil
	default:
	}
	select {
	case e.destroyCh <- struct{}{}:
		return nil
	case <-ctx.Done():
		return bus.Errorf(bus.CodeOf(ctx.Err()), "role %s is being destroyed or resized: %w", e.c.Name(), ctx.Err())
	}
}

// remove frees the name.
func (e *ender) remove(ctx context.Context, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	reg, err := e.c.rt.registry(ctx)
	if err != nil {
		return err
	}
	if rec := e.c.Record(); rec.ReplacesWorkers() || rec.ReplaysCalls() { // before the record, so that a role without a record has no other keys
		if err := reg.DeleteRestartKeys(ctx, rec.Name); err != nil {
			return err
		}
	}
	return reg.Remove(ctx, e.c.Record())
}

// stopWorkers stops all ranks concurrently, and rank 0 after the others, which may need it to stop.
func (e *ender) stopWorkers(ctx context.Context, grace time.Duration, manner stopManner) error {
	ranks := e.c.Record().PlacedRanks()
	stop := e.stopRemote
	switch rec := e.c.Record(); {
	case rec.Process && len(rec.Placements) == 0:
		return nil // none was started
	case rec.Process && manner == stopNow:
		return e.c.workforce.killProcesses(ctx, ranks, rec, 0)
	case rec.Process:
		stop = func(ctx context.Context, ranks []int, grace time.Duration) error {
			return e.c.workforce.stopProcesses(ctx, ranks, grace, manner)
		}
	case e.c.origin == created:
		stop = e.stopLocal
	}
	return errors.Join(stop(ctx, ranks[1:], grace), stop(ctx, ranks[:1], grace))
}

func (e *ender) stopLocal(ctx context.Context, ranks []int, grace time.Duration) error {
	e.c.starter.mu.Lock()
	workers := e.c.starter.workers
	e.c.starter.mu.Unlock()
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

// stopRemote asks workers of other processes to stop, and waits until each has reported its end or is lost.
func (e *ender) stopRemote(ctx context.Context, ranks []int, grace time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, grace+closeTimeout)
	defer cancel()
	left, _ := e.c.life.notOver(ranks)
	if len(left) == 0 {
		return nil
	}
	f, err := e.c.send(ctx, dispatch.Call{
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
	if left = e.awaitOver(ctx, left); len(left) > 0 {
		return bus.Errorf(bus.CodeTimedOut, "role %s: %d of %d workers have not reported that they stopped", e.c.Name(), len(left), len(ranks))
	}
	return nil
}

// cleanUp runs do in the background and logs its error.
func (e *ender) cleanUp(do func(context.Context) error) {
	ctx, cancel := context.WithTimeout(e.c.rt.ctx, e.c.spec.StopGrace+closeTimeout)
	defer cancel()
	if err := do(ctx); err != nil && e.c.rt.ctx.Err() == nil {
		e.c.rt.log.Warn("roles: cleaning up a role failed", "role", e.c.Name(), "error", err)
	}
}

// fail writes the cause into the registry and stops the other workers. The name stays taken, so that later drivers find
// the cause.
func (e *ender) fail(ctx context.Context, why error) error {
	err := e.c.record.step(ctx, registry.RoleFailed, why.Error())
	spread := time.After(failureSpread)
	if err == nil { // of several processes that see the failure one stores the timeline
		e.storeFailureTimeline(ctx, why)
	}
	if errors.Is(err, bus.ErrConflict) || errors.Is(err, bus.ErrNotFound) {
		err = nil // another process is destroying it, or has
	}
	select { // callers of these workers receive the cause before the workers stop
	case <-spread:
	case <-ctx.Done():
	}
	return errors.Join(err, e.stopWorkers(ctx, 0, stopInOrder))
}

// killFailed kills the processes of a failed role and releases their reservations. It retries until every agent has seen
// its workers exit or placement counts the node as lost, or this runtime ends: the record stays, so that another
// process can finish.
func (e *ender) killFailed() {
	for waits := killBackoff.Start(); e.c.rt.ctx.Err() == nil; {
		done, err := e.killFailedOnce()
		if done {
			return
		}
		pause := waits.Next()
		e.c.rt.log.Warn("roles: some workers of a failed role may still run; retrying", "role", e.c.Name(), "in", pause, "error", err)
		_ = bus.Sleep(e.c.rt.ctx, pause) // the loop checks the context
	}
}

// killFailedOnce reports whether only the record of the role is left, or another process destroys it.
func (e *ender) killFailedOnce() (done bool, _ error) {
	ctx, cancel := context.WithTimeout(e.c.rt.ctx, killGrace+agentTimeout+releaseTimeout+registryTimeout)
	defer cancel()
	if err := e.lockDestroy(ctx); err != nil {
		return false, err
	}
	defer func() { <-e.destroyCh }()
	rec, err := e.c.record.readRecord()
	switch {
	case errors.Is(err, bus.ErrNotFound):
		return true, nil
	case err != nil:
		return false, err
	}
	e.c.record.setRecord(rec)
	if err := e.c.workforce.killAll(ctx, rec); err != nil {
		return false, err
	}
	if err := e.c.workforce.releaseReservations(ctx); err != nil {
		return false, err
	}
	err = e.c.record.alter(ctx, func(r *registry.RoleRecord) error {
		if r.State == registry.RoleFailed {
			r.Reservations, r.Replaced = nil, nil
		}
		return nil
	})
	return err == nil || errors.Is(err, bus.ErrNotFound), err
}

// stopWorker stops a worker of this process. An earlier failure of the worker is no error.
func stopWorker(ctx context.Context, w *actors.Worker) error {
	err := w.Stop(ctx)
	if state, _ := w.State(); state == actors.Failed {
		return nil
	}
	return err
}
