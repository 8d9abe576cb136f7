package main

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/cmd/troupe/cli"
	"troupe/nodes"
)

// script runs a script as a worker of a role on a node.
func script(t *testing.T, client *nodes.Client, node string, rank int, text string) {
	t.Helper()
	started, err := client.Launch(t.Context(), nodes.Launch{
		Node: node, Program: nodes.Program{Command: []string{"sh", "-c", text}},
		Workers: []nodes.Start{{ID: nodes.WorkerID{Namespace: "default", Role: "role", Incarnation: "one", Rank: rank}, Name: "role"}},
	})
	require.NoError(t, err)
	require.True(t, started[0].Err == nil || started[0].PID > 0, "%v", started[0].Err)
}

// statusOutput is what tests read of the JSON output of status.
type statusOutput struct {
	Head struct {
		Version string `json:"version"`
		Refused int    `json:"refused"`
	} `json:"head"`
	Nodes []struct {
		Version string           `json:"version"`
		Workers []map[string]any `json:"workers"`
	} `json:"nodes"`
}

// An operator's session: status, logs, events, drain.
func TestOperator(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up("--gpus", "sim:2x2", "--name", "box", "--labels", "rack=r7")
	require.Equal(t, "2 nodes with 4 devices are there\n", u.output("wait", "--nodes", "2", "--gpus", "4"))
	_, stderr, code := u.run("wait", "--nodes", "3", "--gpus", "9", "--timeout", "300ms")
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "troupe: waiting: 2 of 3 nodes are there, 4 of 9 devices are there\n")
	require.Contains(t, stderr, "gave up waiting: 2 of 3 nodes")

	client := u.on(head)
	script(t, client, "box-0", 0, "echo zero; echo oops >&2; exec sleep 1000")
	script(t, client, "box-1", 1, "echo one; echo nan; exit 3")
	require.Eventually(t, func() bool { out, _, _ := u.run("logs", "role"); return strings.Count(out, "\n") == 4 }, 2*time.Minute, 20*time.Millisecond)
	require.Contains(t, u.output("logs", "role/0"), "role/0! oops\n")
	require.NotContains(t, u.output("logs", "role/0"), "one")
	require.Contains(t, u.output("logs", "role/1", "--tail", "1"), "nan")
	require.NotContains(t, u.output("logs", "role/1", "--tail", "1"), "one")
	require.Equal(t, 1, strings.Count(u.output("logs", "role", "--grep", "^(nan|inf)$"), "\n"))
	require.Empty(t, u.output("logs", "role", "--since", time.Now().Add(time.Hour).Format(time.RFC3339)))
	require.Contains(t, u.fails(1, "logs", "absent"), `no role "absent"`)
	var line nodes.Line
	require.NoError(t, json.Unmarshal([]byte(u.output("logs", "role/1", "--tail", "1", "--json")), &line))
	require.Equal(t, 1, line.ID.Rank)
	require.Contains(t, u.fails(2, "logs", "role/x"), "RANK")
	require.Contains(t, u.fails(2, "logs", "role", "--grep", "("), "--grep")
	require.Contains(t, u.fails(2, "logs", "role", "--since", "soon"), "--since")

	status := u.output("status")
	require.NotContains(t, status, "?")
	for _, text := range []string{"HEAD   nats://", "connections refused: 0", "box-0  ready", "rack=r7", "no roles\n", "0 reservations, no request waits"} {
		require.Contains(t, status, text)
	}
	require.Contains(t, newShell(t).fails(1, "status", "--url", head.URL), "credentials")
	var view statusOutput
	require.NoError(t, json.Unmarshal([]byte(u.output("status", "--json")), &view))
	require.Len(t, view.Nodes, 2)
	require.Len(t, view.Nodes[0].Workers, 1)
	require.NotNil(t, view.Nodes[1].Workers, "its agent has answered")
	require.Empty(t, view.Nodes[1].Workers)
	require.EqualValues(t, 1, view.Head.Refused, "a stranger was refused, and counted")

	require.Contains(t, u.output("drain", "box-0", "--grace", "100ms", "--why", "a new fan"), "box-0 is drained")
	require.Contains(t, u.output("status"), "box-0  ready, cordoned")
	require.Contains(t, u.output("drain", "box-0", "--json"), `"stopped":0`)
	events := u.output("events")
	for _, text := range []string{"node_joined on box-0", "worker_exit default/role/1 on box-1: it exited with code 3", "drained by", "a new fan"} {
		require.Contains(t, events, text)
	}
	require.Contains(t, u.output("events", "--json"), `"kind":"worker_exit"`)
}

// logs -f prints stored and new lines, and ends at an interrupt.
func TestFollowLogs(t *testing.T) {
	u := newShell(t)
	head, _ := u.up("--gpus", "none", "--name", "box")
	client := u.on(head)
	script(t, client, "box", 0, "echo first; while :; do echo more; sleep 0.05; done")
	var out, errs screen
	ctx, cancel := context.WithCancel(t.Context())
	doneCh := make(chan int, 1)
	go func() {
		doneCh <- execute(ctx, []string{"logs", "role", "-f"}, &cli.CLI{Out: &out, Err: &errs, Env: u.getenv})
	}()
	require.Eventually(t, func() bool { return strings.Count(out.String(), "more") > 3 }, 2*time.Minute, 10*time.Millisecond)
	require.Contains(t, out.String(), "first")
	cancel()
	require.Zero(t, <-doneCh, errs.String())
}

// wait may start before the head.
func TestWaitForAHead(t *testing.T) {
	u := newShell(t)
	var out, errs screen
	doneCh := make(chan int, 1)
	go func() {
		doneCh <- execute(t.Context(), []string{"wait", "--nodes", "1", "--timeout", "20s"}, &cli.CLI{Out: &out, Err: &errs, Env: u.getenv})
	}()
	u.up("--gpus", "none")
	require.Zero(t, <-doneCh, errs.String())
	require.Contains(t, u.fails(2, "wait"), "--nodes")
}
