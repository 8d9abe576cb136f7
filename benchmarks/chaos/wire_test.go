package chaos

import (
	"io"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The wire itself carries, loses and partitions. It needs root and iproute2, which `make test` must not assume: `make chaos` runs
// it first.
func TestWire(t *testing.T) {
	if os.Getenv("TROUPE_CHAOS") == "" {
		t.Skip("it needs root, iproute2 and /dev/net/tun; make chaos runs it")
	}
	w, err := NewWire(1, 1)
	require.NoError(t, err)
	defer func() { require.NoError(t, w.Close()) }()
	l, err := net.Listen("tcp", net.JoinHostPort(w.Host(), "0"))
	require.NoError(t, err)
	defer l.Close()
	accepted := make(chan net.Conn, 1)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	dial := func() *exec.Cmd {
		cmd := exec.Command("ip", "netns", "exec", w.Netns(0), "bash", "-c", "exec 3<>/dev/tcp/"+w.Host()+"/"+port+"; echo hello >&3; cat <&3")
		require.NoError(t, cmd.Start())
		return cmd
	}
	w.SetLoss(0, 0.2)
	cmd := dial()
	c := <-accepted
	line := make([]byte, 6)
	_, err = io.ReadFull(c, line)
	require.NoError(t, err)
	require.Equal(t, "hello\n", string(line))
	require.NoError(t, c.Close())
	w.SetLoss(0, 0)
	_ = cmd.Wait() // its answer does not matter
	w.SetLoss(0, 1)
	cmd = dial()
	select {
	case <-accepted:
		require.Fail(t, "a partition lets a connection through")
	case <-time.After(500 * time.Millisecond):
	}
	w.SetLoss(0, 0)
	_ = (<-accepted).Close()
	_ = cmd.Wait()
}
