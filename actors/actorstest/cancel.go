package actorstest

import (
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// cancel: a call is cancelled in every state, and the worker continues with the next.
func (s *suite) cancel(t *testing.T) {
	t.Run("running", func(t *testing.T) {
		st := s.startRole(t, Role{})
		g := st.send(calls.Call{Method: "block", Parts: st.one(0, "k")})
		st.await(0, "begin k")
		g.Cancel()
		require.ErrorIs(t, st.failure(g), bus.ErrCancelled)
		st.await(0, "cancel k")
		require.Equal(t, 2, get[int](st, 0, "double", 1))
		require.Empty(t, st.info(0).Calls)
	})
	t.Run("queued", func(t *testing.T) {
		st := s.startRole(t, Role{})
		blocked := st.send(calls.Call{Method: "block", Parts: st.one(0, "k")})
		st.await(0, "begin k")
		g := st.send(calls.Call{Method: "note", Parts: st.one(0, "never")})
		st.until("it waits", func() bool { return st.lane(0, "work").Queued == 1 })
		g.Cancel()
		st.until("it is taken out", func() bool { return st.lane(0, "work").Queued == 0 })
		st.release(0, "k")
		st.finish(blocked)
		get[int](st, 0, "note", "after")
		require.Equal(t, []string{"begin k", "end k", "after"}, st.events(0))
	})
	t.Run("not arrived yet", func(t *testing.T) {
		st := s.startRole(t, Role{})
		w := st.rawCaller("hasty")
		w.control(wire.KindCancel, 1)
		st.events(0) // the cancellation has arrived: it used the same connection and lane
		w.call(w.header(1, "note"), "never")
		w.call(w.header(2, "note"), "after")
		require.EqualValues(t, 1, w.good(2))
		require.Equal(t, wire.StateUnknown, w.asked(1))
		require.Equal(t, []string{"after"}, st.events(0))
	})
	t.Run("a method that ignores it", func(t *testing.T) {
		st := s.startRole(t, Role{})
		w := st.rawCaller("impatient")
		w.call(w.header(1, "ignore"), "k")
		st.await(0, "begin k")
		w.control(wire.KindCancel, 1)
		st.await(0, "cancel k")
		calls := st.info(0).Calls
		require.Len(t, calls, 1)
		require.Equal(t, "ignore", calls[0].Method)
		require.True(t, calls[0].Running)
		require.True(t, calls[0].Cancelled)
		require.Positive(t, calls[0].For)
		require.Equal(t, wire.StateRunning, w.asked(1))
		w.call(w.header(2, "note"), "after")
		st.release(0, "k")
		require.EqualValues(t, 4, w.good(2), "the late answer is dropped, the next comes")
		require.Equal(t, wire.StateUnknown, w.asked(1))
		require.Equal(t, []string{"begin k", "cancel k", "end k", "after"}, st.events(0))
	})
	t.Run("siblings of a failure", func(t *testing.T) {
		st := s.startRole(t, Role{World: 2})
		g := st.send(calls.Call{Method: "block", FailFast: true, Parts: append(st.one(0, "k"), st.one(1, 3)...)})
		answers := st.answers(g)
		require.ErrorIs(t, answers[1].Err, bus.ErrRefused)
		if answers[0].Err == nil {
			t.Fatal("rank 0 was not cancelled")
		}
		require.ErrorIs(t, answers[0].Err, bus.ErrCancelled)
		require.ErrorContains(t, answers[0].Err, "because of rank 1")
		st.until("rank 0 is free again", func() bool { return len(st.info(0).Calls) == 0 })
	})
	t.Run("the cancellation is lost", func(t *testing.T) {
		st := s.startRole(t, Role{})
		w := st.rawCaller("unheard")
		w.call(w.header(1, "block"), "k")
		st.await(0, "begin k")
		w.call(w.header(2, "note"), "never")
		h := w.header(3, "note")
		h.Acked = 2 // the caller has finished with both
		w.call(h, "after")
		require.EqualValues(t, 3, w.good(3))
		require.Equal(t, []string{"begin k", "cancel k", "after"}, st.events(0))
	})
}
