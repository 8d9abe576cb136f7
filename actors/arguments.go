package actors

import (
	"context"
	"time"

	"troupe/bus/values"
	"troupe/bus/wire"
)

// callArguments are the arguments of a call that are references. They are obtained while the call is queued. The worker's mutex
// guards them.
type callArguments struct {
	left    int // values that have not arrived
	values  map[wire.Reference]values.Value
	err     error // the first failure; the call fails with it
	cancels []func()
}

// newArguments is nil for a call without references.
func newArguments(h *wire.Header) *callArguments {
	if len(h.Arguments) == 0 {
		return nil
	}
	a := &callArguments{values: map[wire.Reference]values.Value{}}
	for _, ref := range h.Arguments {
		a.values[ref] = values.Value{}
	}
	a.left = len(a.values)
	return a
}

// ready reports whether the call has everything that its method needs.
func (c *call) ready() bool { return c.bodyHere && !c.awaitsValues() }

// awaitsValues reports whether an argument is a reference whose value has not arrived. It may be the result of a call that has
// not run, so calls of other callers may start before this one.
func (c *call) awaitsValues() bool { return c.args != nil && c.args.left > 0 && c.args.err == nil }

// getArguments requests the values of a call's references. w.mu is not held: a value may be there at once.
func (h *Host) getArguments(c *call) {
	refs, w := c.header.Arguments, c.worker
	asked := map[wire.Reference]bool{}
	for _, ref := range refs {
		if asked[ref] {
			continue
		}
		asked[ref] = true
		cancel := h.ep.References().Get(ref, c.binding.memory, func(v values.Value, err error) { w.argumentArrived(c, ref, v, err) })
		w.mu.Lock()
		over := c.phase != queued
		if !over {
			c.args.cancels = append(c.args.cancels, cancel)
		}
		w.mu.Unlock()
		if over {
			cancel()
		}
	}
}

// argumentArrived gives a queued call the value of a reference, or its error.
func (w *Worker) argumentArrived(c *call, ref wire.Reference, v values.Value, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if c.phase != queued || c.args == nil { // the call was cancelled or refused meanwhile
		w.dropValue(c, v)
		return
	}
	c.args.values[ref] = v
	c.args.left--
	if err != nil && c.args.err == nil {
		c.args.err = err
	}
	w.startReady(c.binding.queue, instantOf(time.Now()))
}

func (w *Worker) dropValue(c *call, v values.Value) {
	c.free(v.Body)
	w.host.ep.References().Release(v.References...)
}

// dropArguments ends the requests for a call's references and frees the values that were not taken. w.mu is held.
func (w *Worker) dropArguments(c *call) {
	a := c.args
	if a == nil {
		return
	}
	c.args = nil
	for _, cancel := range a.cancels {
		cancel()
	}
	for _, v := range a.values {
		w.dropValue(c, v)
	}
}

// placeArguments puts the values of references into the body of the call, for a handler that does not take them itself.
func (c *call) placeArguments() error {
	a := c.args
	if a == nil {
		return nil
	}
	if t, ok := c.binding.async.(ArgumentTaker); ok && t.TakesArguments() {
		return nil
	}
	values := map[wire.Reference][]byte{}
	for ref, v := range a.values {
		values[ref] = v.Body
	}
	body, err := wire.ReplaceArguments(c.body, values)
	if err != nil {
		return err
	}
	c.free(c.body)
	c.body = body
	return nil
}

// Argument is the value of an argument that was a reference.
type Argument struct {
	Reference wire.Reference
	values.Value
}

// TakeArguments returns the values of the call's arguments that were references, once. They belong to the handler, which frees the
// bodies. The references inside them are retained at holder, where the handler releases them. A nil holder stands for the endpoint of the
// worker's host; a program with another endpoint, such as a driver that serves an object, passes that one.
func TakeArguments(ctx context.Context, holder *values.References) []Argument {
	c, ok := ctx.Value(callKey{}).(*callContext)
	if !ok {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.call == nil || c.call.args == nil {
		return nil
	}
	host := c.call.worker.host.ep.References()
	var out []Argument
	for ref, v := range c.call.args.values {
		if holder != nil && holder != host {
			holder.Retain(v.References...)
			host.Release(v.References...)
		}
		out = append(out, Argument{Reference: ref, Value: v})
	}
	c.call.args = nil
	return out
}

// SetReferences names the references inside the result of the call. Their uses belong to the call from now on. It reports false if the
// call is over: then they still belong to the handler.
func SetReferences(ctx context.Context, refs values.RetainedReferences) bool {
	return withCall(ctx, func(c *call) { c.refs = refs })
}

// SendResult has the result of the call sent to its caller at once, also if the call leaves large results with their workers.
func SendResult(ctx context.Context) { withCall(ctx, func(c *call) { c.sends = true }) }

// withCall reports false if the call of ctx is over, and calls do otherwise.
func withCall(ctx context.Context, do func(*call)) bool {
	c, ok := ctx.Value(callKey{}).(*callContext)
	if !ok {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.call == nil {
		return false
	}
	do(c.call)
	return true
}

// mayStay reports whether a large result stays here until its caller asks for it.
func (c *call) mayStay() bool { return c.header.Keep && !c.sends }

// dropReferences ends the call's use of the references inside its result. The mutex of the worker is held.
func (c *call) dropReferences() {
	refs := c.refs
	c.refs = values.RetainedReferences{}
	refs.ReleaseSent()
}

// referencesTaken handles the caller's message that it holds the references inside an answer.
func (w *Worker) referencesTaken(h *wire.Header) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s := w.callers[h.Session]; s != nil {
		if c := s.calls[h.Seq]; c != nil && c.phase == answered {
			c.dropReferences()
		}
	}
}
