package roles

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/calls"
	"troupe/roles/registry"
)

const (
	sharedMost = 4096 // workers on one connection, which sizes its buffers
	dialsMost  = 64   // concurrent connection attempts
)

// Local runs workers as goroutines of this process. A Local that serves several drivers keeps the roles that they
// detach.
type Local struct {
	bus          *bus.Bus
	classes      []*actors.Class
	node         string
	reapsOrphans bool // destroys roles of dead drivers; a runtime's own Local leaves that to the runtime
	// ownProcess: the process belongs to one worker
	ownProcess bool
	beatEvery  time.Duration                            // zero: the default of actors
	classFunc  func(name string) (*actors.Class, error) // for classes that are not in classes; nil: none

	dialCh chan struct{} // holds a token for each connection attempt

	group  sync.WaitGroup         // of constructors, and of connections that close after their workers; see spawn
	mu     sync.Mutex             // guards what follows
	shared map[string]*workerHost // by namespace
	own    map[*workerHost]struct{}
	closed bool
}

// workerHost is one actors.Host and its connection.
type workerHost struct {
	bus  *bus.Bus // nil: the Local's own
	ep   *calls.Endpoint
	rt   *Runtime // for calls that the workers make
	host *actors.Host
}

// NewLocal makes a Local on the bus, which the caller closes. It also destroys the roles of dead drivers.
func NewLocal(b *bus.Bus, classes []*actors.Class) *Local {
	l := newLocal(b, classes)
	l.reapsOrphans = true
	return l
}

func newLocal(b *bus.Bus, classes []*actors.Class) *Local {
	node, err := os.Hostname()
	if err != nil {
		node = "local"
	}
	return &Local{bus: b, classes: classes, node: node, dialCh: make(chan struct{}, dialsMost), shared: map[string]*workerHost{}, own: map[*workerHost]struct{}{}}
}

func (l *Local) class(name string) (*actors.Class, error) {
	var names []string
	for _, c := range l.classes {
		if c.Name == name {
			return c, nil
		}
		names = append(names, c.Name)
	}
	if l.classFunc != nil {
		return l.classFunc(name)
	}
	return nil, bus.Errorf(bus.CodeNotFound, "no class %q in this program; it has %v", name, names)
}

// spawn runs do in a goroutine that Close waits for, or returns an error after Close.
func (l *Local) spawn(do func()) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return errLocalClosed
	}
	l.group.Go(bus.Guard(do))
	return nil
}

var errLocalClosed = bus.Errorf(bus.CodeClosed, "the workers' process is closing")

// flushSubscriptions waits until the server has this connection's subscriptions. It proves nothing about other servers, which the
// barrier does, but makes the barrier's first probe arrive.
func flushSubscriptions(ctx context.Context, b *bus.Bus) error {
	ctx, cancel := context.WithTimeout(ctx, registryTimeout)
	defer cancel()
	if err := b.Flush(ctx); err != nil {
		return bus.Errorf(bus.CodeUnavailable, "flush subscriptions: %w", err)
	}
	return nil
}

// startOne starts one worker.
func (l *Local) startOne(ctx context.Context, spec Spec, w actors.WorkerSpec) (*actors.Worker, error) {
	p, err := l.hostFor(ctx, spec, w)
	if err != nil {
		return nil, err
	}
	worker, err := p.host.Start(ctx, w)
	if p.bus == nil {
		return worker, err
	}
	if err == nil { // the connection belongs to this worker
		err = l.throttled(ctx, func() error { return flushSubscriptions(ctx, p.bus) })
	}
	if err != nil {
		_ = l.closeHost(context.WithoutCancel(ctx), p) // the worker's error counts
		return nil, err
	}
	l.group.Go(bus.Guard(func() { // the group cannot be empty here
		<-worker.Done()
		_ = l.closeHost(context.Background(), p) // a stopped worker's host has nothing to report
	}))
	return worker, nil
}

// hostFor is the host of the worker: on the shared connection, or on one of its own.
func (l *Local) hostFor(ctx context.Context, spec Spec, w actors.WorkerSpec) (*workerHost, error) {
	ns := w.Address.Namespace
	shared, err := l.sharedHost(ns)
	if err != nil || !spec.OwnConnections {
		return shared, err
	}
	b, err := l.dial(ctx, fmt.Sprintf("%s/%s/%d", ns, spec.Name, w.Rank))
	if err != nil {
		return nil, err
	}
	p, err := l.newWorkerHost(b, ns, 1)
	if err != nil {
		return nil, errors.Join(err, b.Close())
	}
	p.bus = b
	l.mu.Lock()
	l.own[p] = struct{}{}
	closed := l.closed
	l.mu.Unlock()
	if closed { // Close has not seen this one
		return nil, errors.Join(errLocalClosed, l.closeHost(ctx, p))
	}
	return p, nil
}

// dial opens a connection for one worker.
func (l *Local) dial(ctx context.Context, name string) (b *bus.Bus, err error) {
	err = l.throttled(ctx, func() error { b, err = l.bus.Dial(ctx, name); return err })
	return b, err
}

// throttled limits concurrent requests to the server: it would answer the last of thousands of connection attempts too
// late.
func (l *Local) throttled(ctx context.Context, turn func() error) error {
	select {
	case l.dialCh <- struct{}{}:
		defer func() { <-l.dialCh }()
		return turn()
	case <-ctx.Done():
		return bus.Errorf(bus.CodeOf(ctx.Err()), "connect: %w", ctx.Err())
	}
}

func (l *Local) sharedHost(namespace string) (*workerHost, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, errLocalClosed
	}
	if p := l.shared[namespace]; p != nil {
		return p, nil
	}
	p, err := l.newWorkerHost(l.bus, namespace, sharedMost)
	if err != nil {
		return nil, err
	}
	l.shared[namespace] = p
	if l.reapsOrphans {
		p.rt.startOrphanReaper()
	}
	return p, nil
}

// follow monitors a detached role whose workers are here. A runtime's own Local leaves that to the runtime.
func (l *Local) follow(rec registry.RoleRecord) error {
	if !l.reapsOrphans {
		return nil
	}
	p, err := l.sharedHost(rec.Namespace)
	if err == nil {
		_, err = p.rt.newMonitor(rec)
	}
	return err
}

func (l *Local) newWorkerHost(b *bus.Bus, namespace string, workers int) (*workerHost, error) {
	ep, err := calls.Open(b, namespace)
	if err != nil {
		return nil, err
	}
	rt := newWorkerRuntime(ep, l)
	host, err := actors.NewHost(ep, actors.HostConfig{Classes: l.classes, ClassFunc: l.classFunc, HeartbeatEvery: l.beatEvery, Node: l.node, Owner: rt, OwnProcess: l.ownProcess, Workers: workers})
	if err != nil {
		rt.closeWorkerRuntime(context.Background())
		ep.Close()
		return nil, err
	}
	return &workerHost{ep: ep, rt: rt, host: host}, nil
}

// closeHost closes a host once.
func (l *Local) closeHost(ctx context.Context, p *workerHost) error {
	l.mu.Lock()
	_, mine := l.own[p]
	delete(l.own, p)
	l.mu.Unlock()
	if !mine && p.bus != nil {
		return nil
	}
	err := p.host.Close(ctx)
	p.rt.closeWorkerRuntime(ctx)
	p.ep.Close()
	if p.bus != nil {
		err = errors.Join(err, p.bus.Close())
	}
	return err
}

// Close stops every remaining worker.
func (l *Local) Close(ctx context.Context) error {
	l.mu.Lock()
	l.closed = true
	var all []*workerHost
	for _, p := range l.shared {
		all = append(all, p)
	}
	for p := range l.own {
		all = append(all, p)
	}
	l.shared = map[string]*workerHost{}
	l.mu.Unlock()
	errs := make([]error, len(all), len(all)+1)
	var group sync.WaitGroup
	for i, p := range all {
		group.Go(bus.Guard(func() { errs[i] = l.closeHost(ctx, p) }))
	}
	group.Wait()
	return errors.Join(append(errs, l.await(ctx))...)
}

// await waits for the goroutines of the Local until a moment after ctx ends. A constructor that never returns must not
// block the end of the process.
func (l *Local) await(ctx context.Context) error {
	doneCh := make(chan struct{})
	bus.Go(func() { l.group.Wait(); close(doneCh) })
	select {
	case <-doneCh:
		return nil
	case <-ctx.Done():
	}
	select {
	case <-doneCh:
		return nil
	case <-time.After(constructorGrace):
		return bus.Errorf(bus.CodeOf(ctx.Err()), "a worker's constructor has not returned: %w", ctx.Err())
	}
}
