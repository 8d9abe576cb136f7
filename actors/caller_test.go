package actors

import (
	"context"
	"testing"
	"time"

	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/wire"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func newCallerState() *callerState { return &callerState{calls: map[uint64]*call{}} }

// TestCallerNeverAdmitsACallTwice: in every state of a call, a repeat finds the call or that it is over.
func TestCallerNeverAdmitsACallTwice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, now := newCallerState(), time.Now()
		var all []*call // admitted calls, by sequence
		pick := func() *call { return all[rapid.IntRange(0, len(all)-1).Draw(t, "call")] }
		forget := func(c *call) {
			if c.phase == answered {
				c.phase = forgotten
			}
		}
		giveUp := func(c *call) {
			switch c.phase {
			case queued:
				c.dropped, c.phase = true, forgotten
				s.retire(c)
			case running:
				c.dropped = true
			}
		}
		for range rapid.IntRange(1, 150).Draw(t, "steps") {
			step := rapid.IntRange(0, 7).Draw(t, "step")
			if step < 3 || len(all) == 0 {
				h := &wire.Header{Seq: uint64(len(all) + 1)}
				if c, over := s.find(h, now); c != nil || over {
					t.Fatalf("call %d has not come yet", h.Seq)
				}
				c := &call{header: h, caller: s}
				s.calls[h.Seq] = c
				all = append(all, c)
				continue
			}
			switch c := pick(); step {
			case 3:
				if c.phase == queued {
					c.phase = running
				}
			case 4: // it ends, and is answered unless it was cancelled
				if c.phase == running && c.dropped {
					c.phase = forgotten
					s.retire(c)
				} else if c.phase == running {
					c.phase = answered
				}
			case 5: // its answer is dropped
				forget(c)
				s.retire(c)
			case 6:
				giveUp(c)
			case 7:
				s.acknowledge(c.header.Seq, forget, giveUp)
			}
			open, buried := 0, 0
			for _, c := range all {
				known, over := s.find(c.header, now)
				switch {
				case known == nil && !over:
					t.Fatalf("call %d would run again", c.header.Seq)
				case c.phase <= running && known != c:
					t.Fatalf("call %d is under way and not known", c.header.Seq)
				case c.phase <= running && !c.dropped && c.header.Seq <= s.acked:
					t.Fatalf("call %d runs although its caller has cancelled it", c.header.Seq)
				case c.phase > running && known != nil && c.header.Seq <= s.acked:
					t.Fatalf("call %d is remembered for nothing", c.header.Seq)
				}
				if c.phase <= running {
					open++
				}
				if known == tombstone {
					buried++
				}
			}
			if s.tombstones != buried || s.busy() != (open > 0) {
				t.Fatalf("%d calls gone, not %d; %d under way, busy %t", buried, s.tombstones, open, s.busy())
			}
		}
	})
}

// TestCallerTombstonesAreBounded: a caller that acknowledges nothing has a bounded number of entries.
func TestCallerTombstonesAreBounded(t *testing.T) {
	s, now := newCallerState(), time.Now()
	slow := &call{header: &wire.Header{Seq: 1}, caller: s, phase: running}
	s.calls[1] = slow
	const n = 5 * maxTombstones
	for seq := uint64(2); seq <= n; seq++ {
		s.markOver(seq)
		if len(s.calls) > maxTombstones+1 {
			t.Fatalf("%d entries after %d calls", len(s.calls), seq)
		}
	}
	for _, seq := range []uint64{2, n / 2, n} {
		c, over := s.find(&wire.Header{Seq: seq}, now)
		require.True(t, c == tombstone || over, "%d", seq)
	}
	c, over := s.find(&wire.Header{Seq: n + 1}, now)
	require.True(t, c == nil && !over)
	c, _ = s.find(&wire.Header{Seq: 1}, now)
	require.Same(t, slow, c)

	none := func(*call) {}
	s.acknowledge(n/2, none, none) // far below the floor: still valid
	require.Less(t, s.floor-s.acked, uint64(n))
	slow.phase = forgotten
	s.acknowledge(n, none, none)
	s.retire(slow)
	require.Zero(t, s.tombstones)
	require.LessOrEqual(t, len(s.calls), 1)
}

func TestCallerAfterPurge(t *testing.T) {
	now := time.Now()
	s := newCallerState()
	s.unknownBefore = now.Add(-time.Minute)
	for age, want := range map[time.Duration]bool{0: false, time.Second: false, 2 * time.Minute: true} {
		_, over := s.find(&wire.Header{Seq: 1, Age: age}, now)
		require.Equal(t, want, over, "first sent %s ago", age)
	}
}

func TestSequencerHasItsOwnOrder(t *testing.T) {
	own, sequenced := orderOf(&wire.Header{Session: "a"}), orderOf(&wire.Header{Session: "b", Stream: "a"})
	require.Equal(t, own.session, sequenced.session)
	require.NotEqual(t, own, sequenced)
}

// TestLargeAnswersOfADeadCallerAreDropped: a large answer is held as long as its caller's inbox has a subscriber;
// afterwards it is dropped and calls start again.
func TestLargeAnswersOfADeadCallerAreDropped(t *testing.T) {
	st := newHostFixture(t, funcClass(methods{"large": func(context.Context, []byte) ([]byte, error) { return wire.Marshal(make([]byte, 1<<20)) }}))
	w := st.start(WorkerSpec{})
	sub, err := st.ep.Bus().Conn().SubscribeSync(st.ep.Inbox("caller"))
	require.NoError(t, err)
	require.NoError(t, st.ep.Bus().Flush(context.Background()))
	w.inject(wire.Header{Session: "caller", Seq: 1, Method: "large"}, nil, time.Now())
	m, err := sub.NextMsg(2 * time.Minute)
	require.NoError(t, err)
	f, err := wire.ParseFrame(m.Data)
	require.NoError(t, err)
	require.NotEmpty(t, f.Header.Ref.Owner)

	for range 20 { // probes arrive and have no further effect
		m, err := sub.NextMsg(2 * time.Minute)
		require.NoError(t, err)
		f, err := wire.ParseFrame(m.Data)
		require.NoError(t, err)
		require.Equal(t, wire.KindProgress, f.Kind)
	}
	require.Equal(t, 1, st.host.ep.Values().Uploads())

	require.NoError(t, sub.Unsubscribe())
	require.Eventually(t, func() bool { return st.host.ep.Values().Uploads() == 0 && w.idle(true) }, 2*time.Minute, 10*time.Millisecond)
	next := st.inbox("caller")
	w.statusAsked(&wire.Header{Session: "caller", Seq: 1, Age: 1}, time.Now())
	require.Equal(t, wire.StateUnknown, next().Header.State, "the caller may still exist")
}

// TestMethodHearsOfItsCallersDeadline: a cancellation that is sent because the caller's deadline has passed may arrive before the
// worker's own timer fires; the method hears of the deadline either way.
func TestMethodHearsOfItsCallersDeadline(t *testing.T) {
	type none struct{}
	startedCh, errCh := make(chan struct{}, 1), make(chan error, 1)
	c := NewClass("waits", func(context.Context, Setup) (*none, error) { return &none{}, nil })
	Method(c, "wait", func(_ *none, ctx context.Context, _ None) (None, error) {
		startedCh <- struct{}{}
		<-ctx.Done()
		errCh <- ctx.Err()
		return None{}, nil
	})
	st := newHostFixture(t, c.Class)
	st.start(WorkerSpec{})
	for cause, want := range map[bus.Code]error{
		bus.CodeTimedOut:   context.DeadlineExceeded,
		bus.CodeCancelled:  context.Canceled,
		bus.CodeWorkerLost: context.Canceled,
	} {
		g := st.send(calls.Call{Method: "wait", Timeout: time.Hour})
		<-startedCh
		g.Fail(bus.Errorf(cause, "the call is over"))
		require.ErrorIs(t, <-errCh, want)
	}
}
