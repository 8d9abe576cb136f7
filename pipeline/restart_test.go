package pipeline_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/wire"
	"troupe/pipeline"
)

func three(handle pipeline.Func) pipeline.Spec {
	return pipeline.Spec{Name: "p",
		Streams: []pipeline.StreamSpec{newStream("a"), newStream("b"), newStream("c"), {Name: "d", Sink: true, Items: 1 << 20}},
		Stages: []pipeline.StageSpec{
			{Name: "one", In: []string{"a"}, Out: []string{"b"}, Func: handle, Workers: 2, InFlight: 32, Backoff: time.Millisecond},
			{Name: "two", In: []string{"b"}, Out: []string{"c"}, Func: handle, Workers: 2, InFlight: 32, Backoff: time.Millisecond},
			{Name: "three", In: []string{"c"}, Out: []string{"d"}, Func: handle, Workers: 2, InFlight: 32, Backoff: time.Millisecond},
		}}
}

// The server is restarted twice while items pass: nothing is lost or repeated.
func TestTheServerRestarts(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	b := bustest.Open(t, bus.Config{InProcess: srv})
	p := open(t, b, three(pass))
	c, err := pipeline.Connect(bustest.Open(t, bus.Config{InProcess: srv}), "default", "p")
	require.NoError(t, err)
	const n = 3000
	putCh := make(chan error, 1)
	go func() { putCh <- c.Producer().Put(testContext(t), "a", items(n)...) }()
	for i := range 2 {
		require.Eventually(t, func() bool { return status(t, p).Streams[3].In > uint64(500*(i+1)) }, 2*time.Minute, time.Millisecond)
		srv.Stop()
		srv.Restart()
	}
	require.NoError(t, <-putCh)
	requireEachOnce(t, p, n)
}

// requireEachOnce takes n items from the sink d and checks that each of them comes once.
func requireEachOnce(t *testing.T, p *pipeline.Pipeline, n int) {
	t.Helper()
	seen := map[string]int{}
	for _, it := range drainSink(t, p, "d", n) {
		seen[it.ID]++
	}
	require.Len(t, seen, n)
	require.NoError(t, p.Drain(testContext(t)))
	require.Zero(t, status(t, p).Streams[3].Items, "no item came twice")
}

// An engine that was replaced can commit nothing more and ends with an error; its items are handled by the new one.
func TestTakenOver(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	g := newGate()
	spec := oneStage(pipeline.StageSpec{Func: g.handle})
	old, err := pipeline.Open(testContext(t), pipeline.Config{Bus: b, By: "the old one"}, spec)
	require.NoError(t, err)
	require.NoError(t, old.Put(testContext(t), "in", items(2)...))
	g.came(t)
	_, err = pipeline.Open(testContext(t), pipeline.Config{Bus: b}, spec)
	require.ErrorIs(t, err, bus.ErrExists)
	require.ErrorContains(t, err, "the old one")

	p := open(t, b, oneStage(pipeline.StageSpec{Func: pass}), func(c *pipeline.Config) { c.TakeOver, c.By = true, "the new one" })
	require.Equal(t, ids(items(2)), ids(drainSink(t, p, "out", 2)))
	close(g.goCh) // the old engine's handler ends too late
	<-old.Done()
	require.ErrorIs(t, old.Err(), bus.ErrFenced)
	require.ErrorContains(t, old.Err(), "the new one")
	client, err := pipeline.Connect(b, "default", spec.Name)
	require.NoError(t, err)
	for range 20 { // the old engine answers no more, though it is not closed yet
		st, err := client.Status(testContext(t))
		require.NoError(t, err)
		require.Equal(t, "the new one", st.By)
	}
	require.ErrorIs(t, old.Put(testContext(t), "in", items(1)...), bus.ErrFenced)
	require.ErrorIs(t, old.Close(testContext(t)), bus.ErrFenced)
	require.NoError(t, p.Drain(testContext(t)))
	require.Zero(t, status(t, p).Streams[1].Items, "and no output came twice")
}

// An engine without work is told that it was replaced.
func TestTakenOverWhileIdle(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	spec := oneStage(pipeline.StageSpec{Func: pass})
	old, err := pipeline.Open(testContext(t), pipeline.Config{Bus: b}, spec)
	require.NoError(t, err)
	p := open(t, b, spec, func(c *pipeline.Config) { c.TakeOver, c.By = true, "the new one" })
	select {
	case <-old.Done():
	case <-testContext(t).Done():
		t.Fatal("the old engine goes on")
	}
	require.ErrorIs(t, old.Err(), bus.ErrFenced)
	require.ErrorContains(t, old.Err(), "the new one")
	require.NoError(t, p.Put(testContext(t), "in", items(1)...))
	require.Len(t, drainSink(t, p, "out", 1), 1)
	require.NoError(t, p.Err())
}

// A stream with more items than fit into memory is read from the log, in order, also after a restart.
func TestMoreItemsThanTheMemoryWindow(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	spec := oneStage(pipeline.StageSpec{Func: pass, InFlight: 64}, func(s *pipeline.StreamSpec) { s.Items = 20_000 })
	p := open(t, b, spec)
	require.NoError(t, p.Pause(testContext(t), "work"))
	const n = 9000
	require.NoError(t, p.Put(testContext(t), "in", items(n)...))
	st := status(t, p).Streams[0]
	require.Equal(t, n, st.Items)
	require.LessOrEqual(t, st.InMemory, 4096)
	require.NoError(t, p.Close(testContext(t)))
	p = open(t, b, spec)
	require.Equal(t, st.Bytes, status(t, p).Streams[0].Bytes)
	require.NoError(t, p.Resume(testContext(t), "work"))
	require.NoError(t, p.Put(testContext(t), "in", pipeline.Item{ID: "last"}))
	require.Equal(t, append(ids(items(n)), "last"), ids(drainSink(t, p, "out", n+1)))
	require.NoError(t, p.Drain(testContext(t)))
	require.Zero(t, status(t, p).Streams[0].Bytes)
}

// Large bodies are stored separately, come back complete from memory and from the log, and are deleted.
func TestLargeBodies(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	spec := oneStage(pipeline.StageSpec{Func: pass, InFlight: 8})
	p := open(t, b, spec)
	require.NoError(t, p.Pause(testContext(t), "work"))
	body := func(i int) wire.Raw {
		raw := make(wire.Raw, 20_000+3000*i)
		for k := range raw {
			raw[k] = byte(i + k)
		}
		return raw
	}
	var all []pipeline.Item
	for i := range 40 {
		all = append(all, pipeline.Item{ID: fmt.Sprint(i), Body: body(i)}, pipeline.Item{ID: fmt.Sprint("small", i), Body: wire.Raw{1}})
	}
	require.NoError(t, p.Put(testContext(t), "in", all...))
	require.NoError(t, p.Close(testContext(t)))
	p = open(t, b, spec)
	require.NoError(t, p.Resume(testContext(t), "work"))
	for i, it := range drainSink(t, p, "out", 80) {
		require.Equal(t, all[i].ID, it.ID)
		require.Equal(t, all[i].Body, it.Body)
	}
	names := pipeline.Address{Namespace: "default", Name: "p"}
	s := findStream(t, b, names.BodyStream("in", 0))
	require.Eventually(t, func() bool {
		st, err := s.State(testContext(t))
		return err == nil && st.Messages == 0
	}, 2*time.Minute, 50*time.Millisecond, "completed bodies are deleted")
	err := p.Put(testContext(t), "in", pipeline.Item{Body: make(wire.Raw, pipeline.MaxBody+1)})
	require.ErrorIs(t, err, bus.ErrInvalid)
	require.ErrorContains(t, err, "an item may have 536870912 (cut it into several")
	err = p.Put(testContext(t), "in", pipeline.Item{Body: make(wire.Raw, 300<<20)})
	require.ErrorIs(t, err, bus.ErrInvalid)
	require.ErrorContains(t, err, "never fits into a bound of 268435456; raise bytes")
}

// With a producer ten times as fast as its consumer, memory stays within the window, and the producer is blocked. The
// test runs alone, because it measures the heap.
func TestMemoryStaysBounded(t *testing.T) {
	runtime.GC() // garbage of earlier tests counts as well
	b := newBus(t)
	var handled atomic.Int64
	spec := oneStage(pipeline.StageSpec{Func: func(ctx context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
		handled.Add(1)
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
		return nil, nil
	}}, func(s *pipeline.StreamSpec) { s.Items, s.Bytes = 100_000, 48<<20 })
	p := open(t, b, spec)
	ctx, cancel := context.WithTimeout(t.Context(), time.Duration(soakNumber(t, "TROUPE_SOAK_SECONDS", 2))*time.Second)
	defer cancel()
	var put atomic.Int64
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			batch := make([]pipeline.Item, 40)
			for i := range batch {
				batch[i].Body = make(wire.Raw, 8<<10)
			}
			for p.Put(ctx, "in", batch...) == nil {
				put.Add(int64(len(batch)))
			}
		})
	}
	var most uint64
	full := false
	for ctx.Err() == nil {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		most = max(most, m.HeapInuse)
		st := status(t, p).Streams[0]
		require.LessOrEqual(t, st.Bytes, st.MaxBytes+16<<10)
		full = full || st.Bytes > st.MaxBytes*9/10
		time.Sleep(20 * time.Millisecond)
	}
	group.Wait()
	require.True(t, full || put.Load() > 2*handled.Load(), "the producer is much faster: %d put, %d handled", put.Load(), handled.Load())
	require.Less(t, most, uint64(512<<20), "memory is bounded, whatever the stream has")
	t.Logf("%d put, %d handled, heap up to %d MiB", put.Load(), handled.Load(), most>>20)
}

// No timeout takes an item away from a slow handler while its worker lives.
func TestASlowHandlerKeepsItsItem(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	p := open(t, newBus(t), oneStage(pipeline.StageSpec{Workers: 2, Func: func(ctx context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
		if in[0].ID == "i0" {
			calls.Add(1)
			time.Sleep(1500 * time.Millisecond)
		}
		return pass(ctx, in)
	}}))
	require.NoError(t, p.Put(testContext(t), "in", items(3)...))
	got := ids(drainSink(t, p, "out", 3))
	require.Equal(t, "i0", got[2], "the others passed it")
	require.EqualValues(t, 1, calls.Load())
}

// A close while items run leaves every item either completed or in its stream.
func TestCloseInTheMiddle(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	var mu sync.Mutex
	effects := map[string]int{}
	handle := func(ctx context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
		if in[0].Stream == "b" && in[0].Attempt == 1 && len(in[0].ID)%3 == 0 {
			return nil, errors.New("once more")
		}
		return pass(ctx, in)
	}
	const n = 2000
	p := open(t, b, three(handle))
	require.NoError(t, p.Put(testContext(t), "a", items(n)...))
	for range 4 {
		require.NoError(t, p.Close(testContext(t)))
		p = open(t, b, three(handle))
	}
	for _, it := range drainSink(t, p, "d", n) {
		mu.Lock()
		effects[it.ID]++
		mu.Unlock()
	}
	require.Len(t, effects, n)
	require.NoError(t, p.Drain(testContext(t)))
	st := status(t, p)
	for _, s := range st.Streams {
		require.Zero(t, s.Items, s.Name)
	}
	require.Zero(t, st.Dead)
}

// A server that is stopped in the middle of a batch may leave a part of it. That part is ignored and deleted.
func TestAPartialBatchIsDeleted(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	spec := oneStage(pipeline.StageSpec{Func: pass})
	p := open(t, b, spec)
	require.NoError(t, p.Pause(testContext(t), "work"))
	require.NoError(t, p.Put(testContext(t), "in", items(2)...))
	require.NoError(t, p.Close(testContext(t)))
	at := pipeline.Address{Namespace: "default", Name: "p"}
	for n := range 3 {
		m := &bus.Msg{Subject: at.Items("in", 0), Header: bus.Header{}}
		m.Header.Set("Troupe-Item", fmt.Sprintf(`{"n":%d,"id":"ghost%d","v":0,"at":0}`, 3+n, n))
		appendMsg(t, b, m)
	}
	p = open(t, b, spec)
	require.NoError(t, p.Resume(testContext(t), "work"))
	require.NoError(t, p.Put(testContext(t), "in", pipeline.Item{ID: "next"}))
	require.Equal(t, []string{"i0", "i1", "next"}, ids(drainSink(t, p, "out", 3)))
	require.NoError(t, p.Drain(testContext(t)))
}

// Completed items behind a long-running item are deleted from the log.
func TestALongItemDoesNotKeepTheOthersOnDisk(t *testing.T) {
	if testing.Short() {
		t.Skip("it needs the machine for itself under the race detector: the second command of make race runs it")
	}
	t.Parallel()
	b := newBus(t)
	holdCh := make(chan struct{})
	p := open(t, b, oneStage(pipeline.StageSpec{Workers: 2, InFlight: 64, Func: func(ctx context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
		if in[0].ID == "long" {
			select {
			case <-holdCh:
			case <-ctx.Done():
			}
			return pass(ctx, in)
		}
		return nil, nil
	}}))
	require.NoError(t, p.Put(testContext(t), "in", pipeline.Item{ID: "long"}))
	const n = 12_000
	require.NoError(t, p.Put(testContext(t), "in", items(n)...))
	require.Eventually(t, func() bool { return status(t, p).Streams[0].Items == 1 }, 2*time.Minute, 10*time.Millisecond)
	s := findStream(t, b, pipeline.Address{Namespace: "default", Name: "p"}.Stream())
	require.Eventually(t, func() bool {
		st, err := s.State(testContext(t))
		return err == nil && st.Messages < n-1000
	}, 2*time.Minute, 50*time.Millisecond)
	close(holdCh)
	require.Equal(t, []string{"long"}, ids(drainSink(t, p, "out", 1)))
	require.Eventually(t, func() bool {
		st, err := s.State(testContext(t))
		return err == nil && st.Messages < 10
	}, 2*time.Minute, 50*time.Millisecond)
}

// The process that runs the pipeline is killed again and again. The next one continues from the log, and the producer,
// which repeats unanswered puts, stores nothing twice.
func TestTheEngineIsKilled(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ items, piece, bytes, through int }{
		"small items":                 {2000, 8, 0, 150},
		"items larger than a message": {36, 1, 2_500_000, 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			killEngines(t, c.items, c.piece, c.bytes, c.through)
		})
	}
}

// killEngines puts n items in pieces and kills the engine three times, each time after more items have passed.
func killEngines(t *testing.T, n, piece, bytes, through int) {
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	b := bustest.Open(t, bus.Config{InProcess: srv})
	c, err := pipeline.Connect(b, "default", "p")
	require.NoError(t, err)
	all := items(n)
	for i := range all {
		all[i].Body = bodyOf(i, bytes)
	}
	putCh := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 3*time.Minute) // for all of them
		defer cancel()
		producer := c.Producer()
		for some := range slices.Chunk(all, piece) {
			if err := producer.Put(ctx, "a", some...); err != nil {
				putCh <- err
				return
			}
		}
		putCh <- nil
	}()
	for i := range 3 {
		engine := spawn(t, nil, engineRole, srv.URL())
		t.Cleanup(engine.kill)
		require.Eventually(t, func() bool {
			st, err := c.Status(testContext(t))
			return err == nil && st.Streams[3].Items > through*(i+1)
		}, 2*time.Minute, time.Millisecond)
		engine.kill()
	}
	p := open(t, b, three(pass))
	require.NoError(t, <-putCh)
	seen := map[string]int{}
	for _, it := range drainSink(t, p, "d", n) {
		seen[it.ID]++
		var i int
		_, err := fmt.Sscanf(it.ID, "i%d", &i)
		require.NoError(t, err)
		require.True(t, slices.Equal(all[i].Body, it.Body), "the body of %s", it.ID)
	}
	require.Len(t, seen, n)
	require.NoError(t, p.Drain(testContext(t)))
	for _, s := range status(t, p).Streams {
		require.Zero(t, s.Items, s.Name)
		require.Zero(t, s.Bytes, s.Name)
	}
}
