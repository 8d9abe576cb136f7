package nodes_test

import (
	"context"
	"fmt"
	"net"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/bus/bustest"
	"troupe/nodes"
)

// listen listens on a port, with or without SO_REUSEADDR.
func listen(port int, network string, reuse int) error {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		_ = c.Control(func(fd uintptr) {
			err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_REUSEADDR, reuse)
		})
		return err
	}}
	l, err := lc.Listen(context.Background(), network, fmt.Sprintf(":%d", port))
	if err == nil {
		err = l.Close()
	}
	return err
}

func TestPorts(t *testing.T) {
	s := startAgent(t)
	host, ports, err := s.client.Ports(t.Context(), "host", id(0), 3)
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1", host)
	require.Len(t, ports, 3)
	_, again, err := s.client.Ports(t.Context(), "host", id(0), 3)
	require.NoError(t, err)
	require.Equal(t, ports, again, "a repeated request leases nothing more")
	for _, port := range ports {
		require.Less(t, port, 32768)
		for _, network := range []string{"tcp4", "tcp6"} {
			require.Error(t, listen(port, network, 0), "without SO_REUSEADDR the port is taken")
			require.NoError(t, listen(port, network, 1), "a worker that sets SO_REUSEADDR can listen")
		}
	}

	// A stopped role releases its ports.
	s.launch(sh("sleep 1000", 0, 1))
	_, err = s.client.Stop(t.Context(), "host", ids(0), 0)
	require.NoError(t, err)
	require.Error(t, listen(ports[0], "tcp4", 0), "rank 1 runs")
	_, err = s.client.Stop(t.Context(), "host", ids(1), 0)
	require.NoError(t, err)
	require.NoError(t, listen(ports[0], "tcp4", 0))
	require.NoError(t, listen(ports[2], "tcp6", 0))

	// A restarted rank gets them again.
	l := sh("sleep 1000", 0)
	l.Workers[0].ID.Gen = 1
	s.launch(l)
	require.Error(t, listen(ports[0], "tcp4", 0))
	s.stop()
	require.NoError(t, listen(ports[0], "tcp4", 0))
}

// This must not happen: two agents on one machine lease the same port.
func TestPortsOfTwoAgents(t *testing.T) {
	b := bustest.Open(t)
	startAgentIn(t, b, t.TempDir())
	s := startAgentIn(t, b, t.TempDir(), func(cfg *nodes.AgentConfig) { cfg.Nodes[0].Name = "other" })
	seen := map[int]bool{}
	for _, node := range []string{"host", "other"} {
		for rank := range 4 {
			_, ports, err := s.client.Ports(t.Context(), node, id(rank), 256)
			require.NoError(t, err)
			for _, port := range ports {
				require.False(t, seen[port])
				seen[port] = true
			}
		}
	}
}

func ids(ranks ...int) (out []nodes.WorkerID) {
	for _, rank := range ranks {
		out = append(out, id(rank))
	}
	return out
}
