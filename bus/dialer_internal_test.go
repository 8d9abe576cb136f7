package bus

import (
	"net"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// With another server to go to, a dial fails if the server accepts the connection and says nothing; each failure gives the next one longer.
func TestDialWaitsForAServerToSpeak(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	d := &dialer{&Bus{}}
	c, err := d.Dial("tcp", l.Addr().String())
	require.NoError(t, err, "there is no other server")
	require.NoError(t, c.Close())

	d.bus.several.Store(true)
	_, err = d.Dial("tcp", l.Addr().String())
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.EqualValues(t, 1, d.bus.dialFailures.Load())

	go func() {
		for range 3 { // two were accepted above
			if c, err := l.Accept(); err == nil {
				_, _ = c.Write([]byte("INFO"))
			}
		}
	}()
	c, err = d.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	said := make([]byte, 4)
	n, err := c.Read(said)
	require.NoError(t, err)
	require.Equal(t, "I", string(said[:n]), "what the dialer has read comes first")
	require.Zero(t, d.bus.dialFailures.Load())
	require.NoError(t, c.Close())
}
