package main

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/placement"
	"troupe/roles"
)

// warnings are the log of a driver.
type warnings struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (w *warnings) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.Write(p)
}

// falls is how many of the driver's lines say that values come over the bus.
func (w *warnings) falls() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.Count(w.text.String(), "comes over the bus")
}

// TestAFirewallBetweenHosts: the ways from a second host to its peers, except its connection to the head, are dropped, refused, or dropped while a value is
// under way; then the link is slow. The value arrives whole over the bus, soon, its receiver says so once, and doctor names the port. A slow link is no fault.
func TestAFirewallBetweenHosts(t *testing.T) {
	t.Parallel()
	h, u := bustest.NewHosts(t), newShell(t)
	if !h.Apart {
		t.Skip("this machine gives no network namespaces, which a firewall between hosts needs")
	}
	store := t.TempDir()
	_, out := u.process("up", "--json", "--listen", h.Near+":0", "--store", store, "--gpus", "none", "--name", "near")
	u.killAfter(store)
	head := u.ready(out)
	server, err := url.Parse(head.URL)
	require.NoError(t, err)
	dir, err := os.MkdirTemp("", "shm") // its path is short enough for sockets
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	joinFrom(t, h, u, head, "far", "TROUPE_SHM_DIR="+dir)

	unreachable := func() bool {
		stdout, _, _ := u.run("doctor", "--json", "--listen", "4s")
		var found doctorOutput
		require.NoError(t, json.Unmarshal([]byte(stdout), &found), stdout)
		for _, f := range found.Findings {
			if f.Code == "data_port_unreachable" && strings.Contains(f.Subject, "far") {
				return true
			}
		}
		return false
	}
	require.False(t, unreachable())
	const mib = 1 << 20
	for _, c := range []struct {
		name   string
		size   int
		before func() (lift func())
		// underWay is done when a part of the value has arrived; nil: nothing.
		underWay func() (lift func())
		falls    int
		within   time.Duration
	}{
		{name: "nothing", size: 16 * mib, within: 30 * time.Second},
		{name: "dropped", size: 16 * mib, before: func() func() { return h.Firewall(server.Port(), false) }, falls: 1, within: 30 * time.Second},
		{name: "refused", size: 16 * mib, before: func() func() { return h.Firewall(server.Port(), true) }, falls: 1, within: 30 * time.Second},
		{
			name: "one-way", size: 16 * mib, before: func() func() { h.Slow(64); return func() {} },
			underWay: func() func() { return h.Firewall(server.Port(), false) }, falls: 1, within: 40 * time.Second,
		},
		{name: "slow", size: 4 * mib, before: func() func() { h.Slow(8); return func() {} }, within: 60 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			said := &warnings{}
			cfg := head.access()
			cfg.Values.Direct = bus.DirectConfigOf(u.getenv)
			cfg.Logger = slog.New(slog.NewTextHandler(said, nil))
			rt, err := roles.Open(t.Context(), roles.Config{Namespace: c.name, BusConfig: cfg})
			require.NoError(t, err)
			defer func() { require.NoError(t, rt.Close(context.Background())) }()
			maker, err := rt.Create(t.Context(), roles.Spec{
				Name: "maker", Class: "bench-holder", World: 1, StopGrace: time.Second,
				Process: &roles.Process{Command: []string{os.Args[0]}, Needs: placement.Request{Bundles: []placement.Bundle{{Node: "far"}}}},
			})
			require.NoError(t, err)
			if c.before != nil {
				defer c.before()()
			}
			for range 2 { // the second value does not pay for what is known
				began, carried := time.Now(), h.ReceivedFromSecond()
				doneCh := make(chan struct{})
				var got []byte
				go func() {
					defer close(doneCh)
					got, err = roles.Call[[]byte](t.Context(), maker, "had", c.size)
				}()
				if c.underWay != nil {
					require.Eventually(t, func() bool { return h.ReceivedFromSecond()-carried > mib }, 2*time.Minute, 10*time.Millisecond)
					defer c.underWay()()
					c.underWay = nil
				}
				<-doneCh
				require.NoError(t, err)
				require.Len(t, got, c.size)
				for i, b := range got {
					if b != byte(i)^byte(i>>11) {
						t.Fatalf("byte %d is %d", i, b)
					}
				}
				t.Logf("after %v", time.Since(began).Round(time.Millisecond))
				require.Less(t, time.Since(began), c.within)
			}
			require.Equal(t, c.falls, said.falls())
			require.Equal(t, c.falls > 0, unreachable())
		})
	}
}
