package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/placement"
	"troupe/roles"
)

// The memory of a head and of an agent does not grow with the number of roles that were created. TROUPE_HEAVY makes it ten
// times as many.
func TestMemoryStaysFlat(t *testing.T) {
	t.Parallel()
	goroutines, processes, remembered := 300, 10, 16
	if os.Getenv("TROUPE_HEAVY") != "" {
		goroutines, processes, remembered = 6000, 500, 32
	}
	u := newShell(t)
	store := t.TempDir()
	cmd, out := u.process("up", "--json", "--listen", "127.0.0.1:0", "--store", store, "--gpus", "sim:1x8", "--name", "box")
	head := u.ready(out)
	agent := agentOf(t, store)
	cfg := head.access()
	cfg.Logger = slog.New(slog.DiscardHandler)
	b, err := bus.Open(t.Context(), cfg)
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	rt, err := roles.Open(t.Context(), roles.Config{Bus: b, Classes: []*actors.Class{calcClass()}})
	require.NoError(t, err)
	defer func() { require.NoError(t, rt.Close(context.Background())) }()
	create := func(first, n int, spec roles.Spec) { // four at a time: most of a creation is waiting
		var group sync.WaitGroup
		for worker := range 4 {
			group.Go(func() {
				for i := first + worker; i < first+n; i += 4 {
					spec := spec
					spec.Name = fmt.Sprintf("r%d", i)
					c, err := rt.Create(t.Context(), spec)
					if !assert.NoError(t, err) || !assert.NoError(t, c.Destroy(t.Context())) {
						return
					}
				}
			})
		}
		group.Wait()
	}
	local := roles.Spec{Class: "calc", World: 4}
	process := roles.Spec{Class: "calc", World: 2, Process: &roles.Process{Needs: placement.Request{Bundles: []placement.Bundle{{Devices: 1000}}}}}
	fresh := resident(t, cmd.Process.Pid)
	create(0, goroutines, local)
	create(0, processes, process)
	warm, warmAgent := resident(t, cmd.Process.Pid), resident(t, agent)
	for round := 1; round <= 3; round++ {
		create(round*goroutines, goroutines, local)
		create(round*processes, processes, process)
	}
	now, nowAgent := resident(t, cmd.Process.Pid), resident(t, agent)
	t.Logf("the head had %d MiB and has %d; its agent had %d and has %d", warm, now, warmAgent, nowAgent)
	require.Less(t, now, fresh+48*memoryFactor, "the head has grown since it was started")
	require.Less(t, now, warm+24*memoryFactor, "the head grows")
	require.Less(t, nowAgent, warmAgent+remembered*memoryFactor, "the agent grows") // it keeps 4,096 exits for ten minutes, 5 KiB each
}

// resident is the smallest of five readings of the memory of a process, in MiB: garbage makes single readings vary.
func resident(t *testing.T, pid int) int {
	t.Helper()
	least := 1 << 30
	for range 5 {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		require.NoError(t, err)
		_, rest, _ := strings.Cut(string(status), "VmRSS:")
		kib, err := strconv.Atoi(strings.Fields(rest)[0])
		require.NoError(t, err)
		least = min(least, kib>>10)
		time.Sleep(100 * time.Millisecond)
	}
	return least
}
