package planner

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestGrantRefusesHeldDevices(t *testing.T) {
	pl := simPlanner(t, 1, 2)
	plan, err := pl.Plan(Request{ID: "a", Bundles: Repeat(1, Bundle{Devices: Wholes(2)})})
	require.NoError(t, err)
	require.NoError(t, pl.Grant(plan.Reservation(Request{ID: "a"}, testNow)))

	require.ErrorIs(t, pl.Grant(plan.Reservation(Request{ID: "a"}, testNow)), ErrDuplicate)
	before := pl.Snapshot()
	var conflict *ConflictError
	require.ErrorAs(t, pl.Grant(plan.Reservation(Request{ID: "b"}, testNow)), &conflict, "a plan made before another grant")
	require.Equal(t, []string{"a"}, conflict.Holders)
	require.Equal(t, before, pl.Snapshot())
	requireSound(t, pl)

	bad := plan.Reservation(Request{ID: "c"}, testNow)
	bad.Workers = []Worker{{Node: "n0", Slots: []Slot{{Node: "n0", UUID: "GPU-0000-00", Share: -Whole}}}}
	require.ErrorIs(t, pl.Grant(bad), ErrBadShare, "a negative share must not free a device")
}

// Parts of one reservation on a device add up; colocated reservations do not.
func TestPartsAddUp(t *testing.T) {
	pl := simPlanner(t, 1, 1)
	require.True(t, grant(t, pl, Request{ID: "halves", Bundles: Repeat(2, Bundle{Devices: 500})}, testNow))
	require.False(t, grant(t, pl, Request{ID: "more", Bundles: Repeat(1, Bundle{Devices: 1})}, testNow))
	require.True(t, grant(t, pl, Request{ID: "over", Colocate: "halves", Bundles: Repeat(1, Bundle{Devices: Whole})}, testNow))
	requireSound(t, pl)
	pl.Release("halves")
	require.False(t, grant(t, pl, Request{ID: "more", Bundles: Repeat(1, Bundle{Devices: 1})}, testNow), "what lies over it still holds it")
	err := pl.Grant(Reservation{ID: "halves"})
	require.ErrorIs(t, err, ErrDuplicate, "the name of what is still shared is taken")
	pl.Release("over")
	require.True(t, grant(t, pl, Request{ID: "more", Bundles: Repeat(1, Bundle{Devices: 1})}, testNow))
}

// The devices of a reservation are still held when their node is removed and returns.
func TestNodesComeAndGo(t *testing.T) {
	pl := simPlanner(t, 2, 2)
	require.True(t, grant(t, pl, Request{ID: "a", Bundles: Repeat(2, Bundle{Devices: Whole, Node: "n1", CPUs: Whole})}, testNow))
	node := *pl.byID["n1"].info

	pl.RemoveNode("n1")
	pl.RemoveNode("n1")
	requireSound(t, pl)
	require.Len(t, pl.nodes, 1)
	held, ok := pl.Reservation("a")
	require.True(t, ok)
	require.Len(t, held.Workers, 2)

	node.State = NodeUnproven
	require.NoError(t, pl.SetNode(node))
	requireSound(t, pl)
	require.Zero(t, pl.byID["n1"].freeCount)
	require.Equal(t, Wholes(62), pl.byID["n1"].cpus)

	node.Devices = node.Devices[:1]
	require.NoError(t, pl.SetNode(node), "a device fell off the bus")
	pl.Release("a")
	requireSound(t, pl)
	require.Empty(t, pl.usage)
}

func TestInconsistentSnapshots(t *testing.T) {
	nodes := simNodes(2, 2)
	for name, change := range map[string]func([]Node){
		"a name twice":     func(n []Node) { n[1].ID = "n0" },
		"a rank twice":     func(n []Node) { n[1].Rank = 0 },
		"an index twice":   func(n []Node) { n[0].Devices[1].Index = 0 },
		"a UUID twice":     func(n []Node) { n[0].Devices[1].UUID = n[0].Devices[0].UUID },
		"a negative index": func(n []Node) { n[0].Devices[1].Index = -1 },
		"negative CPUs":    func(n []Node) { n[0].CPUs = -1 },
	} {
		bad := simNodes(2, 2)
		change(bad)
		_, err := New(Snapshot{Nodes: bad})
		var wrong *SnapshotError
		require.ErrorAs(t, err, &wrong, name)
	}

	pl, err := New(Snapshot{Nodes: nodes})
	require.NoError(t, err)
	moved := nodes[1]
	moved.Rank = 0
	require.Error(t, pl.SetNode(moved))
	moved.Rank = 7
	require.NoError(t, pl.SetNode(moved))
	requireSound(t, pl)

	_, err = New(Snapshot{Nodes: nodes, Reservations: []Reservation{
		{ID: "a", Workers: []Worker{{Node: "n0", Slots: []Slot{{Node: "n0", UUID: "GPU-0000-00", Share: Whole}}}}},
		{ID: "b", Workers: []Worker{{Node: "n0", Slots: []Slot{{Node: "n0", UUID: "GPU-0000-00", Share: 1}}}}},
	}})
	var conflict *ConflictError
	require.ErrorAs(t, err, &conflict)
}

// A node may have more devices than a machine word has bits.
func TestLargeNodes(t *testing.T) {
	pl := simPlanner(t, 1, 1000)
	require.True(t, grant(t, pl, Request{ID: "a", Bundles: Repeat(999, Bundle{Devices: Whole})}, testNow))
	requireSound(t, pl)
	require.Equal(t, 1, pl.byID["n0"].freeCount)
	require.True(t, grant(t, pl, Request{ID: "b", Bundles: Repeat(1, Bundle{Devices: Whole})}, testNow))
	held, _ := pl.Reservation("b")
	require.Equal(t, []int{999}, held.Workers[0].Devices)
}
