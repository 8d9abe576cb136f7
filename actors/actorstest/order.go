package actorstest

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// order: a caller's calls run in their order on every rank, on whichever subject they came; a call that arrives early
// waits.
func (s *suite) order(t *testing.T) {
	t.Run("one caller, many subjects", func(t *testing.T) {
		st := s.startRole(t, Role{World: 4, Slices: [][]actors.Slice{
			{{Mesh: "main", N: 0}}, {{Mesh: "main", N: 0}}, {{Mesh: "main", N: 1}}, {{Mesh: "main", N: 1}},
		}})
		want := make([][]string, 4)
		var gathers []*calls.Gather
		note := func(event string, scope calls.Scope, some bool, ranks ...int) {
			gathers = append(gathers, st.send(calls.Call{Method: "note", Parts: []calls.Part{{Scope: scope, Some: some, Ranks: ranks, Body: st.body(event)}}}))
			for _, r := range ranks {
				want[r] = append(want[r], event)
			}
		}
		for i := range 40 {
			note(fmt.Sprint("all ", i), calls.Everyone(), false, 0, 1, 2, 3)
			note(fmt.Sprint("rank ", i), calls.OneRank(i%4), false, i%4)
			note(fmt.Sprint("slice ", i), calls.DPSlice("main", i%2), false, i%2*2, i%2*2+1)
			note(fmt.Sprint("some ", i), calls.Everyone(), true, 1, 3)
		}
		for _, g := range gathers {
			st.finish(g)
		}
		for r := range want {
			require.Equal(t, want[r], st.events(r), "rank %d", r)
		}
	})
	t.Run("many goroutines, one order on all ranks", func(t *testing.T) {
		st := s.startRole(t, Role{World: 3})
		var group sync.WaitGroup
		for i := range 8 {
			group.Go(func() {
				for j := range 15 {
					for _, a := range st.answers(st.send(calls.Call{Method: "note", Parts: st.all(fmt.Sprint(i, "-", j))})) {
						assert.NoError(t, a.Err)
					}
				}
			})
		}
		group.Wait()
		want := st.events(0)
		require.Len(t, want, 8*15)
		for r := range 3 {
			require.Equal(t, want, st.events(r))
		}
	})
	t.Run("several drivers of an ordered role", func(t *testing.T) {
		st := s.startRole(t, Role{World: 3, Ordered: true})
		var group sync.WaitGroup
		for d := range 3 {
			driver := &roleFixture{t: t, bus: st.bus, role: st.role, ep: s.driver(t)}
			group.Go(func() {
				var gathers []*calls.Gather
				for i := range 30 {
					parts := driver.all(fmt.Sprint(d, " all ", i))
					if i%3 == 2 { // some calls are for two ranks only
						parts = driver.one(d, fmt.Sprint(d, " one ", i))
					}
					gathers = append(gathers, driver.send(calls.Call{Method: "note", Ordered: true, Parts: parts}))
				}
				for _, g := range gathers {
					for _, a := range driver.answers(g) {
						assert.NoError(t, a.Err)
					}
				}
			})
		}
		group.Wait()
		common := func(rank int) (out []string) {
			for _, e := range st.events(rank) {
				if strings.Contains(e, "all") {
					out = append(out, e)
				}
			}
			return out
		}
		want := common(0)
		require.Len(t, want, 3*20)
		for r := range 3 {
			require.Equal(t, want, common(r))
			require.Len(t, st.events(r), 3*20+10)
		}
	})
	t.Run("an early call waits", func(t *testing.T) {
		st := s.startRole(t, Role{})
		w := st.rawCaller("a")
		h := func(seq, order, prev uint64) wire.Header {
			h := w.header(seq, "note")
			h.Order, h.Prev = order, prev
			return h
		}
		w.call(h(1, 1, 0), "one")
		require.EqualValues(t, 1, w.good(1))
		w.call(h(3, 3, 2), "three")
		gap := w.missing()
		require.Equal(t, []uint64{1, 2}, []uint64{gap.Prev, gap.Order}, "what lies after 1, up to 2, is missing")
		require.Equal(t, st.role.Address.Prefix(), gap.Object)
		require.Equal(t, wire.StateQueued, w.asked(3))
		w.call(h(2, 2, 1), "two")
		require.EqualValues(t, 2, w.good(2))
		require.EqualValues(t, 3, w.good(3))

		w.call(h(9, 9, 8), "nine")
		for gap = w.missing(); gap.Order != 8; gap = w.missing() {
		}
		w.send(st.role.Address.Rank(0), wire.Frame{Kind: wire.KindSkip, Header: wire.Header{Session: w.session, Order: 8}})
		require.EqualValues(t, 4, w.good(9))
		require.Equal(t, []string{"one", "two", "three", "nine"}, st.events(0))
	})
	t.Run("the order is that of the envelopes, not of the bodies", func(t *testing.T) {
		st := s.startRole(t, Role{})
		large := st.send(calls.Call{Method: "size", Parts: st.one(0, make([]byte, 5<<20))})
		small := st.send(calls.Call{Method: "block", Parts: st.one(0, "k")})
		st.await(0, "begin k")
		select {
		case <-large.Done():
		default: // it has run; its answer may not have arrived
			require.Len(t, st.info(0).Calls, 1)
		}
		st.release(0, "k")
		require.Equal(t, 5<<20, read[int](st, st.finish(large)[0]))
		st.finish(small)
	})
}
