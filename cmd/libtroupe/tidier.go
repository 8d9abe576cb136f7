package main

import (
	"runtime"
	"runtime/debug"
	"sync"
	"time"
)

const (
	tidyBytes = 32 << 20        // of large bodies that nobody needs any more, or soon: the collector is run
	tidyIdle  = 3 * time.Second // without any: what they took goes back to the system. It costs page faults to take it again
)

// tidier has large bodies leave the process as promptly as if they were freed by hand. Go's collector alone waits until there is as
// much garbage as there was memory in use, bodies included, and keeps what it frees for minutes. The heap beside them is small,
// so a collection costs less than a hundredth of what moving the bodies did.
type tidier struct {
	mu     sync.Mutex
	passed int // bytes since the last collection
	awake  bool
	dueCh  chan struct{} // holds one: enough has passed
}

func newTidier() *tidier { return &tidier{dueCh: make(chan struct{}, 1)} }

// passedBy notes a body that nobody needs any more, or that is on its way out.
func (t *tidier) passedBy(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.passed += n
	if !t.awake {
		t.awake = true
		spawn(t.run, func(error) {}) // the collector alone is not worth a failure
	}
	if t.passed >= tidyBytes {
		select {
		case t.dueCh <- struct{}{}:
		default:
		}
	}
}

// run tidies up until there has been nothing to do for a while.
func (t *tidier) run() {
	for {
		select {
		case <-t.dueCh:
			t.begin()
			runtime.GC()
		case <-time.After(tidyIdle):
			if t.begin() == 0 && t.rest() {
				return
			}
		}
	}
}

// begin counts anew, and returns what had been counted.
func (t *tidier) begin() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	passed := t.passed
	t.passed = 0
	return passed
}

// rest gives memory back to the system, and reports whether there is still nothing to do.
func (t *tidier) rest() bool {
	debug.FreeOSMemory()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.awake = t.passed > 0
	return !t.awake
}
