package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/placement"
)

// granter is a head process and the clients that reserve on it.
type granter struct {
	*shell
	head    readyHead
	words   []string // the command line
	closers []func() // called while the head runs: a connection without a server takes long to close
}

func (g *granter) close() {
	for _, f := range g.closers {
		f()
	}
}

// start runs the head, and returns when it is ready.
func (g *granter) start() *exec.Cmd {
	cmd, out := g.process(g.words...)
	require.NoError(g.t, json.Unmarshal([]byte(out.line(g.t, out.String)), &g.head))
	return cmd
}

func (g *granter) client(namespace string) *placement.Client {
	b, err := bus.Open(g.t.Context(), bus.Config{
		URLs: []string{g.head.URL}, TokenFile: g.head.TokenFile, OnError: func(error) {}, Logger: slog.New(slog.DiscardHandler),
	})
	require.NoError(g.t, err)
	c, err := placement.NewClient(b, namespace)
	require.NoError(g.t, err)
	g.closers = append(g.closers, func() { c.Close(); _ = b.Close() }) // fails only if the server is gone
	return c
}

// Acknowledged reservations survive the kill of a head, and the next head grants no device twice.
func TestKilledHeadKeepsReservations(t *testing.T) {
	t.Parallel()
	const total, clients = 1000, 8
	g := &granter{shell: newShell(t)}
	defer g.close()
	store := t.TempDir()
	g.words = strings.Fields("up --json --gpus sim:16x8 --name host --listen 127.0.0.1:0 --store " + store)
	leader := g.start()
	g.words = strings.Fields("up --json --gpus sim:16x8 --name host --listen " + strings.TrimPrefix(g.head.URL, "nats://") + " --store " + store)

	var done atomic.Int64
	var mu sync.Mutex // guards what follows
	records := map[string]placement.Record{}
	var killed, back time.Time
	var group sync.WaitGroup
	for n := range clients {
		c := g.client("default")
		group.Go(func() {
			for i := n; i < total; i += clients {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				r, err := c.Reserve(ctx, placement.Request{ID: fmt.Sprintf("r%d", i), Bundles: []placement.Bundle{{Devices: 100}}})
				cancel()
				if err != nil {
					t.Errorf("r%d: %v", i, err)
					return
				}
				mu.Lock()
				records[r.ID] = r
				if back.IsZero() && !killed.IsZero() && r.Since.After(killed) {
					back = time.Now()
				}
				if done.Add(1) == total/3 {
					killed = time.Now()
					_ = leader.Process.Kill()
				}
				mu.Unlock()
			}
		})
	}
	_ = leader.Wait() // one of the clients kills it
	g.start()
	group.Wait()
	require.Len(t, records, total)
	t.Logf("granting again %v after the kill, the start of the next head included", back.Sub(killed))
	require.Less(t, back.Sub(killed), 10*time.Second) // a standby takes over within 3 s: see placement

	op := g.client("")
	list, err := op.List(t.Context())
	require.NoError(t, err)
	require.Len(t, list.Records, total)
	used := map[string]placement.Share{}
	for _, r := range list.Records {
		require.Equal(t, records[r.ID].Token, r.Token, "%s was granted twice", r.ID)
		require.Equal(t, records[r.ID].Workers, r.Workers)
		used[r.Workers[0].Slots[0].UUID] += r.Workers[0].Slots[0].Share
	}
	for uuid, share := range used {
		require.LessOrEqual(t, share, placement.Whole, uuid)
	}
}
