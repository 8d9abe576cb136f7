package planner

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Preemption selects as few victims as possible, and none of a higher priority than necessary.
func TestFewestVictims(t *testing.T) {
	nodes := simNodes(2, 4)
	pl, err := New(Snapshot{Now: testNow, Nodes: nodes})
	require.NoError(t, err)
	hold := func(id, node string, devices, priority int) {
		r := Request{ID: id, Priority: priority, Bundles: []Bundle{{Node: node, Devices: Wholes(devices)}}}
		require.True(t, grant(t, pl, r, testNow), id)
	}
	hold("half-a", "n0", 2, 0)
	hold("half-b", "n0", 2, 0)
	hold("whole", "n1", 4, 1)
	victims := func(priority, devices int) []string {
		d := pl.Schedule([]Queued{{Request: Request{ID: "x", Priority: priority, Bundles: []Bundle{{Devices: Wholes(devices)}}}, Since: testNow}}, Policy{Preempt: true})
		if len(d.Preemptions) == 0 {
			return nil
		}
		return d.Preemptions[0].Victims
	}
	require.Equal(t, []string{"whole"}, victims(5, 4), "the fewest")
	require.Equal(t, []string{"half-a", "half-b"}, victims(1, 4), "that are of a lower priority")
	require.Len(t, victims(5, 2), 1)
	require.NotContains(t, victims(5, 2), "whole", "of the lowest priority")

	// Devices that only wait for verification are not preempted for.
	cleared, _ := pl.Release("half-a")
	node := *pl.byID["n0"].info
	node.Devices = append([]Device{}, node.Devices...)
	for i := range node.Devices {
		for _, slot := range cleared.Workers[0].Slots {
			if node.Devices[i].UUID == slot.UUID {
				node.Devices[i].Unfit, node.Devices[i].Clearing = "not shown clean", true
			}
		}
	}
	require.NoError(t, pl.SetNode(node))
	require.Empty(t, victims(5, 2))
	require.Equal(t, []string{"half-b"}, victims(1, 4), "beside what is enough with them")
}
