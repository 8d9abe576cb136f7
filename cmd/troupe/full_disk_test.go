package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/placement"
)

// While its disk is full, a head refuses at once whatever needs the store; when there is space again, it accepts writes without
// a restart.
func TestHeadOutlivesFullDisk(t *testing.T) {
	t.Parallel()
	disk := bustest.SmallDisk(t, 24<<20)
	if disk == "" {
		return
	}
	g := &granter{shell: newShell(t)}
	defer g.close()
	g.words = []string{"up", "--json", "--gpus", "sim:1x8", "--name", "host", "--listen", "127.0.0.1:0", "--store", disk, "--store-limit", "2GiB", "--metrics", "127.0.0.1:0"}
	cmd, out := g.process(g.words...)
	require.NoError(t, json.Unmarshal([]byte(out.line(t, out.String)), &g.head))
	require.NotNil(t, cmd.Process)
	text := scrape(t, g.head.Metrics)
	require.Contains(t, text, `troupe_store_bytes{kind="limit"} 2.147483648e+09`)
	require.Contains(t, text, "troupe_store_full 0")
	c := g.client("here")
	request := placement.Request{Bundles: []placement.Bundle{{Devices: 1000}}}
	kept, err := c.Reserve(t.Context(), request)
	require.NoError(t, err)

	free := bustest.FillDisk(t, disk)
	var refusal error
	for late := time.Now().Add(2 * time.Minute); refusal == nil && time.Now().Before(late); {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		_, refusal = c.TryReserve(ctx, request)
		cancel()
	}
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		began := time.Now()
		_, err := c.Reserve(ctx, request)
		cancel()
		require.ErrorIs(t, err, bus.ErrNoSpace)
		require.ErrorContains(t, err, "no space left in the head's store")
		require.Less(t, time.Since(began), 8*time.Second, "refused at once")
	}
	require.Contains(t, scrape(t, g.head.Metrics), "troupe_store_full 1")
	require.Contains(t, g.fails(1, "roles"), "no space left in the head's store")

	free()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for {
		_, err = c.Reserve(ctx, request)
		if err == nil {
			break
		}
		require.NoError(t, ctx.Err(), "the placement service does not come back: %v", err)
		require.ErrorIs(t, err, bus.ErrNoSpace)
		time.Sleep(100 * time.Millisecond) // another process has no signal to wait for
	}
	list, err := c.List(ctx)
	require.NoError(t, err)
	held := map[string]bool{}
	for _, r := range list.Records {
		held[r.ID] = true
	}
	require.True(t, held[kept.ID], "what was granted before is still held")
	require.Contains(t, g.output("roles"), "no roles")
}

// A head whose server cannot close its store after a full disk replaces itself: the process id, the agent and the reservations
// stay, and placement grants again without anybody's help.
func TestStuckHeadReplacesItself(t *testing.T) {
	t.Parallel()
	disk := bustest.SmallDisk(t, 24<<20)
	if disk == "" {
		return
	}
	g := &granter{shell: newShell(t).with("TROUPE_TEST_HANG_STORE", "2s")}
	defer g.close()
	cmd, out := g.process("up", "--json", "--gpus", "sim:1x8", "--name", "host", "--listen", "127.0.0.1:0", "--store", disk, "--store-limit", "2GiB")
	require.NoError(t, json.Unmarshal([]byte(out.line(t, out.String)), &g.head))
	agentLock := filepath.Join(disk, "agent", "lock")
	before := agentOf(t, disk)
	require.True(t, isLocked(agentLock))
	c := g.client("here")
	request := placement.Request{Bundles: []placement.Bundle{{Devices: 1000}}}
	kept, err := c.Reserve(t.Context(), request)
	require.NoError(t, err)

	free := bustest.FillDisk(t, disk)
	var refusal error
	for late := time.Now().Add(2 * time.Minute); !errors.Is(refusal, bus.ErrNoSpace); {
		require.True(t, time.Now().Before(late), "requests are not refused: %v", refusal)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		_, refusal = c.TryReserve(ctx, request)
		cancel()
	}
	free()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for late := time.Now().Add(time.Minute); strings.Count(out.String(), "\n") < 2; {
		require.True(t, time.Now().Before(late), "the head does not replace itself")
		time.Sleep(50 * time.Millisecond) // a pipe has no signal for a second line
	}
	var next readyHead
	_, line, _ := strings.Cut(out.String(), "\n")
	require.NoError(t, json.Unmarshal([]byte(line), &next))
	require.Equal(t, g.head, next, "the address, the token and the process id stay")
	require.Equal(t, cmd.Process.Pid, next.PID)
	require.True(t, isLocked(agentLock))
	require.Equal(t, before, agentOf(t, disk), "the agent stays")
	_, err = c.Reserve(ctx, request)
	require.NoError(t, err, "the client of the head before is served")
	list, err := c.List(ctx)
	require.NoError(t, err)
	require.True(t, slices.ContainsFunc(list.Records, func(r placement.Record) bool { return r.ID == kept.ID }), "what was granted before is still held")
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, cmd.Wait(), "the new head ends in order")
	require.False(t, isLocked(agentLock), "and its agent with it")
}

// isLocked reports whether a process holds the lock of a file.
func isLocked(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }() // releases the lock
	return errors.Is(syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB), syscall.EWOULDBLOCK)
}

// A head that replaced itself while the disk is still full waits for space: nothing else would start it again.
func TestReplacedHeadWaitsForSpace(t *testing.T) {
	t.Parallel()
	disk := bustest.SmallDisk(t, 24<<20)
	if disk == "" {
		return
	}
	free := bustest.FillDisk(t, disk)
	u := newShell(t).with("TROUPE_HEAD_REPLACED", "1")
	cmd, out := u.process("up", "--json", "--no-agent", "--listen", "127.0.0.1:0", "--store", disk, "--store-limit", "2GiB")
	for late := time.Now().Add(2 * time.Minute); !isLocked(filepath.Join(disk, "lock")); {
		require.True(t, time.Now().Before(late), "the head does not start")
		time.Sleep(10 * time.Millisecond) // the file may not be there yet
	}
	free()
	var head readyHead
	require.NoError(t, json.Unmarshal([]byte(out.line(t, out.String)), &head))
	require.Equal(t, cmd.Process.Pid, head.PID)
}
