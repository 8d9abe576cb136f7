package main

import (
	"context"

	"troupe/bus"
	"troupe/pipeline"
)

// stageFuncs runs the functions of one pipeline in Python. Work arrives as completions with one token; each has its own
// number, under which it is answered like a call. The pipeline bounds the work in flight.
// The body of such a completion is a stageHead and what follows it.
type stageFuncs struct {
	core   *core
	token  uint64
	overCh chan struct{} // closed when the pipeline has ended
}

// Flags of a stageHead.
const (
	stageGrouped   = 1 // the items are a group
	stageCancelled = 2
)

func (c *core) newStageFuncs(token uint64) *stageFuncs {
	return &stageFuncs{core: c, token: token, overCh: make(chan struct{})}
}

// end reports the end of the pipeline to Python and to waiting functions.
func (w *stageFuncs) end() {
	close(w.overCh)
	w.core.pushSide(completion{kind: kindOver, flags: flagLast, token: w.token, rank: -1})
}

// function returns the function of a stage.
func (w *stageFuncs) function(s pipeline.StageSpec) pipeline.Func {
	var flags uint32
	if s.Group != nil {
		flags = stageGrouped
	}
	return func(ctx context.Context, items []pipeline.Item) ([]pipeline.Out, error) {
		body, err := pipeline.MarshalItems(items)
		if err != nil {
			return nil, err
		}
		answer, err := w.wait(ctx, s.Name, flags, body)
		if err != nil {
			return nil, err
		}
		return pipeline.UnmarshalOuts(answer)
	}
}

type stageAnswer struct {
	body []byte
	err  error
}

// wait passes work to Python and waits for its answer. When ctx ends Python is told, and may still answer with a
// partial result. Only the end of the pipeline ends the wait.
func (w *stageFuncs) wait(ctx context.Context, stage string, flags uint32, items []byte) ([]byte, error) {
	ch := make(chan stageAnswer, 1)
	t := &openCall{ctx: ctx, done: func(body []byte, err error) { ch <- stageAnswer{body, err} }}
	number := w.core.incoming.add(t)
	t.stop = context.AfterFunc(ctx, bus.Guard(func() { w.tell(w.body(number, stageCancelled, nil, nil)) }))
	w.tell(w.body(number, flags, metaOf(ctx, stage, ""), items))
	select {
	case a := <-ch:
		return a.body, a.err
	case <-w.overCh:
		t.stop()
		w.core.incoming.remove(number)
		return nil, bus.Errorf(bus.CodeCancelled, "the pipeline has ended")
	}
}

func (w *stageFuncs) tell(body []byte) {
	w.core.pushSide(completion{kind: kindAnswer, token: w.token, rank: -1, body: body})
}

func (w *stageFuncs) body(number uint64, flags uint32, meta, items []byte) []byte {
	h := stageHead{Number: number, Meta: uint32(len(meta)), Flags: flags}
	head := append(bytesOf(&h), meta...)
	start := (len(head) + align - 1) &^ (align - 1)
	b := w.core.memory.room(start + len(items))
	copy(b, head)
	copy(b[start:], items)
	return b
}
