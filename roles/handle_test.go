package roles_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/roles"
)

func TestWorkersCallEachOther(t *testing.T) {
	for _, own := range []bool{false, true} {
		_, rt, c := newRole(t, roles.Spec{World: 3, OwnConnections: own})
		judges := create(t, rt, roles.Spec{Name: "judges", Class: "actor", World: 2, OwnConnections: own})
		w, err := judges.Worker(1)
		require.NoError(t, err)
		answers, err := c.ExecuteAll(patient(t), "ask", w)
		require.NoError(t, err)
		assert.Equal(t, []any{int64(1), int64(1), int64(1)}, answers, "a worker, sent as it is and called on the other side")
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
		assert.EqualError(t, err, "actors[0] ask_fail on "+node(t)+": judges[1] fail on "+node(t)+": tired", "where, and from where")
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
	require.NoError(t, err, "who opened it shares it with others")
	again, err := rt.Open(c.Handle())
	require.NoError(t, err)
	assert.Same(t, opened, again)

	var cluster roles.Cluster
	raw, err := bus.Marshal(c)
	require.NoError(t, err)
	assert.ErrorContains(t, bus.Unmarshal(raw, &cluster), "received as a roles.Handle")
}

func second2[T any](v T, _ error) T { return v }

// The harm: a worker that is given the same role in every call watches it once for every call, for ever.
func TestOpeningAHandleAgainHoldsNothingMore(t *testing.T) {
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
