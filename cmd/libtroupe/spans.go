package main

/*
#include <stdint.h>
*/
import "C"

import (
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

func (o *openSpans) end(number uint64, failed bool) {
	o.mu.Lock()
	s := o.all[number]
	delete(o.all, number)
	o.mu.Unlock()
	if s != nil {
		s.End(failed)
	}
}

// troupe_span begins a section of a program in the flight recorder. call is the call that the code serves, or 0; name is copied. It
// returns a number for troupe_span_end; 0: the section is not recorded. It does not block.
//
//export troupe_span
func troupe_span(call C.uint64_t, name *C.char, n C.uint64_t) (number C.uint64_t) {
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
	scope := recorder.Outside
	if call != 0 {
		if ctx := c.incoming.contextOf(uint64(call)); ctx != nil {
			scope = recorder.ScopeOf(ctx)
		}
	}
	return C.uint64_t(c.spans.begin(scope, string(C.GoBytes(unsafe.Pointer(name), C.int(min(n, recorder.MaxText))))))
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
