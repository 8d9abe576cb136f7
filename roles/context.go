package roles

import (
	"context"

	"troupe/actors"
	"troupe/bus"
)

// FromContext is the runtime of the worker whose method ctx belongs to. It makes calls and attaches to roles; it holds
// no lease and therefore creates none.
func FromContext(ctx context.Context) (*Runtime, error) {
	info, ok := actors.Current(ctx)
	if !ok {
		return nil, bus.Errorf(bus.CodeInvalid, "this context does not belong to a method of a worker")
	}
	rt, ok := info.Host.Owner().(*Runtime)
	if !ok {
		return nil, bus.Errorf(bus.CodeInvalid, "the worker's host was not made by this package")
	}
	return rt, nil
}

// newInside makes the runtime of the workers at one endpoint.
func newInside(ep *bus.Endpoint) *Runtime {
	rt := newRuntime(Config{Namespace: ep.Namespace()}.withDefaults(), ep.Bus())
	rt.ep, rt.log = ep, ep.Bus().Logger()
	return rt
}

// mind has the runtime look after the roles of drivers that are gone.
func (rt *Runtime) mind() {
	rt.spawn(func() { rt.reach.watch(rt.ctx, rt.bus.Conn()) })
	rt.spawn(rt.janitor)
}

// closeInside lets go of what the workers opened.
func (rt *Runtime) closeInside() {
	for _, c := range rt.noMore() {
		c.release()
	}
	rt.wait()
	if lease := rt.currentLease(); lease != nil {
		_ = lease.Release(context.Background()) // or it expires
	}
}
