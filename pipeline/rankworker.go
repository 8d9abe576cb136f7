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
	"troupe/pipeline/flow"
	"troupe/pipeline/spec"
	"troupe/roles"
)

// rankWorker calls a method of one rank for each task. Calls are sent in the order of the tasks; a goroutine per task
// waits for the answer, so there are at most as many as credits.
type rankWorker struct {
	p    *Pipeline
	rank roles.Worker

	mu      sync.Mutex // guards the following fields
	cancels map[uint64]context.CancelCauseFunc
}

// styleMeta is the metadata of a pipeline's calls, {"pipeline": style}: it tells the worker that the argument is an
// item, which any client may have put.
var styleMeta = map[spec.Style][]byte{spec.Bodies: metaOf(spec.Bodies), spec.Items: metaOf(spec.Items)}

func metaOf(s spec.Style) []byte {
	body, _ := wire.Marshal(map[string]spec.Style{"pipeline": s}) // cannot fail
	return body
}

// StyleOf is the style of a call, from its metadata; empty: the caller is not a pipeline.
func StyleOf(meta []byte) spec.Style {
	for style, m := range styleMeta {
		if bytes.Equal(meta, m) {
			return style
		}
	}
	return ""
}

func (w *rankWorker) start(t *flow.Task) {
	ctx, cancel := context.WithCancelCause(w.p.ctx)
	w.mu.Lock()
	w.cancels[t.ID] = cancel
	w.mu.Unlock()
	arg, err := argument(t)
	var f *dispatch.Future
	if err == nil {
		f, err = w.rank.Go(ctx, dispatch.Call{Method: t.Stage.Spec.Method, Args: []any{arg}, Timeout: t.Stage.Spec.Timeout, Meta: styleMeta[t.Stage.Spec.Style], NoWait: true})
	}
	w.p.group.Go(bus.Guard(func() {
		defer cancel(nil)
		o := &resultEvent{flow.Result{TaskID: t.ID, Stage: t.Stage}}
		if err == nil {
			o.Outs, err = outputsOf(ctx, f, t)
		}
		w.mu.Lock()
		delete(w.cancels, t.ID)
		w.mu.Unlock()
		w.report(ctx, t, o, err)
	}))
}

// report passes the result of a task to the loop. A lost worker is removed from the stage with all its tasks.
func (w *rankWorker) report(ctx context.Context, t *flow.Task, o *resultEvent, err error) {
	o.Err = err
	switch {
	case err == nil:
	case errors.Is(context.Cause(ctx), errRevoked):
		o.Kind = flow.Revoked
	case roles.IsWorkerLost(err):
		w.p.inbox.push(eventFunc(func(p *Pipeline) {
			if p.workers[t.Worker] == worker(w) {
				p.removeLostWorker(t.Stage, t.Worker, 0, err)
			}
		}))
		return
	default:
		o.Kind = flow.Failed
	}
	w.p.inbox.push(o)
}

// isDisplaced reports whether the rank was stopped for another reason than a failure of its own: its role restarts
// because of another rank, it was asked to stop (a drain), or its role has ended. Its tasks are not charged with the
// loss.
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

// cancel revokes or aborts the task. An abort uses the stage's abort method if there is one, which lets the rank return
// a partial result.
func (w *rankWorker) cancel(t *flow.Task, abort bool) {
	if abort && t.Stage.Spec.AbortMethod != "" {
		w.p.group.Go(bus.Guard(func() {
			for _, e := range t.Entries {
				f, err := w.rank.Go(w.p.ctx, dispatch.Call{Method: t.Stage.Spec.AbortMethod, Args: []any{e.ID}, Control: true, Timeout: requestTimeout})
				if err == nil {
					err = f.Wait(w.p.ctx)
				}
				if err != nil {
					w.cancelTask(t.ID, ErrAborted) // no answer: no partial result
				}
			}
		}))
		return
	}
	why := error(errRevoked)
	if abort {
		why = ErrAborted
	}
	w.cancelTask(t.ID, why)
}

func (w *rankWorker) cancelTask(id uint64, why error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if cancel := w.cancels[id]; cancel != nil {
		cancel(why)
	}
}

// cancelAll cancels every call of a dead rank.
func (w *rankWorker) cancelAll() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, cancel := range w.cancels {
		cancel(errRevoked)
	}
}

// argument is the argument of the method.
func argument(t *flow.Task) (any, error) {
	items := make([]wireItem, len(t.Entries))
	bodies := make([]wire.Raw, len(t.Entries))
	for i, e := range t.Entries {
		items[i], bodies[i] = toWire(&e.Item), e.Body
		if len(e.Body) == 0 {
			items[i].Body, bodies[i] = wire.Raw{0xc0}, wire.Raw{0xc0}
		}
	}
	switch {
	case t.Stage.Spec.Style == spec.Items && t.Grouped:
		return items, nil
	case t.Stage.Spec.Style == spec.Items:
		return items[0], nil
	case t.Grouped:
		return bodies, nil
	}
	return bodies[0], nil
}

// outputsOf waits for the rank's answer and decodes the outputs.
func outputsOf(ctx context.Context, f *dispatch.Future, t *flow.Task) ([]spec.Out, error) {
	if t.Stage.Spec.Style == spec.Items {
		answers, err := dispatch.AwaitEach[[]wireItem](ctx, f)
		if err != nil {
			return nil, err
		}
		outs := make([]spec.Out, len(answers[0]))
		for i, w := range answers[0] {
			outs[i] = spec.Out{To: w.To, Item: w.item()}
		}
		return outs, nil
	}
	answers, err := dispatch.AwaitEach[wire.Raw](ctx, f)
	if err != nil {
		return nil, err
	}
	if answers[0].IsNil() || len(t.Stage.Outputs) == 0 {
		return nil, nil
	}
	return []spec.Out{{Item: spec.Item{Body: answers[0]}}}, nil
}
