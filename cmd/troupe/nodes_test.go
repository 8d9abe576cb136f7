package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/cmd/troupe/cli"
	"troupe/nodes"
	"troupe/nodes/proctree"
)

// agentOf is the pid of the agent of a head's store, once the agent has written it.
func agentOf(t *testing.T, store string) int {
	t.Helper()
	var file struct{ PID int }
	require.Eventually(t, func() bool {
		data, err := os.ReadFile(filepath.Join(store, "agent", "agent.json"))
		return err == nil && json.Unmarshal(data, &file) == nil
	}, 2*time.Minute, 10*time.Millisecond)
	return file.PID
}

// gone reports whether a process has ended.
func gone(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

// on connects to a head.
func (u *shell) on(head readyHead) *nodes.Client {
	u.t.Helper()
	b, err := bus.Open(u.t.Context(), head.access())
	require.NoError(u.t, err)
	u.t.Cleanup(func() { require.NoError(u.t, b.Close()) })
	return nodes.NewClient(b)
}

func workerID(rank int) nodes.WorkerID {
	return nodes.WorkerID{Namespace: "run", Role: "role", Incarnation: "one", Rank: rank}
}

// sleeps starts a worker process that sleeps, with a child.
func sleeps(t *testing.T, client *nodes.Client, node string, rank int) int {
	t.Helper()
	started := launchSleep(t, client, node, rank)
	require.Nil(t, started.Err)
	return started.PID
}

// launchSleep is what the agent answers to one request for such a process.
func launchSleep(t *testing.T, client *nodes.Client, node string, rank int) nodes.Started {
	t.Helper()
	started, err := client.Launch(t.Context(), nodes.Launch{
		Node: node, Program: nodes.Program{Command: []string{"sh", "-c", "setsid sleep 1000 & echo up; exec sleep 1000"}},
		Workers: []nodes.Start{{ID: workerID(rank), Name: fmt.Sprintf("role-%d", rank)}},
	})
	require.NoError(t, err)
	return started[0]
}

// workersOf are the pids of an agent's workers, found by the agent's folder in their environment.
func workersOf(t *testing.T, dir string) (pids []string) {
	t.Helper()
	identity, err := os.ReadFile(filepath.Join(dir, "identity"))
	require.NoError(t, err)
	all, err := filepath.Glob("/proc/[0-9]*/environ")
	require.NoError(t, err)
	for _, path := range all {
		if env, err := os.ReadFile(path); err == nil && strings.Contains(string(env), proctree.MarkerEnv+"="+strings.TrimSpace(string(identity))) {
			pids = append(pids, path)
		}
	}
	return pids
}

// ready waits for the line that a head prints.
func (u *shell) ready(out *screen) (head readyHead) {
	u.t.Helper()
	line := out.line(u.t, out.String)
	require.NoError(u.t, json.Unmarshal([]byte(line), &head), line)
	return head
}

// killAfter kills an agent that outlives its head at the end of the test.
func (u *shell) killAfter(store string) {
	u.t.Cleanup(func() {
		if data, err := os.ReadFile(filepath.Join(store, "agent", "agent.json")); err == nil {
			var file struct{ PID int }
			if json.Unmarshal(data, &file) == nil && !gone(file.PID) {
				_ = syscall.Kill(file.PID, syscall.SIGKILL)
			}
		}
	})
}

// The agent and the workers of a killed head run on; the next head on the same store takes them over, and its end ends them.
func TestAgentOutlivesAKilledHead(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	store := t.TempDir()
	words := []string{"up", "--json", "--listen", "127.0.0.1:0", "--store", store, "--gpus", "sim:2x2", "--name", "box"}
	cmd, out := u.process(words...)
	u.killAfter(store)
	head := u.ready(out)
	client := u.on(head)
	worker, agent := sleeps(t, client, "box-1", 0), agentOf(t, store)

	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	cmd, out = u.process(words...)
	again := u.ready(out)
	require.Equal(t, head.URL, again.URL, "a free port is kept")
	require.Equal(t, agent, agentOf(t, store))
	require.False(t, gone(worker))
	status, err := client.Workers(t.Context(), "box-1")
	require.NoError(t, err)
	require.Equal(t, worker, status[0].PID)
	require.Nil(t, status[0].Exit)
	require.Eventually(t, func() bool { return strings.Contains(u.output("gpus"), "nodes: 2") }, 2*time.Minute, 50*time.Millisecond, "its nodes are registered again")

	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, cmd.Wait())
	require.True(t, gone(agent))
	require.True(t, gone(worker))
	require.Empty(t, workersOf(t, filepath.Join(store, "agent")))
}

// A head restarts its killed agent, and the new agent ends the orphan processes.
func TestKilledAgentIsStartedAgain(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up("--gpus", "none", "--name", "box")
	client := u.on(head)
	worker, agent := sleeps(t, client, "box", 0), agentOf(t, head.Store)
	require.Eventually(t, func() bool { return len(workersOf(t, filepath.Join(head.Store, "agent"))) == 2 }, 2*time.Minute, time.Millisecond)
	require.NoError(t, syscall.Kill(agent, syscall.SIGKILL))
	require.Eventually(t, func() bool { return gone(worker) }, 2*time.Minute, time.Millisecond, "it dies with its agent")
	require.Eventually(t, func() bool { return agentOf(t, head.Store) != agent }, 2*time.Minute, 10*time.Millisecond)
	require.Eventually(t, func() bool { return len(workersOf(t, filepath.Join(head.Store, "agent"))) == 0 }, 2*time.Minute, 10*time.Millisecond)
	sleeps(t, client, "box", 1)
}

// The error of an agent that cannot start is in the head's error.
func TestAgentThatCannotStart(t *testing.T) {
	u := newShell(t)
	store := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(store, "agent"), nil, 0o600))
	require.Contains(t, u.fails(1, "up", "--listen", "127.0.0.1:0", "--store", store), "agent")
}

// An agent joins a head beyond loopback with the printed command.
func TestJoin(t *testing.T) {
	u := newShell(t)
	head, _ := u.up("--listen", "0.0.0.0:0", "--gpus", "none", "--name", "box")
	other := newShell(t)
	words := []string{"join", head.URL, "--fingerprint", head.Fingerprint, "--token-file", head.TokenFile, "--gpus", "sim:1x2", "--name", "second", "--labels", "rack=r7", "--json"}
	cmd, out := other.process(words...)
	require.Contains(t, out.line(t, out.String), `"nodes":["second"]`)
	client := u.on(head)
	worker := sleeps(t, client, "second", 0)
	require.Contains(t, other.fails(1, append(words, "--token-file", "/dev/null")...), "empty")

	require.NoError(t, cmd.Process.Signal(syscall.SIGHUP))
	require.NoError(t, cmd.Wait(), "exit code 0")
	require.True(t, gone(worker))
}

func TestJoinIsRefusedWithoutToken(t *testing.T) {
	u := newShell(t)
	head, _ := u.up()
	stranger := newShell(t)
	require.Contains(t, stranger.fails(1, "join", head.URL, "--gpus", "none", "--name", "x"), "credentials")
	require.Contains(t, stranger.with("TROUPE_TOKEN", "wrong").fails(1, "join", head.URL, "--gpus", "none", "--name", "x"), "credentials")
}

// An agent waits for its head; with --exit-when-lost it exits with code 0 when the head has been gone for longer than --grace.
func TestJoinWaitsAndLeaves(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	store := t.TempDir()
	head, stop := u.up("--store", store, "--no-agent")
	stop()
	token, err := os.ReadFile(filepath.Join(store, "token"))
	require.NoError(t, err)
	require.Contains(t, u.with("TROUPE_TOKEN", strings.TrimSpace(string(token))).fails(75, "join", head.URL, "--gpus", "none", "--wait", "0s"), "--wait")
	cmd, out := u.with("TROUPE_TOKEN", strings.TrimSpace(string(token))).process("join", head.URL, "--gpus", "none", "--name", "late", "--grace", "500ms", "--exit-when-lost")
	again, stop := u.up("--store", store, "--no-agent")
	require.Equal(t, head.URL, again.URL)
	require.Contains(t, out.line(t, out.String), "joined")
	client := u.on(again)
	worker := sleeps(t, client, "late", 0)
	stop()
	require.NoError(t, cmd.Wait(), "exit code 0")
	require.True(t, gone(worker))
}

// An agent without a head ends its workers after --grace, does not exit, and joins the next head.
func TestAgentOutlivesItsHead(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	store := t.TempDir()
	head, stop := u.up("--store", store, "--no-agent")
	cmd, out := newShell(t).process("join", head.URL, "--token-file", head.TokenFile, "--gpus", "none", "--name", "faithful", "--grace", "500ms")
	require.Contains(t, out.line(t, out.String), "joined")
	worker := sleeps(t, u.on(head), "faithful", 0)
	stop()
	require.Eventually(t, func() bool { return gone(worker) }, 2*time.Minute, 20*time.Millisecond, "after the grace its workers are ended")
	require.False(t, gone(cmd.Process.Pid))
	again, _ := u.up("--store", store, "--no-agent")
	require.Equal(t, head.URL, again.URL)
	stdout, stderr, _ := u.run("wait", "--nodes", "1", "--timeout", "20s")
	require.Equal(t, "1 node with 0 devices is there\n", stdout, stderr)
	client := u.on(again)
	var next nodes.Started
	require.Eventually(t, func() bool { // the agent refuses as long as it ends the workers of the first head
		next = launchSleep(t, client, "faithful", 1)
		return next.Err == nil
	}, 2*time.Minute, 50*time.Millisecond)
	require.Contains(t, u.output("events"), "head_lost on faithful: no head was reachable for 500ms (--grace); the agent has ended its workers")
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, cmd.Wait(), "exit code 0")
	require.True(t, gone(next.PID))
}

// Two heads on one host: the end of one does not affect the other.
func TestTwoHeadsSideBySide(t *testing.T) {
	t.Parallel()
	one, two := newShell(t), newShell(t)
	first, stop := one.up("--gpus", "none", "--name", "box")
	second, _ := two.up("--gpus", "none", "--name", "box")
	a, b := sleeps(t, one.on(first), "box", 0), sleeps(t, two.on(second), "box", 0)
	stop()
	require.True(t, gone(a))
	require.False(t, gone(b))
}

// A frozen agent is lost; when it continues, its node and workers are back.
func TestFrozenAgent(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up("--gpus", "none", "--name", "box")
	client := u.on(head)
	began := time.Now()
	// Before a leader has led for as long as a node's lease lasts it declares no node lost: the lease would expire at the same moment.
	require.Eventually(t, func() bool { return time.Since(began) > 16*time.Second }, 2*time.Minute, 100*time.Millisecond)
	worker, agent := sleeps(t, client, "box", 0), agentOf(t, head.Store) // the head kills a process of an unknown role after a while
	bustest.Freeze(t, agent)
	t.Cleanup(func() { _ = syscall.Kill(agent, syscall.SIGCONT) })
	require.Eventually(t, func() bool { return strings.Contains(u.output("events"), "node_lost on box") }, 2*time.Minute, 100*time.Millisecond)
	require.NoError(t, syscall.Kill(agent, syscall.SIGCONT))
	require.Eventually(t, func() bool { return strings.Contains(u.output("status"), "box   ready") }, 2*time.Minute, 100*time.Millisecond)
	require.False(t, gone(worker))
	require.Equal(t, agent, agentOf(t, head.Store))
}

// A head replaces an agent with another spec, and finds an agent without a recorded pid by its lock.
func TestAgentIsReplaced(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	store := t.TempDir()
	cmd, out := u.process("up", "--json", "--listen", "127.0.0.1:0", "--store", store, "--gpus", "sim:1x2", "--name", "box")
	u.killAfter(store)
	worker, agent := sleeps(t, u.on(u.ready(out)), "box", 0), agentOf(t, store)
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	require.NoError(t, os.Remove(filepath.Join(store, "agent", "agent.json")))
	u.up("--store", store, "--gpus", "sim:1x4", "--name", "box")
	require.True(t, gone(agent))
	require.True(t, gone(worker))
	require.Contains(t, u.output("gpus"), "devices: 4")
}

// A head on an external NATS server.
func TestExternalNATS(t *testing.T) {
	u := newShell(t)
	url := bustest.External(t)
	ctx, cancel := context.WithCancel(context.Background())
	var out, errs screen
	doneCh := make(chan int, 1)
	go func() {
		doneCh <- execute(ctx, []string{"up", "--json", "--nats", url, "--gpus", "sim:1x2", "--name", "box"}, &cli.CLI{Out: &out, Err: &errs, Env: u.getenv})
	}()
	t.Cleanup(func() { cancel(); require.Zero(t, <-doneCh, errs.String()) })
	var head readyHead
	require.NoError(t, json.Unmarshal([]byte(out.line(t, errs.String)), &head))
	require.Equal(t, url, head.URL)
	require.Equal(t, "1 node with 2 devices is there\n", u.output("wait", "--gpus", "2"))
	script(t, u.on(head), "box", 0, "echo printed")
	require.Eventually(t, func() bool {
		out, _, _ := u.run("logs", "role") // an error while nothing is stored
		return strings.Contains(out, "printed")
	}, 2*time.Minute, 20*time.Millisecond)
	require.Contains(t, u.fails(2, "up", "--nats", url, "--listen", "127.0.0.1:0"), "exclude")
}

// Agents notice the end of a head whose external NATS server stays.
func TestHeadGoneFromExternalNATS(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	url := bustest.External(t)
	cmd, out := u.process("up", "--json", "--nats", url, "--no-agent")
	head := u.ready(out)
	agent, said := newShell(t).process("join", url, "--gpus", "none", "--name", "box", "--grace", "500ms", "--exit-when-lost")
	require.Contains(t, said.line(t, said.String), "joined")
	worker := sleeps(t, u.on(head), "box", 0)
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	require.NoError(t, agent.Wait(), "exit code 0")
	require.True(t, gone(worker))
}

// An agent on an external NATS server waits for the next head.
func TestAgentAwaitsHeadOnExternalNATS(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	url := bustest.External(t)
	cmd, out := u.process("up", "--json", "--nats", url, "--no-agent")
	head := u.ready(out)
	agent, said := newShell(t).process("join", url, "--gpus", "none", "--name", "box", "--grace", "500ms")
	require.Contains(t, said.line(t, said.String), "joined")
	worker := sleeps(t, u.on(head), "box", 0)
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	require.Eventually(t, func() bool { return gone(worker) }, 2*time.Minute, 20*time.Millisecond)
	_, out = u.process("up", "--json", "--nats", url, "--no-agent")
	head = u.ready(out)
	stdout, stderr, _ := u.run("wait", "--nodes", "1", "--timeout", "25s")
	require.Contains(t, stdout, "1 node ", stderr)
	client := u.on(head)
	var next nodes.Started
	require.Eventually(t, func() bool { // the agent refuses as long as it ends the workers of the first head
		next = launchSleep(t, client, "box", 1)
		return next.Err == nil
	}, 2*time.Minute, 50*time.Millisecond)
	require.NoError(t, agent.Process.Signal(syscall.SIGTERM))
	require.NoError(t, agent.Wait(), "exit code 0")
	require.True(t, gone(next.PID))
}
