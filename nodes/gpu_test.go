package nodes_test

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus/bustest"
	"troupe/gpu/nvml"
	"troupe/nodes"
	"troupe/nodes/protocol"
)

// On a machine with an NVIDIA GPU and torch: a worker sees its device and no other, and does not count as foreign on
// it; when it is killed, the device is free again.
func TestWorkerOnARealGPU(t *testing.T) {
	inventory, err := nvml.Open()
	if err != nil {
		t.Skipf("this test needs a GPU: %v", err)
	}
	t.Cleanup(func() { require.NoError(t, inventory.Close()) }) // after the agent has ended
	devices, err := inventory.Devices(t.Context())
	require.NoError(t, err)
	b := bustest.Open(t)
	ch := beats(t, b)
	s := startAgentIn(t, b, t.TempDir(), func(cfg *nodes.AgentConfig) {
		cfg.Nodes = []nodes.Config{{Name: "host", Inventory: inventory, Read: 200 * time.Millisecond}}
	})
	f := s.follow()
	l := sh(`python3 -c 'import torch,time; x=torch.ones(1<<28, device="cuda:0"); torch.cuda.synchronize(); print("sees", torch.cuda.device_count(), flush=True); time.sleep(600)'`, 0)
	started := s.launch(on(l, "r", 1, devices[0].UUID))
	require.Eventually(t, func() bool { return len(f.ch) > 0 }, 2*2*time.Minute, 10*time.Millisecond)
	require.Equal(t, "sees 1", (<-f.ch).Text)
	busy := next(t, ch, func(beat protocol.Heartbeat) bool {
		return beat.Report != nil && len(beat.Report.Devices[0].Sample.Processes) > 0
	})
	t.Logf("pid %d of this agent %d; the driver says %+v, foreign are %+v", started[0].PID, os.Getpid(), busy.Report.Devices[0].Sample.Processes, busy.Report.Foreign)
	require.Empty(t, busy.Report.Foreign, "its own worker is not foreign")
	_, err = s.client.Stop(t.Context(), "host", ids(0), 0)
	require.NoError(t, err)
	next(t, ch, func(beat protocol.Heartbeat) bool {
		return beat.Report != nil && len(beat.Report.Devices[0].Sample.Processes) == 0
	})
}
