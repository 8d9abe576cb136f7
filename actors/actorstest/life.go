package actorstest

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
)

// life: beats come whatever the worker does, and tell busy from dead; a call may last longer than any of them.
func (s *suite) life(t *testing.T) {
	const often = 15 * time.Millisecond
	t.Run("beats tell busy from idle", func(t *testing.T) {
		st := s.stage(t, Role{World: 2, Gen: 3, HeartbeatEvery: often})
		life := st.life()
		idle := life.next(1)
		require.Equal(t, []any{uint32(3), actors.Ready, time.Duration(0), 0, 0}, []any{idle.Gen, idle.State, idle.Busy, idle.Calls, idle.Queued})
		require.NotEmpty(t, idle.Node)
		blocked := st.send(bus.Call{Method: "block", Parts: st.one(1, "k")})
		st.await(1, "begin k")
		waiting := st.send(bus.Call{Method: "note", Parts: st.one(1, "n")})
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
	t.Run("a call longer than all patience", func(t *testing.T) {
		st := s.stage(t, Role{HeartbeatEvery: often})
		life := st.life()
		g := st.send(bus.Call{Method: "block", Parts: st.one(0, "k"), AskAfter: often})
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

// life follows the beats of a role.
type life struct {
	st  *stage
	ch  chan *bus.Msg
	got []actors.Heartbeat
}

func (st *stage) life() *life {
	st.t.Helper()
	ch := st.subscribe(st.role.Address.Life())
	require.NoError(st.t, st.ep.Bus().Flush(st.t.Context()))
	return &life{st: st, ch: ch}
}

// next is the next beat of that rank.
func (l *life) next(rank int) actors.Heartbeat {
	l.st.t.Helper()
	return l.until(rank, func(actors.Heartbeat) bool { return true })
}

// until is the next beat of that rank of which it holds.
func (l *life) until(rank int, holds func(actors.Heartbeat) bool) actors.Heartbeat {
	l.st.t.Helper()
	for {
		for len(l.got) == 0 {
			f, err := wire.ParseFrame(l.st.receive(l.ch, "no beat"))
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

// await waits until the rank has said that it is in that state.
func (l *life) await(rank int, state actors.State) actors.Heartbeat {
	l.st.t.Helper()
	return l.until(rank, func(b actors.Heartbeat) bool { return b.State == state })
}
