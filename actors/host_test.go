package actors

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// TestFailedStartLeavesNothing: no worker, subscription or sequencer remains, however the constructor fails.
func TestFailedStartLeavesNothing(t *testing.T) {
	var how func() (Handler, error)
	class := &Class{Name: "failing", Open: true, New: func(context.Context, Setup) (Handler, error) { return how() }}
	st := newHostFixture(t, class)
	conn := st.ep.Bus().Conn()
	before := conn.NumSubscriptions()
	for words, f := range map[string]func() (Handler, error){
		"not today":                          func() (Handler, error) { return nil, errors.New("not today") },
		"panic: help":                        func() (Handler, error) { panic("help") },
		"nil pointer":                        func() (Handler, error) { return nil, (*panickingError)(nil) },
		"neither an object nor an error":     func() (Handler, error) { return nil, nil },
		"configuration of role: not a thing": func() (Handler, error) { return nil, bus.Errorf(bus.CodeRefused, "configuration of role: not a thing") },
	} {
		how = f
		_, err := st.host.Start(t.Context(), st.spec(WorkerSpec{Ordered: true}))
		require.ErrorContains(t, err, words)
		e := bus.AsError(err)
		require.Equal(t, []any{"role", 0, "here"}, []any{e.Role, e.Rank, e.Node})
	}
	require.Empty(t, st.host.Workers())
	require.Equal(t, before, conn.NumSubscriptions())

	how = func() (Handler, error) { return unansweredHandler{}, nil }
	w := st.start(WorkerSpec{Ordered: true, Slices: []Slice{{Mesh: "main", N: 0}}})
	require.Equal(t, before+6, conn.NumSubscriptions())
	require.NoError(t, w.Stop(t.Context()))
	require.Equal(t, before, conn.NumSubscriptions())
	require.Empty(t, st.host.Workers())
}

func TestStartRefusesInvalidSpecs(t *testing.T) {
	st := newHostFixture(t, funcClass(methods{"ok": returnNil}))
	for words, change := range map[string]func(*WorkerSpec){
		`no class "unknown" in this program; it has [funcs]`: func(s *WorkerSpec) { s.Class = "unknown" },
		"rank 1 is not in a world of 1":                      func(s *WorkerSpec) { s.Rank = 1 },
		"rank -1 is not in a world of 1":                     func(s *WorkerSpec) { s.Rank = -1 },
		"rank 0 is not in a world of 0":                      func(s *WorkerSpec) { s.World = 0 },
		`its namespace is "other", the host's "test"`:        func(s *WorkerSpec) { s.Address.Namespace = "other" },
		`incarnation name ""`:                                func(s *WorkerSpec) { s.Address.Incarnation = "" },
		`mesh name "a.b"`:                                    func(s *WorkerSpec) { s.Slices = []Slice{{Mesh: "a.b"}} },
		"must not be negative":                               func(s *WorkerSpec) { s.QueueLimit = -1 },
	} {
		spec := st.spec(WorkerSpec{})
		change(&spec)
		_, err := st.host.Start(t.Context(), spec)
		require.ErrorContains(t, err, words)
	}
	st.start(WorkerSpec{})
	_, err := st.host.Start(t.Context(), st.spec(WorkerSpec{}))
	require.ErrorIs(t, err, bus.ErrExists)
	require.ErrorContains(t, err, "role[0] already runs in this process")
	st.start(WorkerSpec{Gen: 1}) // a successor may start before the old worker has ended
	st.do("ok")
}

func TestStartOnAClosedHost(t *testing.T) {
	class, closed := closingClass(map[string]func() error{"": func() error { return nil }})
	st := newHostFixture(t, class)
	require.NoError(t, st.host.Close(t.Context()))
	_, err := st.host.Start(t.Context(), st.spec(WorkerSpec{}))
	require.ErrorIs(t, err, bus.ErrClosed)
	require.Equal(t, "<>", closed(), "what was made is closed")
}

// TestStartWhileClosing: a worker is either refused or stopped by Close.
func TestStartWhileClosing(t *testing.T) {
	for range 20 {
		st := newHostFixture(t, funcClass(methods{"ok": returnNil}))
		st.world = 8
		before := st.ep.Bus().Conn().NumSubscriptions()
		started := make([]*Worker, st.world)
		var group sync.WaitGroup
		for rank := range started {
			group.Go(func() { started[rank], _ = st.host.Start(t.Context(), st.spec(WorkerSpec{Rank: rank})) })
		}
		group.Go(func() { require.NoError(t, st.host.Close(t.Context())) })
		group.Wait()
		for _, w := range started {
			if w != nil {
				<-w.Done()
			}
		}
		require.Equal(t, before, st.ep.Bus().Conn().NumSubscriptions())
	}
}

// TestNoCallIsLostWhileWorkersStartAndStop: no call is lost when other workers start and stop meanwhile.
func TestNoCallIsLostWhileWorkersStartAndStop(t *testing.T) {
	st := newHostFixture(t, funcClass(methods{"ok": returnNil}))
	st.world = 2
	st.start(WorkerSpec{})
	overCh := make(chan struct{})
	var group sync.WaitGroup
	group.Go(func() {
		for {
			select {
			case <-overCh:
				return
			default:
			}
			w, err := st.host.Start(context.Background(), st.spec(WorkerSpec{Rank: 1}))
			if err == nil {
				_ = w.Stop(context.Background())
			}
		}
	})
	for range 500 {
		g := st.send(calls.Call{Method: "ok", AskAfter: time.Minute, Need: 1, Parts: []calls.Part{{Scope: calls.Everyone(), Ranks: []int{0, 1}}}})
		<-g.Done()
	}
	close(overCh)
	group.Wait()
	st.do("ok")
}

func TestCurrent(t *testing.T) {
	got, before := make(chan CallInfo, 1), newBlocking()
	st := newHostFixture(t, funcClass(methods{"before": before.method, "look": func(ctx context.Context, _ []byte) ([]byte, error) {
		child, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		info, ok := Current(child)
		require.True(t, ok)
		got <- info
		return []byte{0xc0}, nil
	}}))
	st.start(WorkerSpec{})
	st.send(calls.Call{Method: "before"})
	<-before.beganCh
	g := st.send(calls.Call{Method: "look", AskAfter: time.Millisecond, Meta: []byte{7}, Trace: "00-1-2-3", Parts: []calls.Part{{Scope: calls.OneRank(0), Ranks: []int{0}, NoData: true}}})
	require.Eventually(t, func() bool { return g.Progress()[0].State == wire.StateQueued }, 2*time.Minute, time.Millisecond)
	close(before.releaseCh)
	<-g.Done()
	require.NoError(t, g.Answers()[0].Err)
	info := <-got
	require.NotEmpty(t, info.Caller)
	require.Positive(t, info.Queued)
	info.Caller, info.Queued = "", 0
	require.Equal(t, CallInfo{
		Session: st.ep.Session(), Seq: 2, Method: "look", Role: st.address, NoData: true, Meta: []byte{7}, Trace: "00-1-2-3", Host: st.host,
	}, info)
}

// TestWorkerCallsWorker: a method calls other workers and its own through the host's endpoint.
func TestWorkerCallsWorker(t *testing.T) {
	st := newHostFixture(t, funcClass(methods{
		"c_leaf": returnNil,
		"forward": func(ctx context.Context, _ []byte) ([]byte, error) {
			info, _ := Current(ctx)
			g, err := info.Host.Endpoint().Scatter(ctx, calls.Call{To: info.Role, Method: "c_leaf", World: 2, Parts: []calls.Part{{Scope: calls.Everyone(), Ranks: []int{0, 1}}}})
			if err != nil {
				return nil, err
			}
			<-g.Done()
			return wire.Marshal(g.AllGood())
		},
	}))
	st.world = 2
	st.start(WorkerSpec{Rank: 0})
	st.start(WorkerSpec{Rank: 1})
	require.Equal(t, true, st.do("forward"))
}

func TestEnv(t *testing.T) {
	t.Setenv("ACTORS_TEST_OWN", "process")
	t.Setenv("ACTORS_TEST_SET", "process")
	st := newHostFixture(t, funcClass(methods{"ok": returnNil}))
	w := st.start(WorkerSpec{})
	st.do(VerbSetEnv, map[string]string{"ACTORS_TEST_SET": "worker"})
	require.Equal(t, "worker", w.Env("ACTORS_TEST_SET"))
	require.Equal(t, "process", w.Env("ACTORS_TEST_OWN"))
	require.Equal(t, "process", os.Getenv("ACTORS_TEST_SET"))
	st.host.cfg.OwnProcess = true
	st.do(VerbSetEnv, map[string]string{"ACTORS_TEST_SET": "worker"})
	require.Equal(t, "worker", os.Getenv("ACTORS_TEST_SET"))
}

// TestConfigureNamedObject: the named object is configured; a class without Configure is an error.
func TestConfigureNamedObject(t *testing.T) {
	st := newHostFixture(t, counterClass().Class, funcClass(methods{"ok": returnNil}))
	st.start(WorkerSpec{})
	st.do(VerbCreate, CreateRequest{Name: "second", Class: "counter"})
	st.do(VerbCreate, CreateRequest{Name: "third", Class: "funcs"})
	configure := func(object string, v int) error {
		body := wire.Args{Positional: []wire.Raw{{byte(v)}}}.Append(nil, nil)
		g := st.send(calls.Call{Method: VerbConfigure, Object: object, Parts: []calls.Part{{Scope: calls.OneRank(0), Ranks: []int{0}, Body: body}}})
		<-g.Done()
		return g.Answers()[0].Err
	}
	require.NoError(t, configure("", 10))
	require.NoError(t, configure("second", 20))
	require.ErrorContains(t, configure("third", 1), "class funcs cannot be configured")
	require.ErrorIs(t, configure("fourth", 1), bus.ErrNotFound)
	require.EqualValues(t, 11, st.do("add", 1))
}

// TestObjectsShareLanes: the objects of a worker share its serial lane; lanes with one name and different limits are
// separate.
func TestObjectsShareLanes(t *testing.T) {
	b := newBlocking()
	wide := funcClass(methods{"c_block": b.method, "block": b.method})
	narrow := &Class{Name: "narrow", Methods: []MethodInfo{{Name: "c_block", Lane: Concurrent(1)}, {Name: "block", Lane: Serial}}, New: wide.New}
	st := newHostFixture(t, wide, narrow)
	w := st.start(WorkerSpec{})
	st.do(VerbCreate, CreateRequest{Name: "n", Class: "narrow"})
	var gathers []*calls.Gather
	for range 3 {
		gathers = append(gathers, st.send(calls.Call{Method: "c_block"}), st.send(calls.Call{Method: "c_block", Object: "n"}))
	}
	gathers = append(gathers, st.send(calls.Call{Method: "block", Object: "n"}))
	for range 5 {
		<-b.beganCh
	}
	gathers = append(gathers, st.send(calls.Call{Method: "block"})) // queued behind the other object's call
	close(b.releaseCh)
	for _, g := range gathers {
		<-g.Done()
		require.NoError(t, g.Answers()[0].Err)
	}
	info, err := w.info(t.Context(), None{})
	require.NoError(t, err)
	var lanes []string
	for _, l := range info.Lanes {
		lanes = append(lanes, fmt.Sprint(l.Lane))
	}
	require.Equal(t, []string{"{concurrent 1}", "{concurrent 64}", "{work 1}"}, lanes)
}

// TestOneHeartbeatMessagePerRole: a role's workers on one host share a heartbeat message.
func TestOneHeartbeatMessagePerRole(t *testing.T) {
	st := newHostFixture(t, funcClass(methods{"ok": returnNil}))
	st.world = 3
	for rank := range 3 {
		st.start(WorkerSpec{Rank: rank, Gen: uint32(rank)})
	}
	next := st.beats()
	for next().Rank != 2 {
	}
	for rank := range 3 {
		b := next()
		require.Equal(t, Heartbeat{Rank: rank, Gen: uint32(rank), State: Ready, Node: "here"}, b)
	}
}

// TestStopOfManyWorkers: stopping all workers of a host costs time in proportion to their number. With a cost in proportion
// to the square, sixteen times as many workers would take 256 times as long.
func TestStopOfManyWorkers(t *testing.T) {
	perWorker := func(n int) time.Duration {
		st := newHostFixtureWith(t, HostConfig{Classes: []*Class{funcClass(nil)}, HeartbeatEvery: time.Hour, Workers: n})
		st.world = n
		for rank := range n {
			st.start(WorkerSpec{Rank: rank, Slices: []Slice{{Mesh: "main", N: rank}}})
		}
		begin := time.Now()
		for _, w := range st.host.Workers() {
			require.NoError(t, w.Stop(t.Context()))
		}
		return time.Since(begin) / time.Duration(n)
	}
	few := perWorker(256)
	many := perWorker(4096)
	require.Less(t, many, 4*few+100*time.Microsecond)
}

// BenchmarkStopWorkers stops a host's workers; ns/worker must not grow with their number.
func BenchmarkStopWorkers(b *testing.B) {
	for _, n := range []int{64, 512, 4096} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				ep, err := calls.Open(bustest.Open(b), "test")
				require.NoError(b, err)
				address, err := bus.NewAddress("test", "role", "i1")
				require.NoError(b, err)
				h, err := NewHost(ep, HostConfig{Classes: []*Class{funcClass(nil)}, HeartbeatEvery: time.Hour, Workers: n})
				require.NoError(b, err)
				for rank := range n {
					_, err := h.Start(b.Context(), WorkerSpec{Address: address, Class: "funcs", Rank: rank, World: n})
					require.NoError(b, err)
				}
				b.StartTimer()
				require.NoError(b, h.Close(b.Context()))
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/worker")
		})
	}
}
