package main

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus/bustest"
)

// hangEnv makes TestHang hang, with the parts of a run beside it.
const hangEnv = "TROUPE_TEST_HANG"

// TestHang is what TestNothingOutlivesAKilledTest kills.
func TestHang(t *testing.T) {
	if os.Getenv(hangEnv) == "" {
		t.Log("it does nothing by itself; TestNothingOutlivesAKilledTest runs it")
		return
	}
	u := newUser(t)
	near, _ := u.up("--gpus", "none", "--name", "near") // a head in this process
	far := newUser(t)
	cmd, out := far.process("up", "--json", "--listen", "127.0.0.1:0", "--store", t.TempDir(), "--gpus", "none", "--name", "far")
	other := far.ready(out)
	pids := []int{cmd.Process.Pid, agentOf(t, near.Store), agentOf(t, other.Store), sleeps(t, u.on(near), "near", 0), sleeps(t, far.on(other), "far", 0)}
	fmt.Println("hanging:", strings.Trim(fmt.Sprint(pids), "[]"))
	select {}
}

// TestNothingOutlivesAKilledTest: what tests start is not left behind when they are killed.
func TestNothingOutlivesAKilledTest(t *testing.T) {
	cmd := exec.Command(os.Args[0], "-test.run=^TestHang$", "-test.v")
	cmd.Env = append(os.Environ(), hangEnv+"=1", "TMPDIR="+t.TempDir()) // nobody removes its folders
	cmd.Stderr = t.Output()
	bustest.Tie(cmd, syscall.SIGKILL)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var pids []string
	for lines := bufio.NewScanner(stdout); pids == nil && lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), "hanging: "); ok {
			pids = strings.Fields(rest)
		}
	}
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	require.Len(t, pids, 5)
	for _, text := range pids {
		pid, err := strconv.Atoi(text)
		require.NoError(t, err)
		require.Eventually(t, func() bool { return gone(pid) }, 30*time.Second, 10*time.Millisecond, "process %d of %v", pid, pids)
	}
}
