package bus

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

// link is what the events of the NATS connection have told about it. NATS answers the same questions under its lock, and it
// holds that lock while it connects again: up to dialTimeout if the server hangs. A caller that publishes cannot wait for that,
// because it may hold Python's interpreter lock.
type link struct {
	up         atomic.Bool
	closed     atomic.Bool
	maxPayload atomic.Int64
	connects   atomic.Uint64 // after the first one

	mu        sync.Mutex
	listeners map[chan bool]struct{} // of Connections
	attempts  map[*context.CancelFunc]struct{}
}

// linkCheck is how often the state of a connection that is down is read from NATS, which drops events if ten are unread.
const linkCheck = time.Second

func (l *link) begin(nc *nats.Conn) {
	l.listeners, l.attempts = map[chan bool]struct{}{}, map[*context.CancelFunc]struct{}{}
	l.maxPayload.Store(nc.MaxPayload())
	l.up.Store(nc.IsConnected())
}

// change records a state and tells it to the listeners.
func (l *link) change(s nats.Status, nc *nats.Conn) {
	switch s {
	case nats.CONNECTED:
		l.maxPayload.Store(nc.MaxPayload()) // the server may be another one
		l.connects.Add(1)
		l.up.Store(true)
	case nats.CLOSED:
		l.closed.Store(true)
		l.up.Store(false)
	default:
		l.up.Store(false)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if s == nats.CONNECTED {
		for cancel := range l.attempts {
			(*cancel)()
		}
	}
	for ch := range l.listeners {
		select { // replace a state that was not read
		case <-ch:
		default:
		}
		ch <- s == nats.CONNECTED
	}
}

func (l *link) listen() (ch chan bool, stop func()) {
	ch = make(chan bool, 1)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.listeners[ch] = struct{}{}
	return ch, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.listeners, ch)
	}
}

// Attempt is a context for one attempt of a request that is repeated: it ends with the limit, and when the connection is made again, because
// the request or its answer may be lost then.
func (b *Bus) Attempt(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	l := &b.link
	l.mu.Lock()
	l.attempts[&cancel] = struct{}{}
	l.mu.Unlock()
	return ctx, func() {
		l.mu.Lock()
		delete(l.attempts, &cancel)
		l.mu.Unlock()
		cancel()
	}
}

// watchLink runs until the connection is closed for good. After each reconnect it requests the status of every pending call.
func (b *Bus) watchLink() {
	defer close(b.watchDone)
	waits, since := reopenBackoff.Start(), time.Now()
	for {
		s, ended := b.nextStatus()
		if ended {
			return
		}
		if s == nats.CLOSED && b.closedUnasked() {
			b.link.change(nats.RECONNECTING, b.Conn())
			if time.Since(since) > reopenSteady {
				waits.Reset()
			}
			if b.reopen(waits) {
				s, since = nats.CONNECTED, time.Now()
			}
		}
		b.link.change(s, b.Conn())
		switch s {
		case nats.CLOSED:
			b.eachSession(func(s *Session) { s.fail(b.ClosedError()) })
			return
		case nats.CONNECTED:
			b.eachSession((*Session).sweepNow)
		}
	}
}

// nextStatus waits for the next state of the connection. ended: the bus was closed and nothing more is to be told.
func (b *Bus) nextStatus() (s nats.Status, ended bool) {
	c := b.conn.Load()
	for {
		var checkCh <-chan time.Time
		if !b.link.up.Load() {
			checkCh = time.After(linkCheck)
		}
		select {
		case event, open := <-c.statusCh:
			if open {
				return event, false
			}
			if c.nc.IsClosed() {
				b.link.change(nats.CLOSED, c.nc)
			}
			return 0, true
		case <-checkCh:
			if s := c.nc.Status(); s == nats.CONNECTED || s == nats.CLOSED {
				return s, false
			}
		}
	}
}

// Connected reports whether the connection to the server is up.
func (b *Bus) Connected() bool { return b.link.up.Load() }

// Closed reports whether the bus was closed, or its connection has ended for good.
func (b *Bus) Closed() bool {
	select {
	case <-b.closingCh:
		return true
	default:
		return b.link.closed.Load()
	}
}

// MaxPayload is the size of the largest message that the server takes.
func (b *Bus) MaxPayload() int { return int(b.link.maxPayload.Load()) }

// downError is the error of a message that cannot be sent because the connection is down.
func (b *Bus) downError(doing string) error {
	if b.Closed() {
		return b.ClosedError()
	}
	return Errorf(CodeUnavailable, "%s: the server is unreachable", doing)
}

// Connections sends true when the connection comes up and false when it goes down, until stop is called. It sends the
// newest state alone: a slow reader misses those between.
func (b *Bus) Connections() (ch <-chan bool, stop func()) { return b.link.listen() }
