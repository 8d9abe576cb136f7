package main

/*
#include <stdint.h>
*/
import "C"

import (
	"fmt"
	"os"
	"runtime/debug"
	"sync"
	"time"
	"unsafe"

	"troupe/bus"
)

// last is the error of the last failed function.
var last struct {
	sync.Mutex
	text string
}

func lastError() string {
	last.Lock()
	defer last.Unlock()
	return last.text
}

func setError(status int, err error) int {
	last.Lock()
	defer last.Unlock()
	last.text = err.Error()
	return status
}

// notePanic stores a panic and its stack for troupe_error. It must be called while the stack exists.
func notePanic(p any) error {
	err := fmt.Errorf("a bug in the Go core: %v\n%s", p, debug.Stack())
	setError(statusPanic, err)
	return err
}

// guard turns a panic into a status. Every exported function defers it: a panic that left one would end the
// interpreter.
func guard(status *C.int32_t) {
	if p := recover(); p != nil {
		_ = notePanic(p) // stored for troupe_error
		*status = statusPanic
	}
}

func guardPointer(at *unsafe.Pointer) {
	if p := recover(); p != nil {
		_ = notePanic(p) // stored for troupe_error
		*at = nil
	}
}

func guard64(n *C.int64_t) {
	if p := recover(); p != nil {
		_ = notePanic(p) // stored for troupe_error
		*n = statusPanic
	}
}

// spawn runs do in a goroutine; a panic in it goes to failed.
func spawn(do func(), failed func(error)) {
	go func() {
		defer func() {
			if p := recover(); p != nil {
				failed(notePanic(p))
			}
		}()
		do()
	}()
}

// A panic in a goroutine of the packages below leaves them in an unknown state: a mutex may stay locked, a loop may
// have ended. Everything in flight fails, later requests are refused before they reach those packages, and the process
// continues.

// corePanicked handles a panic, on the goroutine that panicked.
func (c *core) corePanicked(p any, stack []byte) {
	why := bus.Errorf(bus.CodeInternal, "a bug in the Go core: %v; this process cannot use Troupe any more: restart it", p)
	why.Stack = string(stack)
	fmt.Fprintf(os.Stderr, "troupe: %v\n%s", why, stack)
	if !c.broken.CompareAndSwap(nil, why) {
		return // an earlier panic has been handled
	}
	c.failAll(why)
}

// checkUsable refuses after a core panic.
func (c *core) checkUsable() error {
	if why := c.broken.Load(); why != nil {
		return why
	}
	return nil
}

// failAll fails everything in flight, and ends the worker if this process is one.
func (c *core) failAll(why *bus.Error) {
	body := encodeError(why)
	c.mu.Lock()
	out := make([]completion, 0, len(c.calls)+1)
	for token := range c.calls {
		end := completion{kind: kindOver, flags: flagFailed | flagLast, token: token, rank: -1, body: body}
		if token&sideToken != 0 {
			c.pushSide(end)
			continue
		}
		out = append(out, end)
	}
	clear(c.calls)
	isWorker := c.worker != nil
	c.mu.Unlock()
	if isWorker {
		out = append(out, completion{kind: kindStopped, flags: flagFailed | flagLast, rank: -1, body: body})
		time.AfterFunc(exitAfter, func() { os.Exit(1) }) // a method may never return
	}
	c.queue.push(out...)
}
