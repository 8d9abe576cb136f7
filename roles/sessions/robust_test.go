package sessions_test

import (
	"context"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/dispatch"
	"troupe/roles"
	"troupe/roles/registry"
)

// fails makes a request that is refused, and returns the error.
func (d *driver) fails(method string, args ...any) error {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(d.t.Context(), limit)
	defer cancel()
	_, err := dispatch.AwaitEach[any](ctx, d.begin(method, args...))
	require.Error(d.t, err, method)
	return err
}

// A malformed request is refused, and the service goes on for everyone.
func TestMalformedRequests(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	h.serve()
	d := h.driver("driver-a")
	grouped := func(rank int) func(map[string]any) {
		return func(s map[string]any) { s["group"] = map[string]any{"name": "g", "rank": rank} }
	}
	for method, args := range map[string][]any{
		"placement": {}, "nothing": {}, "register_job": {7}, "create_actor": {"a", "no spec", d.name}, "lease": {"l", d.job, map[string]float64{}, 7, nil},
		"group_size": {"g", -1}, "rejoin": {d.name, d.job, "no map", nil},
	} {
		require.Error(t, d.fails(method, args...))
	}
	for _, amount := range []float64{-1, math.NaN(), math.Inf(1), 1e300} {
		wrong := map[string]float64{"GPU": amount}
		require.ErrorContains(t, d.fails("lease", "l", d.job, wrong, nil, map[string]any{}), `resource "GPU"`)
		require.ErrorContains(t, d.fails("create_actor", "a", d.spec("", "made", func(s map[string]any) { s["demand"] = wrong }), d.name), `resource "GPU"`)
		require.ErrorContains(t, d.fails("placement", "create_group", "g", "", "space", d.name, false, []map[string]float64{wrong}, "PACK", ""), `resource "GPU"`)
	}
	for _, bad := range []string{"", strings.Repeat("x", 5000), "a.b", "a b", "*", "../a"} { // a name that is no key would stop the store of all
		require.ErrorIs(t, d.fails("create_actor", bad, d.spec("", "made", nil), d.name), bus.ErrInvalid)
		require.ErrorIs(t, d.fails("lease", bad, d.job, map[string]float64{}, nil, map[string]any{}), bus.ErrInvalid)
		require.ErrorIs(t, d.fails("placement", "create_group", bad, "", "space", d.name, false, []map[string]float64{{"CPU": 1}}, "PACK", ""), bus.ErrInvalid)
		require.ErrorIs(t, d.fails("register_job", map[string]any{"process": bad, "session": "s"}), bus.ErrInvalid)
		require.ErrorIs(t, d.fails("register_job", map[string]any{"process": "other", "session": bad}), bus.ErrInvalid)
	}
	require.ErrorContains(t, d.fails("create_actor", "low", d.spec("", "made", grouped(-1)), d.name), "rank -1")
	require.ErrorContains(t, d.fails("create_actor", "high", d.spec("", "made", grouped(1<<40)), d.name), "rank 1099511627776")

	d.create("r0", "", grouped(0))
	d.create("r2", "", grouped(2))
	d.create("twice", "", grouped(0))
	d.ask("group_size", "g", 2)
	for _, id := range []string{"r0", "r2", "twice"} {
		require.Equal(t, "actor-"+id, d.info(id)["role"], "ranks with a gap have roles of their own")
	}
}

// What a process has leased, and what it waits for, ends with it.
func TestLeasesEndWithTheirProcess(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	h.serve()
	d := h.driver("driver-a")
	d.create("a1", "", nil)
	a := &driver{t: t, rt: d.rt, name: d.info("a1")["role"].(string), job: d.job, control: d.control}
	one := map[string]float64{"CPU": 1}
	for i := range 2 {
		require.Contains(t, a.ask("lease", fmt.Sprint("l", i), d.job, one, nil, map[string]any{}), "role")
	}
	a.begin("lease", "waits", d.job, one, nil, map[string]any{})
	eventually(t, "the third waits", func() bool { return len(d.ask("placement", "waiting").([]any)) == 1 })
	d.ask("kill_actor", "a1")
	eventually(t, "nothing waits", func() bool { return len(d.ask("placement", "waiting").([]any)) == 0 })
	require.Contains(t, d.ask("lease", "all", d.job, map[string]float64{"CPU": 2}, nil, map[string]any{}), "role", "the CPUs are free")

	for method, args := range map[string][]any{
		"lease": {"late", d.job, one, nil, map[string]any{}}, "create_actor": {"late", a.spec("", "made", nil), a.name}, "handle_taken": {"late", a.name},
		"placement": {"create_group", "late", "", "space", a.name, false, []map[string]float64{one}, "PACK", ""}, "rejoin": {a.name, d.job, map[string]int{}, []any{}}, "present": {},
	} {
		require.ErrorContains(t, a.fails(method, args...), "has ended", method)
	}
}

// A caller that has lost the service for a moment repeats its requests under new numbers, and gets the same answers.
func TestRepeatedLeases(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	h.serve()
	d := h.driver("driver-a")
	all := map[string]float64{"CPU": 2}
	first := d.ask("lease", "l1", d.job, all, nil, map[string]any{})
	d.begin("lease", "l2", d.job, all, nil, map[string]any{})
	d.number = 0
	d.ask("rejoin", d.name, d.job, map[string]int{}, []any{})
	require.Equal(t, first, d.ask("lease", "l1", d.job, all, nil, map[string]any{}))
	again := d.begin("lease", "l2", d.job, all, nil, map[string]any{})
	d.ask("end_lease", "l1")
	require.Contains(t, d.await(again), "role")
}

// A detached actor keeps its placement groups, its actors and its place among the callers when its job ends.
func TestADetachedActorKeepsWhatItCreated(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	h.serve()
	first, second := h.driver("driver-a"), h.driver("driver-b")
	first.create("kept", "kept", func(s map[string]any) { s["detached"] = true })
	kept := &driver{t: t, rt: second.rt, name: second.info("kept")["role"].(string), job: first.job, control: second.control}
	require.Empty(t, kept.ask("placement", "create_group", "g", "", "space", kept.name, false, []map[string]float64{{"CPU": 1}}, "PACK", ""))
	kept.create("child", "", nil)
	require.Contains(t, kept.info("child"), "role")
	first.create("own", "", nil)
	require.Contains(t, first.info("own"), "role")
	first.ask("end_job", first.job)
	require.Equal(t, "DEAD", second.ask("actor_state", "own"))
	began := time.Now()
	require.Equal(t, "ALIVE", kept.ask("actor_state", "child"))
	require.Equal(t, "CREATED", kept.ask("placement", "wait_group", "g", 0.0))
	require.Less(t, time.Since(began), 20*time.Second, "its requests keep their order")
	second.ask("kill_actor", "kept")
	eventually(t, "its actor ends with it", func() bool { return second.ask("actor_state", "child") == "DEAD" })
}

// A handle that was taken and dropped before its actor was there does not keep the actor.
func TestAHandleThatCameAndWent(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	h.serve()
	first, second := h.driver("driver-a"), h.driver("driver-b")
	second.ask("handle_taken", "a1", second.name)
	second.ask("handle_dropped", "a1", second.name)
	first.create("a1", "", nil)
	require.Contains(t, first.info("a1"), "role")
	first.ask("handle_dropped", "a1", first.name)
	eventually(t, "the actor ends with its last handle", func() bool { return first.ask("actor_state", "a1") == "DEAD" })
}

// A role that an earlier service has begun to start and has not stored is not the role of an actor with the same id: that request is
// repeated, and gets a process of its own; the other process ends.
func TestARoleThatWasNotStoredIsNotUsed(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	earlier, err := roles.Open(t.Context(), roles.Config{BusConfig: bus.Config{InProcess: h.server}, Namespace: "ray", Name: "earlier"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = earlier.Close(context.Background()) }) // the head may be gone
	_, err = earlier.Create(t.Context(), roles.Spec{Name: "actor-a1", Class: "ray", World: 1, Detached: true, Process: &roles.Process{Command: []string{os.Args[0]}}})
	require.NoError(t, err)

	h.serve()
	d := h.driver("driver")
	require.Empty(t, d.create("a1", "name", nil))
	role := d.info("a1")["role"].(string)
	require.NotEqual(t, "actor-a1", role)
	require.Contains(t, role, "actor-a1-")
	require.NotEmpty(t, d.pid(role))
	eventually(t, "the other process ends", func() bool {
		all, err := earlier.Roles(t.Context())
		require.NoError(t, err)
		return !slices.ContainsFunc(all, func(r registry.RoleRecord) bool { return r.Name == "actor-a1" })
	})
}
