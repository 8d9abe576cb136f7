package weights

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/weights/versions"
)

const (
	attemptLimit = 6 * time.Second  // for one answer, beside what the service may wait
	serviceWait  = 4 * time.Second  // that the service may wait before it answers that it has nothing
	absentMost   = 20 * time.Second // that a service has to return while the server says that there is none
	renewEvery   = 5 * time.Second
	leaveLimit   = time.Second
)

// ClientConfig describes a process that publishes weights, or takes them.
type ClientConfig struct {
	// Bus, Namespace and Session are those of the process, and References its values.
	Bus        *bus.Bus
	Namespace  string
	Session    string
	References *values.References
	// Memory holds buckets that are taken. Zero: Go's heap.
	Memory values.Memory
	// AllocFunc returns memory of Memory for buckets that are published: other processes of the host use it in place. Nil: out of
	// memory. Zero: Go's heap.
	AllocFunc func(n int) []byte
	// Device moves the bytes of tensors that are bound with BindOn. Zero: there are none.
	Device Device
	// Member says who the process is: its role, rank, host and device. Its id and session are set by the client.
	Member versions.Member
	// Logger receives errors without a caller. Zero: the logger of the bus.
	Logger *slog.Logger
}

// Client is the weights of one process. It is safe for concurrent use.
type Client struct {
	cfg    ClientConfig
	ctx    context.Context // of background goroutines
	cancel context.CancelFunc
	group  sync.WaitGroup
	sub    *bus.Subscription // requests of the service

	mu    sync.Mutex // guards what follows
	names map[string]*Weights
	ended bool // no goroutine starts any more
}

// NewClient makes the client of a process.
func NewClient(cfg ClientConfig) (*Client, error) {
	if cfg.Logger == nil {
		cfg.Logger = cfg.Bus.Logger()
	}
	if cfg.AllocFunc == nil {
		cfg.AllocFunc = func(n int) []byte { return make([]byte, n) }
	}
	c := &Client{cfg: cfg, names: map[string]*Weights{}}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	var err error
	if c.sub, err = cfg.Bus.Subscribe(memberSubject(cfg.Namespace, cfg.Session), c.requested); err != nil {
		c.cancel()
		return nil, err
	}
	c.spawn(c.renewLoop)
	return c, nil
}

// Open returns the weights of a name.
func (c *Client) Open(name string) (*Weights, error) {
	if err := bus.CheckName("weights", name); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if w := c.names[name]; w != nil {
		return w, nil
	}
	if c.ctx.Err() != nil {
		return nil, bus.Errorf(bus.CodeClosed, "the session is closed, and its weights with it")
	}
	w := &Weights{client: c, name: name, changedCh: make(chan struct{}), bindings: map[versions.Use]*Binding{}}
	sub, err := c.cfg.Bus.Subscribe(newsSubject(c.cfg.Namespace, name), w.heard)
	if err != nil {
		return nil, err
	}
	w.sub = sub
	c.names[name] = w
	return w, nil
}

// Committed is the version of each name that this process has committed last.
func (c *Client) Committed() map[string]versions.Version {
	out := map[string]versions.Version{}
	for _, w := range c.all() {
		if v := w.Version(); !v.IsZero() {
			out[w.name] = v
		}
	}
	return out
}

func (c *Client) all() (out []*Weights) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range c.names {
		out = append(out, w)
	}
	return out
}

// Close leaves all names and frees what was published.
func (c *Client) Close() {
	c.cancel()
	_ = c.sub.Unsubscribe() // fails only if the connection is closed
	c.mu.Lock()
	c.ended = true
	c.mu.Unlock()
	c.group.Wait()
	for _, w := range c.all() {
		w.close()
	}
}

// spawn runs a goroutine that Close waits for; false: the client is closed.
func (c *Client) spawn(do func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.ended {
		c.group.Go(bus.Guard(do))
	}
	return !c.ended
}

// renewLoop tells the service regularly that members live.
func (c *Client) renewLoop() {
	for bus.Sleep(c.ctx, time.Duration(float64(renewEvery)*(0.75+rand.Float64()/2))) == nil {
		for _, w := range c.all() {
			for _, b := range w.all() {
				b.renew(c.ctx)
			}
		}
	}
}

// requested hands a request of the service to its member.
func (c *Client) requested(m *bus.Msg) {
	var r message
	if err := wire.UnmarshalRecord(m.Data, &r); err != nil {
		c.cfg.Bus.Malformed("a request of the service of weights", err)
		return
	}
	c.mu.Lock()
	w := c.names[r.Name]
	c.mu.Unlock()
	if w == nil {
		return
	}
	for _, b := range w.all() {
		if b.member.ID == r.Member {
			c.spawn(func() { b.cutAsked(c.ctx, r) })
		}
	}
}

// ask sends a request to the service until it is answered. wait is how long the service may take to answer that it has nothing.
func (c *Client) ask(ctx context.Context, v verb, name, member string, wait time.Duration, request, into any) error {
	m := message{Session: c.cfg.Session, Name: name, Member: member, Wait: wait}
	release, err := m.encode(c.cfg.References, request)
	if err != nil {
		return err
	}
	defer release()
	data, err := wire.MarshalRecord(&m)
	if err != nil {
		return err
	}
	answer, err := c.request(ctx, askSubject(c.cfg.Namespace, v), data, wait)
	switch {
	case err != nil:
		return err
	case answer.Err != nil:
		return answer.Err
	case into == nil:
		return nil
	}
	return answer.decode(ctx, c.cfg.References, into)
}

// request sends a message until there is an answer.
func (c *Client) request(ctx context.Context, subject string, data []byte, wait time.Duration) (out message, err error) {
	waits, absentSince := bus.Backoff{First: 20 * time.Millisecond, Most: time.Second}.Start(), time.Now()
	for {
		attempt, cancel := context.WithTimeout(ctx, attemptLimit+wait)
		m, err := c.cfg.Bus.Request(attempt, subject, data)
		cancel()
		if err == nil {
			out = message{}
			if err = wire.UnmarshalRecord(m.Data, &out); err != nil {
				return out, err
			}
			if out.Err == nil || out.Err.Code != bus.CodeUnavailable {
				return out, nil
			}
			err = out.Err // another head leads from now on
		}
		if !errors.Is(err, bus.ErrNoResponders) {
			absentSince = time.Now()
		}
		if ctx.Err() == nil && time.Since(absentSince) > absentMost {
			return out, bus.Errorf(bus.CodeUnavailable, "no head serves weights in namespace %s: it is down, or older than this program; `troupe status` tells (%w)", c.cfg.Namespace, err)
		}
		if waits.Wait(ctx) != nil {
			return out, bus.Errorf(bus.CodeOf(ctx.Err()), "the service of weights has not answered: %w", err)
		}
	}
}

// Status asks the service what there is of a name.
func (c *Client) Status(ctx context.Context, name string) (out versions.Status, err error) {
	if err := bus.CheckName("weights", name); err != nil {
		return out, err
	}
	err = c.ask(ctx, verbStatus, name, "", 0, struct{}{}, &out)
	return out, err
}
