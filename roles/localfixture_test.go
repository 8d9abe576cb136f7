package roles_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/dispatch"
	"troupe/roles"
	"troupe/roles/registry"
)

// patient is a context with a deadline that is only reached by a failing test.
func patient(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// open is a driver that is closed with the test.
func open(t testing.TB, cfg roles.Config) *roles.Runtime {
	t.Helper()
	if cfg.Bus == nil {
		cfg.Bus = bustest.Open(t, cfg.BusConfig)
	}
	rt, err := roles.Open(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rt.Close(context.Background())) })
	return rt
}

// newLocal is a Local that is closed with the test.
func newLocal(t testing.TB, b *bus.Bus, classes ...*actors.Class) *roles.Local {
	l := roles.NewLocal(b, classes)
	t.Cleanup(func() { require.NoError(t, l.Close(context.Background())) })
	return l
}

func create(t testing.TB, rt *roles.Runtime, spec roles.Spec) *roles.Cluster {
	t.Helper()
	c, err := rt.Create(t.Context(), spec)
	require.NoError(t, err)
	return c
}

func attach(t testing.TB, rt *roles.Runtime, name string) *roles.Cluster {
	t.Helper()
	c, err := rt.Attach(patient(t), name)
	require.NoError(t, err)
	return c
}

func rolesOf(t testing.TB, rt *roles.Runtime) map[string]registry.RoleRecord {
	all, err := rt.Roles(patient(t))
	require.NoError(t, err)
	out := map[string]registry.RoleRecord{}
	for _, r := range all {
		out[r.Name] = r
	}
	return out
}

// eventually polls a condition without a signal: a record in the registry, as another driver reads it.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	require.Eventually(t, cond, 2*time.Minute, 20*time.Millisecond, what)
}

// actor is the worker of these tests.
type actor struct {
	setup  actors.Setup
	config config
	probe  *workerProbe

	total int
}

type config struct {
	Rate  float64
	Fails []int // ranks whose constructor fails
	Panic []int // ranks whose constructor panics
	Hangs []int // ranks whose constructor waits for its context
	Deaf  []int // ranks whose constructor waits until the test lets it go
}

// workerProbe observes the workers of its classes, and blocks them.
type workerProbe struct {
	started chan int      // ranks in hold
	ended   chan int      // ranks whose hold was cancelled
	gate    chan struct{} // lets go of what is in hold
	deafCh  chan struct{} // lets go of deaf constructors

	mu    sync.Mutex
	stops []int // ranks in the order in which they were closed
	alive int
}

func newWorkerProbe() *workerProbe {
	return &workerProbe{started: make(chan int, 1024), ended: make(chan int, 1024), gate: make(chan struct{}), deafCh: make(chan struct{})}
}

func (c *workerProbe) stopped() []int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.stops)
}

func (c *workerProbe) living() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.alive
}

var errTired = errors.New("tired")

func init() { bus.RegisterError("roles_test_tired", errTired) }

// class is a class named actor.
func (c *workerProbe) class() *actors.Class {
	k := actors.NewClass("actor", c.construct)
	mode := func(m dispatch.Mode) actors.MethodOptions { return actors.MethodOptions{Mode: string(m)} }
	actors.Method(k, "rank", (*actor).Rank)
	actors.Method(k, "add", (*actor).Add)
	actors.Method(k, "config", (*actor).Config, mode(dispatch.RankZero))
	actors.Method(k, "double", (*actor).Double, mode(dispatch.DPMPCompute))
	actors.Method(k, "first", (*actor).Double, mode(dispatch.DPMPDispatchFirst))
	actors.Method(k, "first_all", (*actor).Double, mode(dispatch.DPMPDispatchFirstCollectAll))
	actors.Method(k, "own", (*actor).Own, mode(dispatch.AllToAll))
	actors.Method(k, "lead", (*actor).Rank, mode(dispatch.OneToAllOne))
	actors.Method(k, "zero", (*actor).Rank, mode(dispatch.RankZero))
	actors.Method(k, "hold", (*actor).Hold)
	actors.Method(k, "fail", (*actor).Fail)
	actors.Method(k, "boom", (*actor).Boom)
	actors.Method(k, "ask", (*actor).Ask)
	actors.Method(k, "ask_all", (*actor).AskAll)
	actors.Method(k, "remaining", (*actor).Remaining)
	actors.Method(k, "remaining_of", (*actor).RemainingOf)
	actors.Method(k, "ask_fail", (*actor).AskFail)
	actors.Method(k, "create", (*actor).Create, mode(dispatch.RankZero))
	actors.Method(k, "attach", (*actor).Attach)
	actors.Method(k, "holds", (*actor).Holds, mode(dispatch.RankZero))
	actors.Method(k, "echo", (*actor).Echo, mode(dispatch.RankZero))
	actors.Method(k, "poke", (*actor).Rank, actors.MethodOptions{Lane: actors.Control})
	return k.Class
}

func (c *workerProbe) construct(ctx context.Context, s actors.Setup) (*actor, error) {
	a := &actor{setup: s, probe: c}
	if err := s.DecodeConfig(&a.config); err != nil {
		return nil, err
	}
	switch {
	case slices.Contains(a.config.Fails, s.Rank):
		return nil, errTired
	case slices.Contains(a.config.Panic, s.Rank):
		panic("no room")
	case slices.Contains(a.config.Hangs, s.Rank):
		<-ctx.Done()
		return nil, ctx.Err()
	case slices.Contains(a.config.Deaf, s.Rank):
		<-c.deafCh
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.alive++
	return a, nil
}

func (a *actor) Close(context.Context) error {
	a.probe.mu.Lock()
	defer a.probe.mu.Unlock()
	a.probe.stops = append(a.probe.stops, a.setup.Rank)
	a.probe.alive--
	return nil
}

func (a *actor) Rank(context.Context, actors.None) (int, error) { return a.setup.Rank, nil }

func (a *actor) Add(_ context.Context, n int) (int, error) {
	a.total += n
	return a.total, nil
}

func (a *actor) Config(context.Context, actors.None) (config, error) { return a.config, nil }

// Double returns its rows doubled, or its rank without rows.
func (a *actor) Double(ctx context.Context, rows []int) ([]int, error) {
	if call, _ := actors.Current(ctx); call.NoData {
		return []int{-a.setup.Rank}, nil
	}
	for i := range rows {
		rows[i] *= 2
	}
	return rows, nil
}

func (a *actor) Own(_ context.Context, s string) (string, error) {
	return s + "!", nil
}

func (a *actor) Hold(ctx context.Context, _ actors.None) (int, error) {
	a.probe.started <- a.setup.Rank
	select {
	case <-a.probe.gate:
		return a.setup.Rank, nil
	case <-ctx.Done():
		a.probe.ended <- a.setup.Rank
		return 0, ctx.Err()
	}
}

func (a *actor) Fail(_ context.Context, rank int) (actors.None, error) {
	if a.setup.Rank == rank {
		return actors.None{}, errTired
	}
	return actors.None{}, nil
}

func (a *actor) Boom(_ context.Context, rank int) (actors.None, error) {
	if a.setup.Rank == rank {
		panic("boom")
	}
	return actors.None{}, nil
}

// Ask calls another worker.
func (a *actor) Ask(ctx context.Context, h roles.Handle) (any, error) {
	w, err := h.OpenWorker(ctx)
	if err != nil {
		return nil, err
	}
	return w.Call(ctx, "rank")
}

// Remaining is the seconds that are left of the call's deadline; 0: it has none.
func (a *actor) Remaining(ctx context.Context, _ actors.None) (float64, error) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return 0, nil
	}
	return time.Until(deadline).Seconds(), nil
}

// remainingOf is the argument of RemainingOf: another worker, and the timeout of the call to it, 0: none.
type remainingOf struct {
	Other roles.Handle  `msgpack:"other"`
	Own   time.Duration `msgpack:"own"`
}

// RemainingOf is how much another worker has left of the deadline.
func (a *actor) RemainingOf(ctx context.Context, ask remainingOf) (any, error) {
	w, err := ask.Other.OpenWorker(ctx)
	if err != nil {
		return nil, err
	}
	f, err := w.Go(ctx, dispatch.Call{Method: "remaining", Timeout: ask.Own})
	if err != nil {
		return nil, err
	}
	left, err := dispatch.AwaitEach[float64](ctx, f)
	return left[0], err
}

// AskFail calls a worker whose method fails, and returns its error.
func (a *actor) AskFail(ctx context.Context, h roles.Handle) (any, error) {
	w, err := h.OpenWorker(ctx)
	if err != nil {
		return nil, err
	}
	return w.Call(ctx, "fail", w.Rank())
}

// AskAll calls every worker of some other roles.
func (a *actor) AskAll(ctx context.Context, hs []roles.Handle) (any, error) {
	var out []any
	for _, h := range hs {
		c, err := h.Open(ctx)
		if err != nil {
			return nil, err
		}
		answers, err := c.ExecuteAll(ctx, "rank")
		if err != nil {
			return nil, err
		}
		out = append(out, answers...)
	}
	return out, nil
}

// Attach calls a role that it finds by name.
func (a *actor) Attach(ctx context.Context, name string) (any, error) {
	rt, err := roles.FromContext(ctx)
	if err != nil {
		return nil, err
	}
	c, err := rt.Attach(ctx, name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close(ctx) }()
	return c.ExecuteRankZero(ctx, "rank")
}

// Holds counts the clusters of the worker's process.
func (a *actor) Holds(ctx context.Context, _ actors.None) (int, error) {
	rt, err := roles.FromContext(ctx)
	if err != nil {
		return 0, err
	}
	return rt.Holds(), nil
}

func (a *actor) Echo(_ context.Context, v any) (any, error) { return v, nil }

// Create creates a role of goroutines, and returns the sum of its ranks.
func (a *actor) Create(ctx context.Context, name string) (int, error) {
	rt, err := roles.FromContext(ctx)
	if err != nil {
		return 0, err
	}
	c, err := rt.Create(ctx, roles.Spec{Name: name, Class: "actor", World: 3})
	if err != nil {
		return 0, err
	}
	ranks, err := roles.CallEach[int](ctx, c, "rank")
	sum := 0
	for _, rank := range ranks {
		sum += rank
	}
	return sum, err
}

// await receives n ranks from a channel.
func await(t testing.TB, ch <-chan int, n int) []int {
	t.Helper()
	var got []int
	ctx := patient(t)
	for range n {
		select {
		case rank := <-ch:
			got = append(got, rank)
		case <-ctx.Done():
			t.Fatalf("received %v, want %d ranks", got, n)
		}
	}
	return got
}
