package actors

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"troupe/bus"
)

// Stop ends the worker in order: no new calls but control, what runs may finish and what it answers may be fetched
// within ctx, then it is cancelled, and at last the objects are closed. Past ctx that takes a moment more, never longer
// than twice lastGrace. Its error names the calls that would not end. It may be called more than once; the first ctx to
// end counts for all.
func (w *Worker) Stop(ctx context.Context) error {
	w.beginStop()
	w.awaitIdle(ctx, w.hurryCh, true)
	if ctx.Err() != nil {
		w.hurry.Do(func() { close(w.hurryCh) })
	}
	w.end(Stopped, nil)
	_, err := w.State()
	return err
}

// beginStop refuses what waits and what comes. It does nothing in a worker that is ending already.
func (w *Worker) beginStop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.becomeLocked(Stopping, nil) {
		w.refuseWaiting(bus.Errorf(bus.CodeRefused, "the worker is stopping"))
	}
}

// failLocked ends the worker at once: no more calls start, those that wait or run fail, and everybody is told why.
func (w *Worker) failLocked(err error) {
	if !w.becomeLocked(Failed, err) {
		return
	}
	w.cancelRunning(err)
	bus.Go(func() {
		w.host.beat(w.spec.Address, []*Worker{w}, true)
		w.end(Failed, err)
	})
}

// end is the last step of both ways out, taken once; whoever comes later waits for it.
func (w *Worker) end(as State, why error) {
	w.ending.Do(func() {
		if why == nil {
			why = bus.Errorf(bus.CodeCancelled, "the worker is stopping")
		}
		w.mu.Lock()
		w.cancelRunning(why)
		w.mu.Unlock()
		grace, stop := context.WithTimeout(context.Background(), lastGrace)
		w.awaitIdle(grace, nil, false)
		stop()
		err := w.closeObjects()
		if left := w.runningMethods(); len(left) > 0 {
			err = errors.Join(err, bus.Errorf(bus.CodeTimedOut, "still running in %s[%d] although cancelled: %s", w.spec.Address.Role, w.spec.Rank, strings.Join(left, ", ")))
		}
		w.bury(as, err)
		w.host.remove(w)
		close(w.doneCh)
	})
}

// bury takes the last step of the lifecycle and lets go of everything that is remembered.
func (w *Worker) bury(as State, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.becomeLocked(as, nil)
	if w.err == nil {
		w.err = err
	}
	for _, s := range w.sessions {
		w.forgetAll(s)
	}
}

// cancelRunning ends the context of every call, and lets no other begin: those that wait are refused. w.mu is held.
func (w *Worker) cancelRunning(cause error) {
	if w.cause == nil {
		w.cause = bus.Errorf(bus.CodeWorkerLost, "the worker has ended: %w", cause)
	}
	for _, c := range w.active {
		c.ctx.cancel(context.Canceled)
	}
	w.refuseWaiting(w.cause)
}

// refuseWaiting answers what waits with err. w.mu is held.
func (w *Worker) refuseWaiting(err error) {
	now := time.Now()
	for _, q := range w.queues {
		for q.waiting.len() > 0 {
			w.answerLocked(q.waiting.pop(), nil, err, now)
		}
	}
}

// awaitIdle waits until nothing runs, nor with fetched set a large answer is left to fetch, or until ctx ends or hurryCh
// is closed.
func (w *Worker) awaitIdle(ctx context.Context, hurryCh <-chan struct{}, fetched bool) {
	for !w.idle(fetched) {
		select {
		case <-w.idleCh:
		case <-ctx.Done():
			return
		case <-hurryCh:
			return
		case <-w.doneCh:
			return
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.signalIdle() // somebody else may wait as well
}

func (w *Worker) idle(fetched bool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.active) == 0 && (!fetched || w.unfetched == 0)
}

// runningMethods names what runs.
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
