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
)

const (
	sharedMost = 4096 // workers on one connection: what its buffers are made for
	dialsMost  = 64   // connections that are made at the same time
)

// Local runs workers as goroutines of this process. One Local may serve several drivers, and then the roles they
// detach outlive them.
type Local struct {
	bus     *bus.Bus
	classes []*actors.Class
	node    string
	minds   bool // the roles of drivers that are gone; a runtime's own Local leaves that to the runtime
	// ownProcess: the process is one worker's own
	ownProcess bool
	beatEvery  time.Duration                            // zero: the actors' own
	classFunc  func(name string) (*actors.Class, error) // for those that are not among classes; nil: there are none

	dialCh chan struct{} // holds a token for each connection that is being made or proved

	group  sync.WaitGroup    // of constructors, and of connections that close behind their workers; see spawn
	mu     sync.Mutex        // guards what follows
	shared map[string]*place // by namespace
	own    map[*place]struct{}
	closed bool
}

// place is one host on one connection.
type place struct {
	bus  *bus.Bus // nil: the Local's own
	ep   *bus.Endpoint
	rt   *Runtime // for calls that the workers make
	host *actors.Host
}

// NewLocal makes a Local on the bus, which stays the caller's. It also ends, when a driver's lease has, what that driver
// owned: the driver itself may be dead, and nobody else there.
func NewLocal(b *bus.Bus, classes []*actors.Class) *Local {
	l := newLocal(b, classes)
	l.minds = true
	return l
}

func newLocal(b *bus.Bus, classes []*actors.Class) *Local {
	node, err := os.Hostname()
	if err != nil {
		node = "local"
	}
	return &Local{bus: b, classes: classes, node: node, dialCh: make(chan struct{}, dialsMost), shared: map[string]*place{}, own: map[*place]struct{}{}}
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

// spawn runs do in a goroutine that Close waits for, or not at all when it no longer would.
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

// settle waits until the server has our subscriptions. For new workers it proves nothing, which is the barrier's work,
// but spares the barrier's first probe from getting there before them and being sent again half a second later.
func settle(ctx context.Context, b *bus.Bus) error {
	ctx, cancel := context.WithTimeout(ctx, registryActs)
	defer cancel()
	if err := b.Conn().FlushWithContext(ctx); err != nil {
		return bus.Errorf(bus.CodeUnavailable, "subscriptions: %w", err)
	}
	return nil
}

// startOne makes one worker.
func (l *Local) startOne(ctx context.Context, spec Spec, w actors.WorkerSpec) (*actors.Worker, error) {
	p, err := l.placeFor(ctx, spec, w)
	if err != nil {
		return nil, err
	}
	worker, err := p.host.Start(ctx, w)
	if p.bus == nil {
		return worker, err
	}
	if err == nil { // the connection is this worker's own
		err = l.taking(ctx, func() error { return settle(ctx, p.bus) })
	}
	if err != nil {
		_ = l.closePlace(context.WithoutCancel(ctx), p) // the worker's error says more
		return nil, err
	}
	l.group.Go(bus.Guard(func() { // inside a goroutine of the group's
		<-worker.Done()
		_ = l.closePlace(context.Background(), p) // a stopped worker's host has nothing left to say
	}))
	return worker, nil
}

// placeFor is where the worker is to live: on the connection all share, or on one of its own.
func (l *Local) placeFor(ctx context.Context, spec Spec, w actors.WorkerSpec) (*place, error) {
	ns := w.Address.Namespace
	shared, err := l.sharedPlace(ns)
	if err != nil || !spec.OwnConnections {
		return shared, err
	}
	b, err := l.dial(ctx, fmt.Sprintf("%s/%s/%d", ns, spec.Name, w.Rank))
	if err != nil {
		return nil, err
	}
	p, err := l.newPlace(b, ns, 1)
	if err != nil {
		return nil, errors.Join(err, b.Close())
	}
	p.bus = b
	l.mu.Lock()
	l.own[p] = struct{}{}
	closed := l.closed
	l.mu.Unlock()
	if closed { // and did not see this one
		return nil, errors.Join(errLocalClosed, l.closePlace(ctx, p))
	}
	return p, nil
}

// dial makes a connection for one worker.
func (l *Local) dial(ctx context.Context, name string) (b *bus.Bus, err error) {
	err = l.taking(ctx, func() error { b, err = l.bus.Dial(ctx, name); return err })
	return b, err
}

// taking waits for one of a few turns at the server. Not all workers of a large role connect at once: the server would answer
// the last of them too late.
func (l *Local) taking(ctx context.Context, turn func() error) error {
	select {
	case l.dialCh <- struct{}{}:
		defer func() { <-l.dialCh }()
		return turn()
	case <-ctx.Done():
		return bus.Errorf(bus.CodeOf(ctx.Err()), "connect: %w", ctx.Err())
	}
}

func (l *Local) sharedPlace(namespace string) (*place, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, errLocalClosed
	}
	if p := l.shared[namespace]; p != nil {
		return p, nil
	}
	p, err := l.newPlace(l.bus, namespace, sharedMost)
	if err != nil {
		return nil, err
	}
	l.shared[namespace] = p
	if l.minds {
		p.rt.mind()
	}
	return p, nil
}

// follow watches over a detached role whose workers are here. A runtime's own Local leaves that to the runtime.
func (l *Local) follow(rec Record) error {
	if !l.minds {
		return nil
	}
	p, err := l.sharedPlace(rec.Namespace)
	if err == nil {
		_, err = p.rt.newCluster(rec, followed, Spec{}.withDefaults())
	}
	return err
}

func (l *Local) newPlace(b *bus.Bus, namespace string, workers int) (*place, error) {
	ep, err := b.Endpoint(namespace)
	if err != nil {
		return nil, err
	}
	rt := newInside(ep)
	host, err := actors.NewHost(ep, actors.HostConfig{Classes: l.classes, ClassFunc: l.classFunc, HeartbeatEvery: l.beatEvery, Node: l.node, Owner: rt, OwnProcess: l.ownProcess, Workers: workers})
	if err != nil {
		rt.closeInside()
		ep.Close()
		return nil, err
	}
	return &place{ep: ep, rt: rt, host: host}, nil
}

// closePlace ends a place once.
func (l *Local) closePlace(ctx context.Context, p *place) error {
	l.mu.Lock()
	_, mine := l.own[p]
	delete(l.own, p)
	l.mu.Unlock()
	if !mine && p.bus != nil {
		return nil
	}
	err := p.host.Close(ctx)
	p.rt.closeInside()
	p.ep.Close()
	if p.bus != nil {
		err = errors.Join(err, p.bus.Close())
	}
	return err
}

// Close stops every worker that is left.
func (l *Local) Close(ctx context.Context) error {
	l.mu.Lock()
	l.closed = true
	var all []*place
	for _, p := range l.shared {
		all = append(all, p)
	}
	for p := range l.own {
		all = append(all, p)
	}
	l.shared = map[string]*place{}
	l.mu.Unlock()
	errs := make([]error, len(all), len(all)+1)
	var group sync.WaitGroup
	for i, p := range all {
		group.Go(bus.Guard(func() { errs[i] = l.closePlace(ctx, p) }))
	}
	group.Wait()
	return errors.Join(append(errs, l.await(ctx))...)
}

// await waits for the goroutines of the Local, and after ctx a moment longer. A constructor that never returns must not
// hold up the end of the process.
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
