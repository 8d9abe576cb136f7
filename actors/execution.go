package actors

import (
	"context"
	"fmt"
	"time"

	"troupe/bus"
)

// buffer is an empty one for an answer, with room for its envelope.
func (w *Worker) buffer() []byte {
	if last := len(w.buffers) - 1; last >= 0 {
		b := w.buffers[last]
		w.buffers = w.buffers[:last]
		return b
	}
	return make([]byte, bus.ReplyRoom, newBuffer)
}

// reuse takes back a buffer that nobody refers to any more.
func (w *Worker) reuse(b []byte) {
	if cap(b) >= newBuffer && cap(b) <= largeBuffer && len(w.buffers) < maxBuffers {
		w.buffers = append(w.buffers, b[:bus.ReplyRoom])
	}
}

// run executes calls of one lane until none may start.
func (w *Worker) run(q *queue, c *call) {
	defer func() {
		if c != nil { // the method has ended this goroutine, with runtime.Goexit
			c.panicked = true
			if c = w.finish(q, c, nil, bus.Errorf(bus.CodePanic, "the method ended its goroutine")); c != nil {
				w.host.runners.start(job{worker: w, queue: q, call: c})
			}
		}
	}()
	for c != nil {
		if s := c.binding.starter; s != nil {
			c = w.begin(s, q, c)
			continue
		}
		body, err := w.execute(c)
		c = w.finish(q, c, body, err)
	}
}

func (w *Worker) execute(c *call) ([]byte, error) {
	c.ctx.begin()
	defer c.ctx.end()
	if err := w.mayRun(c); err != nil {
		return nil, err
	}
	return w.invoke(c.ctx, c)
}

// mayRun is why a call whose turn has come is not run after all. Whatever ends a call ends its context.
func (w *Worker) mayRun(c *call) error {
	if c.bodyErr != nil {
		return bus.Errorf(bus.CodeRefused, "the argument did not arrive: %w", c.bodyErr)
	}
	if c.ctx.Err() == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case c.dropped:
		return bus.ErrCancelled
	case w.cause != nil:
		return w.cause
	}
	return bus.Errorf(bus.CodeTimedOut, "the deadline passed while the call waited in lane %q", c.binding.queue.lane.Name)
}

// invoke calls the method. A panic is that call's error and goes no further; so is one of the error's own methods, which
// is why the error is made ready for the wire here.
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

// method runs the call's method. The result is in c.buf already, or is returned.
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

// wireError is a method's error as it will travel. One that comes from another call says so in its message, because the
// caller will put this call in its place.
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

// finish answers the call and takes the next one of its lane.
func (w *Worker) finish(q *queue, c *call, body []byte, err error) *call {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	w.inactive(c)
	w.answerLocked(c, body, err, now)
	c.noteShort(instantOf(now))
	if c.panicked && w.spec.PanicFails {
		w.failLocked(err)
	}
	w.signalIdle()
	return w.nextLocked(q, instantOf(now))
}

// noteShort counts the short calls of a method in a row.
func (c *call) noteShort(now instant) {
	if now.sub(c.started) > fastCall {
		c.binding.short = 0
	} else if c.binding.short < fastCalls {
		c.binding.short++
	}
}

// signalIdle wakes whoever waits for the worker to become idle.
func (w *Worker) signalIdle() {
	if w.state == Ready {
		return
	}
	select {
	case w.idleCh <- struct{}{}:
	default:
	}
}
