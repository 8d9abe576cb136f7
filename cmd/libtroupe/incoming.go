package main

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"unsafe"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/recorder"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/pipeline"
)

// incoming is the calls that Python has received, or will, and has not answered.
type incoming struct {
	memory *memory

	mu    sync.Mutex // guards what follows
	last  uint64
	calls map[uint64]*openCall
}

type openCall struct {
	ctx  context.Context
	done func(body []byte, err error)
	stop func() bool // removes the cancellation hook
	owns bool        // done takes ownership of a large body; else it gets a copy on Go's heap

	cancels  bool            // Python is told of a cancellation, and cancels the method's task
	inherits bool            // calls that the method makes end with it; see nested
	calls    context.Context // of the calls that the method makes; nil: it has made none
	detach   func() bool     // separates calls from ctx; nil as long as calls is
}

func newIncoming(m *memory) *incoming { return &incoming{memory: m, calls: map[uint64]*openCall{}} }

func (in *incoming) add(t *openCall) uint64 {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.last++
	in.calls[in.last] = t
	return in.last
}

func (in *incoming) remove(token uint64) *openCall {
	in.mu.Lock()
	defer in.mu.Unlock()
	t := in.calls[token]
	delete(in.calls, token)
	return t
}

// answer passes an answer, which belongs to Go, to its call. how has flags of troupe_answer.
func (in *incoming) answer(token uint64, how int32, body []byte) bool {
	t, failed := in.remove(token), how&answerFailed != 0
	if t != nil && how&answerSends != 0 {
		actors.SendResult(t.ctx)
	}
	if t != nil && t.stop != nil {
		t.stop()
	}
	if t != nil && t.detach != nil {
		t.detach()
	}
	if t != nil && !failed && t.owns {
		t.done(body, nil)
		return true
	}
	defer values.FreeBody(in.memory, body)
	switch {
	case t == nil:
		return false
	case failed:
		t.done(nil, t.failure(body))
	case len(body) > values.MaxInline:
		t.done(bytes.Clone(body), nil)
	default:
		t.done(body, nil)
	}
	return true
}

// failure decodes an error of Python. The error of a call whose deadline has passed is a timeout, whatever Python calls
// it.
func (t *openCall) failure(body []byte) error {
	e := &bus.Error{Rank: -1}
	if err := wire.Unmarshal(body, e); err != nil {
		return bus.Errorf(bus.CodeInternal, "malformed error of the worker: %w", err)
	}
	if e.Code == bus.CodeCancelled && errors.Is(t.ctx.Err(), context.DeadlineExceeded) {
		e.Code = bus.CodeTimedOut
	}
	return e
}

// contextOf is the context of a call; nil: it is over.
func (in *incoming) contextOf(token uint64) context.Context {
	in.mu.Lock()
	defer in.mu.Unlock()
	if t := in.calls[token]; t != nil {
		return t.ctx
	}
	return nil
}

func (in *incoming) cancelled(token uint64) int {
	in.mu.Lock()
	t := in.calls[token]
	in.mu.Unlock()
	switch {
	case t == nil:
		return statusUnknown
	case t.ctx.Err() == nil:
		return 0
	case errors.Is(t.ctx.Err(), context.DeadlineExceeded):
		return 2
	}
	return 1
}

// Flags of a callMeta.
const (
	metaNoData   uint32 = 1 // the answer is an acknowledgement alone
	metaPipeline uint32 = 2 // of a pipeline, and answered with bodies
	metaItems    uint32 = 4 // of a pipeline, and answered with items
	metaOnDevice uint32 = 8 // tensors of the answer may stay on their device
)

var styleFlags = map[pipeline.Style]uint32{pipeline.Bodies: metaPipeline, pipeline.Items: metaPipeline | metaItems}

// metaOf encodes what a call is about.
func metaOf(ctx context.Context, method, object string) []byte {
	info, _ := actors.Current(ctx)
	trace := info.Trace
	if trace != "" {
		if t := recorder.ScopeOf(ctx).Trace; !t.IsZero() {
			trace = t.String()
		}
	}
	m := callMeta{
		Sequence: info.Seq, Trace: uint32(len(trace)),
		Session: uint32(len(info.Session)), Method: uint32(len(method)), Object: uint32(len(object)), Caller: uint32(len(info.Caller)),
	}
	if info.NoData {
		m.Flags = metaNoData
	}
	if info.OnDevice {
		m.Flags |= metaOnDevice
	}
	if len(info.Meta) > 0 {
		m.Flags |= styleFlags[pipeline.StyleOf(info.Meta)]
	}
	if deadline, ok := ctx.Deadline(); ok {
		m.Deadline = uint64(deadline.UnixMicro())
	}
	texts := [...]string{info.Session, method, object, info.Caller, trace}
	n := 0
	for _, t := range texts {
		n += len(t)
	}
	b := appendRecord(make([]byte, 0, int(unsafe.Sizeof(m))+n), m)
	for _, t := range texts {
		b = append(b, t...)
	}
	return b
}
