package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/bus/stream"
	"troupe/nodes"
	"troupe/nodes/folders"
	"troupe/placement"
	"troupe/roles"
	"troupe/roles/registry"
)

// joinCredential issues a credential for joining and writes it to a file.
func (u *shell) joinCredential(uses string) (file string) {
	file = filepath.Join(u.t.TempDir(), "join.token")
	require.NoError(u.t, os.WriteFile(file, []byte(u.output("auth", "new", "join", "--uses", uses, "--ttl", "1h")), 0o600))
	return file
}

// join runs an agent as a process, until it says that it has joined.
func (u *shell) join(head readyHead, dir string, words ...string) *exec.Cmd {
	cmd, out := u.process(append([]string{"join", head.URL, "--dir", dir}, words...)...)
	require.Contains(u.t, out.line(u.t, out.String), "joined")
	return cmd
}

// A machine that joins with a credential for that never has the head's token: workers of teams run there with the team's rights, shipped folders
// and output pass the head, and a restart of the agent needs no other credential. With its revocation the node is lost.
func TestJoinWithACredential(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up("--no-agent")
	file, dir, far := u.joinCredential("1"), t.TempDir(), newShell(t)
	words := []string{"--token-file", file, "--gpus", "sim:1x2", "--name", "far", "--grace", "1s"}
	there := func() {
		t.Helper()
		stdout, stderr, _ := u.run("wait", "--nodes", "1", "--gpus", "2", "--timeout", "2m")
		require.Contains(t, stdout, "1 node", stderr)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "credential.next"), []byte("REQUEST"), 0o600))
	agent := far.join(head, dir, words...)
	there()
	require.Contains(t, far.fails(1, "join", head.URL, "--token-file", file, "--gpus", "none", "--name", "more", "--dir", t.TempDir()), "is used")
	require.Contains(t, far.fails(1, "join", head.URL, "--token-file", file, "--gpus", "none", "--name", "far", "--dir", t.TempDir()), "troupe auth revoke")

	cfg, team := u.team(head, "red")
	rt, err := roles.Open(t.Context(), roles.Config{BusConfig: cfg})
	require.NoError(t, err)
	role, err := rt.Create(t.Context(), onHosts("actor", "far"))
	require.NoError(t, err)
	pids, err := roles.CallEach[int](t.Context(), role, "pid")
	require.NoError(t, err)
	worker, _ := bus.ReadCredential(accessOf(t, pids[0]).Token)
	require.Equal(t, team.ID, bus.Caller{ID: worker.ID}.Team())
	require.Equal(t, "red", worker.Namespace)
	token, err := os.ReadFile(head.TokenFile)
	require.NoError(t, err)
	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			data, err := os.ReadFile(path)
			require.NoError(t, err)
			require.NotContains(t, string(data), strings.TrimSpace(string(token)), path)
		}
		return nil // a worker's file may be gone
	}))
	require.NoError(t, rt.Close(t.Context()))

	b, err := bus.Open(t.Context(), head.access())
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	source := t.TempDir()
	big := make([]byte, 12<<20)
	_, _ = rand.Read(big) // never fails
	require.NoError(t, os.WriteFile(filepath.Join(source, "big"), big, 0o600))
	hash, err := folders.Ship(t.Context(), b, source)
	require.NoError(t, err)
	client := nodes.NewClient(b)
	id := nodes.WorkerID{Namespace: "blue", Role: "role", Incarnation: "one"}
	exitCh := make(chan nodes.Exit, 16)
	stop, err := client.Exits(t.Context(), id.Address(), func(e nodes.Exit) { exitCh <- e })
	require.NoError(t, err)
	defer stop()
	started, err := client.Launch(t.Context(), nodes.Launch{
		Node: "far", Program: nodes.Program{Command: []string{"sh", "-c", "echo there are $(wc -c < big) bytes"}, Folder: hash}, Workers: []nodes.Start{{ID: id, Name: "one"}},
	})
	require.NoError(t, err)
	require.Nil(t, started[0].Err)
	require.Zero(t, (<-exitCh).Code)
	var said string
	require.Eventually(t, func() bool {
		err := nodes.ReadLogs(t.Context(), b, nodes.LogQuery{Namespace: "blue", Rank: -1}, func(l nodes.Line) error { said += l.Text; return nil })
		return err == nil && said != ""
	}, time.Minute, 20*time.Millisecond)
	require.Contains(t, said, "there are 12582912 bytes")

	require.NoError(t, agent.Process.Signal(syscall.SIGTERM))
	require.NoError(t, agent.Wait())
	require.NoError(t, os.Remove(filepath.Join(dir, "credential"))) // as if the agent had been killed before it had the answer
	require.NoError(t, os.WriteFile(filepath.Join(dir, "credential.next"), []byte("REQUEST"), 0o600))
	agent = far.join(head, dir, words...)
	there()
	require.NoFileExists(t, filepath.Join(dir, "credential.next"))
	require.NoError(t, agent.Process.Signal(syscall.SIGTERM))
	require.NoError(t, agent.Wait())
	far.join(head, dir, append(words, "--confine-workers")...)
	there()
	id.Rank = 1
	started, err = client.Launch(t.Context(), nodes.Launch{
		Node: "far", Program: nodes.Program{Command: []string{"sleep", "600"}}, Workers: []nodes.Start{{ID: id, Name: "two"}},
	})
	require.NoError(t, err)
	require.Nil(t, started[0].Err)
	confined, _ := bus.ReadCredential(accessOf(t, started[0].PID).Token)
	require.Equal(t, bus.WorkerCredential, confined.Kind, "though the client knows the agent as it was before")
	var all []struct {
		bus.Credential
		Revoked time.Time
	}
	require.NoError(t, json.Unmarshal([]byte(u.output("auth", "list", "--json")), &all))
	var own string
	for _, r := range all {
		if r.Kind == bus.AgentCredential {
			require.Empty(t, own, "one")
			require.Equal(t, "far", r.Node)
			own = r.ID
		}
	}
	require.NotEqual(t, "REQUEST", own, "a machine does not choose it")
	require.Equal(t, own, confined.Parent())
	require.Contains(t, u.output("auth", "list"), "used")
	require.Contains(t, u.output("auth", "revoke", own), own)
	require.Eventually(t, func() bool { return strings.Contains(u.output("events"), "node_lost on far") }, 3*time.Minute, 100*time.Millisecond)
}

// Whoever has an agent's files reaches its nodes alone: not the leases and orders of others, no key of the registry, no stream, and no worker's output.
func TestHostileAgent(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up("--gpus", "sim:1x2", "--name", "box")
	dir := t.TempDir()
	newShell(t).join(head, dir, "--token-file", u.joinCredential("1"), "--gpus", "sim:2x2", "--name", "far")
	victim := driveOn(t, head, "good")
	role, err := victim.Create(t.Context(), onHosts("actor", "box"))
	require.NoError(t, err)
	held := role.Record()

	evil, err := bus.Open(t.Context(), bus.Config{URLs: []string{head.URL}, TokenFile: filepath.Join(dir, "credential"), OnError: func(error) {}})
	require.NoError(t, err)
	defer func() { require.NoError(t, evil.Close()) }()
	leases, err := kv.Open(t.Context(), evil, kv.Config{Bucket: "troupe_nodes", Leases: true})
	require.NoError(t, err)
	_, err = leases.Get(t.Context(), "node.far-1")
	require.NoError(t, err, "its own")
	for _, key := range []string{"node.box", "node.far", "node.far-2", "node.far-1.x", "other"} {
		_, err = leases.Get(t.Context(), key)
		require.ErrorIs(t, err, bus.ErrRefused, key)
		require.ErrorIs(t, leases.Delete(t.Context(), key, 0), bus.ErrRefused, key)
		_, err = leases.Lease(t.Context(), key, nil, time.Minute)
		require.ErrorIs(t, err, bus.ErrRefused, key)
	}
	drivers, err := kv.Open(t.Context(), evil, kv.Config{Bucket: "troupe_leases", Leases: true})
	require.NoError(t, err)
	session := victim.Session()
	_, err = drivers.Get(t.Context(), "good.driver."+session)
	require.NoError(t, err, "a driver on its host")
	trusted, err := bus.Open(t.Context(), head.access())
	require.NoError(t, err)
	defer func() { require.NoError(t, trusted.Close()) }()
	all, err := kv.Open(t.Context(), trusted, kv.Config{Bucket: "troupe_leases", Leases: true})
	require.NoError(t, err)
	_, err = all.Lease(t.Context(), "good.driver.ELSEWHERE", []byte(`{"name":"x","host":"another"}`), time.Minute)
	require.NoError(t, err)
	for _, key := range []string{"good.driver.ELSEWHERE", "good.gone.ELSEWHERE", "good.x", "good", "good.driver"} {
		_, err = drivers.Get(t.Context(), key)
		require.ErrorIs(t, err, bus.ErrRefused, key)
		require.ErrorIs(t, drivers.Delete(t.Context(), key, 0), bus.ErrRefused, key)
		_, err = drivers.Lease(t.Context(), key, nil, time.Minute)
		require.ErrorIs(t, err, bus.ErrRefused, key)
	}
	_, err = drivers.Lease(t.Context(), "good.driver."+session, nil, time.Minute)
	require.ErrorIs(t, err, bus.ErrRefused, "it may end, not take it")
	_, err = drivers.Lease(t.Context(), "good.gone.NOBODY", nil, time.Minute)
	require.ErrorIs(t, err, bus.ErrRefused, "the proof of a driver that was never here")
	_, err = drivers.List(t.Context(), "good")
	require.ErrorIs(t, err, bus.ErrRefused)
	_, err = registry.All(t.Context(), evil)
	require.Error(t, err)

	for _, name := range []string{"troupe_logs", "troupe_events", "troupe_audit", "KV_troupe_registry", "troupe_pipeline_good@p"} {
		s, err := stream.Find(t.Context(), evil, name)
		if err == nil { // it stores there, and reads nothing
			_, err = s.Get(t.Context(), 1)
		}
		require.ErrorIs(t, err, bus.ErrRefused, name)
	}
	for _, subject := range []string{"troupe.good.@pipeline.p.stored.state", "troupe.@events.good", "troupe.good.actor.one.log", "troupe.*.actor.one.log.0", "$KV.troupe_registry.good.x"} {
		_, err = stream.Append(t.Context(), evil, []*bus.Msg{{Subject: subject, Data: []byte("x")}}, "")
		require.Error(t, err, subject)
	}
	_, err = stream.Append(t.Context(), evil, []*bus.Msg{{Subject: held.Address().Log(0), Data: []byte("x"), Header: bus.Header{"Nats-Rollup": {"all"}}}}, "")
	require.Error(t, err)
	require.ErrorIs(t, nodes.ReadLogs(t.Context(), evil, nodes.LogQuery{Namespace: "good", Rank: -1}, func(nodes.Line) error { return nil }), bus.ErrRefused)
	short, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	_, err = placement.NewClient(evil, "good")
	if err == nil {
		_, err = nodes.NewClient(evil).Running(short, "box")
	}
	require.Error(t, err)
	require.NoError(t, nodes.Emit(evil, nodes.Event{Kind: "forged", Node: "box", Text: "of another node"}))
	require.NoError(t, nodes.Audit(evil, nodes.Event{Kind: "forged", Node: "far-0", Text: "an action"}))
	require.NoError(t, nodes.Emit(evil, nodes.Event{Kind: "told", Node: "far-0", Text: "of its own"}))
	require.Eventually(t, func() bool { return strings.Contains(u.output("events"), "told on far-0") }, time.Minute, 50*time.Millisecond)
	require.NotContains(t, u.output("events")+u.output("events", "--audit"), "forged")
	_, err = roles.CallEach[int](t.Context(), role, "pid")
	require.NoError(t, err, "the victim is undisturbed")
}
