package main

import (
	"context"
	"encoding/json"
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
	for late := time.Now().Add(20 * time.Second); refusal == nil && time.Now().Before(late); {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		_, refusal = c.TryReserve(ctx, request)
		cancel()
	}
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		began := time.Now()
		_, err := c.Reserve(ctx, request)
		cancel()
		require.ErrorIs(t, err, bus.ErrNoSpace)
		require.ErrorContains(t, err, "no space left in the head's store")
		require.Less(t, time.Since(began), 2*time.Second, "refused at once")
	}
	require.Contains(t, scrape(t, g.head.Metrics), "troupe_store_full 1")
	require.Contains(t, g.fails(1, "roles"), "no space left in the head's store")

	free()
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
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
