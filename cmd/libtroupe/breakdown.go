package main

import (
	"fmt"
	"os"
	"time"

	"troupe/bus"
)

// A panic in a goroutine below the library leaves things there that nobody can vouch for: a lock may be held for ever, a loop
// may be gone. So it is not gone on with. Everything that is under way fails, whatever is asked for from then on is
// refused before it touches anything below, and the process lives: what it does about it is the other side's to say.

// leavingOps may still be tried when the core is broken: in the background, where the other side waits for so long as it likes.
var leavingOps = map[string]bool{"close": true, "worker_close": true, "worker_stop": true}

// breakDown is told of a panic on the goroutine that it ended.
func (c *core) breakDown(p any, stack []byte) {
	why := bus.Errorf(bus.CodeInternal, "a bug in the Go core: %v; nothing more can be done in this process: end it, and start it again", p)
	why.Stack = string(stack)
	fmt.Fprintf(os.Stderr, "troupe: %v\n%s", why, stack)
	if !c.broken.CompareAndSwap(nil, why) {
		return // it was broken before
	}
	c.failAll(why)
}

// sound refuses when the core is broken.
func (c *core) sound() error {
	if why := c.broken.Load(); why != nil {
		return why
	}
	return nil
}

// failAll ends everything that is under way, and the worker of this process, if it is one.
func (c *core) failAll(why *bus.Error) {
	body := encodeError(why)
	c.mu.Lock()
	out := make([]completion, 0, len(c.calls)+1)
	for token := range c.calls {
		out = append(out, completion{kind: kindOver, flags: flagFailed | flagLast, token: token, rank: -1, body: body})
	}
	clear(c.calls)
	plays := c.worker != nil
	c.mu.Unlock()
	if plays {
		out = append(out, completion{kind: kindStopped, flags: flagFailed | flagLast, rank: -1, body: body})
		time.AfterFunc(exitAfter, func() { os.Exit(1) }) // it may be in a method that never looks
	}
	c.queue.push(out...)
}
