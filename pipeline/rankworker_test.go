package pipeline_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/wire"
	"troupe/pipeline"
	"troupe/roles"
)

// testWorker is the worker class of these tests. Hold blocks until it is aborted or the test releases it.
type testWorker struct {
	setup actors.Setup
	troop *workerSet

	mu   sync.Mutex
	held map[string]chan struct{}
}

// workerSet is what a test sees of the workers of its process.
type workerSet struct {
	cameCh chan string // "rank id" of items in Hold
	goCh   chan struct{}
}

func newWorkerSet() *workerSet {
	return &workerSet{cameCh: make(chan string, 1000), goCh: make(chan struct{})}
}

func (tr *workerSet) class() *actors.Class {
	k := actors.NewClass("judge", func(_ context.Context, s actors.Setup) (*testWorker, error) {
		return &testWorker{setup: s, troop: tr, held: map[string]chan struct{}{}}, nil
	})
	many := actors.MethodOptions{Lane: actors.Concurrent(64)}
	actors.Method(k, "score", (*testWorker).Score, many)
	actors.Method(k, "same", (*testWorker).Same, many)
	actors.Method(k, "fragile", (*testWorker).Fragile, many)
	actors.Method(k, "sum", (*testWorker).Sum)
	actors.Method(k, "split", (*testWorker).Split)
	actors.Method(k, "hold", (*testWorker).Hold, many)
	actors.Method(k, "abort", (*testWorker).Abort, actors.MethodOptions{Lane: actors.Control})
	return k.Class
}

// Score returns its number with the rank and process.
func (j *testWorker) Score(_ context.Context, n int) (int, error) { return n*10 + j.setup.Rank, nil }

// Fragile returns its argument; a negative number ends the process, once other items are running there.
func (j *testWorker) Fragile(ctx context.Context, n int) (int, error) {
	select {
	case <-ctx.Done():
		return 0, ctx.Err()
	case <-time.After(100 * time.Millisecond):
	}
	if n < 0 {
		os.Exit(7)
	}
	time.Sleep(50 * time.Millisecond)
	return n, nil
}

func (j *testWorker) Same(_ context.Context, n int) (int, error) { return n, nil }

func (j *testWorker) Sum(_ context.Context, ns []int) (int, error) {
	sum := 0
	for _, n := range ns {
		sum += n
	}
	return sum, nil
}

// itemFrame is an item as a method with the style "item" receives it.
type itemFrame struct {
	To      string  `msgpack:"to,omitempty"`
	ID      string  `msgpack:"id,omitempty"`
	Key     string  `msgpack:"key,omitempty"`
	Group   string  `msgpack:"group,omitempty"`
	Of      int     `msgpack:"of,omitempty"`
	Version float64 `msgpack:"version,omitempty"`
	Attempt int     `msgpack:"attempt,omitempty"`
	Stream  string  `msgpack:"stream,omitempty"`
	Body    int     `msgpack:"body"`
}

// Split returns two outputs for one item.
func (j *testWorker) Split(_ context.Context, it itemFrame) ([]itemFrame, error) {
	return []itemFrame{{To: "out", Key: "low", Body: it.Body}, {To: "out", Key: "high", Body: it.Body + 100}}, nil
}

func (j *testWorker) Hold(ctx context.Context, it itemFrame) ([]itemFrame, error) {
	ch := make(chan struct{})
	j.mu.Lock()
	j.held[it.ID] = ch
	j.mu.Unlock()
	j.troop.cameCh <- fmt.Sprintf("%d %s", j.setup.Rank, it.ID)
	select {
	case <-j.troop.goCh:
		return []itemFrame{{Key: "whole", Body: it.Body}}, nil
	case <-ch:
		return []itemFrame{{Key: "partial", Body: it.Body}}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (j *testWorker) Abort(_ context.Context, id string) (actors.None, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if ch := j.held[id]; ch != nil {
		close(ch)
		delete(j.held, id)
	}
	return actors.None{}, nil
}

func (tr *workerSet) came(t testing.TB) string {
	t.Helper()
	select {
	case s := <-tr.cameCh:
		return s
	case <-time.After(2 * time.Minute):
		t.Fatal("no item was started")
	}
	return ""
}

// startRole starts a role of testWorkers.
func startRole(t testing.TB, b *bus.Bus, tr *workerSet, name string, world int) *roles.Cluster {
	t.Helper()
	rt, err := roles.Open(t.Context(), roles.Config{Bus: b, Classes: []*actors.Class{tr.class()}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rt.Close(context.Background())) })
	c, err := rt.Create(t.Context(), roles.Spec{Name: name, Class: "judge", World: world, StopGrace: time.Second})
	require.NoError(t, err)
	return c
}

func roleStage(method string, more ...func(*pipeline.StageSpec)) pipeline.Spec {
	st := pipeline.StageSpec{Role: "judges", Method: method}
	for _, m := range more {
		m(&st)
	}
	return oneStage(st)
}

func with(c *roles.Cluster) func(*pipeline.Config) {
	return func(cfg *pipeline.Config) { cfg.Clusters = []*roles.Cluster{c} }
}

func bodies[T any](t testing.TB, items []pipeline.Item) []T {
	out := make([]T, len(items))
	for i, it := range items {
		require.NoError(t, wire.Unmarshal(it.Body, &out[i]))
	}
	return out
}

func TestARoleIsAStage(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	c := startRole(t, b, newWorkerSet(), "judges", 3)
	t.Run("bodies", func(t *testing.T) {
		p := open(t, b, roleStage("score", func(s *pipeline.StageSpec) { s.InFlight = 4 }), with(c))
		require.NoError(t, p.Put(testContext(t), "in", items(60)...))
		got := bodies[int](t, drainSink(t, p, "out", 60))
		ranks := map[int]int{}
		for i := range got {
			ranks[got[i]%10]++
			got[i] /= 10
		}
		slices.Sort(got)
		for i, n := range got {
			require.Equal(t, i, n)
		}
		require.Len(t, ranks, 3, "every rank had some: %v", ranks)
	})
	t.Run("a group is a list", func(t *testing.T) {
		spec := roleStage("sum", func(s *pipeline.StageSpec) { s.Group = &pipeline.GroupSpec{Count: 10} })
		spec.Name = "groups"
		p := open(t, b, spec, with(c))
		require.NoError(t, p.Put(testContext(t), "in", items(20)...))
		got := bodies[int](t, drainSink(t, p, "out", 2))
		require.Equal(t, 190, got[0]+got[1])
	})
	t.Run("items", func(t *testing.T) {
		spec := roleStage("split", func(s *pipeline.StageSpec) { s.Style = pipeline.Items })
		spec.Name = "items"
		p := open(t, b, spec, with(c))
		require.NoError(t, p.Put(testContext(t), "in", items(1)...))
		got := drainSink(t, p, "out", 2)
		require.Equal(t, []string{"i0.0", "i0.1"}, ids(got))
		require.Equal(t, []int{0, 100}, bodies[int](t, got))
		require.Equal(t, "high", got[1].Key)
	})
}

func TestStickyKeysAndPartialResults(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	tr := newWorkerSet()
	c := startRole(t, b, tr, "judges", 2)
	p := open(t, b, roleStage("hold", func(s *pipeline.StageSpec) {
		s.Style, s.Sticky, s.AbortMethod, s.InFlight = pipeline.Items, true, "abort", 2
	}), with(c))
	put := func(id, key string) {
		body, _ := wire.Marshal(7)
		require.NoError(t, p.Put(testContext(t), "in", pipeline.Item{ID: id, Key: key, Body: body}))
	}
	put("a1", "a")
	put("b1", "b")
	came := []string{tr.came(t), tr.came(t)}
	slices.Sort(came)
	require.Equal(t, []string{"0 a1", "1 b1"}, came)
	put("a2", "a")
	require.Equal(t, "0 a2", tr.came(t), "the same key goes to the same rank")
	put("a3", "a")
	put("b2", "b")
	require.Equal(t, "1 b2", tr.came(t), "a3 waits for its rank, and b2 is not blocked by a3")
	require.NoError(t, p.Abort(testContext(t), "a1"))
	got := drainSink(t, p, "out", 1)
	require.Equal(t, "a1 partial", got[0].ID+" "+got[0].Key)
	require.Equal(t, "0 a3", tr.came(t))
	close(tr.goCh)
	drainSink(t, p, "out", 4)
}

// Ranks that leave get no more items and finish the ones they have. Others join while the pipeline runs.
func TestRanksLeaveAndJoin(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	tr := newWorkerSet()
	c := startRole(t, b, tr, "judges", 2)
	p := open(t, b, roleStage("hold", func(s *pipeline.StageSpec) { s.Style = pipeline.Items }), with(c))
	require.NoError(t, p.Put(testContext(t), "in", items(3)...))
	tr.came(t)
	tr.came(t)
	leftCh := make(chan error, 1)
	go func() { leftCh <- p.Leave(testContext(t), "work", c, 0) }()
	other := newWorkerSet()
	more := startRole(t, b, other, "others", 1)
	require.NoError(t, p.Join(testContext(t), "work", more))
	require.Equal(t, "0 i2", other.came(t))
	select {
	case err := <-leftCh:
		t.Fatal("rank 0 still has an item", err)
	default:
	}
	close(tr.goCh)
	require.NoError(t, <-leftCh)
	close(other.goCh)
	drainSink(t, p, "out", 3)
	require.Equal(t, 2, status(t, p).Stages[0].Workers)
	require.ErrorIs(t, p.Scale(testContext(t), "work", 5), bus.ErrRefused, "its ranks are of two roles")
}

// A child is this test binary with these variables set: a process whose workers serve one role until it is killed.
const (
	childEnv    = "TROUPE_PIPELINE_TEST_CHILD" // the role
	childURLEnv = "TROUPE_PIPELINE_TEST_URL"
)

func childIfAsked() {
	role := os.Getenv(childEnv)
	if role == "" {
		return
	}
	serve := serveRole
	if role == engineRole || role == poisonRole || role == modelRole {
		serve = serveEngine
	}
	if err := serve(role, os.Getenv(childURLEnv)); err != nil {
		fmt.Fprintln(os.Stderr, "child:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// engineRole is the child that runs the pipeline "p" of three stages, and poisonRole the one whose function ends the
// process for some items.
const (
	engineRole = "@engine"
	poisonRole = "@poison"
)

// poisoned ends the process for one item.
func poisoned() pipeline.Spec {
	return oneStage(pipeline.StageSpec{Losses: 3, Workers: 2, InFlight: 2, Func: func(ctx context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
		if in[0].ID == "poison" {
			os.Exit(7)
		}
		return pass(ctx, in)
	}})
}

func serveEngine(role, url string) error {
	spec := three(pass)
	if role == poisonRole {
		spec = poisoned()
	}
	if role == modelRole {
		spec = modelled()
	}
	ctx := context.Background()
	b, err := bus.Open(ctx, bus.Config{URLs: []string{url}})
	if err != nil {
		return err
	}
	p, err := pipeline.Open(ctx, pipeline.Config{Bus: b, TakeOver: true}, spec)
	if err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode("ready"); err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0) // its parent has ended
	}()
	<-p.Done()
	return errors.Join(p.Err(), b.Close()) // whoever asks after the end of this process finds no subscription of it
}

// serveRole hosts a role of two ranks and ends with its parent.
func serveRole(role, url string) error {
	ctx := context.Background()
	rt, err := roles.Open(ctx, roles.Config{BusConfig: bus.Config{URLs: []string{url}}, Name: "child", Lease: time.Second, Classes: []*actors.Class{newWorkerSet().class()}})
	if err != nil {
		return err
	}
	if _, err := rt.Create(ctx, roles.Spec{Name: role, Class: "judge", World: 2}); err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode("ready"); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// process is a child process.
type process struct {
	cmd     *exec.Cmd
	cluster *roles.Cluster
	diedCh  chan struct{} // closed when the process has been waited for
	stdin   io.Closer
}

// spawn starts a child and attaches to its role.
func spawn(t testing.TB, rt *roles.Runtime, role, url string, env ...string) *process {
	t.Helper()
	p, err := spawnQuietly(testContext(t), rt, role, url, env...)
	require.NoError(t, err)
	return p
}

// spawnQuietly is spawn for callers that tolerate failures.
func spawnQuietly(ctx context.Context, rt *roles.Runtime, role, url string, env ...string) (*process, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(exe, "-test.run=^$")
	cmd.Env = append(append(os.Environ(), childEnv+"="+role, childURLEnv+"="+url), env...)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	_, err = bufio.NewReader(stdout).ReadString('\n')
	p := &process{cmd: cmd, diedCh: make(chan struct{}), stdin: stdin}
	go func() {
		_ = cmd.Wait() // killed
		close(p.diedCh)
	}()
	if err == nil && rt != nil {
		p.cluster, err = rt.Attach(ctx, role)
	}
	if err != nil {
		p.kill()
		return nil, err
	}
	return p, nil
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill() // it may have ended
	<-p.diedCh
}

// A worker process is killed with running items. The items run on other workers at once.
func TestItemsOfAKilledWorkerMoveToOthers(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	b := bustest.Open(t, bus.Config{InProcess: srv})
	rt, err := roles.Open(t.Context(), roles.Config{Bus: b})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rt.Close(context.Background())) })
	tr := newWorkerSet()
	survivors := startRole(t, b, tr, "survivors", 1)
	p := open(t, b, roleStage("hold", func(s *pipeline.StageSpec) { s.Style, s.InFlight = pipeline.Items, 2 }))
	var times []time.Duration
	rounds := soakNumber(t, "TROUPE_SOAK_KILLS", 3)
	for round := range rounds {
		victim := spawn(t, rt, fmt.Sprintf("victims%d", round), srv.URL())
		t.Cleanup(victim.kill)
		require.NoError(t, p.Join(testContext(t), "work", victim.cluster))
		require.NoError(t, p.Put(testContext(t), "in", items(4)...))
		require.Eventually(t, func() bool { return status(t, p).Stages[0].InFlight == 4 }, 2*time.Minute, time.Millisecond)
		victim.kill()
		known := time.Now()
		require.NoError(t, p.Lost(testContext(t), "work", victim.cluster, bus.Errorf(bus.CodeWorkerLost, "killed")))
		require.NoError(t, p.Join(testContext(t), "work", survivors))
		for range 2 {
			tr.came(t)
		}
		times = append(times, time.Since(known))
		tr.goCh <- struct{}{}
		tr.goCh <- struct{}{}
		for range 2 {
			tr.came(t)
		}
		tr.goCh <- struct{}{}
		tr.goCh <- struct{}{}
		drainSink(t, p, "out", 4)
		require.NoError(t, p.Leave(testContext(t), "work", survivors))
	}
	slices.Sort(times)
	t.Logf("from the known death to the items running elsewhere, %d times: median %v, slowest %v", rounds, times[rounds/2], times[rounds-1])
	require.Less(t, times[0], 6*time.Second, "sooner than the silence of a rank shows")
	require.EqualValues(t, 4*rounds, status(t, p).Stages[0].Lost)
	require.Zero(t, status(t, p).Dead)
}
