package main

/*
#include <stdint.h>
*/
import "C"

import (
	"context"
	"sync"
	"unsafe"

	"troupe/bus/recorder"
)

// maxSpans is the number of open spans of a process that are recorded.
const maxSpans = 1 << 16

// openSpans is the spans that Python has begun and not ended, by number.
type openSpans struct {
	mu   sync.Mutex // guards what follows
	last uint64
	all  map[uint64]*recorder.OpenSpan
}

// begin returns the number of a new span; 0: it is not recorded.
func (o *openSpans) begin(scope recorder.Scope, name string) uint64 {
	if !recorder.On() {
		return 0
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.all) >= maxSpans {
		return 0
	}
	if o.all == nil {
		o.all = map[uint64]*recorder.OpenSpan{}
	}
	o.last++
	o.all[o.last] = recorder.Begin(scope, "", name)
	return o.last
}

// trace is the parent of what happens inside of a span, and whether it is the span itself; zero: the span has ended, or there is none.
func (o *openSpans) trace(number uint64) (parent recorder.Trace, exported bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if s := o.all[number]; s != nil {
		return s.Trace()
	}
	return recorder.Trace{}, false
}

func (o *openSpans) end(number uint64, failed bool) {
	o.mu.Lock()
	s := o.all[number]
	delete(o.all, number)
	o.mu.Unlock()
	if s != nil {
		s.End(failed)
	}
}

// pythonScope is a context of code in Python.
type pythonScope struct {
	context.Context
	scope recorder.Scope
}

func (s pythonScope) RecorderScope() recorder.Scope { return s.scope }

func (s pythonScope) Value(key any) any {
	if _, ok := key.(recorder.ScopeKey); ok {
		return s
	}
	return s.Context.Value(key)
}

// scopeOf adds to ctx where Python makes a call or begins a span: a callScope, or nothing.
func (c *core) scopeOf(ctx context.Context, where []byte) context.Context {
	at, parent, ok := readRecord[callScope](where)
	if !ok {
		return ctx
	}
	scope := recorder.Outside
	if served := c.incoming.contextOf(at.Served); served != nil {
		scope = recorder.ScopeOf(served)
	}
	if t, _ := c.spans.trace(at.Span); !t.IsZero() {
		scope.Trace = t
	}
	if t := recorder.ParseTrace(string(parent)); !t.IsZero() {
		scope.Trace = t
	}
	return pythonScope{ctx, scope}
}

// troupe_span begins a section of a program in the flight recorder. where is a callScope. name and where are
// copied. It returns a number for troupe_span_end; 0: the section is not recorded. It does not block.
//
//export troupe_span
func troupe_span(where *C.char, m C.uint64_t, name *C.char, n C.uint64_t) (number C.uint64_t) {
	defer func() {
		if p := recover(); p != nil {
			_ = notePanic(p) // stored for troupe_error
			number = 0
		}
	}()
	c, err := getCore()
	if err != nil {
		return 0
	}
	scope := recorder.ScopeOf(c.scopeOf(context.Background(), C.GoBytes(unsafe.Pointer(where), C.int(m))))
	return C.uint64_t(c.spans.begin(scope, string(C.GoBytes(unsafe.Pointer(name), C.int(min(n, recorder.MaxText))))))
}

// troupe_span_trace writes the W3C traceparent of a section that has not ended to out if it fits in room, and returns its length; 0: the
// section is not exported.
//
//export troupe_span_trace
func troupe_span_trace(number C.uint64_t, out *C.char, room C.uint64_t) (length C.int64_t) {
	defer guard64(&length)
	c, err := getCore()
	if err != nil {
		return 0
	}
	trace, exported := c.spans.trace(uint64(number))
	if !exported {
		return 0
	}
	text := trace.String()
	if len(text) <= int(room) {
		copy(unsafe.Slice((*byte)(unsafe.Pointer(out)), int(room)), text)
	}
	return C.int64_t(len(text))
}

// troupe_span_end ends a section. An unknown number is ignored.
//
//export troupe_span_end
func troupe_span_end(number C.uint64_t, failed C.int32_t) (status C.int32_t) {
	defer guard(&status)
	if c, err := getCore(); err == nil {
		c.spans.end(uint64(number), failed != 0)
	}
	return statusOK
}
