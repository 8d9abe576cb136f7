package gpu_test

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"troupe/gpu"
)

func devices(t require.TestingT, inv gpu.Inventory) []gpu.Device {
	list, err := inv.Devices(context.Background())
	require.NoError(t, err)
	return list
}

func TestSimIsLaidOutAsAsked(t *testing.T) {
	spec := gpu.SimSpec{Nodes: 2, Devices: 8, NUMA: 2, Island: 4}
	node := devices(t, gpu.NewSims(spec, "")[1])
	require.Equal(t, "GPU-sim-1-7", node[7].UUID)
	require.Equal(t, []int{0, 0, 0, 0, 4, 4, 4, 4}, gpu.Islands(node))
	for i, d := range node {
		require.Equal(t, i/4, *d.NUMA)
		require.Len(t, d.Links, 7)
	}
	require.Equal(t, gpu.Link{Peer: "GPU-sim-1-4", Distance: gpu.System}, node[0].Links[3])
	require.Equal(t, node, devices(t, gpu.NewSims(spec, "")[1]), "the same again")
}

func TestNoTwoSimulatedDevicesShareAUUID(t *testing.T) {
	seen := make(map[string]bool)
	for _, name := range []string{"", "left", "right"} {
		for _, sim := range gpu.NewSims(gpu.SimSpec{Nodes: 3, Devices: 12}, name) {
			for _, d := range devices(t, sim) {
				require.False(t, seen[d.UUID], d.UUID)
				seen[d.UUID] = true
			}
		}
	}
}

func TestSimFailsLooksDirtyAndRecovers(t *testing.T) {
	sim := gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: 2}, "")[0]
	clean := devices(t, sim)
	uuid := clean[1].UUID
	leaked := gpu.Process{PID: 4242, Name: "vllm", Memory: new(10 * gpu.GiB), Kind: gpu.Compute}

	require.NoError(t, sim.Fail(uuid, "pulled out"))
	require.NoError(t, sim.AddProcess(uuid, leaked))
	got := devices(t, sim)
	require.Equal(t, clean[0], got[0])
	require.Equal(t, []string{"pulled out"}, got[1].Unfit())
	require.Equal(t, []gpu.Process{leaked}, got[1].Sample.Processes)
	require.Equal(t, 70*gpu.GiB, *got[1].Sample.MemoryFree)

	require.NoError(t, sim.Recover(uuid))
	require.Equal(t, clean, devices(t, sim))
	require.ErrorIs(t, sim.Fail("GPU-other", "?"), gpu.ErrUnknownDevice)
}

func TestWatchTellsOfEveryChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: 1}, "")[0]
		uuid := devices(t, sim)[0].UUID
		told := 0
		var ended error
		go func() { ended = sim.Watch(t.Context(), func() { told++ }) }()
		synctest.Wait()
		require.NoError(t, sim.Fail(uuid, "pulled out"))
		require.NoError(t, sim.Recover(uuid))
		synctest.Wait()
		require.Positive(t, told, "several changes may be told as one")
		before := told
		require.NoError(t, sim.AddProcess(uuid, gpu.Process{PID: 1}))
		synctest.Wait()
		require.Equal(t, before+1, told)

		require.NoError(t, sim.Close())
		synctest.Wait()
		require.ErrorIs(t, ended, gpu.ErrClosed)
		_, err := sim.Devices(t.Context())
		require.ErrorIs(t, err, gpu.ErrClosed)
	})
}

func TestOveruseIsRefusedAndRemembered(t *testing.T) {
	sim := gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: 2}, "")[0]
	uuid := devices(t, sim)[0].UUID
	require.NoError(t, sim.Acquire(uuid, "train", 600))
	require.NoError(t, sim.Acquire(uuid, "train", 600), "one holder's shares lie over each other")
	require.NoError(t, sim.Acquire(uuid, "reward", 400))
	require.Equal(t, 100, *devices(t, sim)[0].Sample.Utilisation)

	err := sim.Acquire(uuid, "intruder", 1)
	require.EqualError(t, err, "device GPU-sim-0-0 over-used: 1001 of 1000 thousandths by train, reward, intruder")
	require.Len(t, sim.Overuses(), 1)
	require.ErrorIs(t, sim.Release(uuid, "intruder"), gpu.ErrNotHeld)

	require.NoError(t, sim.Release(uuid, "train"))
	require.Error(t, sim.Acquire(uuid, "intruder", 600), "train has it once more")
	require.NoError(t, sim.Release(uuid, "train"))
	require.NoError(t, sim.Acquire(uuid, "successor", 600))
	require.ErrorContains(t, sim.Acquire(uuid, "nobody", 0), "want 1 to 1000")
	require.ErrorContains(t, sim.Acquire(uuid, "greedy", 1001), "want 1 to 1000")
	require.Len(t, sim.Overuses(), 2, "asking for nonsense is no over-use")
}

// In any order of acquire and release, a device is never used beyond its whole, and a device that all holders have
// released is as new.
func TestNoDeviceIsUsedBeyondItself(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sim := gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: 1}, "")[0]
		before := devices(t, sim)
		uuid := before[0].UUID
		var held []string
		t.Repeat(map[string]func(*rapid.T){
			"acquire": func(t *rapid.T) {
				holder := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "holder")
				if sim.Acquire(uuid, holder, rapid.IntRange(1, 1000).Draw(t, "milli")) == nil {
					held = append(held, holder)
				}
			},
			"release": func(t *rapid.T) {
				if len(held) == 0 {
					t.Skip("nothing is held")
				}
				require.NoError(t, sim.Release(uuid, held[0]))
				held = held[1:]
			},
			"": func(t *rapid.T) { require.LessOrEqual(t, *devices(t, sim)[0].Sample.Utilisation, 100) },
		})
		for _, holder := range held {
			require.NoError(t, sim.Release(uuid, holder))
		}
		require.Equal(t, before, devices(t, sim))
	})
}
