//go:build linux

package shm_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"troupe/bus/shm"
	"troupe/bus/wire"
)

const roleVariable = "TROUPE_SHM_TEST_ROLE"

func TestMain(m *testing.M) {
	if os.Getenv(roleVariable) != "" {
		runChild()
		return
	}
	goleak.VerifyTestMain(m)
}

// command is what a test asks of a child process, one JSON object a line.
type command struct {
	Op       string        `json:"op"` // attach, sum, write, release, alloc, free, join, joined, moved, whole, end
	Location wire.Location `json:"location"`
	Length   int           `json:"length"`
	Body     int           `json:"body"` // its number
	Salt     byte          `json:"salt"`
	Name     string        `json:"name"` // of a body that is fetched
}

// outcome is the answer to a command.
type outcome struct {
	Body     int           `json:"body"` // -1: none
	Sum      uint32        `json:"sum"`
	Location wire.Location `json:"location"`
	OK       bool          `json:"ok"`
}

// runChild is the main function of a child process: a reader and an arena that do as they are told until their input ends.
func runChild() {
	cfg := quiet(os.Getenv(roleVariable))
	reader := shm.NewReader(cfg)
	arena, err := shm.Open(cfg)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	bodies := map[int][]byte{}
	joins := map[int]*joining{}
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for number := 0; ; number++ {
		var c command
		if err := in.Decode(&c); err != nil {
			if err := arena.Close(); err != nil {
				os.Exit(1)
			}
			return
		}
		o := outcome{Body: -1}
		switch c.Op {
		case "attach":
			if body := attach(reader, c.Location, int64(c.Length)); body != nil {
				bodies[number] = body
				o.Body, o.Sum = number, crc32.ChecksumIEEE(body)
			}
		case "alloc":
			if body := arena.Alloc(c.Length); body != nil {
				fill(body, c.Salt)
				bodies[number] = body
				o.Body, o.Sum, o.Location = number, crc32.ChecksumIEEE(body), arena.Locate(body)
			}
		case "sum":
			o.Body, o.Sum = c.Body, crc32.ChecksumIEEE(bodies[c.Body])
		case "write":
			fill(bodies[c.Body], c.Salt)
		case "release":
			o.OK = reader.Release(bodies[c.Body])
		case "join":
			joins[number] = join(arena, reader, c.Name, c.Length)
			o.Body = number
		case "joined":
			j := joins[c.Body]
			<-j.over
			o.OK = j.fetch != nil
			if j.body != nil {
				bodies[number] = j.body
				o.Body, o.Sum = number, crc32.ChecksumIEEE(j.body)
			}
		case "moved":
			joins[c.Body].fetch.Moved()
		case "whole":
			f := joins[c.Body].fetch
			fill(f.Room(), c.Salt)
			got := make(chan []byte, 1)
			f.Whole(func(body []byte) { got <- body })
			if body := <-got; body != nil {
				bodies[number] = body
				o.Body, o.Sum = number, crc32.ChecksumIEEE(body)
			}
		case "end":
			joins[c.Body].fetch.End()
		case "free":
			o.OK = arena.Free(bodies[c.Body])
		}
		if err := out.Encode(o); err != nil {
			os.Exit(1)
		}
	}
}

// joining is a join and how it ended.
type joining struct {
	over  chan struct{}
	fetch *shm.Fetch
	body  []byte
}

func join(a *shm.Arena, r *shm.Reader, name string, n int) *joining {
	j := &joining{over: make(chan struct{})}
	a.Join(r, name, int64(n), nil, func(f *shm.Fetch, body []byte) {
		j.fetch, j.body = f, body
		close(j.over)
	})
	return j
}

// attach waits for the body.
func attach(r *shm.Reader, at wire.Location, n int64) []byte {
	ch := make(chan []byte, 1)
	r.Attach(at, n, func(body []byte) { ch <- body })
	return <-ch
}

// fill writes bytes that differ from page to page and from salt to salt.
func fill(body []byte, salt byte) {
	for i := range body {
		body[i] = salt + byte(i) + byte(i>>12)*7
	}
}

func sumOf(n int, salt byte) uint32 {
	body := make([]byte, n)
	fill(body, salt)
	return crc32.ChecksumIEEE(body)
}

// child is a process of a test.
type child struct {
	t   testing.TB
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func startChild(t testing.TB, dir string) *child {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), roleVariable+"="+dir)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	c := &child{t: t, cmd: cmd, in: in, out: bufio.NewReader(out)}
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Process.Signal(syscall.SIGCONT) // one that is stopped does not end
		_ = cmd.Wait()
	})
	return c
}

func (c *child) do(cmd command) outcome {
	c.t.Helper()
	line, err := json.Marshal(cmd)
	require.NoError(c.t, err)
	_, err = c.in.Write(append(line, '\n'))
	require.NoError(c.t, err)
	answer, err := c.out.ReadBytes('\n')
	require.NoError(c.t, err)
	var o outcome
	require.NoError(c.t, json.Unmarshal(answer, &o))
	return o
}

func (c *child) attach(at wire.Location, n int) outcome {
	return c.do(command{Op: "attach", Location: at, Length: n})
}

func (c *child) signal(s syscall.Signal) {
	c.t.Helper()
	require.NoError(c.t, c.cmd.Process.Signal(s))
}

// stop stops the process and waits until it is stopped.
func (c *child) stop() {
	c.t.Helper()
	c.signal(syscall.SIGSTOP)
	eventually(c.t, func() bool {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", c.cmd.Process.Pid))
		require.NoError(c.t, err)
		for _, thread := range threads {
			stat, err := os.ReadFile(thread)
			if _, state, _ := strings.Cut(string(stat), ") "); err != nil || !strings.HasPrefix(state, "T") {
				return false
			}
		}
		return len(threads) > 0
	})
}

// kill ends the process and waits for its end.
func (c *child) kill() {
	c.t.Helper()
	c.signal(syscall.SIGKILL)
	_ = c.cmd.Wait() // it was killed
}

func privateDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "shm")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}

func openArena(t testing.TB, cfg shm.Config) *shm.Arena {
	t.Helper()
	a, err := shm.Open(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, a.Close()) })
	return a
}

func newReader(t testing.TB, cfg shm.Config) *shm.Reader {
	r := shm.NewReader(cfg)
	t.Cleanup(r.Close)
	return r
}

func quiet(dir string) shm.Config {
	return shm.Config{Dir: dir, FetchLimit: time.Second, Logger: slog.New(slog.DiscardHandler)}
}

func eventually(t testing.TB, what func() bool) {
	t.Helper()
	require.Eventually(t, what, 2*time.Minute, 5*time.Millisecond)
}
