package actors

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"weak"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// beats returns a function that waits for the next heartbeat of the role.
func (st *hostFixture) beats() func() Heartbeat {
	st.t.Helper()
	sub, err := st.ep.Bus().Conn().SubscribeSync(st.address.Life())
	require.NoError(st.t, err)
	require.NoError(st.t, st.ep.Bus().Flush(context.Background()))
	st.t.Cleanup(func() { _ = sub.Unsubscribe() })
	var got []Heartbeat
	return func() Heartbeat {
		for len(got) == 0 {
			m, err := sub.NextMsg(2 * time.Minute)
			require.NoError(st.t, err)
			f, err := wire.ParseFrame(m.Data)
			require.NoError(st.t, err)
			require.NoError(st.t, wire.Unmarshal(f.Body, &got))
		}
		b := got[0]
		got = got[1:]
		return b
	}
}

// TestPanicFails: with PanicFails a panic ends the worker. Its call has the stack, other calls get worker_lost, no call
// starts, and a heartbeat has the cause at once, although one method does not end.
func TestPanicFails(t *testing.T) {
	t.Parallel()
	running, stuck, began := newBlocking(), newBlocking(), atomic.Bool{}
	class := funcClass(methods{
		"c_block": running.method, "c_stuck": stuck.ignoreCancel, "panic": panics,
		"next": func(context.Context, []byte) ([]byte, error) { began.Store(true); return nil, nil },
	})
	st := newHostFixtureWith(t, HostConfig{Classes: []*Class{class}, HeartbeatEvery: time.Hour})
	st.host.endGrace = defaultEndGrace // the heartbeat must come before it has passed
	defer close(stuck.releaseCh)
	w := st.start(WorkerSpec{PanicFails: true})
	next := st.beats()
	blocked := st.send(calls.Call{Method: "c_block"})
	st.send(calls.Call{Method: "c_stuck"})
	<-running.beganCh
	<-stuck.beganCh
	w.mu.Lock() // both calls are queued when the panic happens
	panicked, waiting := st.send(calls.Call{Method: "panic"}), st.send(calls.Call{Method: "next"})
	require.NoError(t, st.ep.Bus().Flush(context.Background()))
	w.mu.Unlock()
	at := time.Now()
	for b := next(); ; b = next() {
		if b.State == Failed {
			require.ErrorIs(t, b.Err, bus.ErrPanic)
			require.Contains(t, b.Err.Message, "the floor gave way")
			require.Contains(t, b.Err.Stack, "panics")
			break
		}
	}
	require.Less(t, time.Since(at), time.Minute, "methods that do not end are not waited for")
	<-panicked.Done()
	err := bus.AsError(panicked.Answers()[0].Err)
	require.ErrorIs(t, err, bus.ErrPanic)
	require.Contains(t, err.Stack, "panics")
	for _, g := range []*calls.Gather{blocked, waiting} {
		<-g.Done()
		require.ErrorIs(t, g.Answers()[0].Err, bus.ErrWorkerLost)
		require.ErrorContains(t, g.Answers()[0].Err, "the floor gave way")
	}
	require.False(t, began.Load())
	<-w.Done()
	state, why := w.State()
	require.Equal(t, Failed, state)
	require.ErrorIs(t, why, bus.ErrPanic)
	require.ErrorIs(t, w.Stop(t.Context()), bus.ErrPanic)
	require.Empty(t, st.host.Workers())
}

// TestPanicDuringStop: a failure during Stop ends the worker once.
func TestPanicDuringStop(t *testing.T) {
	for range 20 {
		b := newBlocking()
		st := newHostFixture(t, funcClass(methods{"panic": func(ctx context.Context, body []byte) ([]byte, error) {
			_, _ = b.method(ctx, body)
			return panics(ctx, body)
		}}))
		w := st.start(WorkerSpec{PanicFails: true})
		g := st.send(calls.Call{Method: "panic"})
		<-b.beganCh
		var group sync.WaitGroup
		for range 3 {
			group.Go(func() { _ = w.Stop(t.Context()) })
		}
		for state, _ := w.State(); state != Stopping; state, _ = w.State() {
			runtime.Gosched()
		}
		close(b.releaseCh)
		group.Wait()
		<-w.Done()
		<-g.Done()
		require.ErrorIs(t, g.Answers()[0].Err, bus.ErrPanic)
		state, err := w.State()
		require.Equal(t, Failed, state)
		require.ErrorIs(t, err, bus.ErrPanic)
	}
}

type panickingError struct{ words *string }

func (e *panickingError) Error() string { return *e.words }

// TestErrorsOfMethods: every kind of error, and a panic in an error's method, becomes the call's error.
func TestErrorsOfMethods(t *testing.T) {
	elsewhere := &bus.Error{Code: bus.CodePanic, Message: "bang", Role: "other", Rank: 3, Method: "boom", Stack: "there"}
	st := newHostFixture(t, funcClass(methods{
		"typed_nil": returnError((*panickingError)(nil)),
		"no_code":   returnError(&bus.Error{Message: "nameless"}),
		"not_text":  returnError(errors.New("bad \xff byte")),
		"details":   returnError(&bus.Error{Code: "weird\xff", Message: "m", Details: map[string]string{"k\xff": "v\xff"}}),
		"elsewhere": returnError(fmt.Errorf("asked for help: %w", elsewhere)),
		"goexit":    func(context.Context, []byte) ([]byte, error) { runtime.Goexit(); return nil, nil },
		"beyond":    func(_ context.Context, body []byte) ([]byte, error) { return body[:1<<20], nil },
	}))
	w := st.start(WorkerSpec{PanicFails: false})
	require.ErrorIs(t, st.fails("typed_nil"), bus.ErrPanic)
	err := st.fails("no_code")
	require.ErrorIs(t, err, bus.ErrApplication)
	require.Equal(t, "nameless", err.Message)
	require.Equal(t, "bad \uFFFD byte", st.fails("not_text").Message)
	require.Equal(t, map[string]string{"k\uFFFD": "v\uFFFD"}, st.fails("details").Details)
	err = st.fails("elsewhere")
	require.Contains(t, err.Message, "asked for help: other[3] boom: bang")
	require.Equal(t, []any{"role", 0, "elsewhere", "here", "there"}, []any{err.Role, err.Rank, err.Method, err.Node, err.Stack})
	require.Contains(t, st.fails("goexit").Message, "ended its goroutine")
	require.Contains(t, st.fails("beyond").Stack, "TestErrorsOfMethods")
	state, _ := w.State()
	require.Equal(t, Ready, state)

	picky := newHostFixture(t, funcClass(methods{"elsewhere": returnError(elsewhere), "ok": returnNil}))
	picky.start(WorkerSpec{PanicFails: true})
	require.ErrorIs(t, picky.fails("elsewhere"), bus.ErrPanic)
	picky.do("ok") // the panic was in another worker
}

// TestCallThatDoesNotReturn: a method that ends its goroutine, or does not return, does not block other calls.
func TestCallThatDoesNotReturn(t *testing.T) {
	for name, astray := range map[string]func(ctx context.Context){
		"ends its goroutine": func(context.Context) { runtime.Goexit() },
		"waits":              func(ctx context.Context) { <-ctx.Done() },
	} {
		t.Run(name, func(t *testing.T) {
			var runs atomic.Int64
			st := newHostFixture(t, funcClass(methods{"c_ok": returnNil, "quick": func(ctx context.Context, _ []byte) ([]byte, error) {
				if runs.Add(1) > 20 {
					astray(ctx)
				}
				return []byte{0xc0}, nil
			}}))
			st.start(WorkerSpec{})
			for range 20 {
				st.do("quick")
			}
			g := st.send(calls.Call{Method: "quick"})
			st.do("c_ok")
			g.Cancel()
			<-g.Done()
			st.do("c_ok")
		})
	}
}

func TestStopIsBounded(t *testing.T) {
	t.Parallel()
	b := newBlocking()
	st := newHostFixture(t, funcClass(methods{"stuck": b.ignoreCancel, "c_stuck_too": b.ignoreCancel}))
	defer close(b.releaseCh)
	w := st.start(WorkerSpec{})
	g, _ := st.send(calls.Call{Method: "stuck"}), st.send(calls.Call{Method: "c_stuck_too"})
	<-b.beganCh
	<-b.beganCh
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	began := time.Now()
	err := st.host.Close(ctx)
	require.Less(t, time.Since(began), st.host.endGrace+time.Minute)
	require.ErrorIs(t, err, bus.ErrTimedOut)
	require.ErrorContains(t, err, "still running in role[0] although cancelled: c_stuck_too, stuck")
	<-w.Done()
	state, why := w.State()
	require.Equal(t, Stopped, state)
	require.ErrorIs(t, why, bus.ErrTimedOut)
	select {
	case <-g.Done():
		t.Fatal("a call that runs has no answer")
	default:
	}
	require.NoError(t, st.host.Close(ctx), "a second time there is nothing to do")
}

// TestFirstStopContextToEndCounts: of several Stops the first context to end counts.
func TestFirstStopContextToEndCounts(t *testing.T) {
	b := newBlocking()
	st := newHostFixture(t, funcClass(methods{"block": b.method}))
	w := st.start(WorkerSpec{})
	g := st.send(calls.Call{Method: "block"})
	<-b.beganCh
	patient := make(chan error)
	go func() { patient <- w.Stop(context.Background()) }()
	for state := State(""); state != Stopping; state, _ = w.State() {
		runtime.Gosched()
	}
	hasty, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, w.Stop(hasty))
	require.NoError(t, <-patient)
	<-g.Done()
	require.ErrorIs(t, g.Answers()[0].Err, bus.ErrWorkerLost)
}

// closingObject is an object that records when it is closed.
type closingObject struct {
	name string
	log  func(string)
	how  func() error
}

func (c *closingObject) Handle(context.Context, string, []byte) ([]byte, error) {
	return []byte{0xc0}, nil
}
func (c *closingObject) Close(context.Context) error { c.log(c.name); return c.how() }

func closingClass(how map[string]func() error) (*Class, func() string) {
	var mu sync.Mutex
	var closed []string
	log := func(name string) {
		mu.Lock()
		defer mu.Unlock()
		closed = append(closed, name)
	}
	c := &Class{Name: "closing", Open: true, New: func(_ context.Context, s Setup) (Handler, error) {
		return &closingObject{name: "<" + s.Object + ">", log: log, how: how[s.Object]}, nil
	}}
	return c, func() string {
		mu.Lock()
		defer mu.Unlock()
		return strings.Join(closed, " ")
	}
}

// TestObjectsAreClosed: every object is closed, the main one last, even if one of them fails.
func TestObjectsAreClosed(t *testing.T) {
	class, closed := closingClass(map[string]func() error{
		"":  func() error { return nil },
		"a": func() error { panic("no") },
		"b": func() error { return errors.New("still in use") },
	})
	st := newHostFixture(t, class)
	w := st.start(WorkerSpec{})
	for _, name := range []string{"a", "b"} {
		st.do(VerbCreate, CreateRequest{Name: name, Class: "closing"})
	}
	err := w.Stop(t.Context())
	require.ErrorContains(t, err, `close object "b": still in use`)
	require.ErrorContains(t, err, "panic: no")
	require.Equal(t, "<b> <a> <>", closed())
}

func TestCloseIsBounded(t *testing.T) {
	t.Parallel()
	releaseCh := make(chan struct{})
	defer close(releaseCh)
	class, _ := closingClass(map[string]func() error{"": func() error { <-releaseCh; return nil }})
	st := newHostFixture(t, class)
	w := st.start(WorkerSpec{})
	require.ErrorContains(t, w.Stop(t.Context()), "Close of class closing has not returned in role[0]")
}

// TestObjectCreatedAfterTheEndIsClosed: an object whose constructor returns after the worker's end is closed.
func TestObjectCreatedAfterTheEndIsClosed(t *testing.T) {
	t.Parallel()
	b := newBlocking()
	closedCh := make(chan string, 2)
	slow := &Class{Name: "slow", Open: true, New: func(_ context.Context, s Setup) (Handler, error) {
		if s.Object != "" {
			_, _ = b.ignoreCancel(context.Background(), nil)
		}
		return &closingObject{name: s.Object, log: func(name string) { closedCh <- name }, how: func() error { return nil }}, nil
	}}
	st := newHostFixture(t, slow)
	w := st.start(WorkerSpec{})
	st.send(calls.Call{Method: VerbCreate}, CreateRequest{Name: "late", Class: "slow"})
	<-b.beganCh
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorContains(t, w.Stop(ctx), "although cancelled: "+VerbCreate)
	require.Equal(t, "", <-closedCh)
	close(b.releaseCh)
	require.Equal(t, "late", <-closedCh)
}

// inject passes a call to the worker as its host would.
func (w *Worker) inject(h wire.Header, body []byte, now time.Time) {
	h.Inline = max(h.Inline, 32<<10)
	_, _ = w.accept(&delivery{frame: wire.Frame{Header: h}}, body, now)
}

func (w *Worker) awaitNoCalls(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(100 * time.Microsecond) {
		w.mu.Lock()
		n := len(w.active)
		for _, q := range w.queues {
			n += q.waiting.len()
		}
		w.mu.Unlock()
		if n == 0 {
			return
		}
		require.True(t, time.Now().Before(end), "%d calls do not end", n)
	}
}

// inbox returns a function that waits for the next frame to a caller.
func (st *hostFixture) inbox(session string) func() wire.Frame {
	st.t.Helper()
	sub, err := st.ep.Bus().Conn().SubscribeSync(st.ep.Inbox(session))
	require.NoError(st.t, err)
	require.NoError(st.t, st.ep.Bus().Flush(context.Background()))
	st.t.Cleanup(func() { _ = sub.Unsubscribe() })
	var data []byte // the rest of a bundle
	return func() wire.Frame {
		if len(data) == 0 {
			m, err := sub.NextMsg(2 * time.Minute)
			require.NoError(st.t, err)
			f, err := wire.ParseFrame(m.Data)
			require.NoError(st.t, err)
			if f.Kind != wire.KindBundle {
				return f
			}
			data = f.Body
		}
		n := 4 + binary.BigEndian.Uint32(data)
		f, err := wire.ParseFrame(data[4:n])
		require.NoError(st.t, err)
		data = data[n:]
		return f
	}
}

// TestKeptAnswersAreBounded: the answers kept for callers that acknowledge nothing are bounded in number and bytes; the
// oldest are dropped, and their calls do not run again.
func TestKeptAnswersAreBounded(t *testing.T) {
	var ran atomic.Int64
	st := newHostFixture(t, funcClass(methods{
		"count": func(context.Context, []byte) ([]byte, error) { ran.Add(1); return []byte{0xc0}, nil },
		"long":  func(context.Context, []byte) ([]byte, error) { return wire.Marshal(make([]byte, 30<<10)) },
	}))
	w := st.start(WorkerSpec{})
	now := time.Now()
	const n = maxUnacked + 500
	for seq := range uint64(n) {
		w.inject(wire.Header{Session: "s", Seq: seq + 1, Method: "count"}, nil, now)
	}
	w.awaitNoCalls(t)
	require.EqualValues(t, n, ran.Load())
	require.Equal(t, maxUnacked, w.unacked.n)
	s := w.callers["s"]
	require.Len(t, s.calls, n)
	require.Equal(t, 500, s.tombstones)
	require.Same(t, tombstone, s.calls[1])

	next := st.inbox("s")
	for _, seq := range []uint64{1, 500} {
		w.statusAsked(&wire.Header{Session: "s", Seq: seq, Age: 1}, now)
		require.Equal(t, wire.StateUnknown, next().Header.State)
	}
	w.statusAsked(&wire.Header{Session: "s", Seq: 501, Age: 1}, now)
	require.Equal(t, wire.KindAnswer, next().Kind)
	w.inject(wire.Header{Session: "s", Seq: 1, Method: "count", Age: 1}, nil, now)
	w.awaitNoCalls(t)
	require.EqualValues(t, n, ran.Load())

	w.inject(wire.Header{Session: "s", Seq: n + 1, Acked: n, Method: "count"}, nil, now)
	w.awaitNoCalls(t)
	require.Len(t, s.calls, 1)
	require.Zero(t, s.tombstones)
	require.Equal(t, w.unacked.newest.reply.Size(), w.unackedBytes)

	for seq := range uint64(1000) {
		w.inject(wire.Header{Session: "t", Seq: seq + 1, Method: "long"}, nil, now)
	}
	w.awaitNoCalls(t)
	require.LessOrEqual(t, w.unackedBytes, maxUnackedBytes)
	require.Greater(t, w.unackedBytes, maxUnackedBytes-64<<10)
}

// TestBodiesAreFreedAfterTheAnswer: the body of an answered call is garbage although the answer is kept.
func TestBodiesAreFreedAfterTheAnswer(t *testing.T) {
	st := newHostFixture(t, funcClass(methods{"ok": returnNil}))
	w := st.start(WorkerSpec{})
	var bodies []weak.Pointer[byte]
	func() {
		for i := range 20 {
			h := wire.Header{Session: "s", Seq: uint64(i + 1), Method: "ok", Inline: 1 << 10, Meta: []byte{0xc0}, Some: true, Ranks: wire.Ranks(0), CollectSome: true, Collect: wire.Ranks(0)}
			msg := (&wire.Frame{Kind: wire.KindCall, Header: h, Body: make([]byte, 32<<10)}).Append(nil)
			bodies = append(bodies, weak.Make(&msg[0]))
			newReceiver(st.host, st.host.controlCh).handle(&bus.Msg{Subject: st.address.Rank(0), Data: msg})
		}
		w.awaitNoCalls(t)
	}()
	require.Len(t, w.callers["s"].calls, 20)
	for end := time.Now().Add(10 * time.Second); ; {
		runtime.GC()
		left := 0
		for _, b := range bodies {
			if b.Value() != nil {
				left++
			}
		}
		if left <= 1 { // the last one may still be in a register
			return
		}
		require.True(t, time.Now().Before(end), "%d of %d messages are still in memory", left, len(bodies))
	}
}

// TestLargeErrorsAreTruncated: an error is never fetched and must not count as unfetched.
func TestLargeErrorsAreTruncated(t *testing.T) {
	st := newHostFixture(t, funcClass(methods{"fail": returnError(errors.New(strings.Repeat("blah ", 1000)))}))
	w := st.start(WorkerSpec{})
	next := st.inbox("s")
	h := wire.Header{Session: "s", Seq: 1, Method: "fail", Inline: 10}
	_, _ = w.accept(&delivery{frame: wire.Frame{Header: h}}, nil, time.Now())
	f := next()
	require.Equal(t, bus.CodeApplication, f.Header.Code)
	require.LessOrEqual(t, len(f.Body), minErrorRoom)
	w.mu.Lock()
	defer w.mu.Unlock()
	require.Zero(t, w.unfetched)
}

// TestUnfetchedAnswersDelayWork: above the bound of unfetched answers, work waits and control calls run.
func TestUnfetchedAnswersDelayWork(t *testing.T) {
	st := newHostFixture(t, funcClass(methods{"ok": returnNil}))
	w := st.start(WorkerSpec{})
	w.mu.Lock()
	w.unfetched = maxUnfetched + 1
	w.mu.Unlock()
	g := st.send(calls.Call{Method: "ok"})
	probe := st.send(calls.Call{Method: VerbProbe, Control: true})
	<-probe.Done()
	require.NoError(t, probe.Answers()[0].Err)
	select {
	case <-g.Done():
		t.Fatal("there was no room for another answer")
	default:
	}
	w.fetched(maxUnfetched + 1)
	<-g.Done()
	require.NoError(t, g.Answers()[0].Err)
}

// TestSilentCallersArePurged: a caller that was just answered or has a running call is not purged; a call sent before
// the purge does not run, because it may have run already.
func TestSilentCallersArePurged(t *testing.T) {
	b, ran := newBlocking(), atomic.Int64{}
	st := newHostFixture(t, funcClass(methods{
		"count": func(context.Context, []byte) ([]byte, error) { ran.Add(1); return []byte{0xc0}, nil }, "c_block": b.method,
	}))
	w := st.start(WorkerSpec{})
	begin := time.Now()
	next := st.inbox("gone")
	w.inject(wire.Header{Session: "gone", Seq: 1, Method: "count", Order: 7}, nil, begin)
	require.Equal(t, wire.KindAnswer, next().Kind)
	w.inject(wire.Header{Session: "busy", Seq: 1, Method: "c_block"}, nil, begin.Add(-time.Hour))
	<-b.beganCh
	w.purge(begin.Add(callerTTL / 2))
	require.Len(t, w.callers, 2)
	later := begin.Add(callerTTL + time.Minute)
	w.purge(later)
	require.Len(t, w.callers, 1)
	require.Contains(t, w.callers, "busy")
	require.NotContains(t, w.orders, orderID{session: "gone"})

	w.statusAsked(&wire.Header{Session: "gone", Seq: 1, Age: callerTTL}, later)
	require.Equal(t, wire.StateUnknown, next().Header.State)
	w.inject(wire.Header{Session: "gone", Seq: 2, Method: "count"}, nil, later) // a new call creates the caller again
	require.Equal(t, wire.KindAnswer, next().Kind)
	w.inject(wire.Header{Session: "gone", Seq: 1, Method: "count", Age: callerTTL}, nil, later)
	require.Equal(t, wire.StateUnknown, next().Header.State)
	w.statusAsked(&wire.Header{Session: "gone", Seq: 1, Age: callerTTL}, later)
	require.Equal(t, wire.StateUnknown, next().Header.State)
	w.statusAsked(&wire.Header{Session: "gone", Seq: 3, Age: time.Second}, later.Add(time.Minute))
	require.Equal(t, wire.StateNever, next().Header.State, "sent since")
	require.EqualValues(t, 2, ran.Load())

	close(b.releaseCh)
	w.awaitNoCalls(t)
	require.WithinDuration(t, time.Now(), w.callers["busy"].lastSeen, time.Minute, "it has just been answered")
	w.purge(time.Now().Add(callerTTL / 2))
	require.Contains(t, w.callers, "busy")
}

// TestCallersAreBounded: the longest silent callers are purged, and never one with a running call.
func TestCallersAreBounded(t *testing.T) {
	b := newBlocking()
	st := newHostFixture(t, funcClass(methods{"ok": returnNil, "c_block": b.method}))
	w := st.start(WorkerSpec{})
	now := time.Now()
	w.inject(wire.Header{Session: "busy", Seq: 1, Method: "c_block"}, nil, now)
	<-b.beganCh
	for i := range 3 * maxCallers {
		w.cancelRequested(&wire.Header{Session: fmt.Sprint(i), Seq: 1}, now.Add(time.Duration(i)*time.Millisecond))
		require.LessOrEqual(t, len(w.callers), maxCallers)
	}
	require.Contains(t, w.callers, "busy")
	require.Contains(t, w.callers, fmt.Sprint(3*maxCallers-1))
	require.NotContains(t, w.callers, "0")
	close(b.releaseCh)
}

// TestSequencerOrderOutlivesCallers: the order of a sequencer is kept when callers are purged; else a gap would repeat
// calls that ran.
func TestSequencerOrderOutlivesCallers(t *testing.T) {
	var ran atomic.Int64
	st := newHostFixture(t, funcClass(methods{"count": func(context.Context, []byte) ([]byte, error) { ran.Add(1); return []byte{0xc0}, nil }}))
	w := st.start(WorkerSpec{})
	begin := time.Now()
	sequenced := func(session string, seq, order, prev uint64) wire.Header {
		return wire.Header{Session: session, Seq: seq, Method: "count", Stream: "q", Order: order, Prev: prev}
	}
	w.inject(sequenced("a", 1, 1, 0), nil, begin)
	w.inject(sequenced("q", 1, 2, 1), nil, begin) // the sequencer's process is a caller too
	w.awaitNoCalls(t)
	later := begin.Add(2 * callerTTL)
	w.purge(later)
	require.Empty(t, w.callers)
	w.inject(sequenced("b", 1, 3, 2), nil, later)
	w.awaitNoCalls(t)
	require.EqualValues(t, 3, ran.Load())
	w.inject(sequenced("a", 1, 1, 0), nil, later) // a repeat
	w.awaitNoCalls(t)
	require.EqualValues(t, 3, ran.Load())

	w.inject(sequenced("b", 3, 9, 8), nil, later)
	id := orderID{session: "q", sequencer: true}
	require.Len(t, slices.Collect(w.orders[id].Buffered), 1)
	w.purge(later.Add(2 * callerTTL))
	require.Empty(t, slices.Collect(w.orders[id].Buffered), "its sequencer is gone, and will not be asked for ever")
}

// TestReplacedSequencer: early calls of the old sequencer are dropped.
func TestReplacedSequencer(t *testing.T) {
	st := newHostFixture(t, funcClass(methods{"ok": returnNil}))
	w := st.start(WorkerSpec{})
	next, now := st.inbox("a"), time.Now()
	w.inject(wire.Header{Session: "a", Seq: 1, Method: "ok", Stream: "old", Order: 2, Prev: 1}, nil, now)
	w.statusAsked(&wire.Header{Session: "a", Seq: 1, Age: 1}, now)
	require.Equal(t, wire.StateQueued, next().Header.State)
	w.inject(wire.Header{Session: "b", Seq: 1, Method: "ok", Stream: "new", Order: 1}, nil, now)
	w.statusAsked(&wire.Header{Session: "a", Seq: 1, Age: 1}, now)
	require.Equal(t, wire.StateNever, next().Header.State)
	w.inject(wire.Header{Session: "a", Seq: 1, Method: "ok", Stream: "new", Order: 2, Prev: 1, Age: 1}, nil, now)
	require.Equal(t, wire.KindAnswer, next().Kind)
}

// TestEarlyCallOfAPurgedCaller: the caller's state is created again when the call's turn comes.
func TestEarlyCallOfAPurgedCaller(t *testing.T) {
	var ran atomic.Int64
	st := newHostFixture(t, funcClass(methods{"count": func(context.Context, []byte) ([]byte, error) { ran.Add(1); return []byte{0xc0}, nil }}))
	w := st.start(WorkerSpec{})
	now := time.Now()
	w.inject(wire.Header{Session: "a", Seq: 1, Method: "count", Stream: "q", Order: 2, Prev: 1}, nil, now)
	w.mu.Lock()
	delete(w.callers, "a")
	w.mu.Unlock()
	w.inject(wire.Header{Session: "b", Seq: 1, Method: "count", Stream: "q", Order: 1}, nil, now)
	w.awaitNoCalls(t)
	require.EqualValues(t, 2, ran.Load())
}

// TestCallOlderThanTheWorker: a call sent before the worker existed cannot have run, and runs.
func TestCallOlderThanTheWorker(t *testing.T) {
	st := newHostFixture(t, funcClass(methods{"ok": returnNil}))
	w := st.start(WorkerSpec{})
	next := st.inbox("early")
	w.statusAsked(&wire.Header{Session: "early", Seq: 1, Age: time.Hour}, time.Now())
	require.Equal(t, wire.StateNever, next().Header.State)
	w.inject(wire.Header{Session: "early", Seq: 1, Method: "ok", Age: time.Hour}, nil, time.Now())
	require.Equal(t, wire.KindAnswer, next().Kind)
}

// TestLateBody: a body that arrives after its call has ended is freed.
func TestLateBody(t *testing.T) {
	st := newHostFixture(t, funcClass(methods{"ok": returnNil}))
	w := st.start(WorkerSpec{})
	h := wire.Header{Session: "s", Seq: 1, Method: "ok", Inline: 1 << 10, Ref: wire.BodyRef{Owner: "s", ID: 1, Len: 1 << 20}}
	fetch, _ := w.accept(&delivery{frame: wire.Frame{Header: h}}, nil, time.Now())
	require.Len(t, fetch, 1)
	w.beginStop()
	require.Equal(t, answered, fetch[0].phase)
	w.bodyArrived(fetch[0], make([]byte, 1<<20), nil)
	require.Nil(t, fetch[0].body)
}
