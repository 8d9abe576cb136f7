package main

import (
	"context"
	"errors"
	"time"

	"troupe/actors"
	"troupe/bus"
)

// limits is what a call inherits from the call whose method makes it.
type limits struct {
	ctx     context.Context // ends when the outer call is given up before it is answered
	timeout time.Duration   // the lesser of the call's own and the rest of the outer call's; 0: none
	outer   string          // the method whose deadline timeout is; empty: it is the call's own
}

// cancelGrace is how much later than the task of an async method the calls that it has made end. The task is cancelled
// first, as its code expects, and cancels the calls that it awaits.
const cancelGrace = time.Second

// nested returns the limits of a call that Python makes; where says where (callScope), and own is the call's timeout,
// 0: none. It refuses a call inside a method whose caller has given up. Calls that clean up are made all the same:
// those with a timeout of their own, and those of async methods, which block no other call.
func (c *core) nested(where []byte, own time.Duration) (limits, error) {
	free := limits{ctx: context.Background(), timeout: own}
	scope, _, ok := readRecord[callScope](where)
	if !ok {
		return free, nil
	}
	in := c.incoming
	in.mu.Lock()
	defer in.mu.Unlock()
	t := in.calls[scope.Served]
	if t == nil || !t.inherits {
		return free, nil
	}
	deadline, limited := t.ctx.Deadline()
	left, over := time.Until(deadline), t.ctx.Err()
	if limited && left <= 0 {
		over = context.DeadlineExceeded
	}
	if t.cancels {
		left += cancelGrace
	}
	info, _ := actors.Current(t.ctx)
	switch {
	case over != nil && (own > 0 || t.cancels):
		return free, nil
	case over != nil:
		const refusal = "the caller of %q, which makes this call, has given up; give a call that cleans up a timeout of its own"
		return limits{}, bus.Errorf(bus.CodeOf(over), refusal, info.Method)
	case limited && (own == 0 || left < own):
		return limits{t.callsContext(), left, info.Method}, nil
	}
	return limits{t.callsContext(), own, ""}, nil
}

// callsContext is the context of the calls that the method makes. It ends when the call is cancelled, and does not end
// when the call is answered: a method may leave calls behind. Calls have the deadline as their own. The lock of
// incoming is held.
func (t *openCall) callsContext() context.Context {
	if t.calls == nil {
		ctx, cancel := context.WithCancel(context.Background())
		t.calls, t.detach = ctx, context.AfterFunc(t.ctx, bus.Guard(func() {
			switch {
			case errors.Is(t.ctx.Err(), context.DeadlineExceeded):
			case t.cancels:
				time.AfterFunc(cancelGrace, bus.Guard(cancel))
			default:
				cancel()
			}
		}))
	}
	return t.calls
}

// explain adds to the error of a call whose deadline is inherited whose deadline it is.
func (l limits) explain(err error) error {
	if l.outer == "" || bus.CodeOf(err) != bus.CodeTimedOut {
		return err
	}
	e := *bus.AsError(err)
	e.Message += "; it is the deadline of " + l.outer + ", which made the call"
	return &e
}
