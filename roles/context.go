package roles

import (
	"context"

	"troupe/actors"
	"troupe/bus"
)

// FromContext is the runtime of the worker whose method ctx belongs to. It makes calls and attaches to roles; it holds
// no lease and therefore cannot create roles.
func FromContext(ctx context.Context) (*Runtime, error) {
	info, ok := actors.Current(ctx)
	if !ok {
		return nil, bus.Errorf(bus.CodeInvalid, "the context does not belong to a method of a worker")
	}
	rt, ok := info.Host.Owner().(*Runtime)
	if !ok {
		return nil, bus.Errorf(bus.CodeInvalid, "the worker's host was not created by package roles")
	}
	return rt, nil
}

// newWorkerRuntime makes the runtime of the workers at one endpoint.
func newWorkerRuntime(ep *bus.Endpoint) *Runtime {
	rt := newRuntime(Config{Namespace: ep.Namespace()}.withDefaults(), ep.Bus())
	rt.ep, rt.log = ep, ep.Bus().Logger()
	return rt
}

// startOrphanReaper starts to destroy the roles of dead drivers.
func (rt *Runtime) startOrphanReaper() {
	rt.spawn(func() { rt.uptime.watch(rt.ctx, rt.bus) })
	rt.spawn(rt.runOrphanReaper)
}

// closeWorkerRuntime closes what the workers opened.
func (rt *Runtime) closeWorkerRuntime() {
	for _, c := range rt.refuseClusters() {
		c.release()
	}
	rt.endBackground()
	if lease := rt.currentLease(); lease != nil {
		_ = lease.Release(context.Background()) // otherwise it expires
	}
}
