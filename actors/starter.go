package actors

import (
	"sync/atomic"

	"troupe/bus"
)

// lends reports whether the intake may run the call itself: one that is expected to be short, or that only begins. Of many
// that may run at once, a short one must not hold up the next. w.mu is held.
func (w *Worker) lends(q *queue, c *call) bool {
	if !w.lend || w.lent.call != nil {
		return false
	}
	return c.binding.starter != nil || q.lane.Limit == 1 && c.binding.short >= fastCalls
}

// begin starts a call that is answered later. If it is answered at once, the next one of the lane is returned.
func (w *Worker) begin(s Starter, q *queue, c *call) *call {
	var next *call
	c.delivery = nil // done may be called, and c be looked at, long after the end
	c.ctx.begin()
	if err := w.mayRun(c); err != nil {
		c.ctx.end()
		return w.finish(q, c, nil, err)
	}
	// Of Begin's return and the end of the call, whichever comes second goes on with the lane.
	var claimed, second atomic.Bool
	memory := c.binding.memory
	done := func(body []byte, err error) {
		if claimed.Swap(true) {
			bus.FreeBody(memory, body)
			return
		}
		c.ctx.end()
		if err != nil {
			bus.FreeBody(memory, body)
			body, err = nil, w.laterError(c, err)
		}
		next = w.finish(q, c, body, err)
		if after := next; second.Swap(true) && after != nil {
			w.goOn(q, after)
		}
	}
	w.beginSafely(s, c, done)
	if second.Swap(true) {
		return next
	}
	return nil
}

// beginSafely calls Begin. A panic in it is the call's error.
func (w *Worker) beginSafely(s Starter, c *call, done func([]byte, error)) {
	defer func() {
		if p := recover(); p != nil {
			c.panicked = true
			done(nil, panicError(p))
		}
	}()
	body := c.body
	c.body = nil // it is the starter's
	s.Begin(c.ctx, c.header.Method, body, done)
}

// laterError is wireError for a call whose method has returned long ago. An error that has a panic's code is one, where
// the other language knows such.
func (w *Worker) laterError(c *call, err error) *bus.Error {
	e := wireError(err)
	c.panicked = c.panicked || e.Code == bus.CodePanic
	return e
}

// goOn runs the next call of a lane from the goroutine that answered the one before, which must not block: what may, runs
// on a goroutine of its own.
func (w *Worker) goOn(q *queue, c *call) {
	if c.binding.starter != nil {
		w.run(q, c)
		return
	}
	w.host.runners.start(job{worker: w, queue: q, call: c})
}
