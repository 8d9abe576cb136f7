package nodes_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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

// followed collects the followed lines.
type followed struct {
	*nodes.Follower
	t  *testing.T
	ch chan nodes.Line
}

func (s *testAgent) follow() followed {
	ch := make(chan nodes.Line, 1<<16)
	f, err := s.client.Follow(role, func(l nodes.Line) { ch <- l })
	require.NoError(s.t, err)
	s.t.Cleanup(f.Stop)
	return followed{f, s.t, ch}
}

// until waits for a line with the text.
func (f followed) until(text string) nodes.Line {
	f.t.Helper()
	late := time.After(10 * time.Second)
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
	require.NoError(t, f.Flush(t.Context(), "host"))
	require.Equal(t, "twenty", (<-f.ch).Text, "flushed lines were passed to the follower")

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
	var followed atomic.Int64
	f, err := s.client.Follow(role, func(l nodes.Line) {
		n, err := strconv.ParseInt(l.Text, 10, 64)
		if err == nil {
			followed.Store(n)
		}
	})
	require.NoError(t, err)
	defer f.Stop()
	path := filepath.Join(t.TempDir(), "count")
	s.launch(sh(`i=0; while :; do i=$((i+1)); echo $i; echo $i >`+path+`; done`, 0))
	for range 10 {
		var printed int64
		require.Eventually(t, func() bool {
			data, _ := os.ReadFile(path) // the worker may be writing it
			printed, _ = strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
			return printed > 0
		}, 10*time.Second, time.Millisecond)
		require.NoError(t, f.Flush(t.Context(), "host"))
		require.GreaterOrEqual(t, followed.Load(), printed)
	}
	_, err = s.client.Stop(t.Context(), "host", ids(0), 0)
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
