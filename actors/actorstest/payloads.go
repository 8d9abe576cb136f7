package actorstest

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/bus/calls"
	"troupe/bus/wire"
)

// payloads of any size arrive whole in both directions; bodies that are not needed are not sent.
func (s *suite) payloads(t *testing.T) {
	t.Run("larger than a message", func(t *testing.T) {
		st := s.startRole(t, Role{World: 3})
		for _, n := range []int{0, 1, 31 << 10, 33 << 10, 65 << 10, 1 << 20, 3<<20 + 1} {
			want := pattern(n)
			for _, a := range st.finish(st.send(calls.Call{Method: "echo", Parts: st.all(want)})) {
				require.True(t, bytes.Equal(want, read[[]byte](st, a)), "%d bytes to rank %d and back", n, a.Rank)
			}
		}
		st.until("nothing is held any more", func() bool { return st.ep.Values().Uploads() == 0 })
	})
	t.Run("larger than the budget of a connection", func(t *testing.T) {
		st := s.startRole(t, Role{World: 2})
		const n = 20 << 20
		for _, a := range st.finish(st.send(calls.Call{Method: "size", Parts: st.all(make([]byte, n))})) {
			require.Equal(t, n, read[int](st, a))
		}
		want := pattern(n)
		for _, a := range st.finish(st.send(calls.Call{Method: "big", Parts: st.all(n)})) {
			require.True(t, bytes.Equal(want, read[[]byte](st, a)))
		}
	})
	t.Run("no data", func(t *testing.T) {
		st := s.startRole(t, Role{})
		require.Equal(t, []any{int64(0), []any{}}, get[any](st, 0, "args"))
		require.Equal(t, []any{int64(2), []any{}}, get[any](st, 0, "args", "a", 3))
		g := st.send(calls.Call{Method: "args", Parts: []calls.Part{{Scope: calls.OneRank(0), Ranks: []int{0}, NoData: true}}})
		require.Equal(t, []any{int64(0), []any{}}, read[any](st, st.finish(g)[0]))
		named := wire.Args{Named: map[string]wire.Raw{"y": {2}, "x": {1}}}
		g = st.send(calls.Call{Method: "args", Parts: []calls.Part{{Scope: calls.OneRank(0), Ranks: []int{0}, Body: named.Append(nil, []string{"x", "y"})}}})
		require.Equal(t, []any{int64(0), []any{"x", "y"}}, read[any](st, st.finish(g)[0]))
	})
	t.Run("not collected", func(t *testing.T) {
		st := s.startRole(t, Role{World: 3})
		g := st.send(calls.Call{Method: "note", Parts: st.all("n"), CollectSome: true, Collect: wire.Ranks(1)})
		for _, a := range st.finish(g) {
			require.Equal(t, a.Rank == 1, a.Body != nil, "rank %d", a.Rank)
			require.Equal(t, []string{"n"}, st.events(a.Rank))
		}
		g = st.send(calls.Call{Method: "big", Parts: st.all(2 << 20), CollectSome: true})
		for _, a := range st.finish(g) {
			require.Nil(t, a.Body)
		}
		answers := st.answers(st.send(calls.Call{Method: "fail", Parts: st.all("no luck"), CollectSome: true}))
		for _, a := range answers {
			require.ErrorContains(t, a.Err, "no luck", "a failure is always told")
		}
	})
	t.Run("cancelled while the body is fetched", func(t *testing.T) {
		st := s.startRole(t, Role{})
		for range 3 {
			g := st.send(calls.Call{Method: "echo", Parts: st.one(0, make([]byte, 8<<20))})
			st.ping()
			g.Cancel()
			<-g.Done()
		}
		require.Equal(t, 4, get[int](st, 0, "double", 2))
		require.Zero(t, st.ep.Values().Uploads())
	})
}

func (st *roleFixture) ping() { st.t.Helper(); require.Equal(st.t, "pong", ask[string](st, 0, "ping")) }
