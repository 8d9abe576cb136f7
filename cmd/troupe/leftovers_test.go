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

// hangEnv makes TestHang start the parts of a run and hang.
const hangEnv = "TROUPE_TEST_HANG"

// TestHang is killed by TestNothingOutlivesAKilledTest.
func TestHang(t *testing.T) {
	if os.Getenv(hangEnv) == "" {
		t.Log("it does nothing by itself; TestNothingOutlivesAKilledTest runs it")
		return
	}
	u := newShell(t)
	near, _ := u.up("--gpus", "none", "--name", "near") // a head in this process
	far := newShell(t)
	cmd, out := far.process("up", "--json", "--listen", "127.0.0.1:0", "--store", t.TempDir(), "--gpus", "none", "--name", "far")
	other := far.ready(out)
	pids := []int{cmd.Process.Pid, agentOf(t, near.Store), agentOf(t, other.Store), sleeps(t, u.on(near), "near", 0), sleeps(t, far.on(other), "far", 0)}
	fmt.Println("hanging:", strings.Trim(fmt.Sprint(pids), "[]"))
	select {}
}

// The processes that tests start end when the test process is killed.
func TestNothingOutlivesAKilledTest(t *testing.T) {
	t.Parallel()
	cmd := exec.Command(os.Args[0], "-test.run=^TestHang$", "-test.v")
	cmd.Env = append(os.Environ(), hangEnv+"=1", "TMPDIR="+t.TempDir()) // a killed test does not remove its folders
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
		require.Eventually(t, func() bool { return gone(pid) }, 2*time.Minute, 10*time.Millisecond, "process %d of %v", pid, pids)
	}
}

// A head ends in order when its output is closed, as by Ctrl-C in "troupe up | tee log", which ends tee first.
func TestHeadWithClosedOutput(t *testing.T) {
	read, write, err := os.Pipe()
	require.NoError(t, err)
	store := t.TempDir()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "XDG_STATE_HOME="+t.TempDir(), argsEnv+"="+strings.Join([]string{"up", "--listen", "127.0.0.1:0", "--store", store, "--gpus", "none"}, "\n"))
	cmd.Stdout, cmd.Stderr = write, write
	bustest.Tie(cmd, syscall.SIGTERM)
	require.NoError(t, cmd.Start())
	require.NoError(t, write.Close())
	_, err = bufio.NewReader(read).ReadString('\n')
	require.NoError(t, err)
	agent := agentOf(t, store)
	t.Cleanup(func() { _ = syscall.Kill(agent, syscall.SIGKILL) }) // fails if it has ended
	require.NoError(t, read.Close())
	for range 20 { // make and timeout send more than one signal, too
		_ = cmd.Process.Signal(syscall.SIGTERM) // fails if it has ended
		time.Sleep(100 * time.Microsecond)
	}
	require.NoError(t, cmd.Wait())
	require.True(t, gone(agent), "its agent is left")
}

// A command with endless output ends when its output is closed.
func TestCommandWithClosedOutput(t *testing.T) {
	u := newShell(t)
	head, _ := u.up("--gpus", "none", "--name", "box")
	script(t, u.on(head), "box", 0, "while :; do echo more; sleep 0.05; done")
	for _, words := range [][]string{{"logs", "role", "-f"}, {"logs", "role", "-f", "--json"}} {
		read, write, err := os.Pipe()
		require.NoError(t, err)
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "XDG_STATE_HOME="+u.env["XDG_STATE_HOME"], argsEnv+"="+strings.Join(words, "\n"))
		cmd.Stdout, cmd.Stderr = write, t.Output()
		bustest.Tie(cmd, syscall.SIGKILL)
		require.NoError(t, cmd.Start())
		require.NoError(t, write.Close())
		_, err = bufio.NewReader(read).ReadString('\n')
		require.NoError(t, err)
		require.NoError(t, read.Close())
		late := time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait() // any exit code
		require.True(t, late.Stop(), "troupe %s does not end", strings.Join(words, " "))
	}
}
