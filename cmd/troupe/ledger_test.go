package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/nodes"
	"troupe/nodes/protocol"
	"troupe/placement"
)

// A head with a damaged ledger says so, and does not grant the devices of running workers.
func TestHeadWithADamagedLedger(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	store := t.TempDir()
	words := []string{"up", "--json", "--listen", "127.0.0.1:0", "--store", store, "--gpus", "sim:2x2", "--name", "box"}
	cmd, out := u.process(words...)
	u.killAfter(store)
	head := u.ready(out)
	require.Contains(t, u.output("ledger"), "LEDGER trusted")
	var got reserved
	require.NoError(t, json.Unmarshal([]byte(u.output("reserve", "--bundles", "1", "--devices", "2", "--on", "box-1", "--id", "tr", "--json")), &got))
	start := nodes.Start{ID: nodes.WorkerID{Namespace: "default", Role: "role", Incarnation: "one"}, Name: "role-0"}
	for _, slot := range got.Workers[0].Slots {
		start.Devices = append(start.Devices, slot.UUID)
	}
	started, err := u.on(head).Launch(t.Context(), nodes.Launch{
		Node: "box-1", Reservation: "tr", Token: got.Token, Program: nodes.Program{Command: []string{"sleep", "1000"}}, Workers: []nodes.Start{start},
	})
	require.NoError(t, err)
	require.Nil(t, started[0].Err)
	time.Sleep(time.Second) // the checkpoint follows half a second after the last change

	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	blocks, err := filepath.Glob(filepath.Join(store, "jetstream", "*", "streams", "KV_troupe_ledger", "msgs", "*.blk"))
	require.NoError(t, err)
	require.NotEmpty(t, blocks)
	for _, block := range blocks {
		require.NoError(t, os.Truncate(block, 0))
	}
	cmd, out = u.process(words...)
	u.ready(out)
	require.Eventually(t, func() bool {
		var status placement.LedgerStatus
		return json.Unmarshal([]byte(u.output("ledger", "--json")), &status) == nil && status.Doubt == ""
	}, 2*time.Minute, 50*time.Millisecond, "both nodes have reported")
	require.Contains(t, u.output("reservations"), "adopted from the report of node box-1")
	require.Contains(t, u.fails(1, "reserve", "--bundles", "1", "--devices", "1", "--on", "box-1", "--wait", "0"), "must wait")
	require.Contains(t, u.output("status"), "not confirmed yet")
	require.False(t, gone(started[0].PID))
	require.Contains(t, u.output("ledger", "accept"), "LEDGER trusted")
	require.True(t, strings.Contains(u.output("events"), protocol.EventLedgerDoubt))

	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, cmd.Wait())
	require.True(t, gone(started[0].PID))
}
