package actorstest

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/calls"
)

// deadlines are kept at both ends: the caller stops waiting, and the worker neither starts nor continues the call.
func (s *suite) deadlines(t *testing.T) {
	const soon = 60 * time.Millisecond
	t.Run("while running", func(t *testing.T) {
		st := s.startRole(t, Role{})
		began := time.Now()
		err := st.failure(st.send(calls.Call{Method: "block", Parts: st.one(0, "k"), Timeout: soon}))
		require.ErrorIs(t, err, bus.ErrTimedOut)
		require.GreaterOrEqual(t, time.Since(began), soon)
		st.await(0, "cancel k")
		require.Equal(t, 1, get[int](st, 0, "double", 0)+1)
	})
	t.Run("in the queue", func(t *testing.T) {
		st := s.startRole(t, Role{})
		blocked := st.send(calls.Call{Method: "block", Parts: st.one(0, "k")})
		st.await(0, "begin k")
		require.ErrorIs(t, st.failure(st.send(calls.Call{Method: "note", Parts: st.one(0, "late"), Timeout: soon})), bus.ErrTimedOut)
		st.release(0, "k")
		st.finish(blocked)
		get[int](st, 0, "note", "after")
		require.Equal(t, []string{"begin k", "end k", "after"}, st.events(0))
	})
	t.Run("the worker enforces them without a cancellation", func(t *testing.T) {
		st := s.startRole(t, Role{})
		w := st.rawCaller("silent") // it never sends a cancellation
		first, second := w.header(1, "block"), w.header(2, "note")
		first.Timeout, second.Timeout = soon, soon/2
		w.call(first, "k")
		w.call(second, "late")
		require.Equal(t, bus.CodeTimedOut, w.answer(1).Header.Code)
		require.Equal(t, bus.CodeTimedOut, w.answer(2).Header.Code)
		require.Equal(t, []string{"begin k", "cancel k"}, st.events(0))
	})
	t.Run("an early call's time counts from its arrival", func(t *testing.T) {
		st := s.startRole(t, Role{})
		w := st.rawCaller("late")
		h := w.header(2, "note")
		h.Order, h.Prev, h.Timeout = 2, 1, soon
		w.call(h, "late")
		w.missing()
		w.missing() // reported again, after more than the call's timeout
		first := w.header(1, "note")
		first.Order = 1
		w.call(first, "in time")
		require.EqualValues(t, 1, w.good(1))
		require.Equal(t, bus.CodeTimedOut, w.answer(2).Header.Code)
		require.Equal(t, []string{"in time"}, st.events(0))
	})
}
