package actors

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/values"
)

// takeBuffer returns an empty buffer for an answer, with room for its envelope.
func (w *Worker) takeBuffer() []byte {
	if last := len(w.buffers) - 1; last >= 0 {
		b := w.buffers[last]
		w.buffers = w.buffers[:last]
		return b
	}
	return make([]byte, calls.ReplyRoom, newBufferSize)
}

// releaseBuffer takes back a buffer that nothing refers to.
func (w *Worker) releaseBuffer(b []byte) {
	if cap(b) >= newBufferSize && cap(b) <= maxReusedBuffer && len(w.buffers) < maxBuffers {
		w.buffers = append(w.buffers, b[:calls.ReplyRoom])
	}
}

// run executes calls of one lane until none may start.
func (w *Worker) run(q *queue, c *call) {
	defer func() {
		if c != nil { // the method called runtime.Goexit
			c.panicked = true
			if c = w.finish(q, c, nil, bus.Errorf(bus.CodePanic, "the method ended its goroutine (runtime.Goexit)")); c != nil {
				w.host.runners.start(job{worker: w, queue: q, call: c})
			}
		}
	}()
	for c != nil {
		if s := c.binding.async; s != nil {
			c = w.startAsync(s, q, c)
			continue
		}
		body, err := w.execute(c)
		c = w.finish(q, c, body, err)
	}
}

func (w *Worker) execute(c *call) ([]byte, error) {
	c.ctx.begin()
	defer c.ctx.end()
	if err := w.checkStart(c); err != nil {
		return nil, err
	}
	return w.invoke(c.ctx, c)
}

// checkStart returns why a call whose turn has come must not run. Everything that ends a call ends its context.
func (w *Worker) checkStart(c *call) error {
	if c.bodyErr != nil {
		return bus.Errorf(bus.CodeRefused, "the argument could not be fetched: %w", c.bodyErr)
	}
	if c.args != nil && c.args.err != nil {
		return wireError(c.args.err) // it names the call that failed
	}
	if c.ctx.Err() == nil {
		return c.placeArguments()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case c.dropped:
		return bus.ErrCancelled
	case w.cause != nil:
		return w.cause
	}
	return bus.Errorf(bus.CodeTimedOut, "the deadline passed while the call was queued in lane %q", c.binding.queue.lane.Name)
}

// invoke calls the method. A panic becomes the call's error. The error is encoded here because the error's own methods
// may panic too.
func (w *Worker) invoke(ctx context.Context, c *call) (body []byte, err error) {
	defer func() {
		if p := recover(); p != nil {
			c.panicked = true
			body, err = nil, panicError(p)
		}
	}()
	if body, err = c.method(ctx); err != nil {
		return nil, wireError(err)
	}
	return body, nil
}

// method runs the call's method. The result is in c.buf or is returned.
func (c *call) method(ctx context.Context) (body []byte, err error) {
	if c.binding.bound == nil {
		return c.binding.handle(ctx, c.body)
	}
	out, err := c.binding.bound(ctx, c.body, c.buf)
	if err == nil {
		c.buf = out
	}
	return nil, err
}

// wireError is a method's error as it is sent. The error of another call keeps its text in the message, because the
// receiver sets role and method of this call.
func wireError(err error) *bus.Error {
	e := bus.AsError(err)
	if direct, ok := err.(*bus.Error); ok && direct.Role != "" {
		e.Message = direct.Error()
	}
	if e.Code == "" {
		e.Code = bus.CodeApplication
	}
	if e.Details == nil {
		e.Details = map[string]string{"type": fmt.Sprintf("%T", err)}
	}
	return e
}

// finish answers the call and returns the next call of its lane that may start.
func (w *Worker) finish(q *queue, c *call, body []byte, err error) *call {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	w.inactive(c)
	w.answerLocked(c, body, err, now)
	if c.panicked && w.spec.PanicFails {
		w.failLocked(err)
	}
	w.signalIdle()
	return w.nextLocked(q, instantOf(now))
}

// signalIdle wakes awaitIdle.
func (w *Worker) signalIdle() {
	if w.state == Ready {
		return
	}
	select {
	case w.idleCh <- struct{}{}:
	default:
	}
}

// startAsync begins a call that is answered later. If the answer is there at once, it returns the next call of the
// lane.
func (w *Worker) startAsync(s AsyncHandler, q *queue, c *call) *call {
	var next *call
	c.ctx.begin()
	if err := w.checkStart(c); err != nil {
		c.ctx.end()
		return w.finish(q, c, nil, err)
	}
	// The later of two events continues the lane: Begin returns, or the call ends.
	var claimed, second atomic.Bool
	memory := c.binding.memory
	end := func(body []byte, err error) {
		next = w.finish(q, c, body, err)
		if after := next; second.Swap(true) && after != nil {
			w.continueLane(q, after)
		}
	}
	done := func(body []byte, err error) {
		if claimed.Swap(true) {
			values.FreeBody(memory, body)
			return
		}
		c.ctx.end()
		if err != nil {
			values.FreeBody(memory, body)
			body, err = nil, w.asyncError(c, err)
		}
		if result := body; err == nil && c.mayStay() && w.host.ep.References().MustSpill(len(result)) {
			bus.Go(func() { end(w.spill(c, result), nil) })
			return
		}
		end(body, err)
	}
	w.callBegin(s, c, done)
	if second.Swap(true) {
		return next
	}
	return nil
}

// spill writes a result that is past the bound of kept values to disk; the answer is sent after that. If it cannot be written, it is not kept,
// and its caller pulls it at once.
func (w *Worker) spill(c *call, result []byte) []byte {
	place, memory, err := w.host.ep.References().Spill(result)
	if err != nil {
		w.host.cfg.Logger.Warn("actors: a result is sent to its caller at once instead of being kept", "method", c.header.Method, "error", err)
		return result
	}
	c.free(result)
	c.spilled = memory
	return place
}

// callBegin calls Begin. A panic becomes the call's error.
func (w *Worker) callBegin(s AsyncHandler, c *call, done func([]byte, error)) {
	defer func() {
		if p := recover(); p != nil {
			c.panicked = true
			done(nil, panicError(p))
		}
	}()
	body := c.body
	c.body = nil // the handler owns it
	s.Begin(c.ctx, c.header.Method, body, done)
}

// asyncError is wireError for a call that is answered later; an error with the code of a panic counts as one.
func (w *Worker) asyncError(c *call, err error) *bus.Error {
	e := wireError(err)
	c.panicked = c.panicked || e.Code == bus.CodePanic
	return e
}

// continueLane starts the next call of a lane on a goroutine that must not block: one that received the call, or
// answered the last one. A synchronous method gets a goroutine of its own.
func (w *Worker) continueLane(q *queue, c *call) {
	for c != nil && c.binding.async != nil {
		c = w.startAsync(c.binding.async, q, c)
	}
	if c != nil {
		w.host.runners.start(job{worker: w, queue: q, call: c})
	}
}
