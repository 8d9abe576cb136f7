package bus

import (
	"net"
	"strings"
	"sync/atomic"
	"time"
)

// A client with several servers to go to finds one that hangs (a stopped process, a host that is cut off) in half a second, and goes to
// another. With one server there is nothing to go to, and a false alarm would be an outage: then only the slow pings of NATS count.
const (
	hangCheck     = 250 * time.Millisecond // between two round trips
	hangAfter     = 300 * time.Millisecond // without a byte from a server that was asked
	hangDial      = 500 * time.Millisecond // for a server to accept a connection, and again for its first byte; doubled after each failure
	dialTimeout   = 5 * time.Second        // the same with one server; and for all of a handshake
	hangDialsMost = 4                      // doublings
)

// HangLimit is the longest time in which a client with several servers finds that its own one hangs, and reaches another.
const HangLimit = hangCheck + hangAfter + 3*hangDial

// dialer makes the connections of a bus.
type dialer struct{ bus *Bus }

// Dial is called by NATS, with the lock of its connection held.
func (d *dialer) Dial(network, address string) (net.Conn, error) {
	limit := dialTimeout
	if d.bus.several.Load() {
		limit = min(hangDial<<min(d.bus.dialFailures.Load(), hangDialsMost), dialTimeout)
	}
	c, err := (&net.Dialer{Timeout: limit}).Dial(network, address)
	if err != nil {
		d.bus.dialFailures.Add(1)
		return nil, err
	}
	s := &serverConn{}
	if d.bus.several.Load() && !strings.HasPrefix(strings.Join(d.bus.cfg.URLs, ","), "ws") { // over a WebSocket the client speaks first
		if s.first, err = firstByte(c, limit); err != nil {
			d.bus.dialFailures.Add(1)
			_ = c.Close() // nothing was sent on it
			return nil, err
		}
	}
	d.bus.dialFailures.Store(0)
	w := newBatchConn(c)
	w.beforeRead = &d.bus.beforeRead
	d.bus.dialled.Store(w)
	s.Conn = w
	s.heard()
	d.bus.serverConn.Store(s)
	return s, nil
}

// firstByte waits for a server to speak: the kernel of a stopped process still accepts connections.
func firstByte(c net.Conn, limit time.Duration) ([]byte, error) {
	if err := c.SetReadDeadline(time.Now().Add(limit)); err != nil {
		return nil, err
	}
	first := make([]byte, 1)
	n, err := c.Read(first)
	if err != nil {
		return nil, err
	}
	return first[:n], c.SetReadDeadline(time.Time{})
}

// serverConn is a connection that knows when the server was last heard.
type serverConn struct {
	net.Conn
	first []byte // read by the dialer
	last  atomic.Int64
}

var processStart = time.Now()

func (s *serverConn) heard() { s.last.Store(int64(time.Since(processStart))) }

// silence is the time since the server was last heard.
func (s *serverConn) silence() time.Duration {
	return time.Since(processStart) - time.Duration(s.last.Load())
}

func (s *serverConn) Read(p []byte) (int, error) {
	if len(s.first) > 0 && len(p) > 0 {
		n := copy(p, s.first)
		s.first = s.first[n:]
		return n, nil
	}
	n, err := s.Conn.Read(p)
	if n > 0 {
		s.heard()
	}
	return n, err
}

// Several reports whether there is another server to go to.
func (b *Bus) Several() bool { return b.several.Load() }

// noteServers counts the servers that the connection knows, after it was made and when it learns of others.
func (b *Bus) noteServers(servers []string, cluster string) {
	several := len(servers) > 1 && (cluster != "" || len(b.cfg.URLs) > 1)
	b.several.Store(several && b.cfg.InProcess == nil)
	if several {
		b.startAnswering()
	}
}

// cutIfSilent closes a connection whose server has said nothing since it was asked, so that NATS goes to another one. It is called every
// hangAfter while an answer is missing; a process that was suspended itself gives its server another chance.
func (b *Bus) cutIfSilent(late time.Duration) {
	s := b.serverConn.Load()
	if s == nil || !b.several.Load() || !b.Connected() || late > hangAfter || s.silence() < hangAfter {
		return
	}
	b.cfg.Logger.Warn("bus: the server hangs; going to another one", "server", s.RemoteAddr(), "silent", s.silence().Round(time.Millisecond))
	_ = s.Close() // NATS reads from it, and connects again
}
