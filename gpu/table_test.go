package gpu_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/gpu"
)

func TestTable(t *testing.T) {
	sims := gpu.NewSims(gpu.SimSpec{Nodes: 2, Devices: 4}, "")
	first, second := devices(t, sims[0]), devices(t, sims[1])
	leaked := gpu.Process{PID: 4242, Name: "python\x1b[31m", Memory: new(3215 * gpu.MiB), Kind: gpu.Compute}
	require.NoError(t, sims[0].Acquire(first[0].UUID, "train", 1000))
	require.NoError(t, sims[0].Acquire(first[1].UUID, "reward", 250))
	require.NoError(t, sims[0].AddProcess(first[2].UUID, leaked))
	require.NoError(t, sims[0].Fail(first[3].UUID, "the GPU has fallen off the bus"))
	second[0].Sample.MIG = new(true)
	first = devices(t, sims[0])

	golden(t, "table.txt", gpu.Table([]gpu.Row{
		{Node: "gpu-a", Device: first[0], HeldBy: []gpu.Holder{{Role: "actor_train", Rank: 0}, {Role: "actor_infer", Rank: 0}}},
		{Node: "gpu-a", Device: first[1], HeldBy: []gpu.Holder{{Role: "reward-math", Rank: 12, Milli: 250}}},
		{Node: "gpu-a", Device: first[2], Foreign: []gpu.Process{leaked}},
		{Node: "gpu-a", Device: first[3]},
		{Node: "gpu-b", Device: second[0]},
		{Node: "gpu-b", Device: second[1], Closed: "cordoned by anna"},
		{Node: "npu-c", Device: gpu.Device{UUID: "npu-0", Vendor: gpu.Ascend, Model: "910B", MemoryTotal: 64 * gpu.GiB}},
		{Node: "npu-c", Device: gpu.Device{UUID: "npu-1", Index: 1, Model: "unknown", Health: gpu.Health{Lost: "the device does not answer"}}},
	}))
	require.Equal(t, "no devices\n", gpu.Table(nil))
}
