package inspect

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/gpu"
	"troupe/placement"
	"troupe/roles/registry"
)

func TestCellText(t *testing.T) {
	for want, v := range map[string]any{
		"–": "", "a": "a", "250ms": span(0.25), "12.3s": span(12.34), "1m5s": span(65.2), "3.0": rateOf(3), "7%": percent(7.2), "0.5": 0.5, "4": 4,
	} {
		require.Equal(t, want, cellText(v))
	}
	require.Equal(t, []string{"–", "–"}, []string{cellText(span(0)), cellText(percent(-1))}, "unknown")
}

func TestNodesOf(t *testing.T) {
	var r registry.RoleRecord
	require.Equal(t, "–", nodesOf(r))
	for i := range 3 {
		r.Placements = append(r.Placements, registry.RankPlacement{Node: fmt.Sprint("n", i)}, registry.RankPlacement{Node: fmt.Sprint("n", i)})
	}
	require.Equal(t, "n0,n1,n2", nodesOf(r))
	r.Placements = append(r.Placements, registry.RankPlacement{Node: "n3"})
	require.Equal(t, "n0,n1 and 2 more", nodesOf(r))
}

func TestClosedBy(t *testing.T) {
	cordons := []placement.Cordon{{Node: "box", Device: "GPU-1", By: "anna"}}
	require.Contains(t, closedBy(cordons, "GPU-1"), "cordoned by anna")
	require.Empty(t, closedBy(cordons, "GPU-2"))
	require.Contains(t, closedBy([]placement.Cordon{{Node: "box"}}, "GPU-2"), "cordoned by an operator", "the whole node")
}

// Devices whose driver does not report a value do not count.
func TestDeviceLoad(t *testing.T) {
	busy, free := 40, gpu.Bytes(25)
	var n placement.NodeStatus
	util, mem := deviceLoad(n)
	require.Equal(t, []percent{-1, -1}, []percent{util, mem})
	n.Report.Devices = []gpu.Device{{MemoryTotal: 100, Sample: gpu.Sample{Utilisation: &busy, MemoryFree: &free}}, {MemoryTotal: 100}}
	util, mem = deviceLoad(n)
	require.Equal(t, []percent{40, 75}, []percent{util, mem})
}
