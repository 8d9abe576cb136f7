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

// A spawner that closes does not end processes that other code started on the same thread with a death signal.
func TestSpawnerLeavesOtherProcessesAlone(t *testing.T) {
	var group sync.WaitGroup
	var mu sync.Mutex
	var cmds []*exec.Cmd
	for range 8 { // on as many threads as there are
		group.Go(func() {
			cmd := exec.Command("sleep", "60")
			bustest.Tie(cmd, syscall.SIGKILL) // what ends it below is TERM
			if err := cmd.Start(); err == nil {
				mu.Lock()
				cmds = append(cmds, cmd)
				mu.Unlock()
			}
		})
	}
	group.Wait()
	require.Len(t, cmds, 8)
	for range 32 { // on each of those threads, sooner or later
		s := newSpawner()
		s.close()
	}
	time.Sleep(100 * time.Millisecond) // a death signal takes effect
	for _, cmd := range cmds {
		require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		state, err := cmd.Process.Wait()
		require.NoError(t, err)
		require.Equal(t, syscall.SIGTERM, state.Sys().(syscall.WaitStatus).Signal())
	}
}
