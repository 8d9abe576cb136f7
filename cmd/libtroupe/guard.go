package main

/*
#include <stdint.h>
*/
import "C"

import (
	"fmt"
	"runtime/debug"
	"sync"
)

// last is what the last failure had to say.
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

// notePanic keeps what is known of a panic. It must be called while the stack is still there.
func notePanic(p any) error {
	err := fmt.Errorf("a bug in the Go core: %v\n%s", p, debug.Stack())
	setError(statusPanic, err)
	return err
}

// guard turns a panic into a status. It is deferred by every exported function: a panic that left one would end the
// interpreter.
func guard(status *C.int32_t) {
	if p := recover(); p != nil {
		_ = notePanic(p) // it is kept for troupe_error
		*status = statusPanic
	}
}

func guard64(n *C.int64_t) {
	if p := recover(); p != nil {
		_ = notePanic(p) // it is kept for troupe_error
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
