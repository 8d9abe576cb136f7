package gpu_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"

	"troupe/gpu"
)

// codecDevices are devices whose readings are present, zero, and absent.
var codecDevices = []gpu.Device{
	{
		UUID: "GPU-1", Index: 1, Vendor: gpu.NVIDIA, Model: "H200", MemoryTotal: 141 * gpu.GiB,
		NUMA: new(0), CPUs: "0-31", Links: []gpu.Link{{Peer: "GPU-2", Distance: gpu.Fabric}},
		Sample: gpu.Sample{
			MemoryFree: new(gpu.Bytes(0)), Utilisation: new(0), Temperature: new(0), Power: new(0), MIG: new(false),
			Processes: []gpu.Process{{PID: 7, Name: "python3", Memory: new(gpu.Bytes(0)), Kind: gpu.Compute}},
		},
		Health: gpu.Health{XIDs: []int{79}, ECCUncorrected: new(uint64(0)), RemapPending: new(false), RemapFailed: new(true)},
	},
	{UUID: "GPU-2", Sample: gpu.Sample{Processes: []gpu.Process{}}},
	{UUID: "GPU-3"},
}

func TestAbsentAndZeroStayApartOnTheWire(t *testing.T) {
	for _, sent := range codecDevices {
		var byJSON, byMsgpack gpu.Device
		text, err := json.Marshal(sent)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(text, &byJSON))
		require.Equal(t, sent, byJSON)

		packed, err := msgpack.Marshal(sent)
		require.NoError(t, err)
		require.NoError(t, msgpack.Unmarshal(packed, &byMsgpack))
		require.Equal(t, sent, byMsgpack)
	}
}

func TestUnfitSaysWhyInWords(t *testing.T) {
	for _, c := range []struct {
		name   string
		device gpu.Device
		want   []string
	}{
		{"nothing is known", gpu.Device{}, nil},
		{"all readings are good", gpu.Device{Health: gpu.Health{ECCUncorrected: new(uint64(0)), RemapPending: new(false)}}, nil},
		{"errors of a program", gpu.Device{Health: gpu.Health{XIDs: []int{13, 31, 43}}}, nil},
		{"lost", gpu.Device{Health: gpu.Health{Lost: "unplugged", XIDs: []int{31, 79, 999}}},
			[]string{"unplugged", "XID 79: the GPU has fallen off the bus", "XID 999"}},
		{"memory", gpu.Device{Health: gpu.Health{ECCUncorrected: new(uint64(2)), RemapPending: new(true), RemapFailed: new(true)}},
			[]string{
				"2 uncorrected memory errors since the driver was loaded",
				"a bad memory row could not be remapped: the device must be replaced",
				"a row remap is pending: the device must be reset",
			}},
		{"cut up", gpu.Device{Sample: gpu.Sample{MIG: new(true)}}, []string{"MIG mode is on, and its instances are not offered"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Equal(t, c.want, c.device.Unfit())
		})
	}
}

func TestForeignSparesOurOwnAndTheDesktop(t *testing.T) {
	leaked := gpu.Process{PID: 3, Name: "vllm", Memory: new(3 * gpu.GiB), Kind: gpu.Compute}
	device := gpu.Device{Sample: gpu.Sample{Processes: []gpu.Process{
		{PID: 1, Name: "Xorg", Kind: gpu.Graphics}, {PID: 2, Name: "worker", Kind: gpu.Compute}, leaked,
	}}}
	foreign := device.Foreign(func(pid int) bool { return pid == 2 })
	require.Equal(t, []gpu.Process{leaked}, foreign)
	require.Equal(t, "process 3 (vllm, 3 GiB)", foreign[0].String())
}

func TestIslandsFollowChainsOfFabric(t *testing.T) {
	link := func(peer string, distance gpu.Distance) []gpu.Link {
		return []gpu.Link{{Peer: peer, Distance: distance}}
	}
	devices := []gpu.Device{
		{UUID: "a"},
		{UUID: "b", Links: link("e", gpu.Fabric)},
		{UUID: "c", Links: link("b", gpu.PIX)}, // close, but not on the fabric
		{UUID: "d", Links: link("elsewhere", gpu.Fabric)},
		{UUID: "e", Links: link("f", gpu.Fabric)},
		{UUID: "f"},
	}
	require.Equal(t, []int{0, 1, 2, 3, 1, 1}, gpu.Islands(devices))
	require.Empty(t, gpu.Islands(nil))
}

func TestDistancesAreOrdered(t *testing.T) {
	require.Less(t, gpu.Fabric.Rank(), gpu.PIX.Rank())
	require.Less(t, gpu.Node.Rank(), gpu.System.Rank())
	require.Less(t, gpu.System.Rank(), gpu.Distance("?").Rank())
}
