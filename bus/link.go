package bus

import (
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
}

// linkCheck is how often the state of a connection that is down is read from NATS, which drops events if ten are unread.
const linkCheck = time.Second

func (l *link) begin(nc *nats.Conn) {
	l.listeners = map[chan bool]struct{}{}
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

// watchLink runs until the connection is closed. After each reconnect it requests the status of every pending call.
func (b *Bus) watchLink() {
	defer close(b.watchDone)
	for {
		var checkCh <-chan time.Time
		if !b.link.up.Load() {
			checkCh = time.After(linkCheck)
		}
		var s nats.Status
		select {
		case event, open := <-b.statusCh:
			if s = event; !open { // the bus was closed
				if b.nc.IsClosed() {
					b.link.change(nats.CLOSED, b.nc)
				}
				return
			}
		case <-checkCh:
			if s = b.nc.Status(); s != nats.CONNECTED && s != nats.CLOSED {
				continue
			}
		}
		b.link.change(s, b.nc)
		switch s {
		case nats.CLOSED:
			b.eachEndpoint(func(e *Endpoint) { e.fail(b.ClosedError()) })
			return
		case nats.CONNECTED:
			b.eachEndpoint((*Endpoint).askNow)
		}
	}
}

// Connected reports whether the connection to the server is up.
func (b *Bus) Connected() bool { return b.link.up.Load() }

// Closed reports whether the connection has ended for good.
func (b *Bus) Closed() bool { return b.link.closed.Load() }

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
