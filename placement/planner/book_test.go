package planner

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestGrantRefusesWhatIsHeld(t *testing.T) {
	b := simBook(t, 1, 2)
	plan, err := b.Plan(Request{ID: "a", Bundles: Repeat(1, Bundle{Devices: Wholes(2)})})
	require.NoError(t, err)
	require.NoError(t, b.Grant(plan.Reservation(Request{ID: "a"}, testNow)))

	require.ErrorIs(t, b.Grant(plan.Reservation(Request{ID: "a"}, testNow)), ErrDuplicate)
	before := b.Snapshot()
	var conflict *ConflictError
	require.ErrorAs(t, b.Grant(plan.Reservation(Request{ID: "b"}, testNow)), &conflict, "a plan made before somebody else's grant")
	require.Equal(t, []string{"a"}, conflict.Holders)
	require.Equal(t, before, b.Snapshot())
	requireSound(t, b)

	bad := plan.Reservation(Request{ID: "c"}, testNow)
	bad.Workers = []Worker{{Node: "n0", Slots: []Slot{{Node: "n0", UUID: "GPU-0000-00", Share: -Whole}}}}
	require.ErrorIs(t, b.Grant(bad), ErrBadShare, "nobody frees a device by holding less than nothing")
}

// Parts of one reservation on a device add up; what is laid over it does not.
func TestPartsAddUp(t *testing.T) {
	b := simBook(t, 1, 1)
	require.True(t, grant(t, b, Request{ID: "halves", Bundles: Repeat(2, Bundle{Devices: 500})}, testNow))
	require.False(t, grant(t, b, Request{ID: "more", Bundles: Repeat(1, Bundle{Devices: 1})}, testNow))
	require.True(t, grant(t, b, Request{ID: "over", Colocate: "halves", Bundles: Repeat(1, Bundle{Devices: Whole})}, testNow))
	requireSound(t, b)
	b.Release("halves")
	require.False(t, grant(t, b, Request{ID: "more", Bundles: Repeat(1, Bundle{Devices: 1})}, testNow), "what lies over it still holds it")
	err := b.Grant(Reservation{ID: "halves"})
	require.ErrorIs(t, err, ErrDuplicate, "the name of what is still shared is taken")
	b.Release("over")
	require.True(t, grant(t, b, Request{ID: "more", Bundles: Repeat(1, Bundle{Devices: 1})}, testNow))
}

// A node that goes and comes back finds its devices held; one that was seen on no node is no obstacle.
func TestNodesComeAndGo(t *testing.T) {
	b := simBook(t, 2, 2)
	require.True(t, grant(t, b, Request{ID: "a", Bundles: Repeat(2, Bundle{Devices: Whole, Node: "n1", CPUs: Whole})}, testNow))
	node := *b.byID["n1"].node

	b.RemoveNode("n1")
	b.RemoveNode("n1")
	requireSound(t, b)
	require.Len(t, b.stocks, 1)
	held, ok := b.Reservation("a")
	require.True(t, ok)
	require.Len(t, held.Workers, 2)

	node.State = NodeUnproven
	require.NoError(t, b.SetNode(node))
	requireSound(t, b)
	require.Zero(t, b.byID["n1"].idle)
	require.Equal(t, Wholes(62), b.byID["n1"].cpus)

	node.Devices = node.Devices[:1]
	require.NoError(t, b.SetNode(node), "a device fell off the bus")
	b.Release("a")
	requireSound(t, b)
	require.Empty(t, b.usage)
}

func TestContradictionsAreRefused(t *testing.T) {
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
		_, err := NewBook(Snapshot{Nodes: bad})
		var wrong *SnapshotError
		require.ErrorAs(t, err, &wrong, name)
	}

	b, err := NewBook(Snapshot{Nodes: nodes})
	require.NoError(t, err)
	moved := nodes[1]
	moved.Rank = 0
	require.Error(t, b.SetNode(moved))
	moved.Rank = 7
	require.NoError(t, b.SetNode(moved))
	requireSound(t, b)

	_, err = NewBook(Snapshot{Nodes: nodes, Reservations: []Reservation{
		{ID: "a", Workers: []Worker{{Node: "n0", Slots: []Slot{{Node: "n0", UUID: "GPU-0000-00", Share: Whole}}}}},
		{ID: "b", Workers: []Worker{{Node: "n0", Slots: []Slot{{Node: "n0", UUID: "GPU-0000-00", Share: 1}}}}},
	}})
	var conflict *ConflictError
	require.ErrorAs(t, err, &conflict)
}

// A node with more devices than a machine word has bits is like any other.
func TestLargeNodes(t *testing.T) {
	b := simBook(t, 1, 1000)
	require.True(t, grant(t, b, Request{ID: "a", Bundles: Repeat(999, Bundle{Devices: Whole})}, testNow))
	requireSound(t, b)
	require.Equal(t, 1, b.byID["n0"].idle)
	require.True(t, grant(t, b, Request{ID: "b", Bundles: Repeat(1, Bundle{Devices: Whole})}, testNow))
	held, _ := b.Reservation("b")
	require.Equal(t, []int{999}, held.Workers[0].Devices)
}
