package nodes_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/nodes"
)

// An exit says whether the OOM killer killed the worker.
func TestOutOfMemory(t *testing.T) {
	group := fmt.Sprintf("/sys/fs/cgroup/memory/troupe-test-%d", os.Getpid())
	kernel, err := os.Open("/dev/kmsg")
	if err == nil {
		_ = kernel.Close()
		err = os.Mkdir(group, 0o755)
	}
	if err != nil {
		t.Skipf("this test needs /dev/kmsg and a writable memory cgroup: %v", err)
	}
	s := startAgent(t)
	t.Cleanup(func() { s.stop(); require.NoError(t, os.Remove(group)) })
	require.NoError(t, os.WriteFile(filepath.Join(group, "memory.limit_in_bytes"), []byte("33554432"), 0o644))
	s.launch(sh(`echo $$ >`+group+`/cgroup.procs && echo begins && exec tail /dev/zero`, 0))
	e := s.exit()
	require.Equal(t, "SIGKILL", e.Signal)
	require.True(t, e.OOM)
	require.ErrorContains(t, e.AsError(), "OOM killer")
	require.Equal(t, "true", e.AsError().Details["oom"])
	s.launch(sh(`kill -KILL $$`, 1))
	for e = s.exit(); e.ID.Rank != 1; e = s.exit() {
	}
	require.False(t, e.OOM)
}

// This must not happen: a process that has left its process group, its session and its environment outlives the worker.
func TestCgroupContainsTheTree(t *testing.T) {
	s := startAgent(t)
	status := s.launch(sh(`setsid env -i sleep 1001 & echo up; exec sleep 1000`, 0))
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", status[0].PID))
	require.NoError(t, err)
	if !strings.Contains(string(data), "/troupe-") {
		t.Skip("this test needs a writable cgroup v2 hierarchy")
	}
	_, err = s.client.Stop(t.Context(), "host", []nodes.WorkerID{id(0)}, 0)
	require.NoError(t, err)
	left, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(t, err)
	for _, file := range left {
		text, _ := os.ReadFile(file) // the process may have exited
		require.NotEqual(t, "sleep\x001001\x00", string(text), "%s", file)
	}
}
