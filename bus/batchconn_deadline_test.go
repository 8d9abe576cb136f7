package bus

import (
	"errors"
	"net"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// countedConnConn counts the deadlines that are set on the connection.
type countedConn struct {
	net.Conn
	writes, both int
}

func (c *countedConn) SetWriteDeadline(t time.Time) error {
	c.writes++
	return c.Conn.SetWriteDeadline(t)
}
func (c *countedConn) SetDeadline(t time.Time) error { c.both++; return c.Conn.SetDeadline(t) }

// A busy connection sets few deadlines, and a write that hangs still ends, after a busy or an idle time.
func TestWriteDeadlinesAreSpared(t *testing.T) {
	for name, pause := range map[string]time.Duration{"busy": 0, "silent": time.Hour} {
		t.Run(name, func(t *testing.T) { synctest.Test(t, func(t *testing.T) { spareDeadlines(t, pause) }) })
	}
}

func spareDeadlines(t *testing.T, pause time.Duration) {
	near, far := net.Pipe()
	inner := &countedConn{Conn: near}
	c := newBatchConn(inner)
	defer c.Close()
	read := make([]byte, 16)
	write := func() error {
		if err := c.SetWriteDeadline(time.Now().Add(time.Minute)); err != nil {
			return err
		}
		_, err := c.Write([]byte("PING\r\n"))
		return errors.Join(err, c.SetWriteDeadline(time.Time{}))
	}
	for range 10_000 { // a hundred seconds
		go func() { _, _ = far.Read(read) }()
		require.NoError(t, write())
		time.Sleep(10 * time.Millisecond)
	}
	require.Less(t, inner.writes, 20)

	time.Sleep(pause)
	began := time.Now()
	require.ErrorIs(t, write(), os.ErrDeadlineExceeded)
	require.InDelta(t, 57, time.Since(began).Seconds(), 4)
	require.Error(t, write(), "half a message may have gone out")
	require.NoError(t, far.Close())
}

// A deadline of a handshake, for both directions, does not count as a write deadline.
func TestDeadlineOfAHandshake(t *testing.T) {
	near, far := net.Pipe()
	defer far.Close()
	inner := &countedConn{Conn: near}
	c := newBatchConn(inner)
	defer c.Close()
	now := time.Now()
	require.NoError(t, c.SetDeadline(now.Add(5*time.Second)))
	require.NoError(t, c.SetDeadline(time.Time{}))
	require.Equal(t, 2, inner.both)
	require.NoError(t, c.SetWriteDeadline(now.Add(time.Minute)))
	require.Equal(t, 1, inner.writes)
	require.NoError(t, c.SetWriteDeadline(now)) // sooner: a connection that closes
	require.Equal(t, 2, inner.writes)
}
