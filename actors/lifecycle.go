package actors

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"troupe/bus"
)

// State is a state of the worker's lifecycle:
//
//	created ──► initialising ──► ready ──► stopping ──► stopped
//	   │              │            │           │
//	   └──────────────┴────────────┴───────────┴──► failed
type State string

const (
	Created      State = "created"      // not constructed yet
	Initialising State = "initialising" // the constructor runs
	Ready        State = "ready"        // it accepts calls
	Stopping     State = "stopping"     // it accepts control calls only; running calls may finish
	Stopped      State = "stopped"      // it was stopped
	Failed       State = "failed"       // it ended with an error
)

var successors = map[State][]State{
	Created:      {Initialising, Stopping, Failed},
	Initialising: {Ready, Stopping, Failed},
	Ready:        {Stopping, Failed},
	Stopping:     {Stopped, Failed},
}

// next refuses a transition that the diagram does not have.
func (s State) next(to State) error {
	for _, ok := range successors[s] {
		if ok == to {
			return nil
		}
	}
	return fmt.Errorf("a worker that is %s cannot become %s", s, to)
}

// Over reports whether the state is final.
func (s State) Over() bool { return s == Stopped || s == Failed }

// Stop stops the worker: it accepts only control calls, running calls may finish and large answers be fetched until ctx
// ends, then running calls are cancelled and the objects closed, which takes at most twice defaultEndGrace. The error names
// calls that did not end. Stop may be called more than once; the first ctx to end counts for all.
func (w *Worker) Stop(ctx context.Context) error {
	w.beginStop()
	w.awaitIdle(ctx, w.forceCh, true)
	if w.host.cfg.OwnProcess { // the process ends with the worker
		w.host.ep.References().HandOver(ctx)
	}
	if ctx.Err() != nil {
		w.forceOnce.Do(func() { close(w.forceCh) })
	}
	w.end(Stopped, nil)
	_, err := w.State()
	return err
}

// beginStop refuses queued and new work. It has no effect on a worker that is already ending.
func (w *Worker) beginStop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.becomeLocked(Stopping, nil) {
		w.refuseWaiting(bus.Errorf(bus.CodeRefused, "the worker is stopping"))
	}
}

// failLocked ends the worker at once: no call starts, queued and running ones fail, and a heartbeat has the cause.
func (w *Worker) failLocked(err error) {
	if !w.becomeLocked(Failed, err) {
		return
	}
	w.cancelRunning(err)
	bus.Go(func() {
		w.host.sendHeartbeat(w.spec.Address, []*Worker{w}, true)
		w.end(Failed, err)
	})
}

// end is the last step of Stop and of a failure. It runs once; further callers wait for it.
func (w *Worker) end(as State, why error) {
	w.endOnce.Do(func() {
		if why == nil {
			why = bus.Errorf(bus.CodeCancelled, "the worker is stopping")
		}
		w.mu.Lock()
		w.cancelRunning(why)
		w.mu.Unlock()
		grace, stop := context.WithTimeout(context.Background(), w.host.endGrace)
		w.awaitIdle(grace, nil, false)
		stop()
		err := w.closeObjects()
		if left := w.runningMethods(); len(left) > 0 {
			err = errors.Join(err, bus.Errorf(bus.CodeTimedOut, "still running in %s[%d] although cancelled: %s", w.spec.Address.Role, w.spec.Rank, strings.Join(left, ", ")))
		}
		w.recordEnd(as, err)
		w.host.remove(w)
		close(w.doneCh)
	})
}

// recordEnd takes the last transition and drops all kept answers.
func (w *Worker) recordEnd(as State, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.becomeLocked(as, nil)
	if w.err == nil {
		w.err = err
	}
	for _, s := range w.callers {
		w.forgetAll(s)
	}
	w.runs.Flush()
}

// cancelRunning cancels every running call, refuses the queued ones and lets none start. w.mu is held.
func (w *Worker) cancelRunning(cause error) {
	if w.cause == nil {
		w.cause = bus.Errorf(bus.CodeWorkerLost, "the worker has ended: %w", cause)
	}
	for _, c := range w.active {
		c.ctx.cancel(context.Canceled)
	}
	w.refuseWaiting(w.cause)
}

// refuseWaiting answers queued calls with err. w.mu is held.
func (w *Worker) refuseWaiting(err error) {
	now := time.Now()
	for _, q := range w.queues {
		for q.waiting.len() > 0 {
			w.answerLocked(q.waiting.pop(), nil, err, now)
		}
	}
}

// awaitIdle waits until no call runs and, with fetched set, no large answer is left to fetch, or until ctx ends or
// forceCh is closed.
func (w *Worker) awaitIdle(ctx context.Context, forceCh <-chan struct{}, fetched bool) {
	for !w.idle(fetched) {
		select {
		case <-w.idleCh:
		case <-ctx.Done():
			return
		case <-forceCh:
			return
		case <-w.doneCh:
			return
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.signalIdle() // wake other waiters
}

func (w *Worker) idle(fetched bool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.active) == 0 && (!fetched || w.unfetched == 0)
}

// runningMethods returns the methods of the running calls, sorted.
func (w *Worker) runningMethods() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var names []string
	for _, c := range w.active {
		names = append(names, c.header.Method)
	}
	slices.Sort(names)
	return names
}
