package pipeline

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync"

	"troupe/bus"
	"troupe/pipeline/flow"
	"troupe/pipeline/spec"
)

// ErrAborted is the cause of a handler's context when its item is aborted. The outputs that the handler returns then
// are stored.
var ErrAborted = bus.Errorf(bus.CodeCancelled, "the item was aborted")

// errRevoked is the cause when the task is revoked: the worker leaves, or the pipeline closes.
var errRevoked = bus.Errorf(bus.CodeCancelled, "the task was revoked")

// funcWorker runs a Func on goroutines of this process. It is one worker whose credits cover all goroutines; tasks run
// in order.
type funcWorker struct {
	p     *Pipeline
	do    spec.Func
	tasks chan *flow.Task // capacity: all credits

	mu             sync.Mutex // guards the following fields
	cancels        map[uint64]context.CancelCauseFunc
	cancelledEarly map[uint64]error // cancelled before they started
}

func newFuncWorker(p *Pipeline, s *flow.StageState, goroutines, credits int) *funcWorker {
	w := &funcWorker{p: p, do: s.Spec.Func, tasks: make(chan *flow.Task, credits), cancels: map[uint64]context.CancelCauseFunc{}, cancelledEarly: map[uint64]error{}}
	for range goroutines {
		p.group.Go(bus.Guard(w.run))
	}
	return w
}

func (w *funcWorker) start(t *flow.Task) { w.tasks <- t }

func (w *funcWorker) cancel(t *flow.Task, abort bool) {
	why := error(errRevoked)
	if abort {
		why = ErrAborted
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if end := w.cancels[t.ID]; end != nil {
		end(why)
	} else {
		w.cancelledEarly[t.ID] = why
	}
}

func (w *funcWorker) run() {
	for {
		select {
		case <-w.p.ctx.Done():
			return
		case t := <-w.tasks:
			w.handle(t)
		}
	}
}

func (w *funcWorker) handle(t *flow.Task) {
	ctx, end := context.WithCancelCause(w.p.ctx)
	defer end(nil)
	w.mu.Lock()
	w.cancels[t.ID] = end
	if why := w.cancelledEarly[t.ID]; why != nil {
		delete(w.cancelledEarly, t.ID)
		end(why)
	}
	w.mu.Unlock()
	o := &resultEvent{flow.Result{TaskID: t.ID, Stage: t.Stage}}
	if limit := t.Stage.Spec.Timeout; limit > 0 {
		timed, stop := context.WithTimeoutCause(ctx, limit, bus.Errorf(bus.CodeTimedOut, "the handler took longer than %v (timeout)", limit))
		o.Outs, o.Err = callHandler(timed, w.do, itemsOf(t))
		stop()
	} else {
		o.Outs, o.Err = callHandler(ctx, w.do, itemsOf(t))
	}
	if o.Err != nil {
		o.Kind = flow.Failed
	}
	w.mu.Lock()
	delete(w.cancels, t.ID)
	delete(w.cancelledEarly, t.ID)
	w.mu.Unlock()
	w.p.inbox.push(o)
}

func itemsOf(t *flow.Task) []spec.Item {
	items := make([]spec.Item, len(t.Entries))
	for i, e := range t.Entries {
		items[i] = e.Item
	}
	return items
}

// callHandler calls a handler; a panic becomes its error.
func callHandler(ctx context.Context, do spec.Func, items []spec.Item) (outs []spec.Out, err error) {
	defer func() {
		if r := recover(); r != nil {
			e := bus.Errorf(bus.CodePanic, "the handler panicked: %s", fmt.Sprint(r))
			e.Stack = string(debug.Stack())
			outs, err = nil, e
		}
	}()
	return do(ctx, items)
}
