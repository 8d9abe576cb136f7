package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus/direct"
)

// TestTheAgentRunsTheDataPort: the processes of the node find it; a killed one is replaced; it ends with its agent.
func TestTheAgentRunsTheDataPort(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "shm") // its path is short enough for sockets
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	u := newShell(t).with("TROUPE_SHM_DIR", dir)
	require.Contains(t, u.fails(2, "up", "--data-listen", "nowhere"), "--data-listen")
	cmd, out := u.process("up", "--json", "--listen", "127.0.0.1:0", "--store", t.TempDir(), "--gpus", "none", "--data-listen", "127.0.0.1:0", "--data-address", "here.example")
	u.ready(out)
	var first *direct.Issuer
	require.Eventually(t, func() bool { first = direct.Find(dir, "10.0.0.1"); return first != nil }, 2*time.Minute, 20*time.Millisecond)
	require.Len(t, first.Addresses, 1)
	require.Contains(t, first.Addresses[0], "here.example:")
	require.NoError(t, syscall.Kill(dataPortOf(t, dir), syscall.SIGKILL))
	require.Eventually(t, func() bool {
		now := direct.Find(dir, "10.0.0.1")
		return now != nil && string(now.Server) != string(first.Server)
	}, 2*time.Minute, 20*time.Millisecond)
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, cmd.Wait())
	require.Nil(t, direct.Find(dir, "10.0.0.1"))
}

// dataPortOf is the process that serves the memory of a folder.
func dataPortOf(t *testing.T, dir string) int {
	all, err := filepath.Glob("/proc/[0-9]*/environ")
	require.NoError(t, err)
	for _, path := range all {
		env, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(env), argsEnv+"=data-port") && strings.Contains(string(env), "TROUPE_SHM_DIR="+dir) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			require.NoError(t, err)
			return pid
		}
	}
	t.Fatal("no process is the data port")
	return 0
}
