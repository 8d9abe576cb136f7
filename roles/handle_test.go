package roles_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/roles"
	"troupe/roles/registry"
)

func TestWorkersCallEachOther(t *testing.T) {
	for _, own := range []bool{false, true} {
		_, rt, c := newRole(t, roles.Spec{World: 3, OwnConnections: own})
		judges := create(t, rt, roles.Spec{Name: "judges", Class: "actor", World: 2, OwnConnections: own})
		w, err := judges.Worker(1)
		require.NoError(t, err)
		answers, err := c.ExecuteAll(patient(t), "ask", w)
		require.NoError(t, err)
		assert.Equal(t, []any{int64(1), int64(1), int64(1)}, answers, "a worker as an argument, called by the receiver")
		answers, err = c.ExecuteAll(patient(t), "ask", w.Handle())
		require.NoError(t, err)
		assert.Equal(t, []any{int64(1), int64(1), int64(1)}, answers)

		value, err := c.ExecuteRankZero(patient(t), "ask_all", []any{judges, judges.Handle()})
		require.NoError(t, err)
		assert.Equal(t, []any{int64(0), int64(1), int64(0), int64(1)}, value, "clusters inside a list")
		value, err = c.ExecuteRankZero(patient(t), "attach", "judges")
		require.NoError(t, err)
		assert.Equal(t, int64(0), value)
		_, err = c.ExecuteRankZero(patient(t), "attach", "jury")
		assert.ErrorContains(t, err, `no role "jury" in this namespace; there are actors, judges`)
		assert.ErrorIs(t, err, bus.ErrNotFound)

		_, err = c.ExecuteRankZero(patient(t), "ask_fail", w)
		assert.EqualError(t, err, "actors[0] ask_fail on "+node(t)+": judges[1] fail on "+node(t)+": tired", "the error names both workers")
		assert.ErrorIs(t, err, errTired, "over two hops")

		next, err := c.Worker(2)
		require.NoError(t, err)
		own, err := c.Worker(0)
		require.NoError(t, err)
		value, err = own.Call(patient(t), "ask", next)
		require.NoError(t, err)
		assert.Equal(t, int64(2), value, "a worker of the same role")
	}
}

// A call that a method makes has the rest of the method's deadline, or its own timeout if that is shorter.
func TestADeadlineIsInherited(t *testing.T) {
	_, rt, c := newRole(t, roles.Spec{World: 1})
	w, err := create(t, rt, roles.Spec{Name: "judges", Class: "actor", World: 1}).Worker(0)
	require.NoError(t, err)
	for _, try := range []struct{ outer, own, most time.Duration }{
		{0, 0, 0}, {time.Hour, 0, time.Hour}, {time.Hour, time.Minute, time.Minute},
		{time.Hour, 2 * time.Hour, time.Hour}, {0, time.Minute, time.Minute},
	} {
		call := dispatch.Call{Method: "remaining_of", Args: []any{remainingOf{w.Handle(), try.own}}, Timeout: try.outer}
		f, err := c.Go(context.Background(), call)
		require.NoError(t, err)
		left, err := dispatch.AwaitEach[float64](patient(t), f)
		require.NoError(t, err)
		require.LessOrEqual(t, left[0], try.most.Seconds(), try)
		require.Greater(t, left[0], try.most.Seconds()-50, try)
	}
}

func TestAHandleComesBack(t *testing.T) {
	_, rt, c := newRole(t, roles.Spec{World: 2})
	value, err := c.Call(patient(t), "echo", map[string]any{"role": c, "worker": second2(c.Worker(1))})
	require.NoError(t, err)
	back := value.(map[string]any)
	opened, err := rt.Open(back["role"].(roles.Handle))
	require.NoError(t, err)
	answers, err := opened.ExecuteAll(patient(t), "rank")
	require.NoError(t, err)
	assert.Equal(t, []any{int64(0), int64(1)}, answers)
	assert.Equal(t, 1, back["worker"].(roles.Handle).Rank)
	require.NoError(t, opened.Close(patient(t)))
	_, err = opened.Call(patient(t), "rank")
	require.NoError(t, err, "an opened cluster is shared and stays open")
	again, err := rt.Open(c.Handle())
	require.NoError(t, err)
	assert.Same(t, opened, again)

	var cluster roles.Cluster
	raw, err := wire.Marshal(c)
	require.NoError(t, err)
	assert.ErrorContains(t, wire.Unmarshal(raw, &cluster), "received as a roles.Handle")
}

func second2[T any](v T, _ error) T { return v }

// This must not happen: a worker that receives the same role in every call monitors it once per call, and never releases it.
func TestOpenedHandlesShareACluster(t *testing.T) {
	_, rt, c := newRole(t, roles.Spec{World: 2})
	judges := create(t, rt, roles.Spec{Name: "judges", Class: "actor", World: 2})
	for range 50 {
		_, err := c.ExecuteAll(patient(t), "ask_all", []any{judges})
		require.NoError(t, err)
	}
	holds := func() int {
		n, err := roles.Call[int](patient(t), c, "holds")
		require.NoError(t, err)
		return n
	}
	require.Equal(t, 1, holds())
	stale := judges.Handle()
	require.NoError(t, judges.Destroy(patient(t)))
	eventually(t, "a role that has ended is let go of", func() bool { return holds() == 0 })
	_, err := c.ExecuteRankZero(patient(t), "ask_all", []any{stale})
	require.ErrorIs(t, err, bus.ErrWorkerLost)
}

// A received handle is validated before it is used.
func TestInvalidHandles(t *testing.T) {
	good := registry.RoleRecord{Namespace: "default", Name: "x", Incarnation: "i", World: 4, Mesh: dispatch.Mesh{DP: 2, TP: 2, PP: 1, CP: 1}}
	for words, change := range map[string]func(*roles.Handle){
		"role name":                             func(h *roles.Handle) { h.Record.Name = "a.>" },
		"has world 1099511627776; the maximum ": func(h *roles.Handle) { h.Record.World = 1 << 40 },
		"has world 5 and mesh tp=2":             func(h *roles.Handle) { h.Record.World = 5 },
		"has world 4 and mesh tp=2 cp=0":        func(h *roles.Handle) { h.Record.Mesh.CP = 0 },
		"a handle of rank 4 of role x, which h": func(h *roles.Handle) { h.Rank = 4 },
	} {
		h := roles.Handle{Record: good, Rank: -1}
		change(&h)
		raw, err := wire.Marshal(h)
		require.NoError(t, err)
		var back roles.Handle
		assert.ErrorContains(t, wire.Unmarshal(raw, &back), words)
	}
}

// sayer returns the session of the caller.
type sayer struct{}

func (sayer) Handle(ctx context.Context, _ string, _ []byte) ([]byte, error) {
	info, _ := actors.Current(ctx)
	return wire.Marshal(info.Session)
}

func TestClassesThatAreFoundAtRunTime(t *testing.T) {
	probe := newWorkerProbe()
	found := func(name string) (*actors.Class, error) {
		if name != "sayer" {
			return nil, bus.Errorf(bus.CodeNotFound, "no class %q", name)
		}
		return &actors.Class{Name: name, Open: true, New: func(context.Context, actors.Setup) (actors.Handler, error) { return sayer{}, nil }}, nil
	}
	b := bustest.Open(t, bus.Config{})
	rt := open(t, roles.Config{Bus: b, Classes: []*actors.Class{probe.class()}, ClassFunc: found})
	create(t, rt, roles.Spec{Name: "driver", Class: "sayer", World: 1})
	_, err := rt.Create(patient(t), roles.Spec{Name: "x", Class: "nobody", World: 1})
	assert.ErrorContains(t, err, `no class "nobody"`)
	workers := create(t, rt, roles.Spec{Name: "actors", Class: "actor", World: 2, OwnConnections: true})

	h, err := rt.Find(patient(t), "driver")
	require.NoError(t, err)
	h.Rank = 0
	session, err := workers.ExecuteRankZero(patient(t), "ask", h)
	require.NoError(t, err)
	assert.NotEmpty(t, session)

	other := open(t, roles.Config{Bus: b})
	_, err = other.Find(patient(t), "jury")
	assert.ErrorIs(t, err, bus.ErrNotFound)
}
