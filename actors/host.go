package actors

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"troupe/bus"
	"troupe/bus/wire"
)

const (
	workBuffer       = 8192 // messages between NATS and the host's own goroutine, which never blocks: at least so many
	controlBuffer    = 1024
	workEach         = 16 // and so many for each worker that is expected: all are told something at the same time
	controlEach      = 4
	defaultBeatEvery = time.Second
)

// HostConfig is what all workers of one host share.
type HostConfig struct {
	// Classes are the classes this process can play.
	Classes []*Class
	// ClassFunc finds a class that is not among them: one that is known by its name at run time. Zero: there is none.
	ClassFunc func(name string) (*Class, error)
	// Node names the machine in errors and beats. Zero: "local".
	Node string
	// BeatEvery is the time between heartbeats. Zero: one second.
	BeatEvery time.Duration
	// OwnProcess says that the process is one worker's own: the set_env verb changes its environment, and a worker that
	// cannot be made says so on the bus, because nobody else in the process would. Zero: only the worker's own table, and
	// Start's error.
	OwnProcess bool
	// Above is whatever the package above wants to find again from inside a method, through Host.Above.
	Above any
	// Logger receives what goes wrong with no caller to tell. Zero: the bus's.
	Logger *slog.Logger
	// Workers is how many workers the host may have; its buffers, of eight bytes a message, are made for so many. NATS drops what
	// finds a buffer full. Zero: five hundred.
	Workers int
}

// Host is the part of a process that plays workers: any number of ranks of any roles, on one connection. It subscribes
// once to each subject and copies locally. Two goroutines feed the workers, one for all work in the order of arrival,
// one for control; neither ever waits.
type Host struct {
	ep      *bus.Endpoint
	cfg     HostConfig
	classes map[string]*Class

	workCh    chan *nats.Msg
	controlCh chan *nats.Msg
	closedCh  chan struct{}
	closing   sync.Once
	group     sync.WaitGroup
	runners   runners
	running   atomic.Int64            // calls that run, of all workers
	solo      atomic.Bool             // one worker lives here
	changes   atomic.Uint64           // of routes
	over      atomic.Bool             // the intakes end
	lending   atomic.Pointer[lending] // of the goroutine that is the intake of work now

	mu      sync.RWMutex // guards what follows; slices of routes are replaced, never changed
	routes  map[string]*route
	workers map[*Worker]func() // and how to stop its sequencer
	closed  bool
}

// route is one subscription and the workers behind it.
type route struct {
	sub     *nats.Subscription
	workers []*Worker
}

// NewHost makes a host on the endpoint's connection. It runs until Close.
func NewHost(ep *bus.Endpoint, cfg HostConfig) (*Host, error) {
	if cfg.Node == "" {
		cfg.Node = "local"
	}
	if cfg.BeatEvery == 0 {
		cfg.BeatEvery = defaultBeatEvery
	}
	if cfg.Logger == nil {
		cfg.Logger = ep.Bus().Logger()
	}
	h := &Host{
		ep: ep, cfg: cfg, classes: map[string]*Class{},
		workCh:    make(chan *nats.Msg, max(workBuffer, workEach*cfg.Workers)),
		controlCh: make(chan *nats.Msg, max(controlBuffer, controlEach*cfg.Workers)),
		closedCh:  make(chan struct{}),
		routes:    map[string]*route{}, workers: map[*Worker]func(){},
	}
	for _, c := range cfg.Classes {
		if err := c.check(); err != nil {
			return nil, err
		}
		if h.classes[c.Name] != nil {
			return nil, bus.Errorf(bus.CodeInvalid, "class %q is given twice", c.Name)
		}
		h.classes[c.Name] = c
	}
	h.runners.group.Go(bus.Guard(func() { newIntake(h, h.workCh).loop() }))
	h.runners.group.Go(bus.Guard(func() { newIntake(h, h.controlCh).loop() }))
	ep.OnAbsent(h.absent)
	h.group.Go(bus.Guard(h.beatLoop))
	return h, nil
}

// Endpoint is the host's place on the bus, for calls from inside workers.
func (h *Host) Endpoint() *bus.Endpoint { return h.ep }

// Above is what the host was given for the package above.
func (h *Host) Above() any { return h.cfg.Above }

// Node is the machine's name.
func (h *Host) Node() string { return h.cfg.Node }

// Class finds a class by name.
func (h *Host) Class(name string) (*Class, error) {
	if c := h.classes[name]; c != nil {
		return c, nil
	}
	if h.cfg.ClassFunc != nil {
		return h.cfg.ClassFunc(name)
	}
	var names []string
	for n := range h.classes {
		names = append(names, n)
	}
	slices.Sort(names)
	return nil, bus.Errorf(bus.CodeNotFound, "no class %q in this program; it has %v", name, names)
}

// Start makes a worker: it is constructed, listens on all its subjects, and is ready when Start returns. A worker that
// fails leaves nothing behind.
func (h *Host) Start(ctx context.Context, spec WorkerSpec) (*Worker, error) {
	if err := spec.check(h.ep.Namespace()); err != nil {
		return nil, err
	}
	class, err := h.Class(spec.Class)
	if err != nil {
		return nil, err
	}
	w := newWorker(h, spec, class)
	if err := w.construct(ctx); err != nil {
		return nil, h.stillborn(w, err)
	}
	if err := h.listen(w); err != nil {
		_ = w.Stop(ctx)
		return nil, err
	}
	if h.cfg.OwnProcess {
		h.beat(spec.Address, []*Worker{w}, true) // nobody waits for the next one
	}
	return w, nil
}

// stillborn is the error of a worker that could not be made.
func (h *Host) stillborn(w *Worker, why error) error {
	e := bus.AsError(why)
	e.Role, e.Rank, e.Node = w.spec.Address.Role, w.spec.Rank, h.cfg.Node
	w.become(Failed, e)
	if h.cfg.OwnProcess {
		h.beat(w.spec.Address, []*Worker{w}, true)
		_ = h.ep.Bus().Conn().FlushTimeout(lastGrace) // the agent says that the process ended, if this does not get through
	}
	return e
}

// Fail says on the bus that a worker cannot be made, by a process of its own that found out before Start.
func (h *Host) Fail(spec WorkerSpec, why error) {
	_ = h.stillborn(newWorker(h, spec, &Class{Name: spec.Class}), why) // it is the caller's own
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

// add makes the worker one of the host's.
func (h *Host) add(w *Worker, stopSequencer func()) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return errHostClosed
	}
	for other := range h.workers {
		if a, b := other.spec, w.spec; a.Address == b.Address && a.Rank == b.Rank && a.Gen == b.Gen {
			return bus.Errorf(bus.CodeExists, "%s[%d] runs here already", b.Address.Role, b.Rank)
		}
	}
	h.workers[w] = stopSequencer
	h.solo.Store(len(h.workers) == 1)
	return nil
}

var errHostClosed = bus.Errorf(bus.CodeClosed, "the host is closed")

// subscribe adds the worker to the subject's route, and subscribes if it is the first. All subscriptions of a kind
// feed one channel, which keeps the order of the connection.
func (h *Host) subscribe(subject string, ch chan *nats.Msg, w *Worker) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, here := h.workers[w]; h.closed || !here {
		return errHostClosed
	}
	r := h.routes[subject]
	if r == nil {
		sub, err := h.ep.Bus().Conn().ChanSubscribe(subject, ch)
		if err != nil {
			return bus.Errorf(bus.CodeUnavailable, "subscribe to %s: %w", subject, err)
		}
		r = &route{sub: sub}
		h.routes[subject] = r
	}
	if !slices.Contains(r.workers, w) {
		r.workers = append(slices.Clone(r.workers), w)
		h.changes.Add(1)
	}
	return nil
}

// remove ends the worker's subscriptions; the last one on a subject unsubscribes.
func (h *Host) remove(w *Worker) {
	h.mu.Lock()
	stopSequencer := h.workers[w]
	delete(h.workers, w)
	h.solo.Store(len(h.workers) == 1)
	for subject, r := range h.routes {
		i := slices.Index(r.workers, w)
		if i < 0 {
			continue
		}
		r.workers = slices.Delete(slices.Clone(r.workers), i, i+1)
		if len(r.workers) == 0 {
			_ = r.sub.Unsubscribe() // fails only on a closed connection
			delete(h.routes, subject)
		}
	}
	h.changes.Add(1)
	h.mu.Unlock()
	if stopSequencer != nil {
		stopSequencer()
		h.beat(w.spec.Address, []*Worker{w}, true) // last words: stopped, or failed and why
	}
}

func (h *Host) behind(subject string) []*Worker {
	h.mu.RLock()
	defer h.mu.RUnlock()
	if r := h.routes[subject]; r != nil {
		return r.workers
	}
	return nil
}

// fetch pulls the bodies that calls wait for. One that several ranks of this process need is pulled once.
func (h *Host) fetch(calls []*call) {
	if len(calls) == 0 {
		return
	}
	byRef := map[wire.Ref][]*call{}
	for _, c := range calls {
		byRef[c.header.Ref] = append(byRef[c.header.Ref], c)
	}
	for ref, group := range byRef {
		var ranks wire.RankSet
		for _, c := range group {
			ranks.Add(c.worker.spec.Rank)
		}
		memory := group[0].binding.memory
		h.ep.Fetch(ref, group[0].header.Location, ranks, memory, func(body []byte, err error) {
			for _, c := range group[1:] {
				other := body
				if memory != nil { // it has one owner
					other = bytes.Clone(body)
				}
				c.worker.bodyArrived(c, other, err)
			}
			group[0].worker.bodyArrived(group[0], body, err)
		})
	}
}

// Workers returns the workers that live here.
func (h *Host) Workers() []*Worker {
	h.mu.RLock()
	defer h.mu.RUnlock()
	out := make([]*Worker, 0, len(h.workers))
	for w := range h.workers {
		out = append(out, w)
	}
	slices.SortFunc(out, func(a, b *Worker) int { return a.spec.Rank - b.spec.Rank })
	return out
}

// Close stops every worker within ctx and ends the host. It may be called more than once.
func (h *Host) Close(ctx context.Context) error {
	h.mu.Lock()
	h.closed = true // no worker comes any more
	h.mu.Unlock()
	var group sync.WaitGroup
	workers := h.Workers()
	errs := make([]error, len(workers))
	for i, w := range workers {
		group.Go(bus.Guard(func() { errs[i] = w.Stop(ctx) }))
	}
	group.Wait()
	h.closing.Do(h.closeIntakes)
	h.group.Wait()
	h.runners.close(time.Second)
	return errors.Join(errs...)
}
