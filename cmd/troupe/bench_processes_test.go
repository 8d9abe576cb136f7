package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/benchmarks"
)

// The layout processes of bench fanout has a process for each worker, of Troupe and of the floor, and ends them all.
func TestFanoutOfProcesses(t *testing.T) {
	t.Parallel()
	var got []benchmarks.FanoutResult
	cfg := benchmarks.FanoutConfig{Workers: []int{2}, Layouts: []string{benchmarks.Processes}, Each: 50 * time.Millisecond, Program: programFile(t)}
	require.NoError(t, benchmarks.Fanout(t.Context(), cfg, func(r benchmarks.FanoutResult) error {
		got = append(got, r)
		return nil
	}))
	require.Len(t, got, 1)
	require.Positive(t, got[0].Calls)
	require.Positive(t, got[0].P50)
	require.Positive(t, got[0].FloorP50)
}

// programFile is a file that runs this test as the program.
func programFile(t *testing.T) string {
	program := filepath.Join(t.TempDir(), "troupe")
	script := fmt.Sprintf("#!/bin/sh\n%s=\"$(printf '%%s\\n' \"$@\")\" exec %s\n", argsEnv, os.Args[0])
	require.NoError(t, os.WriteFile(program, []byte(script), 0o755))
	return program
}

// A leading head that is killed or stopped: no call is lost or runs twice, jobs run on, and grants go on. `troupe bench heads` has more faults.
func TestFaultsOfThreeHeads(t *testing.T) {
	if testing.Short() {
		t.Skip("it needs the machine for itself under the race detector: the second command of make race runs it")
	}
	t.Parallel()
	cfg := benchmarks.HeadsConfig{
		Repetitions: 1, Faults: []string{"leader_killed", "leader_stopped"}, Program: programFile(t), Log: t.Logf,
	}
	rows := 0
	require.NoError(t, benchmarks.Heads(t.Context(), cfg, func(r benchmarks.HeadsResult) error {
		t.Logf("%+v", r)
		rows++
		require.Zero(t, r.Lost, r.Fault)
		require.Zero(t, r.Doubled, r.Fault)
		require.Zero(t, r.JobsEnded, r.Fault)
		return nil
	}))
	require.Len(t, cfg.Faults, rows)
}

// bench hosts makes hosts, and of what one node sends to the other nothing crosses the head's link. Its receivers compare checksums.
func TestHostsOfABenchmark(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	const mib = 4
	var between []benchmarks.BetweenResult
	cfg := benchmarks.HostsConfig{Program: programFile(t), MiB: []int{mib}, Rounds: 1}
	require.NoError(t, benchmarks.Hosts(t.Context(), cfg, func(r benchmarks.BetweenResult) error {
		if strings.Contains(r.Row, "a → b") {
			between = append(between, r)
		}
		return nil
	}))
	require.Len(t, between, 2)
	for _, r := range between {
		moved := float64(mib)
		if strings.HasPrefix(r.Row, "4 ×") {
			moved *= 4
		}
		require.Less(t, r.HeadMiB, moved/2, r.Row)
	}
}

// bench scale has rows of the nodes alone and of each size of a role, and slopes of what was measured at two sizes.
func TestScaleOfABenchmark(t *testing.T) {
	t.Parallel()
	var got []benchmarks.ScaleResult
	cfg := benchmarks.ScaleConfig{Program: programFile(t), Nodes: []int{1, 2}, Ranks: []int{2, 4}, Rounds: 1, Idle: time.Second, Log: t.Logf}
	require.NoError(t, benchmarks.Scale(t.Context(), cfg, func(r benchmarks.ScaleResult) error {
		got = append(got, r)
		return nil
	}))
	var sizes [][2]int
	for _, r := range got {
		sizes = append(sizes, [2]int{r.Nodes, r.Ranks})
		if r.Ranks == 0 {
			require.Positive(t, *r.Join)
			require.NotNil(t, r.IdleCPU)
		} else {
			require.Positive(t, *r.Create)
			require.Positive(t, *r.Call)
			require.Positive(t, *r.End)
		}
		require.Positive(t, *r.HeadMB)
	}
	require.Equal(t, [][2]int{{1, 0}, {1, 2}, {1, 4}, {2, 0}, {2, 2}, {2, 4}}, sizes)
	require.Len(t, benchmarks.ScaleSlopes(got), 7)
}
