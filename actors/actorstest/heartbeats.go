package actorstest

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// heartbeats are sent whatever the worker does and show whether it is busy; a call may last longer than any timeout of
// the runtime.
func (s *suite) heartbeats(t *testing.T) {
	const often = 15 * time.Millisecond
	t.Run("heartbeats show busy and idle", func(t *testing.T) {
		st := s.startRole(t, Role{World: 2, Gen: 3, HeartbeatEvery: often})
		life := st.heartbeats()
		idle := life.next(1)
		require.Equal(t, []any{uint32(3), actors.Ready, time.Duration(0), 0, 0}, []any{idle.Gen, idle.State, idle.Busy, idle.Calls, idle.Queued})
		require.NotEmpty(t, idle.Node)
		blocked := st.send(calls.Call{Method: "block", Parts: st.one(1, "k")})
		st.await(1, "begin k")
		waiting := st.send(calls.Call{Method: "note", Parts: st.one(1, "n")})
		busy := life.until(1, func(b actors.Heartbeat) bool { return b.Busy > 0 && b.Queued == 1 })
		require.Equal(t, 1, busy.Calls)
		later := life.until(1, func(b actors.Heartbeat) bool { return b.Busy > 3*often })
		require.Greater(t, later.Busy, busy.Busy)
		require.Zero(t, life.next(0).Busy)
		st.release(1, "k")
		st.finish(blocked)
		st.finish(waiting)
		life.until(1, func(b actors.Heartbeat) bool { return b.Busy == 0 && b.Calls == 0 && b.Queued == 0 })
	})
	t.Run("a call longer than all timeouts", func(t *testing.T) {
		st := s.startRole(t, Role{HeartbeatEvery: often})
		life := st.heartbeats()
		g := st.send(calls.Call{Method: "block", Parts: st.one(0, "k"), AskAfter: often})
		st.await(0, "begin k")
		var first time.Duration
		st.until("the caller has asked twice", func() bool {
			p := g.Progress()[0]
			if p.State != wire.StateRunning {
				return false
			}
			if first == 0 {
				first = p.For
			}
			return p.For > first
		})
		life.until(0, func(b actors.Heartbeat) bool { return b.Busy > 5*often })
		st.release(0, "k")
		require.Equal(t, "k", read[string](st, st.finish(g)[0]))
		require.Equal(t, 1, st.executions(0, "k"))
	})
}

// heartbeats receives the heartbeats of a role.
type heartbeats struct {
	st  *roleFixture
	ch  chan *bus.Msg
	got []actors.Heartbeat
}

func (st *roleFixture) heartbeats() *heartbeats {
	st.t.Helper()
	ch := st.subscribe(st.role.Address.Life())
	require.NoError(st.t, st.ep.Bus().Flush(st.t.Context()))
	return &heartbeats{st: st, ch: ch}
}

// next returns the next heartbeat of the rank.
func (l *heartbeats) next(rank int) actors.Heartbeat {
	l.st.t.Helper()
	return l.until(rank, func(actors.Heartbeat) bool { return true })
}

// until returns the next heartbeat of the rank for which holds is true.
func (l *heartbeats) until(rank int, holds func(actors.Heartbeat) bool) actors.Heartbeat {
	l.st.t.Helper()
	for {
		for len(l.got) == 0 {
			f, err := wire.ParseFrame(l.st.receive(l.ch, "no heartbeat"))
			require.NoError(l.st.t, err)
			require.Equal(l.st.t, wire.KindBeat, f.Kind)
			require.NoError(l.st.t, wire.Unmarshal(f.Body, &l.got))
		}
		b := l.got[0]
		l.got = l.got[1:]
		if b.Rank == rank && holds(b) {
			return b
		}
	}
}

// await waits for a heartbeat of the rank with that state.
func (l *heartbeats) await(rank int, state actors.State) actors.Heartbeat {
	l.st.t.Helper()
	return l.until(rank, func(b actors.Heartbeat) bool { return b.State == state })
}
