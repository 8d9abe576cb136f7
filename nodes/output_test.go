package nodes_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/nodes"
	"troupe/nodes/protocol"
)

// lines is the stored lines.
func (s *testAgent) lines(q nodes.LogQuery) (out []string) {
	s.t.Helper()
	q.Namespace, q.Role = role.Namespace, role.Role
	err := nodes.ReadLogs(s.t.Context(), s.bus, q, func(l nodes.Line) error {
		out = append(out, fmt.Sprintf("%d %s %s", l.ID.Rank, l.Stream, l.Text))
		return nil
	})
	require.NoError(s.t, err)
	return out
}

// followed collects the stored lines as they come.
type followed struct {
	t  *testing.T
	ch chan nodes.Line
}

func (s *testAgent) follow() followed {
	ch, doneCh := make(chan nodes.Line, 1<<16), make(chan error, 1)
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		doneCh <- nodes.ReadLogs(ctx, s.bus, nodes.LogQuery{Namespace: role.Namespace, Role: role.Role, Rank: -1, Follow: true}, func(l nodes.Line) error {
			ch <- l
			return nil
		})
	}()
	s.t.Cleanup(func() {
		cancel()
		require.NoError(s.t, <-doneCh)
	})
	return followed{s.t, ch}
}

// received collects the output that the agent sends to the driver.
type received struct {
	mu   sync.Mutex
	text map[nodes.OutputStream]string
	all  []nodes.OutputItem
	busy bool // messages are refused

	roles map[string]bool // that messages name
}

func (s *testAgent) receive() *received { return s.receiveAt(role) }

func (s *testAgent) receiveAt(address bus.Address) *received {
	r := &received{text: map[nodes.OutputStream]string{}, roles: map[string]bool{}}
	stop, err := s.client.ReceiveOutput(s.t.Context(), address, func(b nodes.OutputBatch) bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.busy {
			return false
		}
		r.roles[b.Role] = true
		for _, item := range b.Items {
			r.text[item.Stream] += string(item.Data)
			r.all = append(r.all, item)
		}
		return true
	})
	require.NoError(s.t, err)
	s.t.Cleanup(stop)
	return r
}

func (r *received) stdout() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text[nodes.Stdout]
}

func (r *received) items() []nodes.OutputItem {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.all)
}

func (r *received) setBusy(busy bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.busy = busy
}

// withOutput is the launch in an output mode.
func withOutput(l nodes.Launch, mode nodes.OutputMode) nodes.Launch {
	l.Output = mode
	return l
}

// In raw mode the driver gets every byte, a driver without room blocks the worker, and a worker can be stopped meanwhile.
func TestRawOutputIsCompleteAndBlocksTheWorker(t *testing.T) {
	s := startAgent(t)
	r := s.receive()
	r.setBusy(true)
	path := filepath.Join(t.TempDir(), "count")
	const lines, width = 20_000, 500
	program := fmt.Sprintf(`BEGIN { for (i = 0; i < %d; i++) { printf "%%0%dd\r\n", i; if (i %% 100 == 0) { print i > "%s"; close("%s") } } printf "\377 no newline" }`,
		lines, width-2, path, path)
	l := sh(`awk "$PROGRAM"; exec sleep 1000`, 0)
	l.Program.Env = map[string]string{"PROGRAM": program}
	s.launch(withOutput(l, nodes.OutputRaw))
	printed := func() int {
		data, _ := os.ReadFile(path) // the worker may be writing it
		n, _ := strconv.Atoi(strings.TrimSpace(string(data)))
		return n
	}
	blocked := -1
	require.Eventually(t, func() bool { // it stops while the driver has no room
		before := blocked
		blocked = printed()
		return blocked > 0 && blocked == before
	}, 2*time.Minute, 500*time.Millisecond)
	require.Less(t, blocked, lines-200)
	r.setBusy(false)
	require.Eventually(t, func() bool { return strings.HasSuffix(r.stdout(), "no newline") }, 2*time.Minute, 20*time.Millisecond)
	var want strings.Builder
	for i := range lines {
		fmt.Fprintf(&want, "%0*d\r\n", width-2, i)
	}
	require.True(t, want.String()+"\xff no newline" == r.stdout(), "every byte, in order")
	r.setBusy(true)
	exits, err := s.client.Stop(t.Context(), "host", ids(0), 0)
	require.NoError(t, err)
	require.True(t, exits[0].Asked)
}

// Output may go to another driver than that of the role; then its messages name the role.
func TestOutputToAnotherDriver(t *testing.T) {
	s := startAgent(t)
	own, other := s.receive(), bus.Address{Namespace: "run", Role: "driver", Incarnation: "other"}
	r := s.receiveAt(other)
	l := withOutput(sh(`echo said; exit 3`, 0), nodes.OutputRaw)
	l.OutputTo = &other
	s.launch(l)
	require.Equal(t, 3, s.exit().Code)
	require.NoError(t, s.client.FlushOutput(t.Context(), "host", role))
	require.Equal(t, "said\n", r.stdout())
	require.True(t, r.roles["role"])
	require.Empty(t, own.items())
}

// A worker that prints too much is shown in part; what is left out is counted, and its last lines on stderr are always sent.
func TestOutputOfAWorkerIsLimited(t *testing.T) {
	s := startAgent(t)
	r := s.receive()
	s.launch(withOutput(sh(`i=0; while [ $i -lt 5000 ]; do echo line $i; i=$((i+1)); done; echo last words >&2; exit 3`, 0), nodes.OutputAll))
	require.Equal(t, 3, s.exit().Code)
	require.NoError(t, s.client.FlushOutput(t.Context(), "host", role))
	lines, leftOut, dying := 0, 0, ""
	for _, item := range r.items() {
		leftOut += item.LeftOut
		switch {
		case item.Dying:
			dying += string(item.Data)
		case item.Seq > 0:
			lines++
		}
	}
	require.Equal(t, 5001, lines+leftOut)
	require.Greater(t, leftOut, 2000)
	require.Equal(t, "last words", dying)
	require.True(t, r.items()[len(r.items())-1].End)
	require.Len(t, s.lines(nodes.LogQuery{Rank: -1}), 5001, "all lines are stored")
}

func TestOutputModes(t *testing.T) {
	for mode, want := range map[nodes.OutputMode][]string{
		nodes.OutputNone: {"two!", "end"}, nodes.OutputErrors: {"two", "two!", "end"}, nodes.OutputAll: {"one", "two", "two!", "end"}, nodes.OutputUnset: nil,
	} {
		t.Run(string(mode), func(t *testing.T) {
			s := startAgent(t)
			r := s.receive()
			s.launch(withOutput(sh(`echo one; sleep 0.2; echo two >&2; exit 1`, 0), mode))
			require.Equal(t, 1, s.exit().Code)
			require.NoError(t, s.client.FlushOutput(t.Context(), "host", role))
			var got []string
			for _, item := range r.items() {
				switch {
				case item.End:
					got = append(got, "end")
				case item.Dying:
					got = append(got, string(item.Data)+"!")
				default:
					got = append(got, string(item.Data))
				}
			}
			require.Equal(t, want, got)
		})
	}
	s := startAgent(t)
	_, err := s.client.Launch(t.Context(), withOutput(sh(`true`, 0), "loud"))
	require.ErrorContains(t, err, "all, errors, none, raw")
}

// until waits for a line with the text.
func (f followed) until(text string) nodes.Line {
	f.t.Helper()
	late := time.After(2 * time.Minute)
	for {
		select {
		case l := <-f.ch:
			if l.Text == text {
				return l
			}
		case <-late:
			f.t.Fatalf("%q was not printed", text)
		}
	}
}

func TestOutputIsFollowedAndKept(t *testing.T) {
	s := startAgent(t)
	f := s.follow()
	s.launch(sh(`echo one; echo two >&2; printf 'ten\rtwenty'; sleep 1000`, 0))
	l := f.until("ten")
	require.Equal(t, nodes.Stdout, l.Stream)
	require.WithinDuration(t, time.Now(), l.At, 10*time.Second)
	s.launch(sh(`i=0; while [ $i -lt 5000 ]; do echo line $i; i=$((i+1)); done; kill -KILL $$`, 1))
	require.Equal(t, "SIGKILL", s.exit().Signal)
	for i := range 5000 {
		f.until(fmt.Sprintf("line %d", i)) // in order, every one, though the worker was killed
	}
	exits, err := s.client.Stop(t.Context(), "host", ids(0, 1), 0)
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"one", "two", "ten", "twenty"}, exits[0].Last)
	f.until("twenty")

	all := s.lines(nodes.LogQuery{Rank: -1})
	require.Len(t, all, 5004)
	require.Equal(t, []string{"0 stdout one", "0 stdout ten", "0 stdout twenty", "0 stderr two"}, sortedByStream(s.lines(nodes.LogQuery{Rank: 0})))
	require.Empty(t, s.lines(nodes.LogQuery{Rank: -1, Since: time.Now().Add(time.Hour)}))

	s.stop()
	data, err := os.ReadFile(filepath.Join(s.dir, "logs", "run", "role", "one", "1.0.log"))
	require.NoError(t, err, "files outlive the worker and the agent")
	require.Equal(t, 5000, strings.Count(string(data), "\n"))
	require.Contains(t, string(data), " 1 stdout line 4999\n")
}

func sortedByStream(lines []string) (out []string) {
	for _, stream := range []string{"stdout", "stderr"} {
		for _, l := range lines {
			if strings.Contains(l, stream) {
				out = append(out, l)
			}
		}
	}
	return out
}

// Flush returns while the worker goes on printing.
func TestFlushWhileTheWorkerPrints(t *testing.T) {
	s := startAgent(t)
	r := s.receive()
	last := func() (n int64) {
		lines := strings.Split(strings.TrimSuffix(r.stdout(), "\n"), "\n")
		n, _ = strconv.ParseInt(lines[len(lines)-1], 10, 64)
		return n
	}
	path := filepath.Join(t.TempDir(), "count")
	s.launch(withOutput(sh(`i=0; while :; do i=$((i+1)); echo $i; echo $i >`+path+`; done`, 0), nodes.OutputRaw))
	for range 10 {
		var printed int64
		require.Eventually(t, func() bool {
			data, _ := os.ReadFile(path) // the worker may be writing it
			printed, _ = strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
			return printed > 0
		}, 2*time.Minute, time.Millisecond)
		require.NoError(t, s.client.FlushOutput(t.Context(), "host", role))
		require.GreaterOrEqual(t, last(), printed)
	}
	_, err := s.client.Stop(t.Context(), "host", ids(0), 0)
	require.NoError(t, err)
}

// This must not happen: a full disk stops or blocks a worker, or is not reported.
func TestFullLogFolder(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("none", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Logf("tmpfs cannot be mounted (%v): the log folder is a file instead", err)
		require.NoError(t, os.Remove(dir))
		require.NoError(t, os.WriteFile(dir, nil, 0o600))
	} else {
		t.Log("the log folder is a tmpfs of 64 KiB")
		t.Cleanup(func() { require.NoError(t, syscall.Unmount(dir, 0)) })
	}
	b := bustest.Open(t)
	require.NoError(t, nodes.CreateEventStream(t.Context(), b, 0))
	s := startAgentIn(t, b, t.TempDir(), func(cfg *nodes.AgentConfig) { cfg.LogDir = filepath.Join(dir, "logs") })
	f := s.follow()
	s.launch(sh(`i=0; while [ $i -lt 3000 ]; do echo line $i with some more words to fill the disk; i=$((i+1)); done; echo done; exit 4`, 0))
	f.until("done")
	require.Equal(t, 4, s.exit().Code)
	require.Len(t, s.lines(nodes.LogQuery{Rank: -1}), 3001, "the stream has every line")
	var kinds []string
	require.NoError(t, nodes.ReadEvents(t.Context(), s.bus, nodes.EventQuery{Namespace: "run"}, func(e nodes.Event) error {
		kinds = append(kinds, e.Kind)
		return nil
	}))
	require.Contains(t, kinds, protocol.EventLogsFailed)
	require.Contains(t, kinds, protocol.EventWorkerExit)
	s.stop()
}
