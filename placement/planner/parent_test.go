package planner

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// inside returns a request for one bundle of a parent reservation.
func inside(id, parent string, bundle int, b Bundle) Request {
	return Request{ID: id, Parent: parent, ParentBundle: bundle, Bundles: []Bundle{b}, Opportunistic: true}
}

// A request inside a reservation uses the bundle's resources, and the nodes are charged once.
func TestParentBundleIsChargedOnce(t *testing.T) {
	pl := simPlanner(t, 2, 4)
	require.True(t, grant(t, pl, Request{ID: "pg", Bundles: Repeat(2, Bundle{Devices: Wholes(2), CPUs: Wholes(4)}), Strategy: StrictSpread}, testNow))
	free := pl.nodes[0].cpus
	require.True(t, grant(t, pl, inside("a", "pg", 1, Bundle{Devices: Whole, CPUs: Wholes(3)}), testNow))
	require.True(t, grant(t, pl, inside("b", "pg", -1, Bundle{CPUs: Wholes(4)}), testNow))
	require.Equal(t, free, pl.nodes[0].cpus)
	parent, _ := pl.Reservation("pg")
	a, _ := pl.Reservation("a")
	b, _ := pl.Reservation("b")
	require.Equal(t, 1, a.ParentBundle)
	require.Equal(t, 0, b.ParentBundle, "bundle 1 has one CPU left")
	require.Equal(t, parent.Workers[1].Node, a.Workers[0].Node)
	require.Equal(t, parent.Workers[1].Slots[0].UUID, a.Workers[0].Slots[0].UUID)
	require.False(t, grant(t, pl, inside("c", "pg", 1, Bundle{Devices: Wholes(2)}), testNow))
	require.True(t, grant(t, pl, inside("d", "pg", 1, Bundle{Devices: Whole}), testNow))
	d, _ := pl.Reservation("d")
	require.Equal(t, parent.Workers[1].Slots[1].UUID, d.Workers[0].Slots[0].UUID)
	pl.Release("a")
	pl.Release("d")
	require.True(t, grant(t, pl, inside("c", "pg", 1, Bundle{Devices: Wholes(2)}), testNow))
}

// Parts of a device inside a bundle share it up to the bundle's share.
func TestPartsInsideABundle(t *testing.T) {
	pl := simPlanner(t, 1, 4)
	require.True(t, grant(t, pl, Request{ID: "pg", Bundles: []Bundle{{Devices: Whole}}}, testNow))
	for _, id := range []string{"a", "b", "c"} {
		require.True(t, grant(t, pl, inside(id, "pg", 0, Bundle{Devices: 333}), testNow))
	}
	require.False(t, grant(t, pl, inside("d", "pg", 0, Bundle{Devices: 333}), testNow))
}

// A request inside a reservation that has no such bundle, or none large enough, is refused.
func TestInvalidParents(t *testing.T) {
	pl := simPlanner(t, 1, 4)
	require.True(t, grant(t, pl, Request{ID: "pg", Bundles: []Bundle{{Devices: Whole, Resources: nil}}}, testNow))
	for _, r := range []Request{
		inside("a", "pg", 1, Bundle{Devices: Whole}),
		inside("a", "pg", 0, Bundle{Devices: Wholes(2)}),
		inside("a", "pg", -1, Bundle{CPUs: Whole}),
		inside("a", "pg", -2, Bundle{Devices: Whole}),
		{ID: "a", Parent: "pg", Bundles: Repeat(2, Bundle{})},
	} {
		_, err := pl.Plan(r)
		require.ErrorIs(t, err, ErrInvalid, "%+v", r)
	}
	_, err := pl.Plan(inside("a", "none", 0, Bundle{}))
	require.ErrorIs(t, err, ErrUnknownReservation)
}

// A request waits for a parent that is in the queue, and for a short time for one that is not; then it is refused.
func TestWaitForParent(t *testing.T) {
	pl := simPlanner(t, 1, 4)
	child := Queued{Request: inside("child", "pg", 0, Bundle{}), Since: testNow}
	parent := Queued{Request: Request{ID: "pg", Bundles: []Bundle{{Devices: Wholes(8)}}, AwaitNodes: true, Opportunistic: true}, Since: testNow}
	pl.Now = testNow.Add(time.Second)
	require.Equal(t, WaitParent, pl.Schedule([]Queued{child}, Policy{}).Waits[0].Code)
	pl.Now = testNow.Add(time.Minute)
	require.Len(t, pl.Schedule([]Queued{parent, child}, Policy{}).Waits, 2)
	require.ErrorIs(t, pl.Schedule([]Queued{child}, Policy{}).Refusals[0].Err, ErrUnknownReservation)
}

// A waiting opportunistic request reserves nothing: later requests that fit are granted.
func TestOpportunisticRequestsAreOvertaken(t *testing.T) {
	pl := simPlanner(t, 1, 4)
	require.True(t, grant(t, pl, Request{ID: "a", Bundles: []Bundle{{Devices: Whole}}}, testNow))
	big := Queued{Request: Request{ID: "big", Bundles: []Bundle{{Devices: Wholes(4)}}, Opportunistic: true}, Since: testNow}
	small := Queued{Request: Request{ID: "small", Bundles: []Bundle{{Devices: Wholes(3)}}, Opportunistic: true}, Since: testNow.Add(time.Second)}
	d := pl.Schedule([]Queued{big, small}, Policy{})
	require.Equal(t, "small", d.Grants[0].Reservation.ID)
	require.Equal(t, "big", d.Waits[0].ID)
	never := Queued{Request: Request{ID: "never", Bundles: []Bundle{{Devices: Wholes(9)}}, Opportunistic: true}, Since: testNow}
	require.Len(t, pl.Schedule([]Queued{never}, Policy{}).Refusals, 1)
	never.Request.AwaitNodes = true
	require.Len(t, pl.Schedule([]Queued{never}, Policy{}).Waits, 1)
}

// Declared resources are counted like CPUs, whatever they are called.
func TestDeclaredResources(t *testing.T) {
	nodes := simNodes(2, 0)
	nodes[1].Resources = map[string]Share{"cpu": Wholes(2), "licence": 500}
	pl, err := New(Snapshot{Nodes: nodes, Now: testNow})
	require.NoError(t, err)
	want := Request{ID: "a", Bundles: []Bundle{{Resources: map[string]Share{"licence": 500}}}}
	require.True(t, grant(t, pl, want, testNow))
	a, _ := pl.Reservation("a")
	require.Equal(t, nodes[1].ID, a.Workers[0].Node)
	want.ID = "b"
	require.False(t, grant(t, pl, want, testNow))
	require.True(t, grant(t, pl, Request{ID: "c", Bundles: Repeat(2, Bundle{Resources: map[string]Share{"cpu": Whole}})}, testNow))
	pl.Release("a")
	require.True(t, grant(t, pl, want, testNow))
	_, err = pl.Plan(Request{Bundles: []Bundle{{Resources: map[string]Share{"other": 1}}}})
	require.ErrorIs(t, err, ErrBundleTooLarge)
}
