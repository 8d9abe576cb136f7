package upgrade

import (
	"bufio"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus/bustest"
)

// limit is how long a step may take on a busy machine.
const limit = 2 * time.Minute

// release is a folder with the programs of one version: troupe, processes (examples/processes) and the Python package.
type release struct{ name, dir string }

func releases(t *testing.T) (earlier, current release) {
	earlier, current = release{"earlier", os.Getenv("TROUPE_UPGRADE_FROM")}, release{"current", os.Getenv("TROUPE_UPGRADE_TO")}
	if earlier.dir == "" || current.dir == "" {
		t.Skip("make upgrade-check builds the earlier version and runs this test")
	}
	return earlier, current
}

func (r release) troupe() string { return filepath.Join(r.dir, "troupe") }

// site is a head, an agent and drivers on one store, each of any version.
type site struct {
	t     *testing.T
	dir   string
	env   []string
	head  *process
	agent *process
}

func newSite(t *testing.T) *site {
	s := &site{t: t, dir: t.TempDir()}
	s.env = append(os.Environ(), "XDG_STATE_HOME="+s.dir, "XDG_RUNTIME_DIR="+s.dir, "TROUPE_TOKEN_FILE=", "TROUPE_TOKEN=", "TROUPE_URL=", "TROUPE_NAMESPACE=", "PYTHONDONTWRITEBYTECODE=1")
	return s
}

// startHead starts a head on the store of the site, and returns when it is ready.
func (s *site) startHead(r release) {
	s.head = s.start("head", nil, r.troupe(), "up", "--listen", "127.0.0.1:0", "--store", filepath.Join(s.dir, "store"), "--no-agent", "--json")
	var at struct {
		URL string `json:"url"`
	}
	require.NoError(s.t, json.Unmarshal([]byte(s.head.waitLine(s.t, "{")), &at))
	token, err := os.ReadFile(filepath.Join(s.dir, "store", "token"))
	require.NoError(s.t, err)
	s.env = append(s.env, "TROUPE_URL="+at.URL, "TROUPE_TOKEN="+strings.TrimSpace(string(token)))
}

// replaceHead ends the head and starts one of another version on its store.
func (s *site) replaceHead(r release) {
	s.head.stop(s.t)
	s.startHead(r)
}

// startAgent starts an agent with two simulated nodes of four devices, and returns when it has joined.
func (s *site) startAgent(r release) {
	url := s.env[len(s.env)-2]
	s.agent = s.start("agent", nil, r.troupe(), "join", strings.TrimPrefix(url, "TROUPE_URL="), "--gpus", "sim:2x4", "--dir", filepath.Join(s.dir, "agent"), "--name", "node")
	s.agent.waitLine(s.t, "joined")
}

// command runs a command of troupe to its end, which must be good, and returns its output.
func (s *site) command(r release, args ...string) string {
	s.t.Helper()
	out, err := s.run(r, r.troupe(), args...)
	require.NoError(s.t, err, "%s troupe %s: %s\n%s", r.name, strings.Join(args, " "), out, s.logs())
	return out
}

// processes runs the Go driver of a version.
func (s *site) processes(r release) string {
	s.t.Helper()
	out, err := s.run(r, filepath.Join(r.dir, "processes"))
	require.NoError(s.t, err, "%s processes: %s\n%s", r.name, out, s.logs())
	return out
}

// python runs the Python driver of a version.
func (s *site) python(r release, args ...string) string {
	s.t.Helper()
	out, err := s.run(r, os.Getenv("TROUPE_UPGRADE_PYTHON"), append([]string{driver(s.t)}, args...)...)
	require.NoError(s.t, err, "%s driver.py %s: %s\n%s", r.name, strings.Join(args, " "), out, s.logs())
	return out
}

func driver(t *testing.T) string {
	path, err := filepath.Abs("driver.py")
	require.NoError(t, err)
	return path
}

func (s *site) run(r release, program string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env, cmd.Dir = append(s.env, "PYTHONPATH="+filepath.Join(r.dir, "python")), s.dir
	bustest.Tie(cmd, syscall.SIGKILL)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (s *site) logs() string {
	out := ""
	for _, p := range []*process{s.head, s.agent} {
		if p != nil {
			out += p.name + ": " + p.output() + "\n"
		}
	}
	return out
}

// process is a program that runs in the background.
type process struct {
	name   string
	cmd    *exec.Cmd
	doneCh chan struct{}
	stdin  interface{ Close() error }

	mu    sync.Mutex
	lines []string
}

func (s *site) start(name string, env []string, program string, args ...string) *process {
	p := &process{name: name, cmd: exec.Command(program, args...), doneCh: make(chan struct{})}
	p.cmd.Env, p.cmd.Dir = append(s.env, env...), s.dir
	bustest.Tie(p.cmd, syscall.SIGTERM)
	out, in, err := os.Pipe()
	require.NoError(s.t, err)
	p.cmd.Stdout, p.cmd.Stderr = in, in
	p.stdin, err = p.cmd.StdinPipe()
	require.NoError(s.t, err)
	require.NoError(s.t, p.cmd.Start())
	_ = in.Close() // the child has it
	go func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			p.mu.Lock()
			p.lines = append(p.lines, lines.Text())
			p.mu.Unlock()
		}
	}()
	go func() {
		defer close(p.doneCh)
		_ = p.cmd.Wait() // its exit code is checked where it matters
	}()
	s.t.Cleanup(func() { p.stop(s.t); _ = out.Close() })
	return p
}

func (p *process) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Join(p.lines, "\n")
}

// waitLine is the first line with a text, once there is one.
func (p *process) waitLine(t *testing.T, text string) (line string) {
	t.Helper()
	require.Eventually(t, func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, line = range p.lines {
			if strings.Contains(line, text) {
				return true
			}
		}
		return false
	}, limit, 20*time.Millisecond, "%s prints no %q", p.name, text)
	return line
}

// count is how many lines it has printed.
func (p *process) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.lines)
}

func (p *process) stop(t *testing.T) {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	select {
	case <-p.doneCh:
	case <-time.After(limit):
		t.Errorf("%s does not end: %s", p.name, p.output())
		_ = p.cmd.Process.Kill() // as above
	}
}

// reservations are the tokens of the reservations that a version of troupe lists, by their ids.
func (s *site) reservations(r release) map[string]uint64 {
	s.t.Helper()
	var list struct {
		Reservations []struct {
			ID    string `json:"id"`
			Token uint64 `json:"token"`
		} `json:"reservations"`
	}
	require.NoError(s.t, json.Unmarshal([]byte(s.command(r, "reservations", "--json", "-n", "run")), &list))
	tokens := map[string]uint64{}
	for _, held := range list.Reservations {
		tokens[held.ID] = held.Token
	}
	return tokens
}

// The order that docs/operations.md asks for: the head first. Agents and drivers of the earlier version go on.
func TestEarlierAgentAndDriversWithACurrentHead(t *testing.T) {
	earlier, current := releases(t)
	s := newSite(t)
	s.startHead(current)
	s.startAgent(earlier)
	for _, r := range []release{earlier, current} { // drivers, with workers of the same version
		require.Contains(t, s.processes(r), "rank 2 of 4 on device 2: 9.0")
		require.Contains(t, s.python(r, "once", "counter"), "[(1, 1048576.0), (1, 1048576.0)]")
	}
	require.Contains(t, s.command(current, "doctor"), "upgrade the agent")
	require.Contains(t, s.command(current, "status"), "0.0.9")
	s.command(earlier, "status")
}

// Not supported. It works as far as the head knows what it is asked for, and the agent says what to do.
func TestCurrentAgentWithAnEarlierHead(t *testing.T) {
	earlier, current := releases(t)
	s := newSite(t)
	s.startHead(earlier)
	s.startAgent(current)
	require.Contains(t, s.agent.waitLine(t, "upgrade the head first"), "the head is of version 0.0.9")
	require.Contains(t, s.processes(earlier), "rank 2 of 4 on device 2: 9.0")
	require.Contains(t, s.command(current, "doctor"), "upgrade the head")
}

func TestHeadIsUpgradedWhileWorkersRun(t *testing.T) {
	earlier, current := releases(t)
	s := newSite(t)
	s.startHead(earlier)
	s.startAgent(earlier)
	s.replacedUnderLoad(earlier, current)

	// Then the agents.
	s.command(current, "drain", "node-0", "--wait", "1m")
	s.agent.stop(t)
	s.startAgent(current)
	s.command(current, "uncordon", "node-0")
	require.NotContains(t, s.command(current, "doctor"), "version")
	require.Contains(t, s.python(current, "once", "after"), "[(1, 1048576.0), (1, 1048576.0)]")
	require.Contains(t, s.python(earlier, "once", "after"), "[(1, 1048576.0), (1, 1048576.0)]")
}

func TestHeadIsRolledBackWhileWorkersRun(t *testing.T) {
	earlier, current := releases(t)
	s := newSite(t)
	s.startHead(current)
	s.startAgent(earlier)
	s.replacedUnderLoad(current, earlier)
}

// replacedUnderLoad replaces the head of one version by that of another while a driver calls its role, a detached role lives and a
// reservation is held. Nothing of it is lost.
func (s *site) replacedUnderLoad(from, to release) {
	t := s.t
	s.command(from, "reserve", "--bundles", "1", "--devices", "1", "--id", "held", "-n", "run")
	token := s.reservations(from)["held"]
	require.NotZero(t, token)
	require.Contains(t, s.python(from, "create", "kept"), "(1, 1048576.0)")
	steady := s.start("steady", []string{"PYTHONPATH=" + filepath.Join(from.dir, "python")}, os.Getenv("TROUPE_UPGRADE_PYTHON"), driver(t), "steady", "steady")
	steady.waitLine(t, "(3, 4.0)")

	s.replaceHead(to)

	seen := steady.count()
	require.Eventually(t, func() bool { return steady.count() > seen+5 }, limit, 50*time.Millisecond, "calls continue:\n%s\n%s", steady.output(), s.logs())
	require.Equal(t, token, s.reservations(to)["held"], "the reservation is alive, under its token")
	require.Contains(t, s.python(to, "call", "kept"), "(2, 1048576.0)", "the worker is the same")
	require.Contains(t, s.python(from, "call", "kept"), "(3, 1048576.0)")
	require.NoError(t, steady.stdin.Close())
	select {
	case <-steady.doneCh:
	case <-time.After(limit):
		t.Fatalf("the driver does not end: %s", steady.output())
	}
	require.True(t, steady.cmd.ProcessState.Success(), steady.output())
	s.python(to, "destroy", "kept")
	s.command(to, "release", "held", "-n", "run")
	require.Eventually(t, func() bool { return len(s.reservations(to)) == 0 }, limit, 200*time.Millisecond, "devices are free again")
}
