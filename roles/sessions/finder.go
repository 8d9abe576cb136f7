package sessions

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/bus/wire"
	"troupe/roles"
	"troupe/roles/registry"
)

const (
	bucketName  = "troupe_sessions"
	bucketBytes = 64 << 20
	leaseBytes  = 4 << 20
	defaultLead = 15 * time.Second
	defaultIdle = 5 * time.Minute
	deadAfter   = 3 * time.Second // without a subscriber a head is dead; its connection may be broken for less
	probeEvery  = 500 * time.Millisecond
	findAttempt = 2 * time.Second  // for one answer of a head
	absentMost  = 20 * time.Second // time that a head has to return while the server says that there is none
	waitingMost = 10_000           // requests that wait for a service to start
)

// findBackoff paces requests while no head serves the namespace.
var findBackoff = bus.Backoff{First: 20 * time.Millisecond, Most: 500 * time.Millisecond}

// Config configures Serve.
type Config struct {
	// Bus is the head's connection. The caller closes it.
	Bus *bus.Bus
	// Replicas is the number of copies of the bucket; see kv.Config.
	Replicas int
	// Head identifies the head over its restarts: no two processes that live have the same. So a restarted head knows its
	// predecessor. Zero: one that no other has.
	Head string
	// Lead is the lifetime of the lease of a service: how long another head waits for one that hangs. One that is dead is noticed before,
	// and one that lives keeps its service when the lease is lost, unless another has taken over. Zero: 15 s.
	Lead time.Duration
	// Idle is the time after which a service ends that has neither jobs nor placement groups; the next request starts it again.
	// Zero: five minutes.
	Idle time.Duration
	// Logger receives errors without a caller. Zero: the logger of the bus.
	Logger *slog.Logger
}

// server runs the services of a head, one for each namespace that has asked.
type server struct {
	cfg   Config
	id    string // of this process
	ctx   context.Context
	group sync.WaitGroup

	mu       sync.Mutex // guards what follows
	services map[string]*entry
	closed   bool
}

// entry is the service of a namespace: handle is nil while another head leads, or none does yet.
type entry struct {
	handle  wire.Raw
	waiting []*bus.Msg
}

// Serve answers the requests of Find, and runs a service for each namespace that has asked, now or in the time of an earlier head.
// Of several heads one runs it.
func Serve(ctx context.Context, cfg Config) (stop func(), err error) {
	if cfg.Logger == nil {
		cfg.Logger = cfg.Bus.Logger()
	}
	cfg.Lead, cfg.Idle = cmp.Or(cfg.Lead, defaultLead), cmp.Or(cfg.Idle, defaultIdle)
	cfg.Head = cmp.Or(cfg.Head, bus.NewID())
	ctx, cancel := context.WithCancel(ctx)
	s := &server{cfg: cfg, id: cfg.Head + "-" + bus.NewID(), ctx: ctx, services: map[string]*entry{}}
	alive, err := cfg.Bus.Subscribe(bus.SessionsHead(s.id), func(m *bus.Msg) { _ = m.Respond(nil) }) // a lost answer is no proof of death
	if err != nil {
		cancel()
		return nil, err
	}
	sub, err := cfg.Bus.Subscribe(bus.SessionsAsk("*"), s.asked)
	if err != nil {
		_ = alive.Unsubscribe() // fails only if the connection is closed
		cancel()
		return nil, err
	}
	if err := s.resume(ctx); err != nil {
		cfg.Logger.Warn("sessions: services of an earlier head are not resumed until a client asks", "error", err)
	}
	return func() {
		_ = sub.Unsubscribe() // fails only if the connection is closed
		s.mu.Lock()
		s.closed = true
		s.mu.Unlock()
		cancel()
		s.group.Wait()
		_ = alive.Unsubscribe()
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
			s.start(rec.Namespace)
		}
	}
	return nil
}

// asked answers with the handle of the service's role, when there is one.
func (s *server) asked(m *bus.Msg) {
	namespace := bus.SessionsNamespace(m.Subject)
	if bus.CheckName("namespace", namespace) != nil {
		return
	}
	e := s.start(namespace)
	if e == nil {
		return
	}
	s.mu.Lock()
	handle := e.handle
	if handle == nil && len(e.waiting) < waitingMost {
		e.waiting = append(e.waiting, m)
	}
	s.mu.Unlock()
	if handle != nil {
		_ = m.Respond(handle) // a lost answer makes the client ask again
	}
}

// start runs the service of a namespace, once; nil: the head ends.
func (s *server) start(namespace string) *entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	e := s.services[namespace]
	if e == nil {
		e = &entry{}
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

// holderEnded waits until a head that holds the lease of a service is known to be dead: no process serves its subject. An earlier
// process of this head is dead as soon as that is so.
func (s *server) holderEnded(ctx context.Context, id string) bool {
	patience := deadAfter
	if strings.HasPrefix(id, s.cfg.Head+"-") {
		patience = 0
	}
	for silent := time.Now(); ctx.Err() == nil; _ = bus.Sleep(ctx, probeEvery) {
		attempt, cancel := context.WithTimeout(ctx, findAttempt)
		_, err := s.cfg.Bus.Request(attempt, bus.SessionsHead(id), nil)
		cancel()
		if !errors.Is(err, bus.ErrNoResponders) {
			silent = time.Now() // it answers, or nothing is known
		} else if time.Since(silent) >= patience {
			return true
		}
	}
	return false
}

func (s *server) compete(namespace string, e *entry) error {
	bucket, err := kv.Open(s.ctx, s.cfg.Bus, kv.Config{Bucket: bucketName, Replicas: s.cfg.Replicas, MaxBytes: bucketBytes})
	if err != nil {
		return err
	}
	leases, err := kv.Open(s.ctx, s.cfg.Bus, kv.Config{Bucket: bucketName + "_leases", Replicas: s.cfg.Replicas, MaxBytes: leaseBytes, Leases: true})
	if err != nil {
		return err
	}
	cfg := kv.LeadConfig{Key: "lead." + namespace, Leases: leases, ID: s.id, TTL: s.cfg.Lead, KeepTerm: true, HolderEnded: s.holderEnded}
	return bucket.Lead(s.ctx, cfg, func(ctx context.Context, term *kv.Term) error {
		maintaining, stop := context.WithCancel(ctx)
		var group sync.WaitGroup
		group.Go(bus.Guard(func() { bucket.Maintain(maintaining) }))
		defer func() { stop(); group.Wait() }()
		defer s.publish(e, nil)
		return run(ctx, s.cfg, namespace, &store{bucket: bucket, writer: term.Writer, prefix: namespace}, func(handle wire.Raw) { s.publish(e, handle) })
	})
}

// publish makes a role of the service known, or nil that there is none.
func (s *server) publish(e *entry, handle wire.Raw) {
	s.mu.Lock()
	e.handle = handle
	var waiting []*bus.Msg
	if handle != nil {
		waiting, e.waiting = e.waiting, nil
	}
	s.mu.Unlock()
	for _, m := range waiting {
		_ = m.Respond(handle) // a lost answer makes the client ask again
	}
}

// Find returns the role that serves the namespace of a runtime. It asks until a head answers or ctx ends, or until no head has served
// it for absentMost. Each start of the service has another role.
func Find(ctx context.Context, rt *roles.Runtime) (*roles.Cluster, error) {
	waits, absentSince := findBackoff.Start(), time.Now()
	for {
		attempt, cancel := context.WithTimeout(ctx, findAttempt)
		m, err := rt.Bus().Request(attempt, bus.SessionsAsk(rt.Namespace()), nil)
		cancel()
		if err == nil {
			var h roles.Handle
			if err := wire.Unmarshal(m.Data, &h); err != nil {
				return nil, err
			}
			return rt.Open(h)
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
