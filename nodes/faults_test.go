package nodes_test

import (
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

// This must not happen: a worker is started twice, or never, because a message was lost, duplicated, delayed or reordered.
func TestUnreliableNetwork(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{})
	startAgentIn(t, bustest.Open(t, bus.Config{InProcess: srv}), t.TempDir())
	line := bustest.NewFaults(srv)
	far := bustest.Open(t, bus.Config{InProcess: line})
	client := nodes.NewClient(far)
	about := func(m bustest.Message) bool {
		return strings.Contains(m.Subject, "@nodes.do") || strings.HasPrefix(m.Subject, "_INBOX")
	}
	line.SetRule(bustest.Random(7, 0.15, 0.15, 0.1, 0.1, about))
	file := filepath.Join(t.TempDir(), "started")
	l := sh(`echo $RANK >>`+file+`; exec sleep 1000`, 0, 1, 2, 3, 4, 5, 6, 7)
	l.Workers[3].Assignment = make([]byte, 4<<20) // in parts
	started, err := client.Launch(t.Context(), l)
	require.NoError(t, err)
	for _, st := range started {
		require.Nil(t, st.Err)
	}
	_, one, err := client.Ports(t.Context(), "host", id(0), 2)
	require.NoError(t, err)
	_, two, err := client.Ports(t.Context(), "host", id(0), 2)
	require.NoError(t, err)
	require.Equal(t, one, two)
	require.Eventually(t, func() bool { return strings.Count(read(t, file), "\n") >= 8 }, 2*time.Minute, 10*time.Millisecond)
	exits, err := client.Stop(t.Context(), "host", ids(0, 1, 2, 3, 4, 5, 6, 7), 0)
	require.NoError(t, err)
	require.Len(t, exits, 8)
	require.Equal(t, 8, strings.Count(read(t, file), "\n"), "each worker is started once")
}

// A stop during an outage completes, and is answered when the server is back.
func TestOutageDuringAStop(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{})
	b := bustest.Open(t, bus.Config{InProcess: srv})
	s := startAgentIn(t, b, t.TempDir())
	f := s.follow()
	s.launch(sh(`trap '' INT TERM; echo ready; while :; do sleep 0.05; done`, 0))
	f.until("ready")
	doneCh := make(chan []nodes.Exit, 1)
	go func() {
		exits, err := s.client.Stop(t.Context(), "host", ids(0), 500*time.Millisecond)
		if err != nil {
			t.Error(err)
		}
		doneCh <- exits
	}()
	time.Sleep(100 * time.Millisecond) // the stop is in progress; otherwise the test checks less
	bustest.Reconnected(t, b.Conn(), srv.Restart)
	select {
	case exits := <-doneCh:
		require.Equal(t, "SIGKILL", exits[0].Signal)
	case <-time.After(2 * time.Minute):
		t.Fatal("the stop was not answered")
	}
}

// An exit during an outage is published as soon as the server is back.
func TestExitDuringAnOutage(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{})
	b := bustest.Open(t, bus.Config{InProcess: srv})
	s := startAgentIn(t, b, t.TempDir())
	started := s.launch(sh(`exec sleep 1000`, 0))
	srv.Stop()
	require.NoError(t, syscall.Kill(started[0].PID, syscall.SIGKILL))
	time.Sleep(1200 * time.Millisecond) // the exit was published once more; the next time is 1.8 s away
	bustest.Reconnected(t, b.Conn(), srv.Restart)
	begin := time.Now()
	require.Equal(t, "SIGKILL", s.exit().Signal)
	require.Less(t, time.Since(begin), 1500*time.Millisecond)
}
