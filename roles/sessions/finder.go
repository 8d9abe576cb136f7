package sessions

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/bus/wire"
	"troupe/placement"
	"troupe/roles"
	"troupe/roles/registry"
)

const (
	bucketName   = "troupe_sessions"
	bucketBytes  = 64 << 20
	defaultIdle  = 5 * time.Minute
	findAttempt  = 2 * time.Second  // for one answer of a head
	absentMost   = 20 * time.Second // time that a head has to return while the server says that there is none
	waitingMost  = 10_000           // requests that wait for a service to start
	lossPatience = 5 * time.Second  // that placement has to lead again before another head may
)

// findBackoff paces requests while no head serves the namespace.
var findBackoff = bus.Backoff{First: 20 * time.Millisecond, Most: 500 * time.Millisecond}

// Config configures Serve.
type Config struct {
	// Bus is the head's connection. The caller closes it.
	Bus *bus.Bus
	// Desk is that of the placement service of the head: services run while it leads.
	Desk *placement.Desk
	// Replicas is the number of copies of the bucket; see kv.Config.
	Replicas int
	// Head names the head to readers of the bucket. Zero: a new name.
	Head string
	// Idle is the time after which a service ends that has neither jobs nor placement groups; the next request starts it again.
	// Zero: five minutes.
	Idle time.Duration
	// Logger receives errors without a caller. Zero: the logger of the bus.
	Logger *slog.Logger
}

// server runs the services of a head, one for each namespace that has asked.
type server struct {
	cfg   Config
	ctx   context.Context
	group sync.WaitGroup

	mu       sync.Mutex // guards what follows
	services map[string]*entry
	closed   bool
}

// entry is the service of a namespace: handle is nil while another head leads, or none does yet. A service that a team has asked for first has
// the team's rights, and so have the processes that it starts; otherwise those of the head.
type entry struct {
	team    string // id of the team's credential; empty: none
	handle  wire.Raw
	waiting []question
}

// question is a request for the handle of a service.
type question struct {
	m    *bus.Msg
	door bool // it came to the door: the answer is a doorAnswer
}

// doorAnswer is the answer at the door "sessions".
type doorAnswer struct {
	Err    *bus.Error `msgpack:"err,omitempty"`
	Handle wire.Raw   `msgpack:"handle,omitempty"`
}

// Serve answers the requests of Find, and runs a service for each namespace that has asked, now or in the time of an earlier head.
// Of several heads one runs it.
func Serve(ctx context.Context, cfg Config) (stop func(), err error) {
	if cfg.Logger == nil {
		cfg.Logger = cfg.Bus.Logger()
	}
	cfg.Head, cfg.Idle = cmp.Or(cfg.Head, bus.NewID()), cmp.Or(cfg.Idle, defaultIdle)
	ctx, cancel := context.WithCancel(ctx)
	s := &server{cfg: cfg, ctx: ctx, services: map[string]*entry{}}
	sub, err := cfg.Bus.Subscribe(askSubject("*"), s.asked)
	if err != nil {
		cancel()
		return nil, err
	}
	unhear, err := cfg.Bus.HearDoor(sessionsDoor, bus.TeamCredential, cfg.Desk.Leads, s.askedAtDoor) // another head does not know whose rights the service has
	if err != nil {
		_ = sub.Unsubscribe() // fails only if the connection is closed
		cancel()
		return nil, err
	}
	if err := s.resume(ctx); err != nil {
		cfg.Logger.Warn("sessions: services of an earlier head are not resumed until a client asks", "error", err)
	}
	return func() {
		unhear()
		_ = sub.Unsubscribe() // fails only if the connection is closed
		s.mu.Lock()
		s.closed = true
		s.mu.Unlock()
		cancel()
		s.group.Wait()
	}, nil
}

// resume starts the services whose processes run.
func (s *server) resume(ctx context.Context) error {
	all, err := registry.All(ctx, s.cfg.Bus)
	if err != nil {
		return err
	}
	for _, rec := range all {
		if rec.Class == processClass && rec.Process {
			s.start(rec.Namespace, rec.Credential)
		}
	}
	return nil
}

// asked answers with the handle of the service's role, when there is one.
func (s *server) asked(m *bus.Msg) {
	namespace := askedNamespace(m.Subject)
	if namespace == "" {
		s.cfg.Bus.Malformed("a request for the control service", bus.Errorf(bus.CodeMalformed, "%q names no namespace", wire.Clip(m.Subject)))
		return
	}
	s.tell(s.start(namespace, ""), question{m: m})
}

// askedAtDoor is asked by a process with a team's credential. A service with the head's rights would act with them for the team.
func (s *server) askedAtDoor(c bus.Caller, m *bus.Msg) {
	e := s.start(c.Namespace, c.Team())
	if e != nil && e.team == "" {
		s.answer(question{m, true}, nil, bus.Errorf(bus.CodeRefused, "programs with the head's token use troupe.ray in namespace %s; try again %v after the last of them has ended", c.Namespace, s.cfg.Idle))
		return
	}
	s.tell(e, question{m, true})
}

// tell answers with the handle of a service, when there is one.
func (s *server) tell(e *entry, q question) {
	if e == nil {
		return
	}
	s.mu.Lock()
	handle := e.handle
	if handle == nil && len(e.waiting) < waitingMost {
		e.waiting = append(e.waiting, q)
	}
	s.mu.Unlock()
	if handle != nil {
		s.answer(q, handle, nil)
	}
}

// answer sends an answer; a lost one makes the client ask again.
func (s *server) answer(q question, handle wire.Raw, err error) {
	data := []byte(handle)
	if q.door {
		a := doorAnswer{Handle: handle}
		if err != nil {
			a.Err = bus.AsError(err)
		}
		var failed error
		if data, failed = wire.Marshal(a); failed != nil {
			return
		}
	}
	_ = s.cfg.Bus.Respond(q.m, data)
}

// start runs the service of a namespace, once; nil: the head ends.
func (s *server) start(namespace, team string) *entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	e := s.services[namespace]
	if e == nil {
		e = &entry{team: team}
		s.services[namespace] = e
		s.group.Go(bus.Guard(func() { s.lead(namespace, e) }))
	}
	return e
}

// lead competes for the service of a namespace until the head ends, or the service has had nothing to do for long.
func (s *server) lead(namespace string, e *entry) {
	for {
		_ = bus.Retry(s.ctx, bus.Backoff{First: 100 * time.Millisecond, Most: 5 * time.Second}, func() error {
			err := s.compete(namespace, e)
			if err != nil && s.ctx.Err() == nil {
				s.cfg.Logger.Warn("sessions: the service has ended; starting it again", "namespace", namespace, "error", err)
				return bus.Errorf(bus.CodeUnavailable, "run the service of %s: %w", namespace, err)
			}
			return nil
		})
		if s.forget(namespace, e) {
			return
		}
	}
}

// forget drops a service that has ended; false: a request came meanwhile.
func (s *server) forget(namespace string, e *entry) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(e.waiting) > 0 && s.ctx.Err() == nil {
		return false
	}
	delete(s.services, namespace)
	return true
}

// compete runs the service while placement leads in this head. Another head that leads begins a term of its own, which fences this one.
func (s *server) compete(namespace string, e *entry) error {
	if err := s.cfg.Desk.AwaitLead(s.ctx); err != nil {
		return err
	}
	if e.team != "" && !accepts(s.cfg.Bus, namespace, e.team) {
		s.drop(e)
		return nil
	}
	bucket, err := kv.Open(s.ctx, s.cfg.Bus, kv.Config{Bucket: bucketName, Replicas: s.cfg.Replicas, MaxBytes: bucketBytes})
	if err != nil {
		return err
	}
	term, err := bucket.Begin(s.ctx, "lead."+namespace, s.cfg.Head)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(s.ctx)
	var group sync.WaitGroup
	group.Go(bus.Guard(func() {
		s.cfg.Desk.AwaitLoss(ctx, lossPatience)
		stop()
	}))
	group.Go(bus.Guard(func() { bucket.Maintain(ctx) }))
	defer func() { stop(); group.Wait() }()
	defer s.publish(e, nil)
	return run(ctx, s.cfg, namespace, e.team, &store{bucket: bucket, writer: term.Writer, prefix: namespace}, func(handle wire.Raw) { s.publish(e, handle) })
}

// drop drops the questions to the service of a team whose credential has ended.
func (s *server) drop(e *entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e.waiting = nil
}

// publish makes a role of the service known, or nil that there is none.
func (s *server) publish(e *entry, handle wire.Raw) {
	s.mu.Lock()
	e.handle = handle
	var waiting []question
	if handle != nil {
		waiting, e.waiting = e.waiting, nil
	}
	s.mu.Unlock()
	for _, q := range waiting {
		s.answer(q, handle, nil)
	}
}

// Find returns the role that serves the namespace of a runtime. It asks until a head answers or ctx ends, or until no head has served
// it for absentMost. Each start of the service has another role.
func Find(ctx context.Context, rt *roles.Runtime) (*roles.Cluster, error) {
	waits, absentSince := findBackoff.Start(), time.Now()
	for {
		attempt, cancel := context.WithTimeout(ctx, findAttempt)
		h, err := ask(attempt, rt)
		cancel()
		if err == nil {
			return rt.Open(h)
		}
		if errors.Is(err, bus.ErrRefused) || errors.Is(err, bus.ErrMalformed) {
			return nil, err
		}
		if !errors.Is(err, bus.ErrNoResponders) { // the server is down, or a head starts the service
			absentSince = time.Now()
		}
		if time.Since(absentSince) > absentMost || waits.Wait(ctx) != nil {
			return nil, bus.Errorf(bus.CodeUnavailable,
				"no head serves jobs of troupe.ray in namespace %s: the head is down, or older than this program; `troupe status` tells, and docs/operations.md how to upgrade it (%w)", rt.Namespace(), err)
		}
	}
}

// ask asks once for the handle of the service.
func ask(ctx context.Context, rt *roles.Runtime) (h roles.Handle, err error) {
	team, isTeam := rt.Bus().Team()
	subject := askSubject(rt.Namespace())
	if isTeam {
		subject = team.DoorSubject(sessionsDoor)
	}
	m, err := rt.Bus().Request(ctx, subject, nil)
	if err != nil {
		return h, err
	}
	data := m.Data
	if isTeam {
		var a doorAnswer
		if err := wire.Unmarshal(data, &a); err != nil {
			return h, err
		}
		if a.Err != nil {
			return h, a.Err
		}
		data = a.Handle
	}
	return h, wire.Unmarshal(data, &h)
}
