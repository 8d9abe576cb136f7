package roles

import (
	"context"
	"fmt"
	"os"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/calls"
	"troupe/nodes"
	"troupe/roles/display"
)

// FromContext is the runtime of the worker whose method ctx belongs to. It makes calls, attaches to roles, and creates roles,
// which end with the worker's process.
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
func newWorkerRuntime(ep *calls.Endpoint, local *Local) *Runtime {
	rt := newRuntime(Config{Namespace: ep.Namespace(), Classes: local.classes, ClassFunc: local.classFunc}.withDefaults(), ep.Bus())
	rt.ep, rt.log = ep, ep.Bus().Logger()
	return rt
}

// setWorker says which worker the runtime belongs to. It is called before the worker is made.
func (rt *Runtime) setWorker(a Assignment, node string) {
	rt.worker = &nodes.WorkerID{Namespace: a.Namespace, Role: a.Role, Incarnation: a.Incarnation, Rank: a.Rank, Gen: a.Gen}
	rt.driver, rt.cfg.Private = a.Driver, a.Private
	rt.cfg.Name = fmt.Sprintf("worker %s/%d on %s[%d]", a.Role, a.Rank, node, os.Getpid())
	if a.Output != nodes.OutputUnset {
		rt.cfg.OutputMode, rt.cfg.OutputFunc = a.Output, passOn
	}
}

// passOn writes the output of workers that this worker process created to its own output, which the driver shows. It blocks while that
// is not read.
func passOn(t display.Text) {
	out := os.Stdout
	if t.Stream == nodes.Stderr {
		out = os.Stderr
	}
	_, _ = out.Write(t.Text) // fails only if the agent has closed its end
}

// becomeCreator makes the runtime of a worker able to create roles and reservations: it acquires the lease with which they
// end. A driver is able from the start.
func (rt *Runtime) becomeCreator(ctx context.Context) error {
	rt.localMu.Lock()
	defer rt.localMu.Unlock()
	if rt.local != nil {
		return nil
	}
	rt.uptime.Follow(rt.bus)
	if err := rt.ensureLease(ctx); err != nil {
		return err
	}
	rt.local = newLocal(rt.bus, rt.cfg.Classes)
	rt.local.classFunc = rt.cfg.ClassFunc
	return nil
}

// startOrphanReaper starts to destroy the roles of dead drivers.
func (rt *Runtime) startOrphanReaper() {
	rt.uptime.Follow(rt.bus)
	rt.spawn(rt.runOrphanReaper)
}

// closeWorkerRuntime destroys the roles that the workers created, and closes what they opened. The lease is released only when
// all of them have ended: otherwise the agent ends it with the process, and another process destroys them.
func (rt *Runtime) closeWorkerRuntime(ctx context.Context) {
	rt.cancelCreate()
	all := rt.refuseClusters()
	err := rt.awaitCreations(ctx)
	rt.localMu.Lock()
	local := rt.local
	rt.localMu.Unlock()
	if local != nil && err == nil {
		if err = rt.closeClusters(ctx); rt.services.used() && err == nil {
			err = rt.releaseOwn(ctx)
		}
	}
	for _, c := range all {
		c.ender.release()
	}
	rt.endBackground()
	rt.endOutput()
	if local != nil {
		_ = local.Close(ctx) // its roles have ended
	}
	rt.services.close()
	if err != nil {
		rt.log.Warn("roles: roles that this worker created have not ended; they are destroyed when its process has exited", "error", err)
	}
	if lease := rt.currentLease(); lease != nil && err == nil {
		_ = lease.Release(context.WithoutCancel(ctx)) // otherwise it expires
	}
}

// awaitCreations waits for calls of Create, which have been cancelled.
func (rt *Runtime) awaitCreations(ctx context.Context) error {
	doneCh := make(chan struct{})
	bus.Go(func() { rt.creating.Wait(); close(doneCh) })
	select {
	case <-doneCh:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
