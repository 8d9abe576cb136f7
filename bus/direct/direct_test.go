package direct

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// source serves one body, and counts its readers.
type source struct {
	body    []byte
	arrived *Arrived
	readers atomic.Int32
	opened  atomic.Int32
}

func (s *source) open(_ context.Context, b Body) (Found, func()) {
	if b.ID != 7 {
		return Found{}, nil
	}
	s.readers.Add(1)
	s.opened.Add(1)
	return Found{Bytes: s.body, Arrived: s.arrived}, func() { s.readers.Add(-1) }
}

func pattern(n int) []byte {
	b := make([]byte, n)
	rng := rand.NewChaCha8([32]byte{1})
	_, _ = rng.Read(b)
	return b
}

func serve(t *testing.T, cfg Config) *Server {
	t.Helper()
	if cfg.Listen == "" {
		cfg.Listen = "127.0.0.1:0"
	}
	s, err := Serve(cfg)
	require.NoError(t, err)
	t.Cleanup(s.Close)
	return s
}

func newClient(t *testing.T) *Client {
	t.Helper()
	c, err := NewClient()
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

func ticket(t *testing.T, s *Server, c *Client, n int) Ticket {
	t.Helper()
	got, err := s.Ticket(c.Fingerprint(), Body{ID: 7, Length: int64(n)})
	require.NoError(t, err)
	return got
}

// TestABodyArrives, small ones on one stream and large ones on several, with TLS and without.
func TestABodyArrives(t *testing.T) {
	for _, plain := range []bool{false, true} {
		for _, n := range []int{1, chunkSize, chunkSize + 1, 3<<20 + 5, largeBody, 20<<20 + 123} {
			src := &source{body: pattern(n)}
			s, c := serve(t, Config{OpenFunc: src.open, Plain: plain}), newClient(t)
			for range 2 { // the second time on connections that wait
				var moved atomic.Int64
				into := make([]byte, n)
				got, err := c.Pull(t.Context(), ticket(t, s, c, n), into, nil, func(n int) { moved.Add(int64(n)) })
				require.NoError(t, err)
				require.Equal(t, n, got)
				require.EqualValues(t, n, moved.Load())
				require.Equal(t, src.body, into)
			}
			require.Eventually(t, func() bool { return src.readers.Load() == 0 }, time.Minute, time.Millisecond)
		}
	}
}

// TestATicketPermitsOneThing: tickets that expired, of another receiver, for another body, changed ones, of another server, and requests that
// were recorded.
func TestATicketPermitsOneThing(t *testing.T) {
	const n = 3 << 20
	src := &source{body: pattern(n)}
	s, other := serve(t, Config{OpenFunc: src.open}), serve(t, Config{OpenFunc: src.open})
	c, foreign := newClient(t), newClient(t)
	good := ticket(t, s, c, n)
	expired, err := s.ticket(c.Fingerprint(), Body{ID: 7, Length: n}, time.Now().Add(-time.Second))
	require.NoError(t, err)
	elsewhere, err := s.Ticket(c.Fingerprint(), Body{ID: 8, Length: n})
	require.NoError(t, err)
	longer, err := s.Ticket(c.Fingerprint(), Body{ID: 7, Length: n + 1})
	require.NoError(t, err)
	changed := good
	changed.Grant = append([]byte(nil), good.Grant...)
	changed.Grant[33]++ // it expires later
	forged := good
	forged.Key = make([]byte, keySize)
	misled := good
	misled.Addresses = other.Addresses
	for name, test := range map[string]struct {
		by     *Client
		ticket Ticket
		length int
		why    error
	}{
		"expired":         {c, expired, n, refusedExpired},
		"foreign":         {foreign, good, n, refusedTicket},
		"of another body": {c, elsewhere, n, refusedGone},
		"of other length": {c, longer, n + 1, refusedGone},
		"changed":         {c, changed, n, refusedTicket},
		"forged":          {c, forged, n, refusedTicket},
		"another server":  {c, misled, n, ErrUnreachable},
	} {
		into := make([]byte, test.length)
		got, err := test.by.Pull(t.Context(), test.ticket, into, nil, nil)
		require.ErrorIs(t, err, test.why, name)
		require.Zero(t, got, name)
		require.Equal(t, make([]byte, test.length), into, name)
	}
	into := make([]byte, n)
	_, err = c.Pull(t.Context(), good, into, nil, nil) // none of these stands in the way of a good one
	require.NoError(t, err)
	require.Equal(t, src.body, into)
}

// TestARecordedRequestIsUseless: what a receiver sent in plain text is sent again, on the same connection and on another one.
func TestARecordedRequestIsUseless(t *testing.T) {
	const n = 1000
	src := &source{body: pattern(n)}
	s, c := serve(t, Config{OpenFunc: src.open, Plain: true}), newClient(t)
	tk := ticket(t, s, c, n)
	dial := func() (net.Conn, []byte) {
		conn, err := net.Dial("tcp", s.Addresses[0])
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		nonce := make([]byte, nonceSize)
		_, err = io.ReadFull(conn, nonce)
		require.NoError(t, err)
		return conn, nonce
	}
	conn, nonce := dial()
	request := appendRequest(nil, &tk, nonce, 0, 0, n)
	into := make([]byte, n)
	_, err := conn.Write(request)
	require.NoError(t, err)
	require.NoError(t, readPieces(conn, into, nil))
	require.Equal(t, src.body, into)
	again, _ := dial()
	for _, conn := range []net.Conn{conn, again} {
		_, err = conn.Write(request)
		require.NoError(t, err)
		require.ErrorIs(t, readPieces(conn, into, nil), refusedTicket)
	}
	require.EqualValues(t, 1, src.opened.Load())
}

// relay passes bytes of a plain server on; change sees those of the server, with their position, and returns how many to pass on.
func relay(t *testing.T, to string, change func(at int, b []byte) int) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", to)
			if err != nil {
				_ = near.Close()
				continue
			}
			t.Cleanup(func() { _ = near.Close(); _ = far.Close() })
			go func() { _, _ = io.Copy(far, near); _ = far.Close() }()
			go func() {
				buf := make([]byte, 32<<10)
				for at := 0; ; {
					n, err := far.Read(buf)
					pass := change(at, buf[:n])
					at += n
					if pass < 0 || err != nil {
						_ = near.Close()
						return
					}
					if _, err := near.Write(buf[:pass]); err != nil {
						return
					}
				}
			}()
		}
	}()
	return l.Addr().String()
}

// TestALinkThatFails: it changes a byte, is silent from some point on, or ends there. The pull fails in time, what it says is there is right, and the
// server is not asked again.
func TestALinkThatFails(t *testing.T) {
	const n, from = 12 << 20, 2<<20 + 100
	for name, change := range map[string]func(at int, b []byte) int{
		"changes": func(at int, b []byte) int {
			if at <= from && from < at+len(b) {
				b[from-at] ^= 1
			}
			return len(b)
		},
		"silent": func(at int, b []byte) int {
			if at > from {
				return 0
			}
			return len(b)
		},
		"ends": func(at int, b []byte) int {
			if at > from {
				return -1
			}
			return len(b)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			src := &source{body: pattern(n)}
			s, c := serve(t, Config{OpenFunc: src.open, Plain: true, Progress: 300 * time.Millisecond}), newClient(t)
			c.progress = 300 * time.Millisecond
			tk := ticket(t, s, c, n)
			tk.Addresses = []string{relay(t, s.Addresses[0], change)}
			into := make([]byte, n)
			got, err := c.Pull(t.Context(), tk, into, nil, nil)
			require.Error(t, err)
			require.Less(t, got, n)
			require.Equal(t, src.body[:got], into[:got])
			_, err = c.Pull(t.Context(), tk, into, nil, nil)
			require.ErrorIs(t, err, ErrUnreachable)
			require.Eventually(t, func() bool { return src.readers.Load() == 0 }, time.Minute, time.Millisecond)
		})
	}
}

// TestAServerThatIsNotThere: the port is closed, or nothing answers behind it. The second pull pays nothing, nor does one from another port of that
// host. Of several addresses one is enough.
func TestAServerThatIsNotThere(t *testing.T) {
	const n = 1000
	src := &source{body: pattern(n)}
	s := serve(t, Config{OpenFunc: src.open})
	silent, err := net.Listen("tcp", "127.0.0.1:0") // the kernel accepts, and no process answers
	require.NoError(t, err)
	t.Cleanup(func() { _ = silent.Close() })
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	for name, addresses := range map[string][]string{"rejects": {closed.Addr().String()}, "drops": {silent.Addr().String()}} {
		c := newClient(t)
		tk := ticket(t, s, c, n)
		tk.Addresses = addresses
		_, err = c.Pull(t.Context(), tk, make([]byte, n), nil, nil)
		require.ErrorIs(t, err, ErrUnreachable, name)
		require.True(t, c.hasFailed(&tk), name)
		next := tk
		next.Addresses = []string{"127.0.0.1:1"}
		require.Equal(t, name == "drops", c.hasFailed(&next), name)
	}
	c := newClient(t)
	tk := ticket(t, s, c, n)
	tk.Addresses = append([]string{silent.Addr().String(), closed.Addr().String()}, tk.Addresses...)
	into := make([]byte, n)
	_, err = c.Pull(t.Context(), tk, into, nil, nil)
	require.NoError(t, err)
	require.Equal(t, src.body, into)
}

// TestAPullIsGivenUp ends without a mark against the server.
func TestAPullIsGivenUp(t *testing.T) {
	const n = 32 << 20
	src := &source{body: pattern(n)}
	s, c := serve(t, Config{OpenFunc: src.open}), newClient(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	var moved atomic.Int32
	tk := ticket(t, s, c, n)
	_, err := c.Pull(ctx, tk, make([]byte, n), nil, func(int) {
		if moved.Add(1) == 3 {
			cancel(errors.New("given up"))
		}
	})
	require.Error(t, err)
	require.False(t, c.hasFailed(&tk))
}

// TestConnectionsAreBounded: one too many is closed at once.
func TestConnectionsAreBounded(t *testing.T) {
	src := &source{body: pattern(10)}
	s, c := serve(t, Config{OpenFunc: src.open, Connections: 1, Plain: true}), newClient(t)
	conn, err := net.Dial("tcp", s.Addresses[0])
	require.NoError(t, err)
	_, err = io.ReadFull(conn, make([]byte, nonceSize))
	require.NoError(t, err)
	_, err = c.Pull(t.Context(), ticket(t, s, c, 10), make([]byte, 10), nil, nil)
	require.ErrorIs(t, err, ErrUnreachable)
	require.NoError(t, conn.Close())
}

// TestABodyIsPassedOnWhileItArrives: the receiver of a body that the server has in part waits, also for longer than a server may be silent, and gets the
// rest piece by piece; of a body that will never be whole it keeps what is there, and only the rest comes from elsewhere.
func TestABodyIsPassedOnWhileItArrives(t *testing.T) {
	const n = 12<<20 + 5
	src := &source{body: pattern(n), arrived: NewArrived(n)}
	s, c := serve(t, Config{OpenFunc: src.open}), newClient(t)
	c.progress = 2 * aliveEvery
	tk := ticket(t, s, c, n)
	tk.Relay = true
	into, arrived := make([]byte, n), NewArrived(n)
	type result struct {
		got int
		err error
	}
	pulledCh := make(chan result, 1)
	go func() {
		got, err := c.Pull(t.Context(), tk, into, arrived, nil)
		pulledCh <- result{got, err}
	}()
	const part = 5<<20 + pieceSize
	src.arrived.Fill(part)
	require.Eventually(t, func() bool { return arrived.Prefix() == part }, time.Minute, time.Millisecond)
	select {
	case r := <-pulledCh:
		require.Fail(t, "it waits", "%v", r)
	case <-time.After(2 * c.progress):
	}
	src.arrived.End()
	r := <-pulledCh
	require.ErrorIs(t, r.err, refusedGone)
	require.Equal(t, part, r.got)
	require.True(t, src.arrived.Ended())

	whole := &source{body: src.body}
	var moved atomic.Int64
	s = serve(t, Config{OpenFunc: whole.open})
	got, err := c.Pull(t.Context(), ticket(t, s, c, n), into, arrived, func(n int) { moved.Add(int64(n)) })
	require.NoError(t, err)
	require.Equal(t, n, got)
	require.EqualValues(t, n-part, moved.Load())
	require.Equal(t, src.body, into)
}
