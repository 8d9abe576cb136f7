package roles

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"troupe/actors"
	"troupe/bus"
)

// Local runs workers as goroutines of this process. One Local may serve several drivers, and then the roles they
// detach outlive them.
type Local struct {
	bus     *bus.Bus
	classes []*actors.Class
	node    string

	group  sync.WaitGroup // of connections that close behind their workers
	mu     sync.Mutex
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

// NewLocal makes a Local on the bus, which stays the caller's.
func NewLocal(b *bus.Bus, classes []*actors.Class) *Local {
	node, err := os.Hostname()
	if err != nil {
		node = "local"
	}
	return &Local{bus: b, classes: classes, node: node, shared: map[string]*place{}, own: map[*place]struct{}{}}
}

func (l *Local) class(name string) (*actors.Class, error) {
	var names []string
	for _, c := range l.classes {
		if c.Name == name {
			return c, nil
		}
		names = append(names, c.Name)
	}
	return nil, bus.Errorf(bus.CodeNotFound, "no class %q in this program; it has %v", name, names)
}

// start makes the workers of a role, all at once. The first that fails is the error; those that had started stay for
// the caller to stop.
func (l *Local) start(ctx context.Context, spec Spec, workers []actors.WorkerSpec) ([]*actors.Worker, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out := make([]*actors.Worker, len(workers))
	var group sync.WaitGroup
	for i, w := range workers {
		group.Go(func() {
			started, err := l.startOne(ctx, spec, w)
			if err != nil {
				cancel(err) // the first one counts
				return
			}
			out[i] = started
		})
	}
	group.Wait()
	return out, context.Cause(ctx)
}

func (l *Local) startOne(ctx context.Context, spec Spec, w actors.WorkerSpec) (*actors.Worker, error) {
	p, err := l.placeFor(ctx, spec, w)
	if err != nil {
		return nil, err
	}
	worker, err := p.host.Start(ctx, w)
	if p.bus != nil { // the connection is this worker's own
		if err != nil {
			return nil, errors.Join(err, l.closePlace(ctx, p))
		}
		l.group.Go(func() {
			<-worker.Done()
			_ = l.closePlace(context.Background(), p) // a stopped worker's host has nothing left to say
		})
	}
	return worker, err
}

func (l *Local) placeFor(ctx context.Context, spec Spec, w actors.WorkerSpec) (*place, error) {
	ns := w.Address.Namespace
	if spec.OwnConnections {
		b, err := l.bus.Dial(ctx, fmt.Sprintf("%s/%s/%d", ns, spec.Name, w.Rank))
		if err != nil {
			return nil, err
		}
		p, err := l.newPlace(b, ns)
		if err != nil {
			return nil, errors.Join(err, b.Close())
		}
		p.bus = b
		l.mu.Lock()
		defer l.mu.Unlock()
		l.own[p] = struct{}{}
		return p, nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, bus.Errorf(bus.CodeClosed, "the workers' process is closing")
	}
	if p := l.shared[ns]; p != nil {
		return p, nil
	}
	p, err := l.newPlace(l.bus, ns)
	if err == nil {
		l.shared[ns] = p
	}
	return p, err
}

func (l *Local) newPlace(b *bus.Bus, namespace string) (*place, error) {
	ep, err := b.Endpoint(namespace)
	if err != nil {
		return nil, err
	}
	rt := newInside(ep)
	host, err := actors.NewHost(ep, actors.HostConfig{Classes: l.classes, Node: l.node, Above: rt})
	if err != nil {
		rt.closeInside()
		ep.Close()
		return nil, err
	}
	return &place{ep: ep, rt: rt, host: host}, nil
}

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
	errs := make([]error, len(all))
	var group sync.WaitGroup
	for i, p := range all {
		group.Go(func() { errs[i] = l.closePlace(ctx, p) })
	}
	group.Wait()
	l.group.Wait()
	return errors.Join(errs...)
}
