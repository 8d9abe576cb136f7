package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/benchmarks"
)

// The layout processes of bench fanout has a process for each worker, of Troupe and of the floor, and ends them all.
func TestFanoutOfProcesses(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "troupe")
	script := fmt.Sprintf("#!/bin/sh\n%s=\"$(printf '%%s\\n' \"$@\")\" exec %s\n", argsEnv, os.Args[0])
	require.NoError(t, os.WriteFile(program, []byte(script), 0o755))
	var got []benchmarks.FanoutResult
	cfg := benchmarks.FanoutConfig{Workers: []int{2}, Layouts: []string{benchmarks.Processes}, Each: 50 * time.Millisecond, Program: program}
	require.NoError(t, benchmarks.Fanout(t.Context(), cfg, func(r benchmarks.FanoutResult) error {
		got = append(got, r)
		return nil
	}))
	require.Len(t, got, 1)
	require.Positive(t, got[0].Calls)
	require.Positive(t, got[0].P50)
	require.Positive(t, got[0].FloorP50)
}
