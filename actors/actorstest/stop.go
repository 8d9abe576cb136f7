package actorstest

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// stop: running calls may finish, queued and new work is refused, control calls run; after the grace running calls are
// cancelled.
func (s *suite) stop(t *testing.T) {
	stop := func(st *roleFixture, grace time.Duration) {
		st.t.Helper()
		ask[any](st, 0, actors.VerbStop, actors.StopRequest{Grace: grace})
	}
	t.Run("idle", func(t *testing.T) {
		st := s.startRole(t, Role{})
		life := st.heartbeats()
		stop(st, patience)
		life.await(0, actors.Stopped)
	})
	t.Run("with a running call", func(t *testing.T) {
		st := s.startRole(t, Role{})
		life := st.heartbeats()
		running := st.send(calls.Call{Method: "block", Parts: st.one(0, "k")})
		st.await(0, "begin k")
		waiting := st.send(calls.Call{Method: "note", Parts: st.one(0, "never")})
		st.until("it waits", func() bool { return st.lane(0, "work").Queued == 1 })
		stop(st, patience)
		require.ErrorIs(t, st.failure(waiting), bus.ErrRefused)
		err := st.fails("note", "never")
		require.ErrorIs(t, err, bus.ErrRefused)
		require.Contains(t, err.Message, "stopping")
		require.Equal(t, actors.Stopping, ask[actors.Health](st, 0, actors.VerbHealth).State)
		require.Len(t, st.info(0).Calls, 1)
		require.ErrorIs(t, st.fails("meet", "never"), bus.ErrRefused)
		require.ErrorIs(t, st.fails(actors.VerbConfigure, "late"), bus.ErrRefused)
		stop(st, patience) // a second stop has no effect
		w := st.rawCaller("gone")
		w.control(wire.KindAsk, 1)
		require.Equal(t, wire.StateNever, w.status(1).State, "it still answers those who ask")
		st.release(0, "k") // a stopping worker accepts control calls
		require.Equal(t, "k", read[string](st, st.finish(running)[0]))
		life.await(0, actors.Stopped)
	})
	t.Run("after the grace", func(t *testing.T) {
		st := s.startRole(t, Role{})
		life := st.heartbeats()
		running := st.send(calls.Call{Method: "block", Parts: st.one(0, "k")})
		st.await(0, "begin k")
		stop(st, 20*time.Millisecond)
		err := st.failure(running)
		require.ErrorIs(t, err, bus.ErrWorkerLost)
		require.Contains(t, err.Message, "stopping")
		life.await(0, actors.Stopped)
	})
	t.Run("a large answer is fetched first", func(t *testing.T) {
		st := s.startRole(t, Role{})
		life := st.heartbeats()
		g := st.send(calls.Call{Method: "big", Parts: st.one(0, 16<<20)})
		st.until("it has arrived", func() bool { return st.lane(0, "work").Name != "" })
		stop(st, patience)
		if a := st.answers(g)[0]; a.Err == nil {
			require.True(t, bytes.Equal(pattern(16<<20), read[[]byte](st, a)))
		} else {
			require.ErrorIs(t, a.Err, bus.ErrRefused, "it had not begun")
		}
		life.await(0, actors.Stopped)
	})
	t.Run("one rank of two", func(t *testing.T) {
		st := s.startRole(t, Role{World: 2})
		life := st.heartbeats()
		stop(st, patience)
		life.await(0, actors.Stopped)
		require.Equal(t, 4, get[int](st, 1, "double", 2))
	})
}
