package nodes_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/nodes"
)

// forked is a launch of Python workers that may be forked: each runs the script after the fork.
func forked(t *testing.T, script string, ranks ...int) nodes.Launch {
	t.Helper()
	python, err := exec.LookPath("python3")
	require.NoError(t, err, "the tests of fork servers need python3")
	folder, err := filepath.Abs("../python/troupe")
	require.NoError(t, err)
	program := filepath.Join(t.TempDir(), "program.py")
	text := "import os, signal, sys, time\nsys.path.append(" + strconv.Quote(folder) + ")\nimport _forkserver\n_forkserver.serve()\n" +
		"was_forked = b'\\0\\0' in open('/proc/self/cmdline', 'rb').read()\n" + script + "\n" // the argument of the server is erased in its workers
	require.NoError(t, os.WriteFile(program, []byte(text), 0o600))
	l := sh("", ranks...)
	l.Program = nodes.Program{Command: []string{python, program}, Dir: t.TempDir(), Fork: true, Env: map[string]string{"PYTHONDONTWRITEBYTECODE": "1"}}
	return l
}

// exitOf is the exit of a rank. Exits are published again until they are confirmed.
func (s *testAgent) exitOf(rank int) nodes.Exit {
	s.t.Helper()
	for {
		if e := s.exit(); e.ID.Rank == rank {
			return e
		}
	}
}

// servers is the pids of the agent's fork servers.
func (s *testAgent) servers() (pids []int) {
	for _, path := range s.orphans() {
		line, err := os.ReadFile(filepath.Join(filepath.Dir(path), "cmdline"))
		if err == nil && strings.Contains(string(line), nodes.ForkServerArg) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			require.NoError(s.t, err)
			pids = append(pids, pid)
		}
	}
	return pids
}

// untilServers waits until there are so many fork servers, and returns their pids.
func (s *testAgent) untilServers(n int) (pids []int) {
	s.t.Helper()
	require.Eventually(s.t, func() bool { pids = s.servers(); return len(pids) == n }, 2*time.Minute, 5*time.Millisecond, "fork servers")
	return pids
}

func TestForkedWorkersExitAsStartedOnes(t *testing.T) {
	s := startAgent(t)
	l := forked(t, `
print("rank", os.environ["RANK"], was_forked, os.getcwd() == os.environ["PWD_WANTED"], os.getsid(0) == os.getpid(), os.getppid() == `+strconv.Itoa(os.Getpid())+`, sys.argv[1:], flush=True)
print("error output", file=sys.stderr, flush=True)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSEGV)
sys.exit(40 + int(os.environ["RANK"]))`, 0, 1, 2)
	l.Program.Env["PWD_WANTED"] = l.Program.Dir
	s.launch(l)
	var got []nodes.Exit
	for rank := range 3 {
		got = append(got, s.exitOf(rank))
		require.ElementsMatch(t, []string{"rank " + strconv.Itoa(rank) + " True True True True []", "error output"}, got[rank].Last)
	}
	require.Equal(t, 40, got[0].Code)
	require.Equal(t, "SIGSEGV", got[1].Signal)
	require.Equal(t, 42, got[2].Code)
	require.Len(t, s.servers(), 1)
}

func TestForkedWorkersOutliveTheirServer(t *testing.T) {
	s := startAgent(t)
	l := forked(t, `time.sleep(600)`, 0, 1)
	started := s.launch(l)
	server := s.untilServers(1)[0]
	require.NoError(t, syscall.Kill(server, syscall.SIGKILL))
	require.Eventually(t, func() bool { return syscall.Kill(server, 0) == syscall.ESRCH }, 2*time.Minute, time.Millisecond, "the agent has seen its end")
	for _, w := range started {
		require.True(t, alive(w.PID))
	}
	require.NoError(t, syscall.Kill(started[1].PID, syscall.SIGKILL))
	require.Equal(t, "SIGKILL", s.exitOf(1).Signal)
	again := l
	again.Workers = sh("", 2).Workers
	s.launch(again) // by another server
	s.untilServers(1)
	s.stop() // checks that nothing is left, fork servers among it
	require.Empty(t, s.servers())
}

// A fork server takes as long as a worker: one worker alone does not wait for it, the second worker of a program has it. It ends
// when it is not used.
func TestForkServerComesWithTheSecondWorker(t *testing.T) {
	s := startAgent(t, func(c *nodes.AgentConfig) { c.ForkIdle = 2 * time.Second }) // longer than a busy machine takes from the server to the fork
	l := forked(t, `sys.exit(was_forked)`, 0)
	s.launch(l)
	require.Equal(t, 0, s.exitOf(0).Code)
	l.Workers = sh("", 1).Workers
	s.launch(l)
	require.Equal(t, 1, s.exitOf(1).Code)
	s.untilServers(0)
	l.Workers = sh("", 2).Workers
	s.launch(l)
	require.Equal(t, 1, s.exitOf(2).Code)
	l.Workers = sh("", 3, 4).Workers
	for i := range l.Workers {
		l.Workers[i].Env["OWN"] = "value"
	}
	s.launch(l)
	require.Equal(t, 0, s.exitOf(3).Code, "a variable of its own is set before the interpreter starts")
	require.Equal(t, 0, s.exitOf(4).Code)
}

// Modules that do not survive a fork, or cannot be imported: the worker is started, and its output says why.
func TestUnfitModules(t *testing.T) {
	s := startAgent(t)
	folder := t.TempDir()
	for i, c := range []struct{ module, text, want string }{
		{"threaded", "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint('imported', flush=True)", "more threads after the imports"},
		{"torch", "class cuda:\n    is_initialized = staticmethod(lambda: True)\nprint('imported', flush=True)", "have initialised CUDA"},
		{"connected", "import socket\npair = socket.socketpair()\nprint('imported', flush=True)", "have opened a connection"},
		{"broken", "print('imported', flush=True)\nimport no_such_module", "import of broken failed: ModuleNotFoundError"},
	} {
		require.NoError(t, os.WriteFile(filepath.Join(folder, c.module+".py"), []byte(c.text+"\n"), 0o600))
		l := forked(t, `sys.exit(5)`, i)
		l.Program.Warm, l.Program.WarmPath = []string{c.module}, []string{folder}
		l.Program.Env["PYTHONPATH"] = folder // before an installed torch
		s.launch(l)
		e := s.exitOf(i)
		require.Equal(t, 5, e.Code)
		require.NotEmpty(t, e.Last, c.module)
		require.Equal(t, "imported", e.Last[0])
		require.Contains(t, e.Last[len(e.Last)-1], c.want)
	}
	s.untilServers(0)
}

func TestStopWhileModulesAreImported(t *testing.T) {
	s := startAgent(t)
	folder := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(folder, "slow.py"), []byte("import time\ntime.sleep(600)\n"), 0o600))
	l := forked(t, `sys.exit(5)`, 0)
	l.Program.Warm, l.Program.WarmPath = []string{"slow"}, []string{folder}
	doneCh := make(chan error, 1)
	go func() {
		started, err := s.client.Launch(t.Context(), l)
		if err == nil && started[0].Err != nil {
			err = started[0].Err
		}
		doneCh <- err
	}()
	s.untilServers(1)
	_, err := s.client.Stop(t.Context(), "host", []nodes.WorkerID{id(0)}, time.Second)
	require.NoError(t, err)
	require.ErrorIs(t, <-doneCh, bus.ErrCancelled)
}

// A module that was edited is imported again, as by workers that are started.
func TestEditedModule(t *testing.T) {
	s := startAgent(t)
	folder := t.TempDir()
	write := func(code int) {
		require.NoError(t, os.WriteFile(filepath.Join(folder, "edited.py"), []byte("code = "+strconv.Itoa(code)+"\n"), 0o600))
	}
	write(7)
	l := forked(t, `import edited; sys.exit(edited.code)`, 0)
	l.Program.Warm, l.Program.WarmPath, l.Program.Env["PYTHONPATH"] = []string{"edited"}, []string{folder}, folder
	s.launch(l)
	require.Equal(t, 7, s.exitOf(0).Code)
	write(108)
	l.Workers = sh("", 1, 2).Workers
	s.launch(l)
	require.Equal(t, 108, s.exitOf(1).Code)
	require.Equal(t, 108, s.exitOf(2).Code)
	s.untilServers(1)
}
