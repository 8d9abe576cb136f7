package bus

import (
	"net"
	"sync"
	"time"
)

// dialer makes connections that are cheap to write to.
type dialer struct{ net.Dialer }

func (d *dialer) Dial(network, address string) (net.Conn, error) {
	c, err := d.Dialer.Dial(network, address)
	if err != nil {
		return nil, err
	}
	return &lazyConn{Conn: c}, nil
}

// lazyConn spares the deadlines of writes. NATS sets one before each write and takes it back afterwards, which costs two
// timers for every message. Here a deadline is left in place as long as it lies far enough ahead: a write that hangs
// ends after its time, or up to an eighth of it sooner.
type lazyConn struct {
	net.Conn

	mu    sync.Mutex
	armed time.Time // the deadline that is set; zero: none
}

func (c *lazyConn) SetWriteDeadline(t time.Time) error {
	if t.IsZero() { // nothing is being written; the next write sets another
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if left := time.Until(t); !c.armed.IsZero() && t.Sub(c.armed) < left/8 && !t.Before(c.armed) {
		return nil
	}
	c.armed = t
	return c.Conn.SetWriteDeadline(t)
}

// SetDeadline sets both, as it says.
func (c *lazyConn) SetDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.armed = t
	return c.Conn.SetDeadline(t)
}
