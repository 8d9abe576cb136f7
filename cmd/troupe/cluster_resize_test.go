package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/cmd/troupe/head"
	"troupe/placement"
	"troupe/roles"
)

// calledRole is a role of two processes that is called without a pause until the test ends.
type calledRole struct {
	*roles.Cluster
	t     *testing.T
	calls atomic.Int64
}

func callRole(t *testing.T, cfg bus.Config) *calledRole {
	rt, err := roles.Open(t.Context(), roles.Config{BusConfig: cfg, Namespace: "run", Classes: []*actors.Class{calcClass()}})
	require.NoError(t, err)
	c, err := rt.Create(t.Context(), roles.Spec{
		Name: "called", Class: "calc", World: 2, Process: &roles.Process{Needs: placement.Request{Bundles: []placement.Bundle{{Node: "box", Devices: 1000}}}},
	})
	require.NoError(t, err)
	r := &calledRole{Cluster: c, t: t}
	ctx, cancel := context.WithCancel(context.Background())
	doneCh := make(chan struct{})
	go func() {
		defer close(doneCh)
		for ctx.Err() == nil {
			limit, stop := context.WithTimeout(context.Background(), 2*time.Minute)
			_, err := roles.CallEach[int](limit, c, "rank")
			stop()
			if err != nil {
				t.Errorf("a call is lost: %v", err)
				return
			}
			r.calls.Add(1)
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-doneCh
		require.NoError(t, rt.Close(context.Background()))
	})
	return r
}

// goesOn waits for calls that begin from now on.
func (r *calledRole) goesOn() {
	r.t.Helper()
	before := r.calls.Load()
	require.Eventually(r.t, func() bool { return r.calls.Load() > before+5 || r.t.Failed() }, 2*time.Minute, 5*time.Millisecond)
}

// statuses are the answers of the heads to `troupe cluster status`.
func (u *shell) statuses() (heads []head.Status) {
	u.t.Helper()
	require.NoError(u.t, json.Unmarshal([]byte(u.output("cluster", "status", "--json")), &heads))
	return heads
}

func reserveOn(t *testing.T, b *bus.Bus, id string) {
	t.Helper()
	client, err := placement.NewClient(b, "run")
	require.NoError(t, err)
	defer client.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	_, err = client.Reserve(ctx, placement.Request{ID: id, Holder: "test", Bundles: []placement.Bundle{{Node: "box", Devices: 1000}}})
	require.NoError(t, err)
}

// A head that runs becomes one of three and is alone again, while its workers, which its own agent runs, are called: no call is lost, no worker ends,
// and what was stored stays. Commands that are interrupted are given again.
func TestHeadGrowsAndShrinks(t *testing.T) {
	if testing.Short() {
		t.Skip("it needs the machine for itself under the race detector: the second command of make race runs it")
	}
	t.Parallel()
	u, at, dir := newShell(t), clusterAddresses(t), t.TempDir()
	file := filepath.Join(dir, "bundle")
	store := func(i int) string { return filepath.Join(dir, fmt.Sprint("store", i)) }
	_, port, err := net.SplitHostPort(at[0])
	require.NoError(t, err)
	first, out := u.process("up", "--json", "--listen", "0.0.0.0:"+port, "--store", store(0), "--gpus", "sim:1x8", "--name", "box")
	u.killAfter(store(0))
	alone := u.ready(out)
	b, err := bus.Open(t.Context(), alone.access())
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	called := callRole(t, alone.access())
	placements := called.Record().Placements
	reserveOn(t, b, "alone")

	grow := []string{"cluster", "grow", strings.Join(at, ","), "--member", at[0], "--bundle", file}
	_, stderr, code := u.run(append(grow, "--timeout", "1s")...)
	require.NotZero(t, code)
	require.Contains(t, stderr, at[1]+", "+at[2])
	require.Contains(t, stderr, "give the command again")
	require.NotContains(t, u.output("status"), "standby", "nothing has changed yet")
	members := []*exec.Cmd{first}
	for i := 1; i < 3; i++ {
		m, _ := u.with("XDG_STATE_HOME", filepath.Join(dir, fmt.Sprint("state", i))).process("up", "--json", "--store", store(i), "--bundle", file, "--member", at[i], "--no-agent")
		members = append(members, m)
	}
	require.Contains(t, u.output(grow...), "the cluster is whole")
	require.Contains(t, u.output(grow...), "the cluster is whole", "a repeat")
	require.Len(t, u.statuses(), 3)
	called.goesOn()
	require.Equal(t, placements, called.Record().Placements, "no worker has ended")
	reserveOn(t, b, "three")
	require.NoDirExists(t, filepath.Join(store(0), "alone"))

	require.Contains(t, u.fails(1, "cluster", "shrink", "--lost", at[1]), at[1]+" runs")
	said, stderr, code := u.run("cluster", "shrink") // it may warn of output of workers, which has one copy
	require.Zero(t, code, stderr)
	require.Contains(t, said, at[0]+" is a head alone")
	require.Contains(t, u.output("cluster", "shrink"), "is alone", "a repeat")
	for _, m := range members[1:] {
		require.NoError(t, m.Wait(), "it ends in order")
	}
	require.Contains(t, u.with("XDG_STATE_HOME", filepath.Join(dir, "state1")).fails(2, "up", "--store", store(1)), "has left")
	called.goesOn()
	require.Equal(t, placements, called.Record().Placements, "no worker has ended")
	for _, id := range []string{"alone", "three"} {
		require.Contains(t, u.output("reservations", "--all"), id)
	}
	reserveOn(t, b, "after")
	state, err := b.ServerState(t.Context())
	require.NoError(t, err)
	require.Empty(t, state.Cluster)
	for _, s := range state.Streams {
		require.Equal(t, 1, s.Replicas, s.Name)
	}
}

// Two of three members are lost for good: the third is a head alone by one command, which its store needs, and has everything.
func TestLastMemberGoesOnAlone(t *testing.T) {
	if testing.Short() {
		t.Skip("it needs the machine for itself under the race detector: the second command of make race runs it")
	}
	t.Parallel()
	u, at, dir := newShell(t), clusterAddresses(t), t.TempDir()
	file := filepath.Join(dir, "bundle")
	var members []*exec.Cmd
	store := filepath.Join(dir, "store0")
	var outs []*screen
	for i := range 3 {
		words := []string{"up", "--json", "--store", filepath.Join(dir, fmt.Sprint("store", i)), "--no-agent", "--member", at[i], "--bundle", file, "--cluster", strings.Join(at, ",")}
		if i == 0 {
			words = append(words, "--init")
		}
		shell := u
		if i > 0 {
			shell = u.with("XDG_STATE_HOME", filepath.Join(dir, fmt.Sprint("state", i)))
		}
		m, out := shell.process(words...)
		members, outs = append(members, m), append(outs, out)
		require.Eventually(t, func() bool { _, err := os.Stat(file); return err == nil }, 2*time.Minute, 5*time.Millisecond)
	}
	for _, out := range outs {
		u.ready(out)
	}
	require.Contains(t, u.output("rules", "--quota", "run=3"), "quota of run")
	for _, m := range []*exec.Cmd{members[1], members[2], members[0]} {
		require.NoError(t, m.Process.Kill())
		require.Error(t, m.Wait())
	}
	require.Contains(t, u.fails(2, "backup", "--store", store, "-o", filepath.Join(dir, "x")), "store of a member")
	require.Contains(t, u.fails(1, "cluster", "shrink", "--store", store), "--lost "+at[1]+","+at[2])
	require.Contains(t, u.fails(2, "cluster", "shrink", "--store", store, "--lost", "x"), "none of the other members")
	require.Contains(t, u.output("cluster", "shrink", "--store", store, "--lost", at[1]+","+at[2]), "troupe up --store "+store)
	for range 2 {
		m, out := u.process("up", "--json", "--store", store, "--no-agent")
		head := u.ready(out)
		require.Equal(t, "tls://"+at[0], head.URL)
		require.Contains(t, u.output("rules"), "quota of run")
		require.NoError(t, m.Process.Signal(syscall.SIGTERM))
		require.NoError(t, m.Wait())
	}
}

func copyProgram(t *testing.T, to string) {
	t.Helper()
	from, err := os.Open(os.Args[0])
	require.NoError(t, err)
	defer func() { _ = from.Close() }() // it was only read
	f, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o700)
	require.NoError(t, err)
	_, err = io.Copy(f, from)
	require.NoError(t, err)
	require.NoError(t, f.Close())
}

// install puts a program at a path, as a package manager does.
func install(t *testing.T, program, path string) {
	t.Helper()
	require.NoError(t, os.Link(program, path+".new"))
	require.NoError(t, os.Rename(path+".new", path))
}

// Members whose program was replaced run the new one after `troupe cluster upgrade`, one after the other, while a role is called: no call is lost, and
// no worker ends. What a command that was interrupted has done is not done again.
func TestClusterUpgrade(t *testing.T) {
	if testing.Short() {
		t.Skip("it needs the machine for itself under the race detector: the second command of make race runs it")
	}
	t.Parallel()
	u, at, dir := newShell(t), clusterAddresses(t), t.TempDir()
	file, older, newer := filepath.Join(dir, "bundle"), filepath.Join(dir, "older"), filepath.Join(dir, "newer")
	copyProgram(t, older)
	copyProgram(t, newer)
	program := func(i int) string { return filepath.Join(dir, fmt.Sprint("troupe", i)) }
	members, heads := []*exec.Cmd{}, []*screen{}
	for i := range 3 {
		install(t, older, program(i))
		words := []string{"up", "--json", "--store", filepath.Join(dir, fmt.Sprint("store", i)), "--bundle", file, "--member", at[i], "--cluster", strings.Join(at, ",")}
		shell := u.with("XDG_STATE_HOME", filepath.Join(dir, fmt.Sprint("state", i)))
		if i == 0 {
			words, shell = append(words, "--init", "--gpus", "sim:1x8", "--name", "box"), u.with("XDG_STATE_HOME", u.env["XDG_STATE_HOME"])
			u.killAfter(filepath.Join(dir, "store0"))
		} else {
			words = append(words, "--no-agent")
		}
		shell.program = program(i)
		m, out := shell.process(words...)
		members, heads = append(members, m), append(heads, out)
		require.Eventually(t, func() bool { _, err := os.Stat(file); return err == nil }, 2*time.Minute, 5*time.Millisecond)
	}
	var first readyHead
	for i, out := range heads {
		if ready := u.ready(out); i == 0 {
			first = ready
		}
	}
	called := callRole(t, first.access())
	placements := called.Record().Placements
	require.Contains(t, u.output("cluster", "upgrade"), "every member runs the program that is installed")

	require.NoError(t, os.WriteFile(program(1)+".new", []byte("#!/bin/false\n"), 0o700))
	require.NoError(t, os.Rename(program(1)+".new", program(1)))
	_, stderr, code := u.run("cluster", "upgrade")
	require.NotZero(t, code)
	require.Contains(t, stderr, "does not run", "a program that cannot run replaces none")
	install(t, newer, program(1))
	upgrade := func(want int) (restarted []struct{ Member string }) {
		stdout, stderr, code := u.run("cluster", "upgrade", "--json")
		require.Zero(t, code, stderr)
		require.NoError(t, json.Unmarshal([]byte(stdout), &restarted))
		require.Len(t, restarted, want, stderr)
		called.goesOn()
		return restarted
	}
	require.Equal(t, at[1], upgrade(1)[0].Member)
	install(t, newer, program(0))
	install(t, newer, program(2))
	upgrade(2)
	upgrade(0)
	for i, m := range members {
		runs, err := os.Stat(fmt.Sprintf("/proc/%d/exe", m.Process.Pid))
		require.NoError(t, err, "it is the same process")
		installed, err := os.Stat(newer)
		require.NoError(t, err)
		require.True(t, os.SameFile(runs, installed), "member %d", i)
	}
	require.Equal(t, placements, called.Record().Placements, "no worker has ended")
}
