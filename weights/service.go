package weights

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/nodes"
	"troupe/weights/versions"
)

const (
	bucketName   = "troupe_weights"
	bucketBytes  = 16 << 20
	epochTimeout = 5 * time.Second
	maxNames     = 10_000 // of all namespaces
	lossPatience = 5 * time.Second
)

// Leader says whether this process leads. The desk of placement does.
type Leader interface {
	AwaitLead(ctx context.Context) error
	AwaitLoss(ctx context.Context, patience time.Duration)
}

// Config configures Serve.
type Config struct {
	// Bus is the head's connection. The caller closes it.
	Bus *bus.Bus
	// Leader says when this process serves. Nil: always.
	Leader Leader
	// Replicas is the number of copies of the bucket with the numbers of epochs; see kv.Config.
	Replicas int
	// Logger receives errors without a caller. Zero: the logger of the bus.
	Logger *slog.Logger
}

// server is the service of a head: it answers members of all namespaces, while its process leads.
type server struct {
	cfg   Config
	group sync.WaitGroup

	mu     sync.Mutex // guards what follows
	bucket *kv.Bucket // nil: it was not needed yet
}

// Serve runs the service until stop is called.
func Serve(ctx context.Context, cfg Config) (stop func()) {
	if cfg.Logger == nil {
		cfg.Logger = cfg.Bus.Logger()
	}
	s := &server{cfg: cfg}
	ctx, cancel := context.WithCancel(ctx)
	s.group.Go(bus.Guard(func() { s.run(ctx) }))
	return func() {
		cancel()
		s.group.Wait()
	}
}

// run serves one term after the other.
func (s *server) run(ctx context.Context) {
	waits := bus.Backoff{First: 100 * time.Millisecond, Most: 5 * time.Second}.Start()
	for ctx.Err() == nil {
		if s.cfg.Leader != nil && s.cfg.Leader.AwaitLead(ctx) != nil {
			return
		}
		if err := s.lead(ctx); err != nil && ctx.Err() == nil {
			s.cfg.Logger.Warn("weights: the service has ended; starting it again", "error", err)
			_ = waits.Wait(ctx) // the loop ends with it
		}
	}
}

// lead serves one term.
func (s *server) lead(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	t := &term{server: s, ctx: ctx, id: bus.NewID(), names: map[nameKey]*keeper{}, stores: map[string]*values.Store{}}
	defer t.end(cancel)
	requests, err := s.cfg.Bus.Subscribe(bus.Subject("*", word, "*"), t.asked)
	if err != nil {
		return err
	}
	defer func() { _ = requests.Unsubscribe() }() // fails only if the connection is closed
	exits, err := s.cfg.Bus.Subscribe(exitSubject(), t.exited)
	if err != nil {
		return err
	}
	defer func() { _ = exits.Unsubscribe() }()
	overviews, err := s.cfg.Bus.Subscribe(overviewSubject(), t.overviewAsked)
	if err != nil {
		return err
	}
	defer func() { _ = overviews.Unsubscribe() }()
	if s.cfg.Leader == nil {
		<-ctx.Done()
		return nil
	}
	s.cfg.Leader.AwaitLoss(ctx, lossPatience)
	return nil
}

// nameKey is a name in its namespace.
type nameKey struct{ namespace, name string }

// term is the time in which a process serves: what it knows comes from members, and ends with it.
type term struct {
	server *server
	ctx    context.Context
	id     string
	group  sync.WaitGroup

	mu     sync.Mutex // guards what follows
	names  map[nameKey]*keeper
	stores map[string]*values.Store // of long requests and answers, by namespace
	over   []func()                 // closes the sessions of the stores
}

// end ends all names, whose members ask the next service.
func (t *term) end(cancel func()) {
	cancel()
	t.group.Wait()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, do := range t.over {
		do()
	}
}

func (t *term) all() (out []*keeper) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, k := range t.names {
		out = append(out, k)
	}
	return out
}

// request is a request that is not answered. The keeper of its name owns it.
type request struct {
	term  *term
	msg   *bus.Msg
	space string
	verb  verb
	message
	refs  *values.References
	timer *time.Timer // ends its wait
}

// answer answers the request. A lost answer makes the member ask again.
func (r *request) answer(v any, err error) {
	if r.timer != nil {
		r.timer.Stop()
	}
	var out message
	release := func() {}
	if err == nil {
		release, err = out.encode(r.refs, v)
	}
	if err != nil {
		out.Err, release = bus.AsError(err), func() {}
	}
	if out.Owner != "" {
		time.AfterFunc(keepAnswers, bus.Guard(release))
	}
	data, err := wire.MarshalRecord(&out)
	if err == nil {
		err = r.term.server.cfg.Bus.Respond(r.msg, data)
	}
	if err != nil {
		r.term.server.cfg.Logger.Debug("weights: an answer is lost; the member asks again", "error", err)
	}
}

// asked passes a request to the keeper of its name. It does not block.
func (t *term) asked(m *bus.Msg) {
	if m.Reply == "" {
		return
	}
	r := &request{term: t, msg: m}
	var ok bool
	if r.space, r.verb, ok = asked(m.Subject); !ok {
		return
	}
	err := wire.UnmarshalRecord(m.Data, &r.message)
	if err == nil {
		err = bus.CheckName("weights", r.Name)
	}
	if err == nil {
		err = t.open(r)
	}
	if err != nil {
		t.server.cfg.Bus.Malformed("a request about weights", err)
		return
	}
	if r.Owner == "" {
		t.pass(r)
		return
	}
	t.group.Go(bus.Guard(func() {
		if err := r.fetch(t.ctx, r.refs); err != nil {
			r.answer(nil, err)
			return
		}
		t.pass(r)
	}))
}

// open gives a request the values of its namespace.
func (t *term) open(r *request) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	store := t.stores[r.space]
	if store == nil {
		session, err := t.server.cfg.Bus.NewSession(r.space)
		if err != nil {
			return err
		}
		store = values.New(session)
		if err := session.Start(store); err != nil {
			return err
		}
		t.stores[r.space], t.over = store, append(t.over, session.Close)
	}
	r.refs = store.References()
	return nil
}

// storeOf is the values of a namespace from which a request has come.
func (t *term) storeOf(namespace string) *values.References {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.stores[namespace].References()
}

// pass passes a request to the keeper of its name, which the first member that binds starts.
func (t *term) pass(r *request) {
	key := nameKey{r.space, r.Name}
	t.mu.Lock()
	k := t.names[key]
	if k == nil && r.verb == verbBind && len(t.names) < maxNames && t.ctx.Err() == nil {
		k = newKeeper(t, key)
		t.names[key] = k
		t.group.Go(bus.Guard(k.run))
	}
	t.mu.Unlock()
	switch {
	case k == nil && r.verb == verbStatus:
		r.answer(versions.Status{Name: r.Name, Versions: []versions.VersionStatus{}, Members: []versions.MemberStatus{}}, nil)
	case k == nil && r.verb == verbCatalog:
		r.answer(nil, bus.Errorf(bus.CodeTimedOut, "weights %q: no process has bound tensors yet", r.Name))
	case k == nil:
		r.answer(nil, versions.ErrUnbound)
	default:
		k.put(func(now time.Time) { k.handle(now, r) })
	}
}

// forget ends the keeper of a name that has no members.
func (t *term) forget(k *keeper) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.names, k.key)
}

// exited tells all names of a worker process that has ended.
func (t *term) exited(m *bus.Msg) {
	var e nodes.Exit
	if err := wire.Unmarshal(m.Data, &e); err != nil {
		return // roles report it
	}
	for _, k := range t.all() {
		if k.key.namespace == e.ID.Namespace {
			k.put(func(now time.Time) { k.exited(now, e) })
		}
	}
}

// readEpoch is the number of the last epoch of a name that was stored. Without a store, members know it.
func (s *server) readEpoch(ctx context.Context, key nameKey) uint64 {
	bucket, err := s.epochs(ctx)
	if err != nil {
		s.cfg.Logger.Warn("weights: the numbers of epochs cannot be read; members say theirs", "error", err)
		return 0
	}
	e, err := bucket.Get(ctx, key.namespace+"."+key.name)
	if err != nil || len(e.Value) != 8 {
		if err != nil && !errors.Is(err, bus.ErrNotFound) {
			s.cfg.Logger.Warn("weights: the number of an epoch cannot be read; members say theirs", "name", key.name, "error", err)
		}
		return 0
	}
	return binary.BigEndian.Uint64(e.Value)
}

// keepEpoch stores the number of an epoch.
func (s *server) keepEpoch(ctx context.Context, key nameKey, epoch uint64) {
	ctx, cancel := context.WithTimeout(ctx, epochTimeout)
	defer cancel()
	bucket, err := s.epochs(ctx)
	if err == nil {
		_, err = bucket.Put(ctx, key.namespace+"."+key.name, binary.BigEndian.AppendUint64(nil, epoch))
	}
	if err != nil {
		s.cfg.Logger.Warn("weights: the number of an epoch is not stored; it may be given again if all processes of the name end", "name", key.name, "epoch", epoch, "error", err)
	}
}

func (s *server) epochs(ctx context.Context) (*kv.Bucket, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bucket == nil {
		bucket, err := kv.Open(ctx, s.cfg.Bus, kv.Config{Bucket: bucketName, Replicas: s.cfg.Replicas, MaxBytes: bucketBytes})
		if err != nil {
			return nil, err
		}
		s.bucket = bucket
	}
	return s.bucket, nil
}
