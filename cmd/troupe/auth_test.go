package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/nodes"
	"troupe/roles"
)

// Confined workers answer calls, and the credential that one of them has does nothing outside its namespace: no order to an agent, no end of the
// run, no key of the store. Without --confine-workers a worker has the head's token.
func TestConfinedWorkers(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up("--gpus", "sim:1x2", "--name", "box", "--confine-workers")
	rt := driveOn(t, head, "run")
	role, err := rt.Create(t.Context(), onHosts("actor", "box"))
	require.NoError(t, err)
	pids, err := roles.CallEach[int](t.Context(), role, "pid")
	require.NoError(t, err)
	access := accessOf(t, pids[0])
	require.Empty(t, access.TokenFile)
	token, err := os.ReadFile(head.TokenFile)
	require.NoError(t, err)
	require.NotContains(t, access.Token, strings.TrimSpace(string(token)))

	cfg := access.BusConfig()
	cfg.OnError = func(error) {}
	evil, err := bus.Open(t.Context(), cfg)
	require.NoError(t, err)
	defer func() { require.NoError(t, evil.Close()) }()
	mark := filepath.Join(t.TempDir(), "owned")
	launch := nodes.Launch{
		Node: "box", Program: nodes.Program{Command: []string{"touch", mark}},
		Workers: []nodes.Start{{ID: nodes.WorkerID{Namespace: "run", Role: "mine", Incarnation: "one"}, Name: "mine"}},
	}
	attempt := func(b *bus.Bus, limit time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		_, err := nodes.NewClient(b).Launch(ctx, launch)
		return err
	}
	require.Error(t, attempt(evil, 3*time.Second))
	require.NoError(t, evil.Publish(bus.NodesEnd(), []byte("1")))
	require.NoError(t, evil.Publish("$JS.API.STREAM.DELETE.KV_troupe_registry", nil))
	require.NoError(t, evil.Flush(t.Context()))
	require.NoFileExists(t, mark)
	again, err := roles.CallEach[int](t.Context(), role, "pid")
	require.NoError(t, err)
	require.Equal(t, pids, again, "the worker is undisturbed")
	require.Contains(t, u.output("roles", "-n", "run"), "actor", "the registry is there")
	var status struct {
		Head struct {
			Denied int `json:"denied"`
		} `json:"head"`
	}
	require.NoError(t, json.Unmarshal([]byte(u.output("status", "--json")), &status))
	require.GreaterOrEqual(t, status.Head.Denied, 3)

	friend, err := bus.Open(t.Context(), head.access())
	require.NoError(t, err)
	defer func() { require.NoError(t, friend.Close()) }()
	require.NoError(t, attempt(friend, time.Minute), "with the token the same request starts a process")
	require.Eventually(t, func() bool { _, err := os.Stat(mark); return err == nil }, time.Minute, 10*time.Millisecond)
	require.NoError(t, role.Destroy(t.Context()))
}

// accessOf is how a worker process connects to the bus.
func accessOf(t *testing.T, pid int) nodes.AssignmentFile {
	t.Helper()
	environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	require.NoError(t, err)
	for entry := range strings.SplitSeq(string(environ), "\x00") {
		if path, ok := strings.CutPrefix(entry, nodes.AssignmentEnv+"="); ok {
			file, err := nodes.ReadAssignmentFile(path)
			require.NoError(t, err)
			return file
		}
	}
	t.Fatalf("process %d has no assignment", pid)
	return nodes.AssignmentFile{}
}

// Credentials are issued, listed and revoked by command; a viewer reads the page and the metrics and is refused on the bus.
func TestAuth(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up("--no-agent", "--metrics", "127.0.0.1:0")
	viewer := strings.TrimSpace(u.output("auth", "new", "viewer", "--name", "prometheus"))
	require.Contains(t, newShell(t).with("TROUPE_URL", head.URL).with("TROUPE_TOKEN", viewer).fails(1, "roles"), "refused")

	var worker struct {
		bus.Credential
		Text string `json:"credential"`
	}
	require.NoError(t, json.Unmarshal([]byte(u.output("auth", "new", "worker", "-n", "rl", "--ttl", "1h", "--json")), &worker))
	require.Equal(t, "rl", worker.Namespace)
	b, err := bus.Open(t.Context(), bus.Config{URLs: []string{head.URL}, Token: worker.Text, OnError: func(error) {}})
	require.NoError(t, err)
	defer func() { _ = b.Close() }()
	require.Contains(t, u.output("auth", "list"), "prometheus")
	require.Contains(t, u.output("auth", "revoke", worker.ID), worker.ID)
	require.Eventually(t, func() bool { return !b.Connected() }, time.Minute, time.Millisecond, "its connection ends")
	require.Contains(t, u.output("auth", "list"), "revoked")
	require.Contains(t, u.output("events"), "credential")

	require.Contains(t, u.fails(1, "auth", "new", "king"), "viewer or worker")
	require.Contains(t, u.fails(2, "auth", "new", "viewer", "--ttl", "0s"), "--ttl")
	require.Contains(t, u.fails(1, "auth", "revoke", "UNKNOWN"), "troupe auth list")
	require.Contains(t, u.fails(2, "up", "--nats", "nats://127.0.0.1:1", "--confine-workers"), "--confine-workers")
}
