package actorstest

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/calls"
)

// lanes: serial work is FIFO; concurrent work starts in order, up to the limit; control never waits; a full lane
// refuses.
func (s *suite) lanes(t *testing.T) {
	t.Run("serial is FIFO", func(t *testing.T) {
		st := s.startRole(t, Role{})
		first := st.send(calls.Call{Method: "block", Parts: st.one(0, "k")})
		st.await(0, "begin k")
		var gathers []*calls.Gather
		want := []string{"begin k", "end k"}
		for i := range 50 {
			event := fmt.Sprint("n", i)
			gathers = append(gathers, st.send(calls.Call{Method: "note", Parts: st.one(0, event)}))
			want = append(want, event)
		}
		st.until("50 gathers wait", func() bool { return st.lane(0, actors.Serial.Name).Queued == 50 })
		require.Equal(t, []string{"begin k"}, st.events(0))
		st.release(0, "k")
		st.finish(first)
		for i, g := range gathers {
			a := st.finish(g)[0]
			require.Equal(t, i+3, read[int](st, a))
			require.Positive(t, a.Queued)
		}
		require.Equal(t, want, st.events(0))
	})
	t.Run("concurrent up to its limit", func(t *testing.T) {
		st := s.startRole(t, Role{})
		var gathers []*calls.Gather
		for i := range 6 {
			gathers = append(gathers, st.send(calls.Call{Method: "meet", Parts: st.one(0, fmt.Sprint("k", i))}))
		}
		for i := range concurrency {
			st.await(0, fmt.Sprint("begin k", i))
		}
		st.until("three run and three wait", func() bool { l := st.lane(0, "concurrent"); return l.Running == 3 && l.Queued == 3 })
		require.Len(t, st.events(0), concurrency)
		st.release(0, "k1")
		st.await(0, "begin k3")
		require.Equal(t, "end k1, begin k3", since(st.events(0), "end k1"))
		require.Equal(t, 3, st.lane(0, "concurrent").Running)
		for i := range 6 {
			st.release(0, fmt.Sprint("k", i))
		}
		for _, g := range gathers {
			st.finish(g)
		}
		running, most := 0, 0
		for _, e := range st.events(0) {
			running += map[bool]int{true: 1, false: -1}[e[:5] == "begin"]
			most = max(most, running)
		}
		require.Equal(t, concurrency, most)
	})
	t.Run("lanes do not wait for each other", func(t *testing.T) {
		st := s.startRole(t, Role{})
		blocked := st.send(calls.Call{Method: "block", Parts: st.one(0, "k")})
		st.await(0, "begin k")
		waiting := st.send(calls.Call{Method: "note", Parts: st.one(0, "n")})
		require.Equal(t, "pong", ask[string](st, 0, "ping"), "on the control subject")
		require.Equal(t, "pong", get[string](st, 0, "ping"), "on the work subject, by its lane")
		require.Equal(t, actors.Ready, ask[actors.Health](st, 0, actors.VerbHealth).State)
		st.release(0, "c")
		require.Equal(t, "c", get[string](st, 0, "meet", "c"))
		require.Equal(t, []string{"begin k", "begin c", "end c"}, st.events(0))
		st.release(0, "k")
		st.finish(blocked)
		st.finish(waiting)
	})
	t.Run("a method that was always short takes long", func(t *testing.T) {
		st := s.startRole(t, Role{HeartbeatEvery: 20 * time.Millisecond})
		st.release(0, "quick")
		for range 20 {
			get[string](st, 0, "block", "quick")
		}
		slow := st.send(calls.Call{Method: "block", Parts: st.one(0, "slow")})
		st.await(0, "begin slow")
		st.release(0, "c")
		get[string](st, 0, "meet", "c")
		st.ping()
		waiting := st.send(calls.Call{Method: "note", Parts: st.one(0, "n")})
		st.until("it waits", func() bool { return st.lane(0, "work").Queued == 1 })
		st.release(0, "slow")
		st.finish(slow)
		st.finish(waiting)
	})
	t.Run("a full lane refuses", func(t *testing.T) {
		st := s.startRole(t, Role{QueueLimit: 2})
		blocked := st.send(calls.Call{Method: "block", Parts: st.one(0, "k")})
		st.await(0, "begin k")
		first := st.send(calls.Call{Method: "note", Parts: st.one(0, "n1")})
		second := st.send(calls.Call{Method: "note", Parts: st.one(0, "n2")})
		err := st.fails("note", "n3")
		require.ErrorIs(t, err, bus.ErrBusy)
		require.Contains(t, err.Message, `lane "work" is full`)
		st.release(0, "c")
		get[string](st, 0, "meet", "c")
		st.release(0, "k")
		st.finish(blocked)
		st.finish(first)
		st.finish(second)
		get[int](st, 0, "note", "n4")
		require.Equal(t, "end k, n1, n2, n4", since(st.events(0), "end k"))
	})
}
