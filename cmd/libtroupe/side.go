package main

import (
	"sync/atomic"

	"troupe/actors"
)

// The side queue is a second queue of completions, for work that a thread of its own reads: calls of what a driver serves, calls that run
// beside a worker's main thread, and functions of pipelines. With a queue of their own they wake only that thread, and answers wake only
// the thread that waits for them. The queue exists once it has been asked for; until then everything goes to the main queue.

// openQueue makes a queue beside the main one, if it does not exist, and returns its descriptor.
func (c *core) openQueue(at *atomic.Pointer[queue]) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if q := at.Load(); q != nil {
		return q.fd, nil
	}
	fd, wake, err := newWake()
	if err != nil {
		return -1, err
	}
	at.Store(&queue{fd: fd, wake: wake})
	return fd, nil
}

// pushSide adds completions to the side queue, or to the main one where there is none.
func (c *core) pushSide(all ...completion) {
	if q := c.side.Load(); q != nil {
		q.push(all...)
		return
	}
	c.queue.push(all...)
}

// sideToken marks the tokens of calls and requests whose completions go to the side queue: those of code that a thread waits for in no
// other way, which must not wake the thread that waits for an answer.
const sideToken = 1 << 62

// report adds completions of one call or request to the queue that its token names.
func (c *core) report(token uint64, all ...completion) {
	if token&sideToken != 0 {
		c.pushSide(all...)
		return
	}
	c.queue.push(all...)
}

// sideKind says which calls of an object go to the side queue.
type sideKind string

const (
	sideNone   sideKind = ""       // none: one thread runs everything
	sideBeside sideKind = "beside" // those that do not run in the work lane
	sideAll    sideKind = "all"
)

// isSide reports whether a method's calls go to the side queue.
func (o *object) isSide(method string) bool {
	switch o.table.Side {
	case sideAll:
		return true
	case sideBeside:
		for i := range o.table.Methods {
			if m := &o.table.Methods[i]; m.Name == method {
				return m.Lane.Name != actors.Serial.Name
			}
		}
	}
	return false
}
