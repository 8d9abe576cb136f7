package actorstest

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// duplicates: a repeated call is answered from memory or with "outcome unknown", and never runs twice.
func (s *suite) duplicates(t *testing.T) {
	t.Run("in every state", func(t *testing.T) {
		st := s.startRole(t, Role{})
		w := st.rawCaller("twice")
		require.Equal(t, wire.StateNever, w.asked(1))
		block, note := w.header(1, "block"), w.header(2, "note")
		w.call(block, "k")
		st.await(0, "begin k")
		w.call(note, "n")
		st.until("it waits", func() bool { return st.lane(0, "work").Queued == 1 })
		w.again(block, "k") // while running
		w.again(note, "n")  // while queued
		w.call(note, "n")   // duplicated by the network
		other := st.rawCaller("other")
		other.call(other.header(1, "note"), "behind")
		st.until("all that was taken", func() bool { return st.lane(0, "work").Queued == 2 })
		require.Equal(t, wire.StateRunning, w.asked(1))
		w.control(wire.KindAsk, 2)
		waits := w.status(2)
		require.Equal(t, wire.StateQueued, waits.State)
		require.Positive(t, waits.Queued)
		st.release(0, "k")
		require.Equal(t, "k", w.good(1))
		require.EqualValues(t, 3, w.good(2))

		w.again(block, "k") // after the answer
		require.Equal(t, "k", w.good(1))
		w.control(wire.KindAsk, 2)
		require.EqualValues(t, 3, w.good(2))

		h := w.header(3, "note")
		h.Acked = 2
		w.call(h, "m")
		require.EqualValues(t, 5, w.good(3))
		w.again(block, "k") // after it was acknowledged
		require.Equal(t, wire.StateUnknown, w.status(1).State)
		require.Equal(t, wire.StateUnknown, w.asked(2))
		w.call(note, "n") // delayed by the network
		w.call(w.header(4, "note"), "o")
		require.EqualValues(t, 6, w.good(4))
		require.Equal(t, []string{"begin k", "end k", "n", "behind", "m", "o"}, st.events(0))
	})
	t.Run("a failure is remembered like a success", func(t *testing.T) {
		st := s.startRole(t, Role{})
		w := st.rawCaller("twice")
		w.call(w.header(1, "fail"), "no luck")
		first := w.answer(1)
		require.Equal(t, bus.CodeApplication, first.Header.Code)
		w.again(w.header(1, "fail"), "no luck")
		require.Equal(t, first, w.answer(1))
		w.call(w.header(2, "nothing"))
		require.Equal(t, bus.CodeNotFound, w.answer(2).Header.Code)
		w.again(w.header(2, "nothing"))
		require.Equal(t, bus.CodeNotFound, w.answer(2).Header.Code)
	})
	t.Run("callers have separate sequences", func(t *testing.T) {
		st := s.startRole(t, Role{})
		for i := range 3 {
			w := st.rawCaller(fmt.Sprint("caller-", i))
			w.call(w.header(1, "note"), "n")
			require.EqualValues(t, i+1, w.good(1))
		}
	})
	t.Run("every message is duplicated", func(t *testing.T) {
		st := s.startRole(t, Role{World: 2})
		repeated := 0
		sub, err := st.bus.Subscribe(st.role.Address.All(), func(m *bus.Msg) {
			if m.Reply != "" { // not a repeat
				repeated++
				_ = st.bus.Publish(m.Subject, m.Data)
			}
		})
		require.NoError(t, err)
		require.NoError(t, st.bus.Flush(t.Context()))
		for i := range 30 {
			st.finish(st.send(calls.Call{Method: "note", Parts: st.all(fmt.Sprint(i))}))
		}
		require.NoError(t, st.bus.Flush(t.Context()))
		require.NoError(t, sub.Unsubscribe())
		st.finish(st.send(calls.Call{Method: "note", Parts: st.all("last")}))
		for r := range 2 {
			require.Len(t, st.events(r), 31)
		}
	})
	t.Run("a lost call is sent again", func(t *testing.T) {
		st := s.startRole(t, Role{})
		w := st.rawCaller("unlucky")
		h := w.header(1, "note")
		h.Age = time.Second // the first message was lost
		w.call(h, "n")
		require.EqualValues(t, 1, w.good(1))
	})
}
