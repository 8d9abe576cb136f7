package sessions_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// member makes an actor a rank of a group.
func member(group string, rank int) func(map[string]any) {
	return func(s map[string]any) {
		s["group"] = map[string]any{"name": group, "rank": rank}
		s["env"] = map[string]any{"env_vars": map[string]string{"MEMBER": fmt.Sprint(rank)}}
	}
}

// createGroup creates actors g0, g1, … of a group g.
func (d *driver) createGroup(group string, size int) {
	for rank := range size {
		require.Empty(d.t, d.create(fmt.Sprint(group, rank), "", member(group, rank)))
	}
	d.ask("group_size", group, size)
	for rank := range size {
		require.Equal(d.t, map[string]any{"role": fmt.Sprintf("group-%s@%d", group, rank), "restarts": false}, d.info(fmt.Sprint(group, rank)))
	}
}

func TestActorsOfAGroupAreRanksOfOneRole(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	h.serve()
	d := h.driver("driver-a")
	require.Empty(t, d.create("first", "", member("x", 0)))
	require.Empty(t, d.create("second", "", member("x", 1)))
	eventually(t, "it has a node", func() bool { return d.ask("actor_state", "first") == "DEPENDENCIES_UNREADY" })
	d.ask("group_size", "x", 2)
	require.Equal(t, map[string]any{"role": "group-x@0", "restarts": false}, d.info("first"))
	require.Equal(t, map[string]any{"role": "group-x@1", "restarts": false}, d.info("second"))

	ended := d.begin("actor_lost", "first", "group-x@0", nil)
	require.NotNil(t, d.ask("kill_actor", "first"))
	require.Contains(t, d.await(ended), "dead")
	require.Equal(t, "ALIVE", d.ask("actor_state", "second"), "the others continue")
	d.ask("handle_dropped", "second", d.name)
	eventually(t, "the role ends with the last", func() bool {
		_, err := d.rt.Attach(t.Context(), "group-x")
		return err != nil
	})
}

func TestAGroupThatIsNotCompleteIsNone(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	h.serve()
	d := h.driver("driver-a")
	own := func(id string) {
		require.Equal(t, map[string]any{"role": "actor-" + id, "restarts": false}, d.info(id))
	}
	d.create("alone", "", member("x", 0))
	d.ask("group_size", "x", 0)
	own("alone")

	d.create("killed", "", member("y", 0))
	d.create("left", "", member("y", 1))
	d.ask("kill_actor", "killed")
	d.create("late", "", member("y", 2))
	d.ask("group_size", "y", 3)
	own("left")
	own("late")

	d.create("one", "", member("z", 0))
	d.create("other", "", func(s map[string]any) { member("z", 1)(s); s["kind"] = "async" })
	d.ask("group_size", "z", 2)
	own("one")
	own("other")
}

func TestAGroupWaitsForTheResourcesOfAll(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	h.serve()
	d := h.driver("driver-a")
	one := func(group string, rank int) func(map[string]any) {
		return func(s map[string]any) { member(group, rank)(s); s["demand"] = map[string]float64{"CPU": 1} }
	}
	d.create("holds", "", func(s map[string]any) { s["demand"] = map[string]float64{"CPU": 1} })
	require.Contains(t, d.info("holds"), "role")
	d.create("first", "", one("x", 0))
	d.create("second", "", one("x", 1))
	d.ask("group_size", "x", 2)
	eventually(t, "it has a node", func() bool { return d.ask("actor_state", "first") == "DEPENDENCIES_UNREADY" })
	require.Equal(t, "PENDING_CREATION", d.ask("actor_state", "second"))
	d.ask("kill_actor", "holds")
	require.Equal(t, "group-x@0", d.info("first")["role"])
	require.Equal(t, "group-x@1", d.info("second")["role"])

	d.create("waits", "", one("y", 0))
	d.create("too", "", one("y", 1))
	d.ask("group_size", "y", 2)
	d.ask("kill_actor", "first")
	eventually(t, "one of the group has a node", func() bool { return d.ask("actor_state", "waits") == "DEPENDENCIES_UNREADY" })
	d.ask("kill_actor", "waits")
	require.Equal(t, "actor-too", d.info("too")["role"], "it has what the other gave back")
}

func TestTheNextServiceAdoptsGroups(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	stop := h.serve()
	d := h.driver("driver-a")
	d.createGroup("g", 3)
	before := d.pidOfRank("group-g", 0)
	d.ask("kill_actor", "g1")
	d.create("waits", "", member("h", 0))
	stop()

	h.serve()
	d.find()
	d.ask("rejoin", d.name, d.job, map[string]int{"g0": 1, "g2": 1, "waits": 1}, []any{})
	require.Equal(t, "group-g@0", d.info("g0")["role"])
	require.Equal(t, "group-g@2", d.info("g2")["role"])
	require.Contains(t, d.info("waits")["role"], "actor-waits", "a group that was being formed is none")
	d.create("more", "", member("h", 1))
	d.ask("group_size", "h", 2)
	require.Equal(t, "actor-more", d.info("more")["role"])
	ended := d.begin("actor_lost", "g2", "group-g@2", nil)
	d.ask("kill_actor", "g2")
	require.Contains(t, d.await(ended), "dead")
	require.Equal(t, before, d.pidOfRank("group-g", 0), "the process of the actor goes on")
	require.Equal(t, "ALIVE", d.ask("actor_state", "g0"))
}

// pidOfRank is the process of a rank, as it says itself.
func (d *driver) pidOfRank(role string, rank int) string {
	cl, err := d.rt.Attach(d.t.Context(), role)
	require.NoError(d.t, err)
	g, err := cl.Ranks(rank)
	require.NoError(d.t, err)
	made, err := g.Call(d.t.Context(), "made")
	require.NoError(d.t, err)
	return fmt.Sprint(made[0].([]any)[1])
}
