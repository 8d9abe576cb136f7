package actorstest

import (
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// verbs are answered by every worker of every class.
func (s *suite) verbs(t *testing.T) {
	t.Run("health and info while busy", func(t *testing.T) {
		st := s.startRole(t, Role{World: 2})
		require.Zero(t, ask[actors.Health](st, 1, actors.VerbHealth).Busy)
		blocked := st.send(calls.Call{Method: "block", Parts: st.one(1, "k")})
		st.await(1, "begin k")
		waiting := st.send(calls.Call{Method: "note", Parts: st.one(1, "n")})
		st.until("it waits", func() bool { return st.lane(1, "work").Queued == 1 })

		health := ask[actors.Health](st, 1, actors.VerbHealth)
		require.Equal(t, actors.Ready, health.State)
		require.Positive(t, health.Since)
		require.Positive(t, health.Busy)
		require.Empty(t, health.Error)

		info := st.info(1)
		require.Equal(t, []any{st.role.Address.Role, ClassName, 1, 2, uint32(0), actors.Ready, wire.Major},
			[]any{info.Role, info.Class, info.Rank, info.World, info.Gen, info.State, info.Wire})
		require.NotEmpty(t, info.Node)
		require.NotEmpty(t, info.Runtime)
		require.Positive(t, info.PID)
		require.Equal(t, []string{""}, info.Objects)
		require.Equal(t, actors.LaneInfo{Lane: actors.Serial, Queued: 1, Running: 1}, st.lane(1, "work"))
		require.Len(t, info.Calls, 2)
		require.Equal(t, []any{"block", true, false}, []any{info.Calls[0].Method, info.Calls[0].Running, info.Calls[0].Cancelled})
		require.Equal(t, []any{"note", false, false}, []any{info.Calls[1].Method, info.Calls[1].Running, info.Calls[1].Cancelled})
		require.NotEmpty(t, info.Calls[0].Caller)
		require.Positive(t, info.Calls[1].For)
		require.Empty(t, st.info(0).Calls)
		st.release(1, "k")
		st.finish(blocked)
		st.finish(waiting)
		require.Empty(t, st.info(1).Calls)
	})
	t.Run("probe on every subject", func(t *testing.T) {
		st := s.startRole(t, Role{World: 2, Slices: [][]actors.Slice{{{Mesh: "main", N: 0}}, {{Mesh: "main", N: 1}, {Mesh: "other", N: 0}}}})
		for _, c := range []calls.Call{
			{Parts: st.all()},
			{Parts: st.one(0)},
			{Parts: []calls.Part{{Scope: calls.DPSlice("main", 1), Ranks: []int{1}}}},
			{Parts: []calls.Part{{Scope: calls.DPSlice("other", 0), Ranks: []int{1}}}},
			{Parts: st.all(), Control: true},
			{Parts: st.one(1), Control: true},
		} {
			c.Method = actors.VerbProbe
			st.finish(st.send(c))
		}
	})
	t.Run("configure", func(t *testing.T) {
		config, err := wire.Marshal(map[string]int{"layers": 2})
		require.NoError(t, err)
		st := s.startRole(t, Role{Config: config})
		require.Equal(t, map[string]any{"layers": int64(2)}, ask[any](st, 0, "configured"))
		get[any](st, 0, actors.VerbConfigure, []any{"a", 1})
		require.Equal(t, []any{"a", int64(1)}, ask[any](st, 0, "configured"))
	})
	t.Run("set_env", func(t *testing.T) {
		st := s.startRole(t, Role{})
		require.Equal(t, "", ask[string](st, 0, "env", "ACTORSTEST_A"))
		get[any](st, 0, actors.VerbSetEnv, map[string]string{"ACTORSTEST_A": "1", "ACTORSTEST_B": "two words"})
		require.Equal(t, "1", ask[string](st, 0, "env", "ACTORSTEST_A"))
		require.Equal(t, "two words", ask[string](st, 0, "env", "ACTORSTEST_B"))
		require.ErrorIs(t, st.fails(actors.VerbSetEnv, "A=1"), bus.ErrRefused)
		require.ErrorIs(t, st.fails(actors.VerbSetEnv, map[string]string{"A=B": "1"}), bus.ErrRefused)
	})
	t.Run("verbs that change the worker wait for its work", func(t *testing.T) {
		st := s.startRole(t, Role{})
		blocked := st.send(calls.Call{Method: "block", Parts: st.one(0, "k")})
		st.await(0, "begin k")
		configure := st.send(calls.Call{Method: actors.VerbConfigure, Parts: st.one(0, "new"), Control: true})
		st.until("it waits", func() bool { return st.lane(0, "work").Queued == 1 })
		require.Nil(t, ask[any](st, 0, "configured"))
		st.release(0, "k")
		st.finish(blocked)
		st.finish(configure)
		require.Equal(t, "new", ask[any](st, 0, "configured"))
	})
	t.Run("create", s.create)
	t.Run("join", func(t *testing.T) {
		st := s.startRole(t, Role{World: 4})
		for r := range 4 {
			ask[any](st, r, actors.VerbJoin, actors.Slice{Mesh: "late", N: r / 2})
		}
		part := func(n int) calls.Part {
			return calls.Part{Scope: calls.DPSlice("late", n), Ranks: []int{2 * n, 2*n + 1}, Body: st.body("slice")}
		}
		st.finish(st.send(calls.Call{Method: "note", Parts: []calls.Part{part(0), part(1)}}))
		st.finish(st.send(calls.Call{Method: "note", Parts: []calls.Part{part(1)}}))
		ask[any](st, 3, actors.VerbJoin, actors.Slice{Mesh: "late", N: 1}) // a repeat has no effect
		st.finish(st.send(calls.Call{Method: "note", Parts: []calls.Part{part(1)}}))
		require.Len(t, st.events(0), 1)
		require.Len(t, st.events(3), 3)
		for _, bad := range []actors.Slice{{Mesh: "a.b", N: 0}, {Mesh: "", N: 0}, {Mesh: "late", N: -1}} {
			g := st.send(calls.Call{Method: actors.VerbJoin, Control: true, Parts: st.one(0, bad)})
			require.ErrorIs(t, st.failure(g), bus.ErrInvalid)
		}
	})
}

func (s *suite) create(t *testing.T) {
	st := s.startRole(t, Role{World: 2})
	config := func(s string) wire.Raw {
		raw, err := wire.Marshal(s)
		require.NoError(t, err)
		return raw
	}
	create := func(name, class, with string) *calls.Gather {
		return st.send(calls.Call{Method: actors.VerbCreate, Parts: st.all(actors.CreateRequest{Name: name, Class: class, Config: config(with)})})
	}
	call := func(object, method string) []calls.Answer {
		return st.answers(st.send(calls.Call{Method: method, Object: object, Parts: st.all()}))
	}
	st.finish(create("tokenizer", SecondClassName, "fast"))
	st.finish(create("engine", SecondClassName, "large"))
	for r, a := range call("tokenizer", "where") {
		require.Equal(t, []any{"tokenizer", int64(r)}, read[any](st, a))
	}
	require.Equal(t, "large", read[string](st, call("engine", "config")[1]))
	require.Equal(t, []string{"", "engine", "tokenizer"}, st.info(0).Objects)
	require.ErrorIs(t, call("engine", "echo")[0].Err, bus.ErrNotFound, "a method of the other class")
	require.Equal(t, 4, get[int](st, 0, "double", 2))

	err := st.answers(create("engine", SecondClassName, "again"))[1].Err
	require.ErrorIs(t, err, bus.ErrExists)
	require.ErrorContains(t, err, "engine")
	require.Equal(t, "large", read[string](st, call("engine", "config")[1]))
	require.ErrorIs(t, st.answers(create("x", "nothing", ""))[0].Err, bus.ErrNotFound)
	require.ErrorIs(t, st.answers(create("no.good", SecondClassName, ""))[0].Err, bus.ErrInvalid)
	require.ErrorIs(t, st.answers(create("", SecondClassName, ""))[0].Err, bus.ErrInvalid, "the worker's own object is taken")
	for _, way := range []string{"fail", "panic"} {
		require.ErrorContains(t, st.answers(create("failing", SecondClassName, way))[0].Err, "told to "+way)
	}
	st.finish(create("failing", SecondClassName, "at last")) // the name is still free
}
