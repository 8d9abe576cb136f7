package pipeline

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync"

	"troupe/bus"
)

// ErrAborted is the cause of the end of a handler's context when its item is aborted. What the handler returns then
// travels on.
var ErrAborted = bus.Errorf(bus.CodeCancelled, "the item was aborted")

// errTakenBack is the cause when the item is taken back: the worker leaves, or the pipeline closes.
var errTakenBack = bus.Errorf(bus.CodeCancelled, "the item was taken back")

// funcWorker runs a Func on some goroutines of this process. It is one worker with as many credits as items they may
// have, taken in the order in which they were handed out.
type funcWorker struct {
	p     *Pipeline
	do    Func
	tasks chan *task // has room for all credits

	mu      sync.Mutex // guards what follows
	cancels map[uint64]context.CancelCauseFunc
	early   map[uint64]error // cancelled before they began
}

func newFuncWorker(p *Pipeline, s *stage, goroutines, credits int) *funcWorker {
	w := &funcWorker{p: p, do: s.spec.Func, tasks: make(chan *task, credits), cancels: map[uint64]context.CancelCauseFunc{}, early: map[uint64]error{}}
	for range goroutines {
		p.group.Go(bus.Guard(w.run))
	}
	return w
}

func (w *funcWorker) start(t *task) { w.tasks <- t }

func (w *funcWorker) cancel(t *task, abort bool) {
	why := error(errTakenBack)
	if abort {
		why = ErrAborted
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if end := w.cancels[t.id]; end != nil {
		end(why)
	} else {
		w.early[t.id] = why
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

func (w *funcWorker) handle(t *task) {
	ctx, end := context.WithCancelCause(w.p.ctx)
	defer end(nil)
	w.mu.Lock()
	w.cancels[t.id] = end
	if why := w.early[t.id]; why != nil {
		delete(w.early, t.id)
		end(why)
	}
	w.mu.Unlock()
	o := &outcome{task: t.id, stage: t.stage}
	if limit := t.stage.spec.Timeout; limit > 0 {
		timed, stop := context.WithTimeoutCause(ctx, limit, bus.Errorf(bus.CodeTimedOut, "the handler took longer than %v (timeout)", limit))
		o.outs, o.err = call(timed, w.do, itemsOf(t))
		stop()
	} else {
		o.outs, o.err = call(ctx, w.do, itemsOf(t))
	}
	if o.err != nil {
		o.ending = failed
	}
	w.mu.Lock()
	delete(w.cancels, t.id)
	delete(w.early, t.id)
	w.mu.Unlock()
	w.p.inbox.push(o)
}

func itemsOf(t *task) []Item {
	items := make([]Item, len(t.entries))
	for i, e := range t.entries {
		items[i] = e.Item
	}
	return items
}

// call runs a handler; a panic is its error.
func call(ctx context.Context, do Func, items []Item) (outs []Out, err error) {
	defer func() {
		if r := recover(); r != nil {
			e := bus.Errorf(bus.CodePanic, "the handler panicked: %s", fmt.Sprint(r))
			e.Stack = string(debug.Stack())
			outs, err = nil, e
		}
	}()
	return do(ctx, items)
}
