package pipeline

import (
	"bytes"
	"context"
	"errors"
	"sync"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/roles"
)

// rankWorker calls a method of one rank for each task. The call is sent in the order of hand-out; its answer comes to a
// goroutine of its own, of which there are no more than credits.
type rankWorker struct {
	p    *Pipeline
	rank roles.Worker

	mu      sync.Mutex // guards what follows
	cancels map[uint64]context.CancelCauseFunc
}

// styleMeta tells the host of a method that its argument is an item, which anybody may have put: {"pipeline": style}.
var styleMeta = map[Style][]byte{Bodies: metaOf(Bodies), Items: metaOf(Items)}

func metaOf(s Style) []byte {
	body, _ := wire.Marshal(map[string]Style{"pipeline": s}) // a text
	return body
}

// StyleOf says from the metadata of a call how a pipeline has made it; empty: it is no pipeline's.
func StyleOf(meta []byte) Style {
	for style, m := range styleMeta {
		if bytes.Equal(meta, m) {
			return style
		}
	}
	return ""
}

func (w *rankWorker) start(t *task) {
	ctx, cancel := context.WithCancelCause(w.p.ctx)
	w.mu.Lock()
	w.cancels[t.id] = cancel
	w.mu.Unlock()
	arg, err := argument(t)
	var f *dispatch.Future
	if err == nil {
		f, err = w.rank.Go(ctx, dispatch.Call{Method: t.stage.spec.Method, Args: []any{arg}, Timeout: t.stage.spec.Timeout, Meta: styleMeta[t.stage.spec.Style], NoWait: true})
	}
	w.p.group.Go(bus.Guard(func() {
		defer cancel(nil)
		o := &outcome{task: t.id, stage: t.stage}
		if err == nil {
			o.outs, err = answerOf(ctx, f, t)
		}
		w.mu.Lock()
		delete(w.cancels, t.id)
		w.mu.Unlock()
		w.tell(ctx, t, o, err)
	}))
}

// tell says what came of the task. A worker that is gone is taken out of the stage, with all it had.
func (w *rankWorker) tell(ctx context.Context, t *task, o *outcome, err error) {
	o.err = err
	switch {
	case err == nil:
	case errors.Is(context.Cause(ctx), errTakenBack):
		o.ending = returned
	case goneFor(err):
		w.p.inbox.push(eventFunc(func(p *Pipeline) {
			if p.workers[t.hand] == worker(w) {
				p.gone(t.stage, t.hand, 0, err)
			}
		}))
		return
	default:
		o.ending = failed
	}
	w.p.inbox.push(o)
}

// goneFor says that the error means the end of the worker, not of the call.
func goneFor(err error) bool {
	code := bus.CodeOf(err)
	return code == bus.CodeWorkerLost || code == bus.CodeNotFound && errors.Is(err, bus.ErrNotFound) && !isMethodMissing(err) || code == bus.CodeClosed
}

// isDisplaced says that the rank did not die by itself: its role is restarted because of another rank, it was asked to stop, as
// a drain does, or its role is over. What it had in hand is not to blame.
func (w *rankWorker) isDisplaced(why error) bool {
	if code := bus.CodeOf(why); code == bus.CodeNotFound || code == bus.CodeClosed {
		return true
	}
	c, rank := w.rank.Cluster(), w.rank.Rank()
	for cause := why; cause != nil; cause = errors.Unwrap(cause) {
		if e, ok := cause.(*bus.Error); ok && e.Role == c.Name() && e.Rank >= 0 && e.Rank != rank {
			return true
		}
	}
	beats := c.Health()
	return rank < len(beats) && beats[rank].State == actors.Stopped
}

// isMethodMissing tells a role that has ended from a method that it does not have.
func isMethodMissing(err error) bool {
	var e *bus.Error
	return errors.As(err, &e) && e.Rank >= 0
}

// cancel takes the task back, or aborts it: by the stage's abort method if it has one, which lets the rank answer with
// what it has.
func (w *rankWorker) cancel(t *task, abort bool) {
	if abort && t.stage.spec.AbortMethod != "" {
		w.p.group.Go(bus.Guard(func() {
			for _, e := range t.entries {
				f, err := w.rank.Go(w.p.ctx, dispatch.Call{Method: t.stage.spec.AbortMethod, Args: []any{e.ID}, Control: true, Timeout: verbLimit})
				if err == nil {
					err = f.Wait(w.p.ctx)
				}
				if err != nil {
					w.end(t.id, ErrAborted) // it does not listen: no partial result
				}
			}
		}))
		return
	}
	why := error(errTakenBack)
	if abort {
		why = ErrAborted
	}
	w.end(t.id, why)
}

func (w *rankWorker) end(id uint64, why error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if cancel := w.cancels[id]; cancel != nil {
		cancel(why)
	}
}

// abandon gives up every call: the rank is dead.
func (w *rankWorker) abandon() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, cancel := range w.cancels {
		cancel(errTakenBack)
	}
}

// argument is what the method gets.
func argument(t *task) (any, error) {
	items := make([]wireItem, len(t.entries))
	bodies := make([]wire.Raw, len(t.entries))
	for i, e := range t.entries {
		items[i], bodies[i] = toWire(&e.Item), e.Body
		if len(e.Body) == 0 {
			items[i].Body, bodies[i] = wire.Raw{0xc0}, wire.Raw{0xc0}
		}
	}
	switch {
	case t.stage.spec.Style == Items && t.grouped:
		return items, nil
	case t.stage.spec.Style == Items:
		return items[0], nil
	case t.grouped:
		return bodies, nil
	}
	return bodies[0], nil
}

// answerOf waits for the rank's answer and reads the outputs in it.
func answerOf(ctx context.Context, f *dispatch.Future, t *task) ([]Out, error) {
	if t.stage.spec.Style == Items {
		answers, err := dispatch.AwaitEach[[]wireItem](ctx, f)
		if err != nil {
			return nil, err
		}
		outs := make([]Out, len(answers[0]))
		for i, w := range answers[0] {
			outs[i] = Out{To: w.To, Item: w.item()}
		}
		return outs, nil
	}
	answers, err := dispatch.AwaitEach[wire.Raw](ctx, f)
	if err != nil {
		return nil, err
	}
	if answers[0].IsNil() || len(t.stage.out) == 0 {
		return nil, nil
	}
	return []Out{{Item: Item{Body: answers[0]}}}, nil
}
