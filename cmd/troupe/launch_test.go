package main

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus/bustest"
)

// The same command on every replica, as under Slurm and Kubernetes: all end with the driver's exit code.
func TestLaunch(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		env  func(u *shell, rank, port int) *shell
		code int
	}{
		"flags and variables of ours": {func(u *shell, rank, port int) *shell {
			return u.with("TROUPE_RANK", fmt.Sprint(rank)).with("TROUPE_WORLD", "3").with("TROUPE_HEAD", fmt.Sprintf("127.0.0.1:%d", port))
		}, 0},
		"slurm": {func(u *shell, rank, port int) *shell {
			return u.with("SLURM_PROCID", fmt.Sprint(rank)).with("SLURM_NTASKS", "3").with("SLURM_LAUNCH_NODE_IPADDR", fmt.Sprintf("127.0.0.1:%d", port))
		}, 7},
		"kubernetes": {func(u *shell, rank, port int) *shell {
			return u.with("JOB_COMPLETION_INDEX", fmt.Sprint(rank)).with("TROUPE_WORLD", "3").with("TROUPE_HEAD", fmt.Sprintf("localhost:%d", port))
		}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			port := bustest.FreePort(t)
			var cmds []*exec.Cmd
			var first *screen
			for rank := range 3 {
				u := test.env(newShell(t), rank, port).with("TROUPE_TOKEN", "a token that they all share")
				cmd, out := u.process("launch", "--gpus", "sim:1x2", "--name", fmt.Sprintf("box%d", rank), "--", "sh", "-c",
					`echo "$TROUPE_URL $(cat $TROUPE_TOKEN_FILE) [$TROUPE_TOKEN]"; exit `+fmt.Sprint(test.code))
				cmds = append(cmds, cmd)
				if rank == 0 {
					first = out
				}
			}
			for rank, cmd := range cmds {
				_ = cmd.Wait() // the exit code is checked below
				require.Equal(t, test.code, cmd.ProcessState.ExitCode(), "rank %d", rank)
			}
			require.Equal(t, fmt.Sprintf("tls://127.0.0.1:%d a token that they all share []\n", port), first.String())
		})
	}
}

// A single replica needs neither --head nor a token.
func TestLaunchAlone(t *testing.T) {
	u := newShell(t)
	stdout, stderr, code := u.run("launch", "--rank", "0", "--world", "1", "--gpus", "none", "--", "sh", "-c", "echo $TROUPE_URL; exit 5")
	require.Equal(t, 5, code, stderr)
	require.True(t, strings.HasPrefix(stdout, "nats://127.0.0.1:"), stdout)
	require.Contains(t, u.fails(1, "launch", "--rank", "0", "--world", "1", "--gpus", "none", "--", "/no/such/driver"), "/no/such/driver")
}

// The error of missing replicas says how many are missing, and the job ends.
func TestLaunchWithoutTheOthers(t *testing.T) {
	u := newShell(t).with("TROUPE_TOKEN", "a token that they all share")
	begin := time.Now()
	_, stderr, code := u.run("launch", "--rank", "0", "--world", "2", "--head", "127.0.0.1:0", "--gpus", "none", "--wait", "300ms", "--", "true")
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "1 of 2 nodes are there")
	require.Less(t, time.Since(begin), time.Minute)
}

func TestLaunchMistakes(t *testing.T) {
	u := newShell(t)
	require.Contains(t, u.with("SLURM_PROCID", "x").fails(2, "launch", "--world", "2", "--", "true"), "SLURM_PROCID")
	require.Contains(t, u.fails(2, "launch", "--rank", "2", "--world", "2", "--", "true"), "--rank")
	require.Contains(t, u.fails(2, "launch", "--rank", "1", "--world", "2", "--", "true"), "--head")
	require.Contains(t, u.fails(2, "launch", "--rank", "1", "--world", "2", "--head", "x:1", "--", "true"), "token")
	require.Contains(t, u.with("TROUPE_TOKEN", "short").fails(2, "launch", "--rank", "1", "--world", "2", "--head", "x:1", "--", "true"), "16")
}
