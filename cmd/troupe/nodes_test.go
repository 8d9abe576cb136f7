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
	"troupe/nodes"
)

// agentOf is the process number of the agent of a head's store.
func agentOf(t *testing.T, store string) int {
	t.Helper()
	var file agentFile
	data, err := os.ReadFile(filepath.Join(store, "agent", "agent.json"))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(data, &file))
	return file.PID
}

// gone reports whether a process has ended.
func gone(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

// on connects to a head as a driver would.
func (u *user) on(head readyHead) *nodes.Client {
	u.t.Helper()
	b, err := bus.Open(u.t.Context(), head.access())
	require.NoError(u.t, err)
	u.t.Cleanup(func() { require.NoError(u.t, b.Close()) })
	return nodes.NewClient(b)
}

func workerID(rank int) nodes.WorkerID {
	return nodes.WorkerID{Namespace: "run", Role: "role", Incarnation: "one", Rank: rank}
}

// sleeps starts a worker that does nothing, and a child of it.
func sleeps(t *testing.T, client *nodes.Client, node string, rank int) int {
	t.Helper()
	started, err := client.Launch(t.Context(), nodes.Launch{
		Node: node, Program: nodes.Program{Command: []string{"sh", "-c", "setsid sleep 1000 & echo up; exec sleep 1000"}},
		Workers: []nodes.Start{{ID: workerID(rank), Name: fmt.Sprintf("role-%d", rank)}},
	})
	require.NoError(t, err)
	require.Nil(t, started[0].Err)
	return started[0].PID
}

// workersOf are the processes of an agent's workers, by the marker of its folder.
func workersOf(t *testing.T, dir string) (pids []string) {
	t.Helper()
	identity, err := os.ReadFile(filepath.Join(dir, "identity"))
	require.NoError(t, err)
	all, err := filepath.Glob("/proc/[0-9]*/environ")
	require.NoError(t, err)
	for _, path := range all {
		if env, err := os.ReadFile(path); err == nil && strings.Contains(string(env), nodes.MarkerEnv+"="+strings.TrimSpace(string(identity))) {
			pids = append(pids, path)
		}
	}
	return pids
}

// ready waits for the line that a head prints.
func (u *user) ready(out *screen) (head readyHead) {
	u.t.Helper()
	line := out.line(u.t, out.String)
	require.NoError(u.t, json.Unmarshal([]byte(line), &head), line)
	return head
}

// killAfter makes sure that an agent which outlives its head does not outlive the test.
func (u *user) killAfter(store string) {
	u.t.Cleanup(func() {
		if data, err := os.ReadFile(filepath.Join(store, "agent", "agent.json")); err == nil {
			var file agentFile
			if json.Unmarshal(data, &file) == nil && !gone(file.PID) {
				_ = syscall.Kill(file.PID, syscall.SIGKILL)
			}
		}
	})
}

// A head that is killed leaves its agent and the workers; the next head at the same place has them again, and when that
// one is ended nothing is left.
func TestAgentOutlivesAKilledHead(t *testing.T) {
	u := newUser(t)
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
	require.Eventually(t, func() bool { return strings.Contains(u.sees("gpus"), "nodes: 2") }, 4*time.Second, 50*time.Millisecond, "its nodes are registered again")

	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, cmd.Wait())
	require.True(t, gone(agent))
	require.True(t, gone(worker))
	require.Empty(t, workersOf(t, filepath.Join(store, "agent")))
}

// An agent that is killed is started again by its head, and what its workers left is ended.
func TestKilledAgentIsStartedAgain(t *testing.T) {
	u := newUser(t)
	head, _ := u.up("--gpus", "none", "--name", "box")
	client := u.on(head)
	worker, agent := sleeps(t, client, "box", 0), agentOf(t, head.Store)
	require.Eventually(t, func() bool { return len(workersOf(t, filepath.Join(head.Store, "agent"))) == 2 }, 5*time.Second, time.Millisecond)
	require.NoError(t, syscall.Kill(agent, syscall.SIGKILL))
	require.Eventually(t, func() bool { return gone(worker) }, 5*time.Second, time.Millisecond, "it dies with its agent")
	require.Eventually(t, func() bool { return agentOf(t, head.Store) != agent }, 10*time.Second, 10*time.Millisecond)
	require.Eventually(t, func() bool { return len(workersOf(t, filepath.Join(head.Store, "agent"))) == 0 }, 10*time.Second, 10*time.Millisecond)
	sleeps(t, client, "box", 1)
}

// An agent that cannot begin says why, on the head's own terminal.
func TestAgentThatCannotBegin(t *testing.T) {
	u := newUser(t)
	store := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(store, "agent"), nil, 0o600))
	require.Contains(t, u.fails(1, "up", "--listen", "127.0.0.1:0", "--store", store), "agent")
}

// Two machines: a head beyond loopback and an agent that joins, as the printed line says.
func TestJoin(t *testing.T) {
	u := newUser(t)
	head, _ := u.up("--listen", "0.0.0.0:0", "--gpus", "none", "--name", "box")
	other := newUser(t)
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
	u := newUser(t)
	head, _ := u.up()
	stranger := newUser(t)
	require.Contains(t, stranger.fails(1, "join", head.URL, "--gpus", "none", "--name", "x"), "credentials")
	require.Contains(t, stranger.with("TROUPE_TOKEN", "wrong").fails(1, "join", head.URL, "--gpus", "none", "--name", "x"), "credentials")
}

// An agent waits for its head, and with --exit-when-lost leaves with exit code 0 when that has been gone for too long.
func TestJoinWaitsAndLeaves(t *testing.T) {
	u := newUser(t)
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

// Harm forbidden: an agent that has lost its head ends with exit code 0, and no supervisor starts it again. It ends its workers
// after the grace, stays, and is there for the next head.
func TestAgentOutlivesItsHead(t *testing.T) {
	u := newUser(t)
	store := t.TempDir()
	head, stop := u.up("--store", store, "--no-agent")
	cmd, out := newUser(t).process("join", head.URL, "--token-file", head.TokenFile, "--gpus", "none", "--name", "faithful", "--grace", "500ms")
	require.Contains(t, out.line(t, out.String), "joined")
	worker := sleeps(t, u.on(head), "faithful", 0)
	stop()
	require.Eventually(t, func() bool { return gone(worker) }, 20*time.Second, 20*time.Millisecond, "after the grace its workers are ended")
	require.False(t, gone(cmd.Process.Pid))
	again, _ := u.up("--store", store, "--no-agent")
	require.Equal(t, head.URL, again.URL)
	stdout, stderr, _ := u.types("wait", "--nodes", "1", "--timeout", "20s")
	require.Equal(t, "1 nodes with 0 devices are there\n", stdout, stderr)
	next := sleeps(t, u.on(again), "faithful", 1)
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, cmd.Wait(), "exit code 0")
	require.True(t, gone(next))
}

// Two runs side by side on one host, and one of them torn down.
func TestTwoHeadsSideBySide(t *testing.T) {
	one, two := newUser(t), newUser(t)
	first, stop := one.up("--gpus", "none", "--name", "box")
	second, _ := two.up("--gpus", "none", "--name", "box")
	a, b := sleeps(t, one.on(first), "box", 0), sleeps(t, two.on(second), "box", 0)
	stop()
	require.True(t, gone(a))
	require.False(t, gone(b))
}

// An agent that is frozen is lost, and found again when it goes on, with its workers.
func TestFrozenAgent(t *testing.T) {
	u := newUser(t)
	head, _ := u.up("--gpus", "none", "--name", "box")
	client := u.on(head)
	worker, agent := sleeps(t, client, "box", 0), agentOf(t, head.Store)
	bustest.Freeze(t, agent)
	t.Cleanup(func() { _ = syscall.Kill(agent, syscall.SIGCONT) })
	require.Eventually(t, func() bool { return strings.Contains(u.sees("events"), "node_lost on box") }, 30*time.Second, 100*time.Millisecond)
	require.NoError(t, syscall.Kill(agent, syscall.SIGCONT))
	require.Eventually(t, func() bool { return strings.Contains(u.sees("status"), "box   ready") }, 10*time.Second, 100*time.Millisecond)
	require.False(t, gone(worker))
	require.Equal(t, agent, agentOf(t, head.Store))
}

// A head that wants another agent than the one it finds replaces it; one whose number was lost is found by its lock.
func TestAgentIsReplaced(t *testing.T) {
	u := newUser(t)
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
	require.Contains(t, u.sees("gpus"), "devices: 4")
}

// A NATS of one's own in place of the embedded one.
func TestExternalNATS(t *testing.T) {
	u := newUser(t)
	url := bustest.External(t)
	ctx, cancel := context.WithCancel(context.Background())
	var out, errs screen
	doneCh := make(chan int, 1)
	go func() {
		doneCh <- execute(ctx, []string{"up", "--json", "--nats", url, "--gpus", "sim:1x2", "--name", "box"}, &cli{out: &out, err: &errs, env: u.getenv})
	}()
	t.Cleanup(func() { cancel(); require.Zero(t, <-doneCh, errs.String()) })
	var head readyHead
	require.NoError(t, json.Unmarshal([]byte(out.line(t, errs.String)), &head))
	require.Equal(t, url, head.URL)
	require.Equal(t, "1 nodes with 2 devices are there\n", u.sees("wait", "--gpus", "2"))
	script(t, u.on(head), "box", 0, "echo printed")
	require.Eventually(t, func() bool { return strings.Contains(u.sees("logs", "role"), "printed") }, 10*time.Second, 20*time.Millisecond)
	require.Contains(t, u.fails(2, "up", "--nats", url, "--listen", "127.0.0.1:0"), "exclude")
}

// A NATS of one's own stays when the head goes: agents notice all the same.
func TestHeadGoneFromExternalNATS(t *testing.T) {
	u := newUser(t)
	url := bustest.External(t)
	cmd, out := u.process("up", "--json", "--nats", url, "--no-agent")
	head := u.ready(out)
	agent, said := newUser(t).process("join", url, "--gpus", "none", "--name", "box", "--grace", "500ms", "--exit-when-lost")
	require.Contains(t, said.line(t, said.String), "joined")
	worker := sleeps(t, u.on(head), "box", 0)
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	require.NoError(t, agent.Wait(), "exit code 0")
	require.True(t, gone(worker))
}

// The same, with an agent that stays until there is a head again.
func TestAgentAwaitsHeadOnExternalNATS(t *testing.T) {
	u := newUser(t)
	url := bustest.External(t)
	cmd, out := u.process("up", "--json", "--nats", url, "--no-agent")
	head := u.ready(out)
	agent, said := newUser(t).process("join", url, "--gpus", "none", "--name", "box", "--grace", "500ms")
	require.Contains(t, said.line(t, said.String), "joined")
	worker := sleeps(t, u.on(head), "box", 0)
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	require.Eventually(t, func() bool { return gone(worker) }, 30*time.Second, 20*time.Millisecond)
	_, out = u.process("up", "--json", "--nats", url, "--no-agent")
	head = u.ready(out)
	stdout, stderr, _ := u.types("wait", "--nodes", "1", "--timeout", "25s")
	require.Contains(t, stdout, "1 nodes", stderr)
	next := sleeps(t, u.on(head), "box", 1)
	require.NoError(t, agent.Process.Signal(syscall.SIGTERM))
	require.NoError(t, agent.Wait(), "exit code 0")
	require.True(t, gone(next))
}
