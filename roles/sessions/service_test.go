package sessions_test

import (
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestActorsAndTheirNames(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	h.serve()
	d := h.driver("driver-a")
	require.Empty(t, d.create("a1", "name", nil))
	require.Equal(t, map[string]any{"role": "actor-a1", "restarts": false}, d.info("a1"))
	require.Empty(t, d.create("a1", "name", nil), "a repeated request finds its own actor")
	require.Equal(t, map[string]any{"taken": true}, d.create("a2", "name", nil))
	existing := d.create("a3", "name", func(s map[string]any) { s["get_if_exists"] = true }).(map[string]any)["existing"]
	require.Equal(t, map[string]any{"actor_id": "a1", "handle": []any{"made"}}, existing)
	require.Equal(t, existing, d.ask("named_actor", "space", "name"))
	require.Nil(t, d.ask("named_actor", "other", "name"))
	require.Equal(t, []any{[]any{"space", "name"}}, d.ask("named_actors", nil))

	cause := d.ask("kill_actor", "a1").(map[string]any)
	require.Equal(t, "died", cause["kind"])
	require.Contains(t, cause["text"], "it was killed by `ray.kill`")
	require.Equal(t, map[string]any{"dead": cause}, d.info("a1"))
	require.Empty(t, d.create("a4", "name", nil), "its name is free")
	d.ask("handle_dropped", "a4", d.name)
	eventually(t, "an actor ends with its last handle", func() bool { return d.ask("actor_state", "a4") == "DEAD" })
	require.Equal(t, map[string]any{"dead": nil}, d.await(d.begin("actor_lost", "unknown", "role")))

	d.ask("create_actor", "a5", d.spec("", "fails", nil), d.name)
	require.Equal(t, map[string]any{"dead": []any{"frame of the exception"}}, d.info("a5"), "what a constructor raised")
}

func TestRequestsOfACallerBeginInTheirOrder(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	h.serve()
	d := h.driver("driver-a")
	second := d.beginAs(d.number+1, "actor_state", "a1")
	first := d.beginAs(d.number, "create_actor", "a1", d.spec("", "made", nil), d.name)
	d.number += 2
	require.Empty(t, d.await(first))
	require.NotEqual(t, "DEAD", d.await(second), "the actor was there when its state was asked for")
}

func TestActorsRestart(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	h.serve()
	d := h.driver("driver-a")
	d.create("a1", "name", func(s map[string]any) { s["restarts"] = 1 })
	require.Equal(t, map[string]any{"role": "actor-a1", "restarts": true}, d.info("a1"))
	ended := d.begin("actor_lost", "a1", "actor-a1", nil)
	before := d.pid("actor-a1")
	require.Nil(t, d.ask("kill_actor", "a1", false))
	require.Equal(t, map[string]any{"restarts": true}, d.await(ended))
	require.Equal(t, map[string]any{"role": "actor-a1-1", "restarts": false}, d.info("a1"))
	require.NotEqual(t, before, d.pid("actor-a1-1"))
	require.NotNil(t, d.ask("named_actor", "space", "name"))
	d.ask("kill_actor", "a1", false)
	require.Contains(t, d.info("a1"), "dead", "no restart is left")
}

func TestResourcesAreWaitedFor(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	h.serve()
	d := h.driver("driver-a")
	both := func(s map[string]any) { s["demand"] = map[string]float64{"CPU": 2} }
	d.create("a1", "", both)
	require.Contains(t, d.info("a1"), "role")
	d.create("a2", "", both)
	require.Equal(t, "PENDING_CREATION", d.ask("actor_state", "a2"))
	require.Equal(t, []any{map[string]any{"CPU": 2.0}}, d.ask("placement", "waiting"))
	require.Equal(t, map[string]any{"waits": true, "infeasible": []any{}}, d.ask("placement", "needs"))
	none := d.begin("lease", "l0", d.job, map[string]float64{"licence": 1}, nil, map[string]any{})
	eventually(t, "no node has a licence", func() bool {
		infeasible := d.ask("placement", "needs").(map[string]any)["infeasible"]
		return reflect.DeepEqual(infeasible, []any{map[string]any{"licence": 1.0}})
	})
	require.Equal(t, map[string]any{"waits": false, "infeasible": []any{}}, h.driver("driver-b").ask("placement", "needs"), "of others")
	d.ask("cancel_lease", "l0")
	require.Equal(t, map[string]any{"cancelled": true}, d.await(none))

	one := map[string]float64{"CPU": 1}
	lease := d.begin("lease", "l1", d.job, one, nil, map[string]any{})
	withdrawn := d.begin("lease", "l2", d.job, one, nil, map[string]any{})
	d.ask("cancel_lease", "l2")
	require.Equal(t, map[string]any{"cancelled": true}, d.await(withdrawn))
	d.ask("kill_actor", "a2")
	d.ask("kill_actor", "a1")
	first := d.await(lease).(map[string]any)
	require.Contains(t, first["role"], "worker-")
	again := d.begin("lease", "l3", d.job, map[string]float64{"CPU": 2}, nil, map[string]any{})
	d.ask("suspend", "l1")
	other := d.await(again).(map[string]any)
	require.NotEqual(t, first["role"], other["role"], "the lease lent its CPU while it waited")
	d.ask("resume", "l1")
	d.ask("end_lease", "l1")
	d.ask("end_lease", "l3")
	reused := d.ask("lease", "l4", d.job, one, nil, map[string]any{}).(map[string]any)
	require.Equal(t, first["role"], reused["role"], "the process of tasks that need the same")

	gone := map[string]any{"kind": "node", "node_id": "00", "soft": false}
	refused := d.ask("lease", "l5", d.job, one, gone, map[string]any{}).(map[string]any)
	require.Equal(t, "unschedulable", refused["unschedulable"])
}

func TestAnActorThatCannotStartGivesItsResourcesBack(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	h.serve()
	d := h.driver("driver-a")
	both := func(s map[string]any) { s["demand"] = map[string]float64{"CPU": 2} }
	d.create("broken", "", func(s map[string]any) { both(s); s["env"] = map[string]any{"py_executable": "/nowhere/python"} })
	require.Contains(t, d.info("broken")["dead"].(map[string]any)["text"], "could not be started")
	d.create("next", "", both)
	require.Contains(t, d.info("next"), "role")
}

func TestPlacementGroups(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	h.serve()
	d := h.driver("driver-a")
	bundles := []map[string]float64{{"CPU": 1}, {"CPU": 1}}
	group := func(id, name string) any {
		return d.ask("placement", "create_group", id, name, "space", d.name, false, bundles, "PACK", "")
	}
	require.Empty(t, group("g1", "first"))
	require.Equal(t, "CREATED", d.ask("placement", "wait_group", "g1", 10.0))
	require.Contains(t, group("g2", "first"), "already exists")
	require.Empty(t, group("g2", "second"))
	waiting := d.begin("placement", "wait_group", "g2", -1.0)
	require.Equal(t, "PENDING", d.ask("placement", "wait_group", "g2", 0.01))
	inside := func(s map[string]any) {
		s["demand"], s["strategy"] = map[string]float64{"CPU": 1}, map[string]any{"kind": "placement_group", "id": "g1", "bundle": 1}
	}
	d.create("a1", "", inside)
	require.Contains(t, d.info("a1"), "role")
	d.ask("placement", "remove_group", "g1")
	require.Equal(t, "CREATED", d.await(waiting), "what the first held is free")
	require.Contains(t, d.info("a1")["dead"].(map[string]any)["text"], "its placement group was removed")
	d.create("a2", "", inside)
	require.Equal(t, "group_removed", d.info("a2")["dead"].(map[string]any)["kind"])
}

// A group of a gang that was removed is not waited for by the others, nor created by a request that comes late, also after the end of a head.
func TestARemovedGroupOfAGangStaysRemoved(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	stop := h.serve()
	d := h.driver("driver-a")
	create := func(id string) any {
		gang := map[string]any{"name": "gang", "size": 3}
		return d.ask("placement", "create_group", id, "", "space", d.name, false, []map[string]float64{{"CPU": 1}}, "PACK", "", gang)
	}
	require.Empty(t, create("g1"))
	require.Equal(t, "PENDING", d.ask("placement", "wait_group", "g1", 0.0))
	d.ask("placement", "remove_group", "g1")
	stop()

	h.serve()
	d.find()
	d.ask("rejoin", d.name, d.job, map[string]int{}, []any{})
	require.Empty(t, create("g1"))
	require.Equal(t, "REMOVED", d.ask("placement", "wait_group", "g1", -1.0))
	require.Empty(t, create("g2"))
	require.Empty(t, create("g3"))
	require.Equal(t, "CREATED", d.ask("placement", "wait_group", "g2", -1.0))
	require.Equal(t, "CREATED", d.ask("placement", "wait_group", "g3", -1.0))
}

func TestADriverThatEndsTakesItsActorsAlong(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	h.serve()
	first, second := h.driver("driver-a"), h.driver("driver-b")
	first.create("own", "own", nil)
	first.create("kept", "kept", func(s map[string]any) { s["detached"] = true })
	require.Contains(t, second.info("own"), "role", "drivers share the directory")
	require.Contains(t, second.info("kept"), "role")
	first.close()
	eventually(t, "the driver's actor is dead", func() bool { return second.ask("actor_state", "own") == "DEAD" })
	require.Nil(t, second.ask("named_actor", "space", "own"))
	require.NotNil(t, second.ask("named_actor", "space", "kept"), "a detached actor lives on")
}

func TestIndicesOfDeclaredDevicesAreStored(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	stop := h.serve()
	d := h.driver("driver-a")
	all := map[string]float64{"NPU": 3}
	require.Empty(t, d.ask("placement", "create_group", "g1", "group", "space", d.name, false, []map[string]float64{all}, "PACK", ""))
	require.Equal(t, "CREATED", d.ask("placement", "wait_group", "g1", 10.0))
	stop()

	h.serve()
	d.find()
	d.ask("rejoin", d.name, d.job, map[string]int{}, []any{})
	lease := d.ask("lease", "l1", d.job, all, map[string]any{"kind": "placement_group", "id": "g1", "bundle": 0}, map[string]any{}).(map[string]any)
	require.Equal(t, map[string]any{"NPU": []any{"0", "1", "2"}}, lease["devices"])
}

func TestTheNextServiceAdoptsWhatRuns(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	stop := h.serve()
	d := h.driver("driver-a")
	one := func(s map[string]any) { s["demand"], s["restarts"] = map[string]float64{"CPU": 1, "GPU": 1}, 1 }
	d.create("a1", "name", one)
	role := d.info("a1")["role"].(string)
	before := d.pid(role)
	require.Empty(t, d.ask("placement", "create_group", "g1", "group", "space", d.name, false, []map[string]float64{{"GPU": 1}}, "PACK", ""))
	lease := d.ask("lease", "l1", d.job, map[string]float64{"CPU": 0.5}, nil, map[string]any{}).(map[string]any)
	d.ask("create_actor", "slow", d.spec("slow", "slow", nil), d.name)
	var making, slow string
	eventually(t, "the constructor runs", func() bool {
		making, slow = d.constructing("actor-slow")
		return making == "running"
	})
	d.create("waits", "waits", func(s map[string]any) { s["demand"] = map[string]float64{"CPU": 1} })
	stop()

	h.serve()
	d.find()
	d.ask("rejoin", d.name, d.job, map[string]int{"a1": 1, "waits": 1, "slow": 1}, []any{map[string]any{
		"id": "l1", "job": d.job, "demand": map[string]float64{"CPU": 0.5}, "role": lease["role"], "node_id": lease["node_id"], "group": "", "bundle": 0, "devices": map[string][]string{},
	}})
	require.Equal(t, "a1", d.ask("named_actor", "space", "name").(map[string]any)["actor_id"])
	require.Equal(t, map[string]any{"role": role, "restarts": true}, d.info("a1"))
	require.Equal(t, before, d.pid(role), "the process of the actor goes on")
	require.Equal(t, map[string]any{"role": "actor-slow", "restarts": false}, d.info("slow"), "a constructor that runs is waited for")
	require.Equal(t, slow, d.pid("actor-slow"))
	require.Equal(t, "CREATED", d.ask("placement", "wait_group", "g1", 0.0))
	require.Equal(t, "g1", d.ask("placement", "group_named", "group", "space"))
	free := d.ask("placement", "nodes").([]any)[0].(map[string]any)["free"].(map[string]any)
	require.InDelta(t, 0.5, free["CPU"], 0, "what the actor and the lease hold is not free")
	require.InDelta(t, 0, free["GPU"], 0)
	require.Equal(t, "PENDING_CREATION", d.ask("actor_state", "waits"), "a request that waited waits again")
	d.ask("end_lease", "l1")
	require.Contains(t, d.info("waits"), "role")
	require.Equal(t, map[string]any{"taken": true}, d.create("a2", "name", nil), "the name is taken")
	d.ask("kill_actor", "a1")
	require.Empty(t, d.create("a3", "name", nil))
}
