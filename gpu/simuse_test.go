package gpu_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/gpu"
)

// claimAndWait is the worker process: it claims the devices of its environment, prints the result and waits for the end
// of its input.
func claimAndWait(use string) {
	release, err := gpu.ClaimSim(use)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("claimed")
	_, _ = io.Copy(io.Discard, os.Stdin) // its end is the order to stop
	release()
	os.Exit(0)
}

// worker starts a process that claims, and returns what it prints.
func worker(t *testing.T, use gpu.SimUse) (cmd *exec.Cmd, said string, stop func()) {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd = exec.Command(exe)
	cmd.Env = append(os.Environ(), use.Env())
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	stop = func() { _ = stdin.Close(); _ = cmd.Wait() }
	t.Cleanup(stop)
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	return cmd, strings.TrimSpace(line), stop
}

// Workers that do not share cannot claim the same device, and the claim of a dead worker does not block the next one.
func TestClaimsOfProcesses(t *testing.T) {
	dir := t.TempDir()
	inventories, err := gpu.Open(gpu.Config{Spec: "sim:1x2", SimClaims: dir})
	require.NoError(t, err)
	uuid := devices(t, inventories[0])[0].UUID
	use := func(key, holder string, milli int) gpu.SimUse {
		return gpu.SimUse{Dir: dir, Key: key, Holder: holder, Devices: []gpu.SimShare{{UUID: uuid, Milli: milli}}}
	}
	first, said, _ := worker(t, use("r1/0", "actor_train/0", 1000))
	require.Equal(t, "claimed", said)
	_, said, _ = worker(t, use("r1/0", "actor_infer/0", 1000))
	require.Equal(t, "claimed", said, "laid over the same reservation")
	_, said, _ = worker(t, use("r2/0", "thief/0", 100))
	require.Regexp(t, `for thief/0: device .* over-used: 1100 of 1000 thousandths by actor_\w+/0 \(process \d+\), actor_\w+/0 \(process \d+\), thief/0`, said)

	seen := devices(t, inventories[0])[0]
	require.Len(t, seen.Sample.Processes, 2)
	require.Equal(t, 100, *seen.Sample.Utilisation)
	own := func(pid int) bool { return pid != first.Process.Pid }
	require.Equal(t, []gpu.Process{{PID: first.Process.Pid, Name: "actor_train/0", Kind: gpu.Compute}}, seen.Foreign(own))

	require.NoError(t, first.Process.Kill())
	_ = first.Wait() // it was killed
	require.Len(t, devices(t, inventories[0])[0].Sample.Processes, 1, "its claim has ended with it")
}

func TestClaimsInOneProcess(t *testing.T) {
	dir := t.TempDir()
	use := func(key string, shares ...gpu.SimShare) gpu.SimUse {
		return gpu.SimUse{Dir: dir, Key: key, Holder: key, Devices: shares}
	}
	half := gpu.SimShare{UUID: "a", Milli: 500}
	one, err := use("x", half).Claim()
	require.NoError(t, err)
	two, err := use("y", half).Claim()
	require.NoError(t, err, "shared in thousandths")
	var over *gpu.OveruseError
	_, err = use("z", gpu.SimShare{UUID: "b", Milli: 1000}, half).Claim()
	require.ErrorAs(t, err, &over)
	require.Equal(t, 1500, over.Milli)
	left, err := filepath.Glob(filepath.Join(dir, "b", "*.claim"))
	require.NoError(t, err)
	require.Empty(t, left, "all or none")
	one()
	three, err := use("z", half).Claim()
	require.NoError(t, err)
	two()
	three()

	none, err := gpu.ClaimSim("")
	require.NoError(t, err)
	none()
	_, err = gpu.ClaimSim("{")
	require.ErrorContains(t, err, gpu.SimUseEnv)
	_, err = use("x", gpu.SimShare{UUID: "../a", Milli: 1000}).Claim()
	require.ErrorContains(t, err, "../a")
	_, err = use("x", gpu.SimShare{UUID: "a", Milli: 1001}).Claim()
	require.ErrorContains(t, err, "1001")
}
