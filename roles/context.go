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
	rt, ok := info.Host.Above().(*Runtime)
	if !ok {
		return nil, bus.Errorf(bus.CodeInvalid, "the worker's host was not made by this package")
	}
	return rt, nil
}

// newInside makes the runtime of the workers at one endpoint.
func newInside(ep *bus.Endpoint) *Runtime {
	rt := &Runtime{
		cfg: Config{Namespace: ep.Namespace(), LostAfter: defaultLostAfter}, bus: ep.Bus(), ep: ep, log: ep.Bus().Logger(),
		clusters: map[*Cluster]struct{}{},
	}
	rt.ctx, rt.cancel = context.WithCancel(context.Background())
	return rt
}

// closeInside lets go of what the workers opened.
func (rt *Runtime) closeInside() {
	rt.mu.Lock()
	rt.closed = true
	all := make([]*Cluster, 0, len(rt.clusters))
	for c := range rt.clusters {
		all = append(all, c)
	}
	rt.mu.Unlock()
	for _, c := range all {
		c.release()
	}
	rt.cancel()
	rt.group.Wait()
}
