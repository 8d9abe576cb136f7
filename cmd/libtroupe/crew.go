package main

import (
	"context"
	"encoding/binary"

	"troupe/bus"
	"troupe/pipeline"
)

// crew is the functions of one pipeline that the other side runs. Work goes to it as completions of one token, each with a
// number of its own under which it is answered like a call; the pipeline says how much may be under way at once.
//
// The body of such a completion is, little-endian: uint64 number, uint32 length of the meta, uint32 flags (1: a group, 2: the
// work should end, and nothing follows), the meta of a call whose method is the stage, and, at a multiple of 64 bytes, the
// items: a list of maps.
type crew struct {
	core   *core
	token  uint64
	overCh chan struct{} // closed when the pipeline has ended: nobody waits for answers any more
}

const (
	crewHead    = 16
	crewGrouped = 1
	crewEnd     = 2
)

func (c *core) newCrew(token uint64) *crew {
	return &crew{core: c, token: token, overCh: make(chan struct{})}
}

// end tells the other side that nothing more comes, and whoever waits for it that nothing will.
func (w *crew) end() {
	close(w.overCh)
	w.core.pushSide(completion{kind: kindOver, flags: flagLast, token: w.token, rank: -1})
}

// function is a stage's function, which runs on the other side.
func (w *crew) function(s pipeline.StageSpec) pipeline.Func {
	var flags uint32
	if s.Group != nil {
		flags = crewGrouped
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

type crewAnswer struct {
	body []byte
	err  error
}

// wait hands work over and waits for its answer. When ctx ends the other side is told, and may still answer with what it
// has: a partial result. Only the end of the pipeline ends the wait.
func (w *crew) wait(ctx context.Context, stage string, flags uint32, items []byte) ([]byte, error) {
	ch := make(chan crewAnswer, 1)
	t := &taken{ctx: ctx, done: func(body []byte, err error) { ch <- crewAnswer{body, err} }}
	number := w.core.incoming.add(t)
	t.stop = context.AfterFunc(ctx, func() { w.tell(w.body(number, crewEnd, nil, nil)) })
	w.tell(w.body(number, flags, callMeta(ctx, stage, ""), items))
	select {
	case a := <-ch:
		return a.body, a.err
	case <-w.overCh:
		t.stop()
		w.core.incoming.remove(number)
		return nil, bus.Errorf(bus.CodeCancelled, "the pipeline has ended")
	}
}

func (w *crew) tell(body []byte) {
	w.core.pushSide(completion{kind: kindAnswer, token: w.token, rank: -1, body: body})
}

func (w *crew) body(number uint64, flags uint32, meta, items []byte) []byte {
	start := (crewHead + len(meta) + align - 1) &^ (align - 1)
	b := w.core.memory.room(start + len(items))
	le := binary.LittleEndian
	le.PutUint64(b, number)
	le.PutUint32(b[8:], uint32(len(meta)))
	le.PutUint32(b[12:], flags)
	copy(b[crewHead:], meta)
	copy(b[start:], items)
	return b
}
