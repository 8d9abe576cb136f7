package sessions

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/placement"
	"troupe/roles"
	"troupe/roles/registry"
	"troupe/roles/sessions/book"
)

const (
	serviceClass = "session_control"
	processClass = "ray" // of the processes of actors and tasks
	pendingMost  = 1_000_000
	endTimeout   = 5 * time.Second
	workLimit    = 2 * time.Second  // for what is under way when the service ends
	lastCalls    = 10 * time.Second // for a process that ends to stop asking

	credentialCheck = time.Second // interval of looking whether the team's credential is valid
)

// service is the control service of one namespace.
type service struct {
	namespace string
	rt        *roles.Runtime
	desk      *placement.Desk
	log       *slog.Logger
	store     *store
	began     time.Time

	ctx   context.Context
	end   context.CancelFunc // of ctx
	group sync.WaitGroup

	mu    sync.Mutex // guards what follows; see do
	after []func()   // what is done once mu is free

	book      *book.Book
	meta      metaRecord
	jobs      map[string]*job
	actors    map[string]*actor
	deaths    []string                       // ids of dead actors, the oldest first
	names     map[actorName]string           // actor id
	expected  map[string]*expectation        // actors whose handles came before the request of their creator
	workers   map[string]*worker             // by id
	leases    map[string]*worker             // by lease
	asking    map[string]*leaseRequest       // by lease: requests that are not answered
	requests  map[string]func(grant)         // by key of the book: what a decision is for
	processes map[string]string              // by process the job
	turns     map[string]*turns              // by caller
	calls     map[*call]bool                 // that are not answered
	groups    map[string]*groupTimes         // by id
	forming   map[string]*actorGroup         // by name: more actors may come
	awaiting  map[string][]*waiter           // by group: requests that wait for it
	unclaimed map[string]bool                // roles of processes for tasks of an earlier service that no process has claimed yet
	creations int                            // of actors
	order     []*actor                       // in the order of their creation
	running   map[string]registry.RoleRecord // processes that ran when the service began
	adopted   map[string]openFunc            // by role: those of several actors that ran when the service began
	restored  bool                           // an earlier service has stored something
	methods   map[string]func(*call) error   // by name
	idle      time.Duration                  // after which it ends
	idleSince time.Time                      // zero: there is something to do
	unneeded  bool                           // it ends, because it had nothing to do for long
}

// grant is what has become of a request.
type grant struct {
	allocation book.Allocation
	refused    *book.RefusedError
}

// run serves a namespace until ctx ends, or it has had nothing to do for long (nil). It calls ready with the handle of the role that
// serves it, and with nil when it ends. It has the rights of a team, or if that is empty of the head.
func run(ctx context.Context, cfg Config, namespace, team string, st *store, ready func(wire.Raw)) error {
	conn, err := dial(ctx, cfg.Bus, namespace, team)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // everything on it has ended
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := newService(ctx, namespace, cfg.Desk, cfg.Logger, st)
	s.end, s.idle = cancel, cfg.Idle
	class := &actors.Class{
		Name: serviceClass, Methods: []actors.MethodInfo{{Name: "ask", Lane: actors.Concurrent(pendingMost)}},
		New: func(context.Context, actors.Setup) (actors.Handler, error) { return handler{s}, nil },
	}
	s.rt, err = roles.Open(ctx, roles.Config{Bus: conn, Namespace: namespace, Name: "the head, for sessions", Classes: []*actors.Class{class}, Logger: cfg.Logger})
	if err != nil {
		return err
	}
	defer s.close()
	if err := s.recover(ctx); err != nil {
		return err
	}
	control, err := s.rt.Create(ctx, roles.Spec{Name: "control-" + bus.NewID(), Class: serviceClass, World: 1, QueueLimit: pendingMost, StopGrace: time.Second})
	if err != nil {
		return err
	}
	handle, err := wire.Marshal(control.Handle())
	if err != nil {
		return err
	}
	s.spawn(s.reapLoop)
	if team != "" {
		s.spawn(func() {
			for accepts(cfg.Bus, namespace, team) && bus.Sleep(ctx, credentialCheck) == nil {
			}
			s.end()
		})
	}
	s.spawn(func() {
		if err := s.store.run(ctx, s); err != nil {
			s.log.Warn("sessions: another head serves the namespace now", "namespace", namespace, "error", err)
			s.end()
		}
	})
	defer cfg.Desk.WatchNodes(func() { s.do(s.takeNodes) })()
	ready(handle)
	<-ctx.Done()
	ready(nil) // clients wait for the next service from now on
	return s.why()
}

// accepts reports whether the credential of a team is valid, as far as this process knows.
func accepts(b *bus.Bus, namespace, team string) bool {
	return b.AcceptsCredential(bus.ForWorker(team, namespace).ID)
}

// dial opens the connection of a service.
func dial(ctx context.Context, b *bus.Bus, namespace, team string) (*bus.Bus, error) {
	const name = "troupe-sessions"
	if team == "" {
		return b.Dial(ctx, name)
	}
	return b.DialAs(ctx, name, bus.ForWorker(team, namespace))
}

// why is why the service ends.
func (s *service) why() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.unneeded {
		return nil
	}
	return s.ctx.Err()
}

// endIfIdle ends a service that has had neither jobs nor groups for long. It runs with the lock.
func (s *service) endIfIdle(now time.Time) {
	switch {
	case len(s.jobs) > 0 || len(s.workers) > 0 || s.isRecovering() || s.book.HasGroups():
		s.idleSince = time.Time{}
	case s.idleSince.IsZero():
		s.idleSince = now
	case now.Sub(s.idleSince) >= s.idle:
		s.unneeded = true
		s.end()
	}
}

func newService(ctx context.Context, namespace string, desk *placement.Desk, log *slog.Logger, st *store) *service {
	s := &service{
		namespace: namespace, desk: desk, log: log, store: st, ctx: ctx, began: time.Now(),
		jobs: map[string]*job{}, actors: map[string]*actor{}, names: map[actorName]string{}, expected: map[string]*expectation{},
		workers: map[string]*worker{}, leases: map[string]*worker{}, asking: map[string]*leaseRequest{}, requests: map[string]func(grant){}, processes: map[string]string{},
		turns: map[string]*turns{}, calls: map[*call]bool{}, groups: map[string]*groupTimes{}, forming: map[string]*actorGroup{}, awaiting: map[string][]*waiter{}, unclaimed: map[string]bool{}, adopted: map[string]openFunc{},
	}
	s.book = book.New(book.Config{Desk: desk, Namespace: namespace, Locked: s.do, Decided: s.decided})
	s.methods = s.table()
	return s
}

// close ends the service. The processes stay, for the next one; those of a head that ends end with their agents.
func (s *service) close() {
	s.do(func() {
		for c := range s.calls {
			c.abandon()
		}
	})
	doneCh := make(chan struct{})
	bus.Go(func() {
		defer close(doneCh)
		s.group.Wait()
	})
	select {
	case <-doneCh:
	case <-time.After(workLimit): // a process is being ended whose agent does not answer
	}
	ctx, cancel := context.WithTimeout(context.Background(), endTimeout)
	defer cancel()
	if err := s.store.last(ctx, s); err != nil {
		s.log.Warn("sessions: the last changes are not stored", "namespace", s.namespace, "error", err)
	}
	s.desk.Forget(s.namespace)
	_ = s.rt.Close(ctx) // the role of the service ends with its lease otherwise
}

// do changes the state: f runs with the lock, and what it has put off (later) afterwards, without it.
func (s *service) do(f func()) {
	for _, do := range s.locked(f) {
		do()
	}
}

// locked runs f with the lock, which it frees also if f panics: a malformed request must not stop the others.
func (s *service) locked(f func()) (after []func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	after, s.after = s.after, nil
	return after
}

// later puts off what must not happen under the lock.
func (s *service) later(f func()) { s.after = append(s.after, f) }

// spawn runs a goroutine that ends with the service.
func (s *service) spawn(f func()) { s.group.Go(bus.Guard(f)) }

// background is spawn from code that holds the lock.
func (s *service) background(f func()) { s.later(func() { s.spawn(f) }) }

// handler serves the method ask.
type handler struct{ s *service }

var _ actors.AsyncHandler = handler{}

// Begin begins a request when it is its turn.
func (h handler) Begin(ctx context.Context, _ string, body []byte, done func([]byte, error)) {
	args, err := wire.ParseArgs(body)
	var caller, method string
	var number int64
	if err == nil && len(args.Positional) < 3 {
		err = bus.Errorf(bus.CodeInvalid, "a request is ask(caller, number, method, arguments…)")
	}
	if err == nil {
		err = arguments(args.Positional).read(&caller, &number, &method)
	}
	if err != nil {
		done(nil, err)
		return
	}
	c := &call{s: h.s, ctx: ctx, caller: caller, method: method, args: args.Positional[3:], done: done}
	h.s.do(func() {
		if h.s.calls[c] = true; h.s.ctx.Err() != nil {
			c.abandon()
			return
		}
		h.s.turn(caller, number, c)
	})
}

// Handle is Begin that waits.
func (h handler) Handle(ctx context.Context, method string, body []byte) ([]byte, error) {
	type result struct {
		body []byte
		err  error
	}
	ch := make(chan result, 1)
	h.Begin(ctx, method, body, func(b []byte, err error) { ch <- result{b, err} })
	select {
	case r := <-ch:
		return r.body, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// call is a request that is not answered. The lock of the service guards it.
type call struct {
	s        *service
	ctx      context.Context
	caller   string // a process
	method   string
	args     arguments
	done     func([]byte, error)
	answered bool
}

// run performs the request.
func (c *call) run() {
	do := c.s.methods[c.method]
	if do == nil {
		c.fail(bus.Errorf(bus.CodeNotFound, "the control service has no method %q", c.method))
		return
	}
	if err := do(c); err != nil {
		c.fail(err)
	}
}

// reply answers the request, once. A service that ends answers nothing: see abandon.
func (c *call) reply(value any) {
	if c.answered || c.s.ctx.Err() != nil {
		return
	}
	body, err := wire.Marshal(value) // now: the value may be part of the state
	c.finish(body, err)
}

func (c *call) fail(err error) {
	if !c.answered && c.s.ctx.Err() == nil {
		c.finish(nil, err)
	}
}

func (c *call) finish(body []byte, err error) {
	c.answered = true
	delete(c.s.calls, c)
	c.s.later(func() { c.done(body, err) })
}

// abandon has the caller repeat the request to the next service.
func (c *call) abandon() {
	if !c.answered {
		c.finish(nil, bus.Errorf(bus.CodeUnavailable, "the control service ends"))
	}
}

// endCallsLater answers what a process that ends still asks once it has surely ended, so that nothing is kept for it.
func (s *service) endCallsLater(process string) {
	time.AfterFunc(lastCalls, bus.Guard(func() {
		s.do(func() {
			for c := range s.calls {
				if c.caller == process {
					c.abandon()
				}
			}
		})
	}))
}

// isKnown reports whether a process may make requests that outlive it: one that has ended holds nothing any more. After the end of a
// head the processes that run are known one by one.
func (s *service) isKnown(process string) bool {
	_, known := s.processes[process]
	return known || s.isRecovering()
}

// errEnded is the answer to a late request of a process that has ended.
func errEnded(process string) error {
	return bus.Errorf(bus.CodeInvalid, "the process %s has ended, and its job with it, or it was killed", process)
}

// replyStored answers the request once what it has changed is stored.
func (c *call) replyStored(value any) {
	c.s.store.onStored(true, func() { c.s.do(func() { c.reply(value) }) })
}

// waiter is a request that waits for an event. The lock of the service guards it.
type waiter struct {
	c    *call
	fire func()
	over bool
}

func (w *waiter) wake() {
	if !w.over {
		w.over = true
		w.fire()
	}
}

// wait adds a waiter to a list, without those whose callers are gone. After patience it is woken; below zero: it waits without end.
func (s *service) wait(list []*waiter, c *call, patience time.Duration, fire func()) []*waiter {
	kept := list[:0]
	for _, w := range list {
		if !w.over && w.c.ctx.Err() == nil {
			kept = append(kept, w)
		}
	}
	w := &waiter{c: c, fire: fire}
	if patience >= 0 {
		time.AfterFunc(patience, bus.Guard(func() { s.do(w.wake) }))
	}
	return append(kept, w)
}

func wakeAll(list []*waiter) {
	for _, w := range list {
		w.wake()
	}
}
