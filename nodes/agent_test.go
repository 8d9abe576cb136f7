package nodes_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/nodes/folders"
	"troupe/nodes/proctree"
)

// testAgent is a running agent and a client of it.
type testAgent struct {
	t      *testing.T
	bus    *bus.Bus
	client *nodes.Client
	dir    string
	exits  chan nodes.Exit // of the role "role"
	stop   func()
}

var role = bus.Address{Namespace: "run", Role: "role", Incarnation: "one"}

func id(rank int) nodes.WorkerID {
	return nodes.WorkerID{Namespace: role.Namespace, Role: role.Role, Incarnation: role.Incarnation, Rank: rank}
}

// startAgent runs an agent until the test ends or stop is called, and checks that no process of its workers is left
// then.
func startAgent(t *testing.T, change ...func(*nodes.AgentConfig)) *testAgent {
	t.Helper()
	return startAgentIn(t, bustest.Open(t), t.TempDir(), change...)
}

func startAgentIn(t *testing.T, b *bus.Bus, dir string, change ...func(*nodes.AgentConfig)) *testAgent {
	t.Helper()
	s := &testAgent{t: t, bus: b, client: nodes.NewClient(b), dir: dir, exits: make(chan nodes.Exit, 1024)}
	readyCh := make(chan struct{})
	cfg := nodes.AgentConfig{
		Bus: b, Dir: dir, ReadyFunc: func() { close(readyCh) }, Access: nodes.Access{URLs: []string{"nats://127.0.0.1:1"}},
		Nodes: []nodes.Config{{Name: "host", Inventory: gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: 4}, "")[0]}}, Grace: time.Second,
	}
	for _, f := range change {
		f(&cfg)
	}
	a, err := nodes.NewAgent(cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	doneCh := make(chan error, 1)
	go func() { doneCh <- a.Run(ctx) }()
	select {
	case <-readyCh:
	case err := <-doneCh:
		require.NoError(t, err)
	}
	ended := false
	s.stop = func() {
		if cancel(); !ended {
			ended = true
			require.NoError(t, <-doneCh)
			require.Empty(t, s.orphans(), "orphan processes")
		}
	}
	t.Cleanup(s.stop)
	stopExits, err := s.client.Exits(t.Context(), role, func(e nodes.Exit) { s.exits <- e })
	require.NoError(t, err)
	t.Cleanup(stopExits)
	return s
}

// orphans is the processes of the agent's workers.
func (s *testAgent) orphans() (found []string) {
	identity, err := os.ReadFile(filepath.Join(s.dir, "identity"))
	require.NoError(s.t, err)
	all, err := filepath.Glob("/proc/[0-9]*/environ")
	require.NoError(s.t, err)
	for _, path := range all {
		if env, err := os.ReadFile(path); err == nil && strings.Contains(string(env), proctree.MarkerEnv+"="+strings.TrimSpace(string(identity))+".") {
			found = append(found, path)
		}
	}
	return found
}

// sh is a launch of workers that run a script.
func sh(script string, ranks ...int) nodes.Launch {
	l := nodes.Launch{Node: "host", Program: nodes.Program{Command: []string{"sh", "-c", script}}}
	for _, rank := range ranks {
		l.Workers = append(l.Workers, nodes.Start{ID: id(rank), Name: fmt.Sprintf("role-%d", rank), Env: map[string]string{"RANK": strconv.Itoa(rank)}})
	}
	return l
}

// launch starts workers and checks that they start.
func (s *testAgent) launch(l nodes.Launch) []nodes.Started {
	s.t.Helper()
	started, err := s.client.Launch(s.t.Context(), l)
	require.NoError(s.t, err)
	require.Len(s.t, started, len(l.Workers))
	for _, st := range started {
		require.True(s.t, st.Err == nil || st.Err.Code == bus.CodeWorkerLost, "%v", st.Err)
	}
	return started
}

// launchFails launches one worker, checks that it does not start, and returns its error.
func (s *testAgent) launchFails(l nodes.Launch) *bus.Error {
	s.t.Helper()
	started, err := s.client.Launch(s.t.Context(), l)
	require.NoError(s.t, err)
	require.NotNil(s.t, started[0].Err)
	return started[0].Err
}

// exit is the next published exit.
func (s *testAgent) exit() nodes.Exit {
	s.t.Helper()
	select {
	case e := <-s.exits:
		return e
	case <-time.After(2 * time.Minute):
		s.t.Fatal("no exit is published")
		panic("")
	}
}

// alive reports whether a process exists and is no zombie.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

// This must not happen: lines on stdout push the line on stderr that says why a worker died out of its exit.
func TestLastLineOnStderr(t *testing.T) {
	s := startAgent(t)
	s.launch(sh(`echo "CUDA error" >&2; echo >&2; seq 100; exit 3`, 0))
	e := s.exit()
	require.Equal(t, "CUDA error", e.LastError)
	s.launch(sh(`echo fine; exit 3`, 1))
	require.Empty(t, s.exit().LastError)
}

func TestWorkerRunsAndEnds(t *testing.T) {
	s := startAgent(t)
	s.launch(sh(`echo hello $RANK; echo oops >&2; exit $((RANK+3))`, 0))
	e := s.exit()
	require.Equal(t, id(0), e.ID)
	require.Equal(t, 3, e.Code)
	require.Empty(t, e.Signal)
	require.True(t, e.Failed())
	require.ElementsMatch(t, []string{"hello 0", "oops"}, e.Last)
	require.Equal(t, "host", e.Node)

	again, err := s.client.Launch(t.Context(), sh("exit 9", 0))
	require.NoError(t, err)
	require.ErrorIs(t, again[0].Err, bus.ErrWorkerLost, "a repeated launch returns the outcome of the first")
	require.Contains(t, again[0].Err.Error(), "exited with code 3")
	status, err := s.client.Workers(t.Context(), "host")
	require.NoError(t, err)
	require.Len(t, status, 1)
	require.Equal(t, 3, status[0].Exit.Code)
}

func TestKillIsPublishedAtOnce(t *testing.T) {
	s := startAgent(t)
	started := s.launch(sh(`echo here; exec sleep 1000`, 0))
	require.NoError(t, syscall.Kill(started[0].PID, syscall.SIGKILL))
	at := time.Now()
	e := s.exit()
	require.Less(t, time.Since(at), 20*time.Second)
	require.Equal(t, -1, e.Code)
	require.Equal(t, "SIGKILL", e.Signal)
}

// This must not happen: a driver that missed the message of an exit never learns of it.
func TestExitIsPublishedAgain(t *testing.T) {
	s := startAgent(t)
	s.launch(sh(`exit 1`, 0))
	s.exit()
	s.exit()
	exits, err := s.client.Stop(t.Context(), "host", []nodes.WorkerID{id(0)}, 0)
	require.NoError(t, err)
	require.Equal(t, 1, exits[0].Code)
	require.False(t, exits[0].Asked, "it exited by itself")
}

func TestStop(t *testing.T) {
	s := startAgent(t)
	f := s.follow()
	s.launch(sh(`trap 'echo bye; exit 0' INT; echo ready; while :; do sleep 0.05; done`, 0))
	s.launch(sh(`trap '' INT TERM; echo ready; while :; do sleep 0.05; done`, 1))
	stubborn := s.launch(sh(`trap '' INT; trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done`, 2))
	require.True(t, alive(stubborn[0].PID))
	for range 3 {
		f.until("ready") // the traps are set
	}
	ids := []nodes.WorkerID{id(0), id(1), id(2), id(3)}
	begin := time.Now()
	exits, err := s.client.Stop(t.Context(), "host", ids, 300*time.Millisecond)
	require.NoError(t, err)
	require.Less(t, time.Since(begin), 30*time.Second)
	require.Equal(t, 0, exits[0].Code)
	require.Equal(t, []string{"ready", "bye"}, exits[0].Last)
	require.Equal(t, "SIGKILL", exits[1].Signal)
	require.Equal(t, 7, exits[2].Code)
	require.True(t, exits[3].Unknown)
	for i, e := range exits {
		require.Equal(t, ids[i], e.ID)
		require.True(t, e.Asked)
		require.False(t, e.Failed())
	}
	require.Empty(t, s.orphans())
	require.ErrorIs(t, s.launchFails(sh("true", 3)), bus.ErrCancelled, "a stopped worker is not started afterwards")
	again, err := s.client.Stop(t.Context(), "host", ids, 0)
	require.NoError(t, err)
	require.Equal(t, exits[:3], again[:3])
}

// This must not happen: a process of the tree outlives the worker, or delays the publication of its exit.
func TestProcessTreeIsKilled(t *testing.T) {
	s := startAgent(t)
	s.launch(sh(`setsid sh -c 'trap "" INT TERM HUP; while :; do sleep 0.1; done' & sleep 1000 & (setsid sleep 1001 &) ; echo started; exit 5`, 0))
	e := s.exit()
	require.Equal(t, 5, e.Code, "other processes have its output open")
	require.Equal(t, []string{"started"}, e.Last)
	_, err := s.client.Stop(t.Context(), "host", []nodes.WorkerID{id(0)}, 0)
	require.NoError(t, err)
	require.Empty(t, s.orphans())
}

// TestSharedFilesOfAWorkerAreRemoved: what CUDA and torch leave in /dev/shm goes with the worker that made it, and nothing else.
func TestSharedFilesOfAWorkerAreRemoved(t *testing.T) {
	s := startAgent(t)
	f := s.follow()
	started := s.launch(sh(fmt.Sprintf(`touch /dev/shm/torch_$$_17_0 /dev/shm/$(printf 'cuda.shm.%%x.%%x.1' %d $$); echo made; exec sleep 1000`, os.Getuid()), 0))
	f.until("made")
	pid := started[0].PID
	own := []string{fmt.Sprintf("/dev/shm/torch_%d_17_0", pid), fmt.Sprintf("/dev/shm/cuda.shm.%x.%x.1", os.Getuid(), pid)}
	other := fmt.Sprintf("/dev/shm/torch_%d0_17_0", pid)
	require.NoError(t, os.WriteFile(other, nil, 0o600))
	t.Cleanup(func() { require.NoError(t, os.Remove(other)) })
	for _, path := range own {
		require.FileExists(t, path)
	}
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	_, err := s.client.Stop(t.Context(), "host", []nodes.WorkerID{id(0)}, 0) // returns when its process tree is gone
	require.NoError(t, err)
	for _, path := range own {
		require.Eventually(t, func() bool { _, err := os.Lstat(path); return os.IsNotExist(err) }, 2*time.Minute, 10*time.Millisecond, path)
	}
	require.FileExists(t, other)
}

func TestMissingProgramAndFolder(t *testing.T) {
	s := startAgent(t)
	l := sh("", 0)
	l.Program.Command = []string{"/no/such/program"}
	err := s.launchFails(l)
	require.ErrorIs(t, err, bus.ErrNotFound)
	require.ErrorContains(t, err, "/no/such/program")
	require.ErrorContains(t, err, "host")
	l = sh("true", 1)
	l.Program.Dir = "/no/such/folder"
	err = s.launchFails(l)
	require.ErrorIs(t, err, bus.ErrNotFound)
	require.ErrorContains(t, err, "/no/such/folder")
	require.ErrorContains(t, err, "host")
	l = sh("", 2)
	l.Program.Command = []string{"no-such-program"}
	require.ErrorContains(t, s.launchFails(l), "no-such-program")
}

func TestSilentNode(t *testing.T) {
	s := startAgent(t)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := s.client.Workers(ctx, "absent")
	require.ErrorIs(t, err, bus.ErrTimedOut)
	require.ErrorContains(t, err, "absent")
}

// This must not happen: a start on a node that was lost a moment ago takes until its deadline.
func TestStartOnALostNode(t *testing.T) {
	s := startAgent(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	l := sh("exit 0")
	l.Node, l.Workers = "absent", []nodes.Start{{ID: id(0), Name: "w"}}
	errCh := make(chan error, 2)
	go func() {
		_, err := s.client.Launch(ctx, l)
		errCh <- err
	}()
	go func() {
		_, _, err := s.client.Ports(ctx, "absent", id(0), 1)
		errCh <- err
	}()
	for range 2 {
		err := <-errCh
		require.ErrorIs(t, err, bus.ErrWorkerLost)
		require.ErrorContains(t, err, "the agent of node absent has not answered for")
	}
	require.NoError(t, ctx.Err())
}

// This must not happen: a request or an answer that exceeds the size of a message fails.
func TestLongRequestsAndAnswers(t *testing.T) {
	s := startAgent(t)
	l := sh(`yes "$(head -c 1200 /dev/zero | tr '\0' x)" | head -n 60; wc -c <$TROUPE_ASSIGNMENT; exit 1`)
	var ids []nodes.WorkerID
	for rank := range 24 {
		start := nodes.Start{ID: id(rank), Name: "big"}
		if rank == 0 {
			start.Assignment = make([]byte, 3<<20)
		}
		l.Workers = append(l.Workers, start)
		ids = append(ids, start.ID)
	}
	_, err := s.client.Launch(t.Context(), l) // some workers have exited by then
	require.NoError(t, err)
	for range ids {
		require.Len(t, s.exit().Last, 50)
	}
	exits, err := s.client.Stop(t.Context(), "host", ids, 0)
	require.NoError(t, err)
	require.Len(t, exits, len(ids))
	for _, e := range exits {
		require.Len(t, e.Last, 50)
		require.Equal(t, 1, e.Code)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(data)
}

// spawn runs a process that is no worker until the test ends.
func spawn(t *testing.T, env string, words ...string) int {
	t.Helper()
	cmd := exec.Command(words[0], words[1:]...)
	cmd.Env = append(os.Environ(), env)
	bustest.Tie(cmd, syscall.SIGKILL)
	require.NoError(t, cmd.Start())
	doneCh := make(chan struct{})
	go func() { _ = cmd.Wait(); close(doneCh) }()
	t.Cleanup(func() { _ = cmd.Process.Kill(); <-doneCh })
	return cmd.Process.Pid
}

// This must not happen: the exit of a worker is published late.
func TestExitLatency(t *testing.T) {
	s := startAgent(t)
	var took []time.Duration
	for rank := range 40 {
		started := s.launch(sh(`exec sleep 1000`, rank))
		at := time.Now()
		require.NoError(t, syscall.Kill(started[0].PID, syscall.SIGKILL))
		for s.exit().ID != id(rank) { // a repeated exit
		}
		took = append(took, time.Since(at))
	}
	slices.Sort(took)
	t.Logf("SIGKILL to the exit on the bus: p50 %v, worst %v", took[len(took)/2], took[len(took)-1])
	require.Less(t, took[len(took)/4], 50*time.Millisecond, "the exit is waited for, not polled")
}

// A worker that an operator or the agent stops has failed, for a stated reason.
func TestEvict(t *testing.T) {
	s := startAgent(t)
	f := s.follow()
	s.launch(sh(`trap 'exit 0' INT; echo ready; while :; do sleep 0.05; done`, 0))
	f.until("ready")
	exits, err := s.client.Evict(t.Context(), "host", ids(0), time.Second, "the node is drained")
	require.NoError(t, err)
	require.True(t, exits[0].Failed())
	require.ErrorContains(t, exits[0].AsError(), "the node is drained")
	require.True(t, s.exit().Failed())

	s.launch(sh(`sleep 1000`, 1))
	s.stop()
	e := s.exit()
	require.True(t, e.Failed())
	require.Contains(t, e.Why, "agent")
}

// A shipped folder is on the node once for all workers, and is removed with the last of them.
func TestShippedFolder(t *testing.T) {
	s := startAgent(t)
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "run.sh"), []byte("#!/bin/sh\necho in $(basename $(pwd)); [ $RANK = 0 ] || exec sleep 1000\n"), 0o755))
	hash, err := folders.Ship(t.Context(), s.bus, dir)
	require.NoError(t, err)
	again, err := folders.Ship(t.Context(), s.bus, dir)
	require.NoError(t, err)
	require.Equal(t, hash, again)
	l := sh("", 0, 1)
	l.Program.Command, l.Program.Folder = []string{"./run.sh"}, hash
	s.launch(l)
	e := s.exit()
	require.Equal(t, []string{"in " + hash}, e.Last)
	require.DirExists(t, filepath.Join(s.dir, "folders", hash), "rank 1 uses it")
	_, err = s.client.Stop(t.Context(), "host", ids(0, 1), 0)
	require.NoError(t, err)
	require.NoDirExists(t, filepath.Join(s.dir, "folders", hash))

	l = sh("true", 2)
	l.Program.Folder = strings.Repeat("0", 64)
	require.ErrorIs(t, s.launchFails(l), bus.ErrNotFound)
	l = sh("true", 3)
	l.Program.Folder = "../../etc"
	require.ErrorIs(t, s.launchFails(l), bus.ErrInvalid)
}

// A frozen worker is stopped like any other.
func TestFrozenWorker(t *testing.T) {
	s := startAgent(t)
	started := s.launch(sh(`exec sleep 1000`, 0))
	bustest.Freeze(t, started[0].PID)
	exits, err := s.client.Stop(t.Context(), "host", ids(0), 100*time.Millisecond)
	require.NoError(t, err)
	require.Contains(t, []string{"SIGKILL", "SIGINT", "SIGTERM"}, exits[0].Signal)
	require.False(t, alive(started[0].PID))
}
