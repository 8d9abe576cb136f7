package nodes

import (
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus/bustest"
)

// This must not happen: closing a spawner kills processes that other code started on the same thread with a parent-death
// signal.
func TestSpawnerLeavesOtherProcessesAlone(t *testing.T) {
	var group sync.WaitGroup
	var mu sync.Mutex
	var cmds []*exec.Cmd
	for range 8 { // on several threads
		group.Go(func() {
			cmd := exec.Command("sleep", "60")
			bustest.Tie(cmd, syscall.SIGKILL) // the test sends SIGTERM below
			if err := cmd.Start(); err == nil {
				mu.Lock()
				cmds = append(cmds, cmd)
				mu.Unlock()
			}
		})
	}
	group.Wait()
	require.Len(t, cmds, 8)
	for range 32 { // eventually on each of these threads
		s := newSpawner()
		s.close()
	}
	time.Sleep(100 * time.Millisecond) // a parent-death signal would have been delivered
	for _, cmd := range cmds {
		require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		state, err := cmd.Process.Wait()
		require.NoError(t, err)
		require.Equal(t, syscall.SIGTERM, state.Sys().(syscall.WaitStatus).Signal())
	}
}
