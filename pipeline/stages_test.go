package pipeline_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/pipeline"
)

// gate is a handler that blocks until the test releases it, and reports its items.
type gate struct {
	cameCh chan pipeline.Item
	goCh   chan struct{}
}

func newGate() *gate { return &gate{cameCh: make(chan pipeline.Item, 1000), goCh: make(chan struct{})} }

func (g *gate) handle(ctx context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
	for _, it := range in {
		g.cameCh <- it
	}
	select {
	case <-g.goCh:
	case <-ctx.Done():
		if errors.Is(context.Cause(ctx), pipeline.ErrAborted) {
			body, _ := wire.Marshal("partial")
			return []pipeline.Out{{Item: pipeline.Item{Body: body}}}, nil
		}
		return nil, context.Cause(ctx)
	}
	return pass(ctx, in)
}

func (g *gate) came(t testing.TB) pipeline.Item {
	t.Helper()
	select {
	case it := <-g.cameCh:
		return it
	case <-time.After(2 * time.Minute):
		t.Fatal("no item was started")
	}
	return pipeline.Item{}
}

func oneStage(st pipeline.StageSpec, in ...func(*pipeline.StreamSpec)) pipeline.Spec {
	source := newStream("in")
	for _, f := range in {
		f(&source)
	}
	st.Name, st.In, st.Out = "work", []string{"in"}, []string{"out"}
	return pipeline.Spec{Name: "p", Streams: []pipeline.StreamSpec{source, newSink("out")}, Stages: []pipeline.StageSpec{st}}
}

func ids(items []pipeline.Item) []string {
	out := make([]string, len(items))
	for i, it := range items {
		out[i] = it.ID
	}
	return out
}

func TestHigherPrioritiesGoFirst(t *testing.T) {
	t.Parallel()
	g := newGate()
	p := open(t, newBus(t), oneStage(pipeline.StageSpec{Func: g.handle}, func(s *pipeline.StreamSpec) { s.Priorities = 3 }))
	put := func(id string, priority int) {
		require.NoError(t, p.Put(testContext(t), "in", pipeline.Item{ID: id, Priority: priority}))
	}
	put("first", 0)
	require.Equal(t, "first", g.came(t).ID)
	put("low", 0)
	put("middle", 1)
	put("high", 2)
	put("high2", 2)
	close(g.goCh)
	require.Equal(t, []string{"first", "high", "high2", "middle", "low"}, ids(drainSink(t, p, "out", 5)))
	err := p.Put(testContext(t), "in", pipeline.Item{Priority: 3})
	require.ErrorIs(t, err, bus.ErrInvalid)
	require.ErrorContains(t, err, "priority 3; it has 0 to 2")
}

// Items of one key never run concurrently and come out in order, also when attempts fail.
func TestOrderByKey(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	busy := map[string]bool{}
	tried := map[string]int{}
	p := open(t, newBus(t), oneStage(pipeline.StageSpec{
		Workers: 4, InFlight: 2, Ordered: true, Backoff: time.Millisecond,
		Func: func(ctx context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
			mu.Lock()
			again := busy[in[0].Key]
			busy[in[0].Key] = true
			tried[in[0].ID]++
			n := tried[in[0].ID]
			mu.Unlock()
			defer func() { mu.Lock(); busy[in[0].Key] = false; mu.Unlock() }()
			if again {
				return nil, errors.New("two items at once")
			}
			if n == 1 && len(in[0].ID)%2 == 0 {
				return nil, errors.New("not the first time")
			}
			return pass(ctx, in)
		},
	}))
	var all []pipeline.Item
	for i := range 120 {
		all = append(all, pipeline.Item{ID: fmt.Sprintf("%c%d", 'a'+i%3, i/3), Key: string(rune('a' + i%3))})
	}
	require.NoError(t, p.Put(testContext(t), "in", all...))
	last := map[string]int{"a": -1, "b": -1, "c": -1}
	for _, it := range drainSink(t, p, "out", 120) {
		var n int
		_, err := fmt.Sscanf(it.ID[1:], "%d", &n)
		require.NoError(t, err)
		require.Equal(t, last[it.Key]+1, n, "key %s", it.Key)
		last[it.Key] = n
	}
	require.Zero(t, status(t, p).Dead)
}

func TestBackPressure(t *testing.T) {
	t.Parallel()
	for _, full := range []pipeline.FullPolicy{pipeline.Block, pipeline.Refuse, pipeline.DropOldest} {
		t.Run(string(full), func(t *testing.T) {
			t.Parallel()
			g := newGate()
			p := open(t, newBus(t), oneStage(pipeline.StageSpec{Func: g.handle}, func(s *pipeline.StreamSpec) { s.Items, s.Full = 3, full }))
			all := items(6)
			require.NoError(t, p.Put(testContext(t), "in", all[0]))
			g.came(t)
			require.NoError(t, p.Put(testContext(t), "in", all[1:3]...))
			ctx := testContext(t)
			if full == pipeline.Block { // the others answer at once
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, 200*time.Millisecond)
				defer cancel()
			}
			err := p.Put(ctx, "in", all[3])
			want := []string{"i0", "i1", "i2"}
			switch full {
			case pipeline.Block:
				require.ErrorIs(t, err, bus.ErrTimedOut)
				blockedCh := make(chan error, 1)
				go func() { blockedCh <- p.Put(testContext(t), "in", all[4]) }()
				require.Eventually(t, func() bool { return status(t, p).Streams[0].Blocked == 1 }, 2*time.Minute, time.Millisecond)
				g.goCh <- struct{}{}
				require.NoError(t, <-blockedCh)
				want = append(want, "i4")
			case pipeline.Refuse:
				require.ErrorIs(t, err, bus.ErrBusy)
				require.ErrorContains(t, err, "stream in is full: 3 of 3 items")
			case pipeline.DropOldest:
				require.NoError(t, err)
				require.NoError(t, p.Put(testContext(t), "in", all[4]))
				want = []string{"i0", "i3", "i4"}
				require.EqualValues(t, 2, status(t, p).Streams[0].Dropped)
			}
			close(g.goCh)
			require.Equal(t, want, ids(drainSink(t, p, "out", len(want))))
			require.NoError(t, p.Drain(testContext(t)))
		})
	}
	t.Run("reaches the producer through a stage", func(t *testing.T) {
		t.Parallel()
		g := newGate()
		p := open(t, newBus(t), pipeline.Spec{Name: "p",
			Streams: []pipeline.StreamSpec{{Name: "a", Items: 4}, {Name: "b", Items: 2}, newSink("c")},
			Stages: []pipeline.StageSpec{
				{Name: "fast", In: []string{"a"}, Out: []string{"b"}, Func: pass},
				{Name: "slow", In: []string{"b"}, Out: []string{"c"}, Func: g.handle},
			}})
		ctx, cancel := context.WithCancel(testContext(t))
		var accepted atomic.Int32
		doneCh := make(chan struct{})
		go func() {
			defer close(doneCh)
			for _, it := range items(20) {
				if p.Put(ctx, "a", it) != nil {
					return
				}
				accepted.Add(1)
			}
		}()
		require.Eventually(t, func() bool { return accepted.Load() == 6 }, 2*time.Minute, time.Millisecond, "four in a, two in b, of which one is running")
		time.Sleep(200 * time.Millisecond)
		cancel()
		<-doneCh
		require.EqualValues(t, 6, accepted.Load())
		close(g.goCh)
		drainSink(t, p, "c", 6)
	})
}

func TestDeadLetters(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	healed := false
	b := newBus(t)
	p := open(t, b, oneStage(pipeline.StageSpec{Failures: 2, Backoff: time.Millisecond, Func: func(ctx context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case healed || in[0].ID == "i2":
			return pass(ctx, in)
		case in[0].ID == "i1":
			panic("no such thing")
		}
		return nil, fmt.Errorf("attempt %d of %s", in[0].Attempt, in[0].ID)
	}}))
	require.NoError(t, p.Put(testContext(t), "in", items(3)...))
	require.Equal(t, []string{"i2"}, ids(drainSink(t, p, "out", 1)))
	require.NoError(t, p.Drain(testContext(t)))
	c, err := pipeline.Connect(b, "default", "p")
	require.NoError(t, err)
	dead, err := c.Dead(testContext(t), true)
	require.NoError(t, err)
	require.Len(t, dead, 2)
	byID := map[string]pipeline.DeadLetter{}
	for _, d := range dead {
		byID[d.ID] = d
	}
	d := byID["i0"]
	require.Equal(t, "work in failures 2 attempt 2 of i0", fmt.Sprint(d.Stage, " ", d.Stream, " ", d.Reason, " ", d.Attempts, " ", d.Failures[1].Error))
	require.Equal(t, bus.CodePanic, byID["i1"].Failures[0].Code)
	require.Contains(t, byID["i1"].Failures[0].Stack, "TestDeadLetters")

	mu.Lock()
	healed = true
	mu.Unlock()
	n, err := c.RetryDead(testContext(t), []uint64{d.Seq}, false)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Equal(t, []string{"i0"}, ids(drainSink(t, p, "out", 1)))
	_, err = c.RetryDead(testContext(t), []uint64{d.Seq}, false)
	require.ErrorIs(t, err, bus.ErrNotFound, "it is not a dead letter any more")
	n, err = c.DropDead(testContext(t), nil, true)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	dead, err = c.Dead(testContext(t), false)
	require.NoError(t, err)
	require.Empty(t, dead)
	require.Zero(t, status(t, p).Dead)
}

func TestGroups(t *testing.T) {
	t.Parallel()
	join := func(_ context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
		body, err := wire.Marshal(ids(in))
		return []pipeline.Out{{Item: pipeline.Item{Body: body}}}, err
	}
	member := func(id, group string) pipeline.Item { return pipeline.Item{ID: id, Group: group, Of: 4} }
	bodyOf := func(it pipeline.Item) (out []string) {
		require.NoError(t, wire.Unmarshal(it.Body, &out))
		return out
	}
	t.Run("first of a group, late ones by rule, over a restart", func(t *testing.T) {
		t.Parallel()
		spec := oneStage(pipeline.StageSpec{Func: join, Group: &pipeline.GroupSpec{First: 3, Late: "late"}})
		spec.Streams = append(spec.Streams, newSink("late"))
		b := newBus(t)
		p := open(t, b, spec)
		require.NoError(t, p.Put(testContext(t), "in", member("a1", "a"), member("b1", "b"), member("a2", "a"), member("b2", "b"), member("a3", "a")))
		got := drainSink(t, p, "out", 1)
		require.Equal(t, []string{"a1", "a2", "a3"}, bodyOf(got[0]))
		require.Equal(t, "a", got[0].ID)
		require.NoError(t, p.Close(testContext(t)))
		p = open(t, b, spec)
		require.NoError(t, p.Put(testContext(t), "in", member("a4", "a"), member("b3", "b")))
		require.Equal(t, []string{"b1", "b2", "b3"}, bodyOf(drainSink(t, p, "out", 1)[0]))
		require.Equal(t, []string{"a4"}, ids(drainSink(t, p, "late", 1)))
		require.NoError(t, p.Drain(testContext(t)))
	})
	t.Run("by count and by time", func(t *testing.T) {
		t.Parallel()
		p := open(t, newBus(t), oneStage(pipeline.StageSpec{Func: join, Group: &pipeline.GroupSpec{Count: 4, Every: 150 * time.Millisecond}}))
		require.NoError(t, p.Put(testContext(t), "in", items(6)...))
		got := drainSink(t, p, "out", 2)
		require.Equal(t, []string{"i0", "i1", "i2", "i3"}, bodyOf(got[0]))
		require.Equal(t, []string{"i4", "i5"}, bodyOf(got[1]))
	})
}

func TestStaleness(t *testing.T) {
	t.Parallel()
	at := func(id string, v float64) pipeline.Item {
		return pipeline.Item{ID: id, Version: pipeline.VersionOf(v), Stamped: true}
	}
	for _, then := range []pipeline.StalePolicy{pipeline.Drop, pipeline.Requeue, pipeline.HandOver} {
		t.Run(string(then), func(t *testing.T) {
			t.Parallel()
			spec := oneStage(pipeline.StageSpec{Func: pass, Stale: &pipeline.StaleSpec{Bound: pipeline.VersionOf(0.3), Then: then}})
			p := open(t, newBus(t), spec)
			require.NoError(t, p.Pause(testContext(t), "work"))
			// 0.4 - 0.3 is exactly 0.1: the item of 0.1 is within the bound.
			require.NoError(t, p.Put(testContext(t), "in", at("old", 0.05), at("edge", 0.1), at("new", 0.4), pipeline.Item{ID: "unstamped"}))
			require.NoError(t, p.SetVersion(testContext(t), pipeline.VersionOf(0.4)))
			require.NoError(t, p.Resume(testContext(t), "work"))
			switch then {
			case pipeline.Drop:
				require.Equal(t, []string{"edge", "new"}, ids(drainSink(t, p, "out", 2)), "the unstamped one was put at version 0")
				require.NoError(t, p.Drain(testContext(t)))
				require.EqualValues(t, 2, status(t, p).Streams[0].Stale)
			case pipeline.Requeue:
				got := drainSink(t, p, "out", 4)
				require.Equal(t, []string{"edge", "new", "old", "unstamped"}, ids(got))
				require.Equal(t, 0.4, got[2].Version.Float(), "stamped anew")
			case pipeline.HandOver:
				require.Equal(t, []string{"old", "edge", "new", "unstamped"}, ids(drainSink(t, p, "out", 4)))
			}
			require.ErrorIs(t, p.SetVersion(testContext(t), pipeline.VersionOf(0.1)), bus.ErrInvalid)
		})
	}
}

// Advance is committed with the outputs of its stage; Stamp uses the version at the start of the task.
func TestVersionsAdvanceAndAreStamped(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	spec := oneStage(pipeline.StageSpec{Func: pass, Advance: pipeline.VersionOf(0.5), Stamp: true})
	p := open(t, b, spec)
	require.NoError(t, p.Put(testContext(t), "in", items(3)...))
	var versions []float64
	for _, it := range drainSink(t, p, "out", 3) {
		versions = append(versions, it.Version.Float())
	}
	require.Equal(t, []float64{0, 0.5, 1}, versions)
	require.NoError(t, p.Close(testContext(t)))
	require.Equal(t, 1.5, status(t, open(t, b, spec)).Version.Float())
}

func TestAbort(t *testing.T) {
	t.Parallel()
	g := newGate()
	p := open(t, newBus(t), oneStage(pipeline.StageSpec{Func: g.handle}))
	require.NoError(t, p.Put(testContext(t), "in", items(3)...))
	require.Equal(t, "i0", g.came(t).ID)
	require.NoError(t, p.Abort(testContext(t), "i1"), "it waits")
	require.NoError(t, p.Abort(testContext(t), "i0"), "it is running")
	got := drainSink(t, p, "out", 1)
	var body string
	require.NoError(t, wire.Unmarshal(got[0].Body, &body))
	require.Equal(t, "i0 partial", got[0].ID+" "+body)
	require.Equal(t, "i2", g.came(t).ID, "the waiting one is dropped")
	close(g.goCh)
	drainSink(t, p, "out", 1)
	require.ErrorIs(t, p.Abort(testContext(t), "nobody"), bus.ErrNotFound)
	require.EqualValues(t, 2, status(t, p).Stages[0].Aborted)
}

func TestPausePersists(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	spec := oneStage(pipeline.StageSpec{Func: pass})
	p := open(t, b, spec)
	require.NoError(t, p.Pause(testContext(t), "work"))
	require.NoError(t, p.Put(testContext(t), "in", items(10)...))
	require.NoError(t, p.Close(testContext(t)))
	p = open(t, b, spec)
	st := status(t, p)
	require.True(t, st.Stages[0].Paused)
	require.Equal(t, 10, st.Streams[0].Items)
	require.NoError(t, p.Resume(testContext(t), "work"))
	require.Equal(t, ids(items(10)), ids(drainSink(t, p, "out", 10)))
	err := p.Pause(testContext(t), "wrok")
	require.ErrorIs(t, err, bus.ErrNotFound)
	require.ErrorContains(t, err, "did you mean work?")
}

func TestRoundsBoundACycle(t *testing.T) {
	t.Parallel()
	spec := pipeline.Spec{Name: "p", Streams: []pipeline.StreamSpec{{Name: "a", Items: 4}, {Name: "b", Items: 2}, newSink("out")},
		Stages: []pipeline.StageSpec{
			{Name: "there", In: []string{"a"}, Out: []string{"b"}, Func: pass},
			{Name: "back", In: []string{"b"}, Out: []string{"a", "out"}, Rounds: 3, Func: func(_ context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
				to := "a"
				if in[0].ID == "i0" && in[0].Rounds == 1 {
					to = "out"
				}
				return []pipeline.Out{{To: to, Item: pipeline.Item{Body: in[0].Body}}}, nil
			}},
		}}
	b := newBus(t)
	p := open(t, b, spec)
	require.NoError(t, p.Put(testContext(t), "a", items(4)...))
	require.Equal(t, []string{"i0"}, ids(drainSink(t, p, "out", 1)))
	require.NoError(t, p.Drain(testContext(t)), "full streams in a cycle do not deadlock")
	dead, err := p.Dead(testContext(t))
	require.NoError(t, err)
	require.Len(t, dead, 3)
	require.Equal(t, "rounds", dead[0].Reason)
}

func TestAgeBoundsAStream(t *testing.T) {
	t.Parallel()
	p := open(t, newBus(t), oneStage(pipeline.StageSpec{Func: pass}, func(s *pipeline.StreamSpec) { s.Age = 100 * time.Millisecond }))
	require.NoError(t, p.Pause(testContext(t), "work"))
	require.NoError(t, p.Put(testContext(t), "in", items(3)...))
	require.NoError(t, p.Drain(testContext(t)))
	require.EqualValues(t, 3, status(t, p).Streams[0].Expired)
}

// lastMoment is a context that ends right after the first check of its error.
type lastMoment struct {
	context.Context
	cancel context.CancelFunc
}

func (c lastMoment) Err() error {
	defer c.cancel()
	return c.Context.Err()
}

// A take whose context ends at the moment its items arrive leaves them in the sink.
func TestTakeAtTheDeadline(t *testing.T) {
	p := open(t, newBus(t), pipeline.Spec{Name: "last", Streams: []pipeline.StreamSpec{newStream("a"), newSink("b")}, Stages: []pipeline.StageSpec{
		{Name: "pass", In: []string{"a"}, Out: []string{"b"}, Func: pass},
	}})
	const n = 20
	require.NoError(t, p.Put(testContext(t), "a", items(n)...))
	require.NoError(t, p.Drain(testContext(t))) // all of them are in the sink
	got, late := 0, 0
	for range n / 2 {
		ctx, cancel := context.WithCancel(t.Context())
		b, err := p.Take(lastMoment{ctx, cancel}, "b", 1)
		if err != nil {
			late++
			continue
		}
		got += len(b.Items)
		require.NoError(t, b.Ack(testContext(t)))
	}
	require.Positive(t, late, "no take ended at that moment")
	drainSink(t, p, "b", n-got) // would block for items that are lost
}

func TestTimeoutAndScale(t *testing.T) {
	t.Parallel()
	g := newGate()
	p := open(t, newBus(t), oneStage(pipeline.StageSpec{Func: g.handle, Timeout: 50 * time.Millisecond, Failures: 1}))
	require.NoError(t, p.Put(testContext(t), "in", items(1)...))
	require.NoError(t, p.Drain(testContext(t)))
	dead, err := p.Dead(testContext(t))
	require.NoError(t, err)
	require.Equal(t, bus.CodeTimedOut, dead[0].Failures[0].Code)

	g = newGate()
	p = open(t, newBus(t), oneStage(pipeline.StageSpec{Func: g.handle}))
	require.NoError(t, p.Put(testContext(t), "in", items(4)...))
	g.came(t)
	require.NoError(t, p.Scale(testContext(t), "work", 3))
	for range 3 {
		g.came(t)
	}
	require.Equal(t, 4, status(t, p).Stages[0].InFlight)
	close(g.goCh)
	drainSink(t, p, "out", 4)
}
