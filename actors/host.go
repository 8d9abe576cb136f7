package actors

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/recorder"
	"troupe/bus/values"
	"troupe/bus/wire"
)

const (
	minWorkBuffer          = 8192 // messages between the connection and the receiver, which does not block
	minControlBuffer       = 1024
	workBufferPerWorker    = 16 // added room for each expected worker: all of them may be called at the same time
	controlBufferPerWorker = 4
	defaultHeartbeatEvery  = time.Second
)

// HostConfig is what all workers of one host share.
type HostConfig struct {
	// Classes are the classes that workers of this host may have.
	Classes []*Class
	// ClassFunc finds a class that is not in Classes, by the name that a caller gives at run time. Zero: there is none.
	ClassFunc func(name string) (*Class, error)
	// Node names the machine in errors and heartbeats. Zero: "local".
	Node string
	// HeartbeatEvery is the time between heartbeats. Zero: one second.
	HeartbeatEvery time.Duration
	// OwnProcess says that the process belongs to one worker: the set_env verb changes the environment of the process, and a
	// constructor's error is also sent as a heartbeat. Zero: set_env changes only Worker.Env, and only Start returns the error.
	OwnProcess bool
	// Owner is a value for the package that made the host; methods find it through Host.Owner.
	Owner any
	// Logger receives errors that no caller can be told of. Zero: the bus's.
	Logger *slog.Logger
	// Workers is the expected number of workers; the receive buffers, of eight bytes a message, are sized for it. Messages that
	// find a buffer full are dropped. Zero: five hundred.
	Workers int
}

// Host runs the workers of a process: any number of ranks of any roles, on one connection. It subscribes once to each
// subject and copies locally. Two goroutines feed the workers, one with work in order of arrival, one with control
// messages. Neither blocks, except that the first may run a call itself until another message arrives.
type Host struct {
	ep       *calls.Endpoint
	cfg      HostConfig
	classes  map[string]*Class
	endGrace time.Duration // defaultEndGrace, shorter in tests

	workCh        chan *bus.Msg
	controlCh     chan *bus.Msg
	closedCh      chan struct{}
	closeOnce     sync.Once
	group         sync.WaitGroup
	runners       runners
	running       atomic.Int64  // running calls of all workers
	routesVersion atomic.Uint64 // changes with routes
	forgetRecords func()        // ends the reports of running calls to the flight recorder
	receiversDone atomic.Bool   // receivers end at their next message
	receiverBusy  atomic.Bool   // the receiver of work runs a call
	relievable    atomic.Bool   // the connection's reader calls relieve,
	stopRelief    func()        // until this is called

	mu      sync.RWMutex // guards what follows
	routes  map[string]*route
	workers map[workerID]*hosted
	closed  bool
}

// workerID names one worker of one host.
type workerID struct {
	address bus.Address
	rank    int
	gen     uint32
}

// hosted is a worker of the host and what ends with it.
type hosted struct {
	worker        *Worker
	subjects      []string // of the routes that it is in
	stopSequencer func()
}

// route is one subscription and its workers.
type route struct {
	sub     *bus.Subscription
	workers map[*Worker]struct{}
	list    []*Worker // workers by rank, for receivers; nil after a change, and then built by workersOn
}

// NewHost makes a host on the endpoint's connection. It runs until Close.
func NewHost(ep *calls.Endpoint, cfg HostConfig) (*Host, error) {
	if cfg.Node == "" {
		cfg.Node = "local"
	}
	if cfg.HeartbeatEvery == 0 {
		cfg.HeartbeatEvery = defaultHeartbeatEvery
	}
	if cfg.Logger == nil {
		cfg.Logger = ep.Bus().Logger()
	}
	h := &Host{
		ep: ep, cfg: cfg, classes: map[string]*Class{}, endGrace: defaultEndGrace,
		workCh:    make(chan *bus.Msg, max(minWorkBuffer, workBufferPerWorker*cfg.Workers)),
		controlCh: make(chan *bus.Msg, max(minControlBuffer, controlBufferPerWorker*cfg.Workers)),
		closedCh:  make(chan struct{}),
		routes:    map[string]*route{}, workers: map[workerID]*hosted{},
	}
	for _, c := range cfg.Classes {
		if err := c.check(); err != nil {
			return nil, err
		}
		if h.classes[c.Name] != nil {
			return nil, bus.Errorf(bus.CodeInvalid, "HostConfig.Classes has class %q twice", c.Name)
		}
		h.classes[c.Name] = c
	}
	h.startReceiver(h.workCh)
	h.startReceiver(h.controlCh)
	h.stopRelief = ep.Bus().BeforeRead(h.relieve)
	ep.OnAbsent(h.callerUnreachable)
	h.group.Go(bus.Guard(h.heartbeatLoop))
	h.forgetRecords = recorder.Register(recorder.Source{OpenFunc: h.openRecords, FlushFunc: h.flushRecords})
	return h, nil
}

// Endpoint makes calls from inside workers.
func (h *Host) Endpoint() *calls.Endpoint { return h.ep }

// Owner is the value that the host was configured with.
func (h *Host) Owner() any { return h.cfg.Owner }

// class finds a class by name.
func (h *Host) class(name string) (*Class, error) {
	if c := h.classes[name]; c != nil {
		return c, nil
	}
	if h.cfg.ClassFunc != nil {
		return h.cfg.ClassFunc(name)
	}
	return nil, bus.Errorf(bus.CodeNotFound, "no class %q in this program; it has %v", name, slices.Sorted(maps.Keys(h.classes)))
}

// Start constructs a worker and subscribes to its subjects; the worker is ready when Start returns. After an error nothing
// of it remains.
func (h *Host) Start(ctx context.Context, spec WorkerSpec) (*Worker, error) {
	if err := spec.check(h.ep.Namespace()); err != nil {
		return nil, err
	}
	class, err := h.class(spec.Class)
	if err != nil {
		return nil, err
	}
	w := newWorker(h, spec, class)
	if err := w.construct(ctx); err != nil {
		return nil, h.startFailed(w, err)
	}
	if err := h.listen(w); err != nil {
		_ = w.Stop(ctx)
		return nil, err
	}
	if h.cfg.OwnProcess {
		h.sendHeartbeat(spec.Address, []*Worker{w}, true) // "ready" without waiting for the next heartbeat
	}
	return w, nil
}

// startFailed makes the worker Failed and returns the error with its role, rank and node.
func (h *Host) startFailed(w *Worker, cause error) error {
	e := bus.AsError(cause)
	e.Role, e.Rank, e.Node = w.spec.Address.Role, w.spec.Rank, h.cfg.Node
	w.become(Failed, e)
	if h.cfg.OwnProcess {
		h.sendHeartbeat(w.spec.Address, []*Worker{w}, true)
		ctx, cancel := context.WithTimeout(context.Background(), h.endGrace)
		defer cancel()
		_ = h.ep.Bus().Flush(ctx) // if it fails, the node's agent still reports the exit of the process
	}
	return e
}

// Fail reports on the bus that a worker cannot be started, for a process that finds out before Start.
func (h *Host) Fail(spec WorkerSpec, cause error) {
	_ = h.startFailed(newWorker(h, spec, &Class{Name: spec.Class}), cause) // the caller has the cause
}

// listen subscribes to every subject of the worker.
func (h *Host) listen(w *Worker) error {
	a, rank := w.spec.Address, w.spec.Rank
	stopSequencer := func() {}
	if w.spec.Ordered && rank == 0 {
		stop, err := h.ep.Sequence(a, w.spec.World)
		if err != nil {
			return err
		}
		stopSequencer = stop
	}
	if err := h.add(w, stopSequencer); err != nil {
		stopSequencer()
		return err
	}
	err := errors.Join(
		h.subscribe(a.All(), h.workCh, w), h.subscribe(a.Rank(rank), h.workCh, w),
		h.subscribe(a.Control(), h.controlCh, w), h.subscribe(a.ControlRank(rank), h.controlCh, w))
	for _, s := range w.spec.Slices {
		err = errors.Join(err, h.subscribe(a.Slice(s.Mesh, s.N), h.workCh, w))
	}
	return err
}

func (w *Worker) id() workerID { return workerID{w.spec.Address, w.spec.Rank, w.spec.Gen} }

// add makes the worker one of the host's.
func (h *Host) add(w *Worker, stopSequencer func()) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.closed:
		return errHostClosed
	case h.workers[w.id()] != nil:
		return bus.Errorf(bus.CodeExists, "%s[%d] already runs in this process", w.spec.Address.Role, w.spec.Rank)
	}
	h.workers[w.id()] = &hosted{worker: w, stopSequencer: stopSequencer}
	return nil
}

var errHostClosed = bus.Errorf(bus.CodeClosed, "the host is closed")

// subscribe adds the worker to the subject's route and subscribes if it is the first. All subscriptions of a kind feed one
// channel, which keeps the order of the connection.
func (h *Host) subscribe(subject string, ch chan *bus.Msg, w *Worker) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	entry := h.workers[w.id()]
	if h.closed || entry == nil || entry.worker != w {
		return errHostClosed
	}
	r := h.routes[subject]
	if r == nil {
		sub, err := h.ep.Bus().SubscribeChan(subject, ch)
		if err != nil {
			return err
		}
		r = &route{sub: sub, workers: map[*Worker]struct{}{}}
		h.routes[subject] = r
	}
	if _, known := r.workers[w]; !known {
		r.workers[w], r.list = struct{}{}, nil
		entry.subjects = append(entry.subjects, subject)
		h.routesVersion.Add(1)
	}
	return nil
}

// remove takes the worker out of its routes and unsubscribes from those that are empty then. Its cost does not depend on the
// number of workers.
func (h *Host) remove(w *Worker) {
	h.mu.Lock()
	entry := h.workers[w.id()]
	if entry == nil || entry.worker != w {
		h.mu.Unlock()
		return
	}
	delete(h.workers, w.id())
	for _, subject := range entry.subjects {
		r := h.routes[subject]
		delete(r.workers, w)
		r.list = nil
		if len(r.workers) == 0 {
			_ = r.sub.Unsubscribe() // fails only on a closed connection
			delete(h.routes, subject)
		}
	}
	h.routesVersion.Add(1)
	h.mu.Unlock()
	entry.stopSequencer()
	h.sendHeartbeat(w.spec.Address, []*Worker{w}, true) // the final state: stopped, or failed with the cause
}

// workersOn returns the workers of a subject by rank. The slice is not changed afterwards.
func (h *Host) workersOn(subject string) []*Worker {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.routes[subject]
	if r == nil {
		return nil
	}
	if r.list == nil {
		r.list = slices.SortedFunc(maps.Keys(r.workers), byRank)
	}
	return r.list
}

func byRank(a, b *Worker) int { return a.spec.Rank - b.spec.Rank }

// fetch pulls the bodies of calls. A body that several ranks of this process need is pulled once.
func (h *Host) fetch(calls []*call) {
	if len(calls) == 0 {
		return
	}
	byRef := map[wire.BodyRef][]*call{}
	for _, c := range calls {
		if len(c.header.Arguments) > 0 {
			h.getArguments(c)
		}
		if c.header.Ref.Owner == "" {
			continue
		}
		byRef[c.header.Ref] = append(byRef[c.header.Ref], c)
	}
	for ref, group := range byRef {
		var ranks wire.RankSet
		for _, c := range group {
			ranks.Add(c.worker.spec.Rank)
		}
		memory := group[0].binding.memory
		h.ep.Values().Fetch(ref, group[0].header.Location, values.Receiver{Ranks: ranks, Memory: memory, Alone: group[0].header.ForHost == wire.ForItself}, func(body []byte, err error) {
			for _, c := range group[1:] {
				other := body
				if memory != nil { // each call owns its own copy
					other = bytes.Clone(body)
				}
				c.worker.bodyArrived(c, other, err)
			}
			group[0].worker.bodyArrived(group[0], body, err)
		})
	}
}

// Workers returns the host's workers by rank.
func (h *Host) Workers() []*Worker {
	h.mu.RLock()
	defer h.mu.RUnlock()
	out := make([]*Worker, 0, len(h.workers))
	for _, entry := range h.workers {
		out = append(out, entry.worker)
	}
	slices.SortFunc(out, byRank)
	return out
}

// Close stops every worker within ctx and ends the host. It may be called more than once.
func (h *Host) Close(ctx context.Context) error {
	h.mu.Lock()
	h.closed = true // Start refuses from now on
	h.mu.Unlock()
	var group sync.WaitGroup
	workers := h.Workers()
	errs := make([]error, len(workers))
	for i, w := range workers {
		group.Go(bus.Guard(func() { errs[i] = w.Stop(ctx) }))
	}
	group.Wait()
	h.closeOnce.Do(h.closeReceivers)
	h.stopRelief()
	h.forgetRecords()
	h.group.Wait()
	h.runners.close(time.Second)
	return errors.Join(errs...)
}
