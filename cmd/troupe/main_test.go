package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/cmd/troupe/cli"
	"troupe/cmd/troupe/head"
	"troupe/roles"
)

// argsEnv makes the test binary run as the program, with these arguments, one a line.
const argsEnv = "TROUPE_TEST_ARGS"

func TestMain(m *testing.M) {
	roles.Main(append(hosted(), calcClass(), hostClass())...)
	args, program := os.LookupEnv(argsEnv)
	head.SelfCommand = func(args ...string) (*exec.Cmd, error) {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), argsEnv+"="+strings.Join(args, "\n"))
		if !program { // an agent may outlive its head, not the test
			bustest.Tie(cmd, syscall.SIGTERM)
		}
		return cmd, nil
	}
	if program {
		limitDescriptors(os.Getenv(descriptorsEnv))
		os.Exit(run(strings.Split(args, "\n"), &cli.CLI{Out: os.Stdout, Err: os.Stderr, Env: os.Getenv}))
	}
	if url, ok := os.LookupEnv(driverEnv); ok {
		if namespace, ok := os.LookupEnv(deviceDriverEnv); ok {
			fmt.Fprintln(os.Stderr, driveDevices(url, namespace))
			os.Exit(1)
		}
		fmt.Fprintln(os.Stderr, drive(url))
		os.Exit(1)
	}
	bustest.MainOverlapping(m, 6)
}

// shell runs commands with its own environment and state folder.
type shell struct {
	t       *testing.T
	env     map[string]string
	dir     string // working directory of its processes; empty: that of the test
	program string // of its processes; empty: that of the test
}

func newShell(t *testing.T) *shell {
	return &shell{t: t, env: map[string]string{"XDG_STATE_HOME": t.TempDir()}}
}

// with is the same shell with one more variable.
func (u *shell) with(name, value string) *shell {
	env := map[string]string{name: value}
	for k, v := range u.env {
		if k != name {
			env[k] = v
		}
	}
	return &shell{t: u.t, env: env, dir: u.dir, program: u.program}
}

func (u *shell) getenv(name string) string { return u.env[name] }

// run runs a command to its end.
func (u *shell) run(words ...string) (stdout, stderr string, code int) {
	u.t.Helper()
	var out, err screen
	ctx, cancel := context.WithTimeout(u.t.Context(), 2*time.Minute)
	defer cancel()
	code = execute(ctx, words, &cli.CLI{Out: &out, Err: &err, Env: u.getenv})
	require.NoError(u.t, ctx.Err(), "troupe %s does not end", strings.Join(words, " "))
	return out.String(), err.String(), code
}

// output is the output of a command that must succeed and print no error.
func (u *shell) output(words ...string) string {
	u.t.Helper()
	stdout, stderr, code := u.run(words...)
	require.Zero(u.t, code, "troupe %s: %s", strings.Join(words, " "), stderr)
	require.Empty(u.t, stderr)
	return stdout
}

// fails runs a command that must fail with the exit code and one line of error, which it returns.
func (u *shell) fails(code int, words ...string) string {
	u.t.Helper()
	stdout, stderr, got := u.run(words...)
	require.Equal(u.t, code, got, "troupe %s: %s", strings.Join(words, " "), stderr)
	require.Empty(u.t, stdout)
	require.Equal(u.t, 1, strings.Count(stderr, "\n"), "an error is one line: %q", stderr)
	require.True(u.t, strings.HasPrefix(stderr, "troupe: "), stderr)
	return stderr
}

// readyHead is the output of `troupe up --json`.
type readyHead struct {
	cli.HeadFile
	Store   string `json:"store"`
	Metrics string `json:"metrics"`
}

// access is the configuration of a driver's connection to the head.
func (h readyHead) access() bus.Config {
	cfg := bus.Config{URLs: strings.Split(h.URL, ",")}
	h.Apply(&cfg)
	return cfg
}

// up runs a head until the test ends or stop is called, by default on a free port.
func (u *shell) up(more ...string) (head readyHead, stop func()) {
	u.t.Helper()
	var out, errs screen
	ctx, cancel := context.WithCancel(context.Background())
	doneCh := make(chan int, 1)
	words := append([]string{"up", "--json", "--listen", "127.0.0.1:0"}, more...)
	go func() { doneCh <- execute(ctx, words, &cli.CLI{Out: &out, Err: &errs, Env: u.getenv}) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case code := <-doneCh:
			require.Zero(u.t, code, errs.String())
		case <-time.After(2 * time.Minute):
			require.Fail(u.t, "troupe up does not end")
		}
	})
	u.t.Cleanup(stop)
	line := out.line(u.t, errs.String)
	require.NoError(u.t, json.Unmarshal([]byte(line), &head), line)
	return head, stop
}

// stateFile is a file in the state folder.
func (u *shell) stateFile(name string) string {
	return filepath.Join(u.env["XDG_STATE_HOME"], "troupe", name)
}

// screen is the output of a command so far.
type screen struct {
	mu   sync.Mutex
	text bytes.Buffer
	more chan struct{} // closed at the next write
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.more != nil {
		close(s.more)
		s.more = nil
	}
	return s.text.Write(p)
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// line waits for the first whole line.
func (s *screen) line(t *testing.T, explain func() string) string {
	t.Helper()
	timeout := time.After(2 * time.Minute)
	for {
		s.mu.Lock()
		if s.more == nil {
			s.more = make(chan struct{})
		}
		text, more := s.text.String(), s.more
		s.mu.Unlock()
		if first, _, whole := strings.Cut(text, "\n"); whole {
			return first
		}
		select {
		case <-more:
		case <-timeout:
			require.Fail(t, "nothing was printed", explain())
		}
	}
}
