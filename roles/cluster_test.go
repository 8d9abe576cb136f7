package roles_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/dispatch"
	"troupe/roles"
	"troupe/roles/registry"
)

// newRole is a driver with one role named "actors".
func newRole(t testing.TB, spec roles.Spec) (*workerProbe, *roles.Runtime, *roles.Cluster) {
	t.Helper()
	probe := newWorkerProbe()
	rt := open(t, roles.Config{Classes: []*actors.Class{probe.class()}, Name: "the test"})
	spec.Name, spec.Class = "actors", "actor"
	return probe, rt, create(t, rt, spec)
}

func TestRoleIsCreatedCalledAndDestroyed(t *testing.T) {
	for _, own := range []bool{false, true} {
		t.Run(map[bool]string{false: "shared connection", true: "own connections"}[own], func(t *testing.T) {
			probe, rt, c := newRole(t, roles.Spec{World: 4, Mesh: dispatch.Mesh{TP: 2}, Config: config{Rate: 0.5}, OwnConnections: own})
			assert.Equal(t, []int{4, 2, 2, 1, 1}, []int{c.WorldSize(), c.DPSize(), c.TPSize(), c.PPSize(), c.CPSize()})
			info, err := c.RankInfo(3)
			require.NoError(t, err)
			assert.Equal(t, []int{1, 1}, []int{info.DPRank, info.TPRank})

			rec := rolesOf(t, rt)["actors"]
			assert.Equal(t, registry.RoleReady, rec.State)
			assert.Equal(t, "the test", rec.By)
			assert.Equal(t, rt.Session(), rec.Owner)
			assert.WithinDuration(t, time.Now(), rec.Since, time.Minute)
			assert.Equal(t, rec, recordNow(c))

			got, err := roles.Call[config](patient(t), c, "config")
			require.NoError(t, err)
			assert.Equal(t, config{Rate: 0.5}, got)
			for want := range 3 {
				totals, err := roles.CallEach[int](patient(t), c, "add", 1)
				require.NoError(t, err)
				assert.Equal(t, []int{want + 1, want + 1, want + 1, want + 1}, totals)
			}
			infos, err := c.Info(patient(t))
			require.NoError(t, err)
			for rank, i := range infos {
				assert.Equal(t, []any{rank, 4, "actor", actors.Ready}, []any{i.Rank, i.World, i.Class, i.State})
			}

			require.NoError(t, c.Destroy(patient(t)))
			assert.Empty(t, rolesOf(t, rt))
			assert.Zero(t, probe.living())
			assert.Equal(t, 0, probe.stopped()[3], "rank 0 is stopped last")
			_, err = c.Call(patient(t), "rank")
			assert.EqualError(t, err, "actors rank: role actors has been destroyed")
			assert.ErrorIs(t, err, bus.ErrNotFound)
			require.NoError(t, c.Destroy(patient(t)), "a second Destroy is no error")
			require.NoError(t, c.Close(patient(t)))
			assert.Zero(t, rt.Holds())
		})
	}
}

// recordNow is the record as read from the registry: a time in JSON has no monotonic clock.
func recordNow(c *roles.Cluster) registry.RoleRecord {
	r := c.Record()
	r.Since = r.Since.Round(0)
	return r
}

func TestRoleInEveryMode(t *testing.T) {
	_, _, c := newRole(t, roles.Spec{World: 8, Mesh: dispatch.Mesh{DP: 2, TP: 2, PP: 2}})
	all := []any{int64(0), int64(1), int64(2), int64(3), int64(4), int64(5), int64(6), int64(7)}
	for _, m := range []struct {
		method string
		args   []any
		want   any
	}{
		{"zero", nil, int64(0)},
		{"rank", nil, all},
		{"lead", nil, int64(0)},
		{"own", []any{[]string{"a", "b", "c", "d", "e", "f", "g", "h"}}, []any{"a!", "b!", "c!", "d!", "e!", "f!", "g!", "h!"}},
		{"double", []any{[]int{1, 2, 3}}, []any{int64(2), int64(4), int64(6)}},
		{"first", []any{[]int{1, 2, 3}}, []any{int64(-4), int64(-6)}},
		{"first_all", []any{[]int{1, 2, 3}}, []any{
			[]any{int64(2), int64(4)}, []any{int64(-1)}, []any{int64(6)}, []any{int64(-3)}, []any{int64(-4)}, []any{int64(-5)}, []any{int64(-6)}, []any{int64(-7)}}},
	} {
		got, err := c.Call(patient(t), m.method, m.args...)
		require.NoError(t, err, m.method)
		assert.Equal(t, m.want, got, m.method)
	}
	zero, err := c.ExecuteRankZero(patient(t), "rank")
	require.NoError(t, err)
	assert.Equal(t, int64(0), zero)
	each, err := c.ExecuteAll(patient(t), "zero")
	require.NoError(t, err)
	assert.Equal(t, all, each, "independent of the method's own mode")
	f, err := c.ExecuteAllAsync(patient(t), "rank")
	require.NoError(t, err)
	g, err := c.ExecuteRankZeroAsync(patient(t), "rank")
	require.NoError(t, err)
	one, err := dispatch.Await[int](patient(t), g)
	require.NoError(t, err)
	assert.Equal(t, 0, one)
	ranks, err := dispatch.AwaitEach[int](patient(t), f)
	require.NoError(t, err)
	assert.Len(t, ranks, 8)
	rows, err := roles.Call[[]int](patient(t), c, "double", []int{1, 2, 3, 4, 5})
	require.NoError(t, err)
	assert.Equal(t, []int{2, 4, 6, 8, 10}, rows)
}

func TestRoleAddressesItsWorkers(t *testing.T) {
	_, rt, c := newRole(t, roles.Spec{World: 8, Mesh: dispatch.Mesh{DP: 2, TP: 2, PP: 2}})
	judges := create(t, rt, roles.Spec{Name: "judges", Class: "actor", World: 2})
	w, err := c.Worker(5)
	require.NoError(t, err)
	assert.Equal(t, 5, w.Rank())
	got, err := w.Call(patient(t), "rank")
	require.NoError(t, err)
	assert.Equal(t, int64(5), got)

	ranks := func(g roles.Group, err error) []any {
		require.NoError(t, err)
		got, err := g.Call(patient(t), "rank")
		require.NoError(t, err)
		return got
	}
	assert.Equal(t, []any{int64(2), int64(3), int64(6), int64(7)}, ranks(c.Slice(1)))
	assert.Equal(t, []any{int64(0), int64(2), int64(4), int64(6)}, ranks(c.Where("tp=0")))
	assert.Equal(t, []any{int64(7), int64(1)}, ranks(c.Ranks(7, 1)))
	some, err := c.Ranks(6, 3)
	require.NoError(t, err)
	both, err := judges.Ranks(1, 0)
	require.NoError(t, err)
	mixed := roles.Group{some[0], both[0], some[1], both[1]}
	assert.Equal(t, []any{int64(6), int64(1), int64(3), int64(0)}, ranks(mixed, nil), "in the group's order, over two roles")

	_, err = mixed.Call(patient(t), "fail", 1)
	assert.ErrorIs(t, err, errTired)
	assert.ErrorContains(t, err, "judges[1] fail on ")
	for words, err := range map[string]error{
		"there is no rank 8: the ranks are 0 to 7":    second(c.Ranks(1, 8)),
		"there is no dp=2, the mesh has dp 0 to 1":    second(c.Slice(2)),
		`there is no axis "xp"`:                       second(c.Where("xp=0")),
		"call rank: the group has no workers":         second(roles.Group{}.Call(patient(t), "rank")),
		"rank 6 is named twice":                       second(roles.Group{some[0], some[0]}.Call(patient(t), "rank")),
		`role actors (class actor) has no method "x"`: second(mixed.Call(patient(t), "x")),
	} {
		assert.ErrorContains(t, err, words)
	}
}

func second[T any](_ T, err error) error { return err }

// The first failure of a group cancels the others, in all roles.
func TestGroupOverTwoRolesFailsFast(t *testing.T) {
	probe, rt, c := newRole(t, roles.Spec{World: 2})
	judges := create(t, rt, roles.Spec{Name: "judges", Class: "actor", World: 1, PanicFails: true})
	a, err := c.Worker(1)
	require.NoError(t, err)
	b, err := judges.Worker(0)
	require.NoError(t, err)
	errCh := make(chan error, 1)
	go func() {
		_, err := roles.Group{a, b}.Call(patient(t), "hold")
		errCh <- err
	}()
	await(t, probe.started, 2)
	require.NoError(t, judges.Destroy(timeout(t, 0)))
	require.ErrorIs(t, <-errCh, bus.ErrWorkerLost)
	require.Subset(t, await(t, probe.ended, 2), []int{1}, "the worker of the other role was cancelled")
}

func timeout(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestNamedObjects(t *testing.T) {
	_, _, c := newRole(t, roles.Spec{World: 2})
	require.NoError(t, c.CreateObject(patient(t), "engine", "actor", config{Rate: 2}))
	add := func(object string, n int) []int {
		f, err := c.Go(patient(t), dispatch.Call{Method: "add", Args: []any{n}, Object: object})
		require.NoError(t, err)
		totals, err := dispatch.AwaitEach[int](patient(t), f)
		require.NoError(t, err)
		return totals
	}
	assert.Equal(t, []int{5, 5}, add("engine", 5))
	assert.Equal(t, []int{1, 1}, add("", 1), "its state is its own")
	assert.Equal(t, []int{10, 10}, add("engine", 5))
	f, err := c.Go(patient(t), dispatch.Call{Method: "config", Object: "engine", Mode: dispatch.RankZero})
	require.NoError(t, err)
	got, err := dispatch.Await[config](patient(t), f)
	require.NoError(t, err)
	assert.Equal(t, config{Rate: 2}, got)
	infos, err := c.Info(patient(t))
	require.NoError(t, err)
	assert.Equal(t, []string{"", "engine"}, infos[1].Objects)

	err = c.CreateObject(patient(t), "engine", "actor", nil)
	assert.ErrorIs(t, err, bus.ErrExists)
	err = c.CreateObject(patient(t), "other", "nothing", nil)
	assert.ErrorContains(t, err, `no class "nothing" in this program; it has [actor]`)
	err = c.CreateObject(patient(t), "other", "actor", config{Fails: []int{1}})
	assert.ErrorIs(t, err, errTired)
	f, err = c.Go(patient(t), dispatch.Call{Method: "add", Args: []any{1}, Object: "nobody"})
	require.NoError(t, err)
	assert.ErrorContains(t, f.Wait(patient(t)), `no object "nobody" in this worker; create it with the verb @create`)
}
