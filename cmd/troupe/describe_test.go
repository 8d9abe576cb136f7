package main

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/cmd/troupe/cli"
	"troupe/roles"
)

// Describe shows one role, node or reservation, and completion knows their names.
func TestDescribe(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	u.up("--gpus", "sim:1x2", "--name", "box", "--labels", "rack=r7")
	u.runs(four, roles.Spec{Name: "pool", World: 1, Process: &roles.Process{Command: roles.Self(), Policy: roles.RestartRank, MaxReplicas: 2}})
	require.Regexp(t, "replicas: +[12], of 1 to 2", u.output("describe", "role", "pool"))
	u.output("reserve", "--bundles", "2", "--devices", "1", "--id", "trainer", "--holder", "ann")
	u.output("cordon", "box", "--why", "a new fan")

	role := u.output("describe", "role", "four")
	for _, text := range []string{"role:         four", "class:        calc", "world:        4, tp=2", "state:        ready since", "RANK  NODE", "idle"} {
		require.Contains(t, role, text)
	}
	var d struct {
		Ranks []struct {
			State string `json:"state"`
		} `json:"ranks"`
	}
	require.NoError(t, json.Unmarshal([]byte(u.output("describe", "role", "four", "--json")), &d))
	require.Len(t, d.Ranks, 4)
	require.Equal(t, "ready", d.Ranks[3].State)

	node := u.output("describe", "node", "box")
	for _, text := range []string{"node:         box", "rack=r7", "agent:        version dev", "clock:", "/dev/shm", "limits:       open files", "a new fan", "trainer", "Devices", "node_joined on box"} {
		require.Contains(t, node, text)
	}
	held := u.output("describe", "reservation", "trainer")
	for _, text := range []string{"holder:       ann", "state:        granted since", "devices:      2 on 1 nodes", "RANK  NODE_RANK"} {
		require.Contains(t, held, text)
	}
	u.output("uncordon", "box")
	ctx, cancel := context.WithCancel(t.Context())
	doneCh := make(chan int, 1)
	go func() {
		var out, errs screen
		doneCh <- execute(ctx, []string{"reserve", "--bundles", "2", "--devices", "1", "--id", "later", "--wait", "1m"}, &cli.CLI{Out: &out, Err: &errs, Env: u.getenv})
	}()
	require.Eventually(t, func() bool {
		out, _, _ := u.run("describe", "reservation", "later")
		return strings.Contains(out, "at place 1 of the queue")
	}, 2*time.Minute, 20*time.Millisecond)
	cancel()
	<-doneCh
	for _, words := range [][]string{{"describe", "role", "nope"}, {"describe", "node", "nope"}, {"describe", "reservation", "nope"}} {
		require.Contains(t, u.fails(1, words...), `"nope"`)
	}
	require.Contains(t, completed(u, "describe", "node", ""), "box\tready, 2 devices")
	require.Contains(t, completed(u, "drain", ""), "box\tready")
	require.Contains(t, completed(u, "release", ""), "trainer\tann")
}

// Top shows nodes, roles and ranks, sorted by a column.
func TestTop(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	u.up("--gpus", "sim:2x2", "--name", "box")
	rt := u.runs(four, roles.Spec{Name: "one", World: 1})
	cluster, err := rt.Attach(t.Context(), "four")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { _, _ = cluster.Call(ctx, "wait") }() // ends with the test

	var busy string
	require.Eventually(t, func() bool {
		busy = u.output("top", "--once", "--sort", "busy")
		return strings.Contains(busy, " wait ")
	}, 2*time.Minute, 10*time.Millisecond)
	lines := strings.Split(busy, "\n")
	require.Regexp(t, `^ROLE +NAMESPACE +STATE +WORLD +READY +SILENT +METHOD +BUSY`, lines[0])
	require.Regexp(t, `^four +default +ready +4 +4 +0 +wait `, lines[1])
	require.Regexp(t, `^one +`, lines[2])
	require.Regexp(t, `^one +`, strings.Split(u.output("top", "roles", "--once", "--sort", "role", "--reverse"), "\n")[1])
	ranks := strings.Split(strings.TrimSpace(u.output("top", "ranks", "four", "--once", "--json")), "\n")
	require.Len(t, ranks, 4)
	var row map[string]any
	require.NoError(t, json.Unmarshal([]byte(ranks[2]), &row))
	require.EqualValues(t, 2, row["rank"])
	require.Contains(t, row, "busy_s")
	require.Regexp(t, `(?m)^box-1 +ready +2 +0 +0 `, u.output("top", "nodes", "--once"))
	require.Contains(t, u.fails(2, "top", "gpus"), "nodes, roles or ranks")
	require.Contains(t, u.fails(2, "top", "--sort", "size"), "the columns of roles are")
	require.Contains(t, u.fails(1, "top", "ranks", "nope", "--once"), `no role "nope"`)
}

// A live view refreshes over one connection, fits the terminal, and goes on when the head is away for a while.
func TestWatch(t *testing.T) {
	t.Parallel()
	u := newShell(t).with("COLUMNS", "40").with("LINES", "6")
	u.up("--gpus", "sim:3x1", "--name", "box")
	for _, command := range []string{"status", "roles", "reservations", "namespaces", "gpus"} {
		ctx, cancel := context.WithCancel(t.Context())
		var out, errs screen
		doneCh := make(chan int, 1)
		go func() {
			doneCh <- execute(ctx, []string{command, "--watch", "--every", "100ms"}, &cli.CLI{Out: &out, Err: &errs, Env: u.getenv})
		}()
		require.Eventually(t, func() bool { return strings.Count(out.String(), "\x1b[H") >= 3 }, 2*time.Minute, 10*time.Millisecond, command)
		cancel()
		require.Zero(t, <-doneCh, errs.String())
		frame := strings.Split(out.String(), "\x1b[H")[2]
		lines := strings.Split(strings.TrimSuffix(strings.ReplaceAll(frame, "\x1b[K", ""), "\n\x1b[J"), "\n")
		require.Less(t, len(lines), 6, command)
		for _, line := range lines {
			require.LessOrEqual(t, len([]rune(line)), 40, "%s: %q", command, line)
		}
	}
	require.Contains(t, u.fails(2, "status", "--watch", "--every", "1ms"), "--every")
}

// completed is what the shell would offer for the last word.
func completed(u *shell, words ...string) string {
	out, _, _ := u.run(append([]string{"__complete"}, words...)...)
	return out
}
