package bustest

import (
	"net"
	"sync"
	"sync/atomic"

	"github.com/nats-io/nats.go"
)

// Faults is a connection provider with faults that can be set at run time: use it as bus.Config.InProcess or in
// nats.InProcessServer. All its connections share one rule, so connections with different faults need a Faults each.
// Connections must not use TLS.
type Faults struct {
	inner nats.InProcessConnProvider
	rule  atomic.Pointer[Rule]

	mu    sync.Mutex // guards what follows
	links map[*link]struct{}
	made  int
	thaw  chan struct{} // nil unless frozen; closed by Thaw
}

// NewFaults connects through inner. At first every message passes.
func NewFaults(inner nats.InProcessConnProvider) *Faults {
	return &Faults{inner: inner, links: map[*link]struct{}{}}
}

// SetRule changes the rule from the next message on. A nil rule lets everything pass.
func (f *Faults) SetRule(r Rule) {
	if r == nil {
		f.rule.Store(nil)
		return
	}
	f.rule.Store(&r)
}

// Cut closes all connections at once and drops the bytes in flight. New connections are accepted.
func (f *Faults) Cut() {
	for _, l := range f.all() {
		l.close()
	}
}

// Freeze stops both directions: after it has returned no byte arrives. As with a host that hangs, the peers are not
// notified, and can write about a MiB each before they block. New connections freeze too. A client that is closed while
// frozen loses the bytes in flight.
func (f *Faults) Freeze() {
	f.mu.Lock()
	if f.thaw == nil {
		f.thaw = make(chan struct{})
	}
	f.mu.Unlock()
	for _, l := range f.all() {
		l.up.interrupt()
		l.down.interrupt()
	}
}

// Thaw ends a freeze.
func (f *Faults) Thaw() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.thaw != nil {
		close(f.thaw)
		f.thaw = nil
	}
}

// Connections counts the open connections.
func (f *Faults) Connections() int { return len(f.all()) }

// InProcessConn opens a connection through the faults.
func (f *Faults) InProcessConn() (net.Conn, error) {
	server, err := f.inner.InProcessConn()
	if err != nil {
		return nil, err
	}
	far, near := net.Pipe()
	l := &link{faults: f, near: near, server: server, gone: make(chan struct{})}
	l.up = newLane(l, ToServer, near, server)
	l.down = newLane(l, ToClient, server, near)
	f.mu.Lock()
	f.made++
	l.number = f.made
	f.links[l] = struct{}{}
	f.mu.Unlock()
	l.up.run()
	l.down.run()
	return &clientConn{Conn: far, link: l}, nil
}

func (f *Faults) all() []*link {
	f.mu.Lock()
	defer f.mu.Unlock()
	links := make([]*link, 0, len(f.links))
	for l := range f.links {
		links = append(links, l)
	}
	return links
}

// frozen returns a channel that Thaw closes; nil when not frozen.
func (f *Faults) frozen() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.thaw
}

// link is one connection through Faults: client ── far|near ── lanes ── server.
type link struct {
	faults       *Faults
	number       int
	near, server net.Conn
	up, down     *lane

	once sync.Once
	gone chan struct{} // closed when the client has closed, or the link has
}

func (l *link) clientGone() { l.once.Do(func() { close(l.gone) }) }

// close closes both sides at once; the lanes end by themselves.
func (l *link) close() {
	l.clientGone()
	_ = l.near.Close()
	_ = l.server.Close()
	l.faults.mu.Lock()
	defer l.faults.mu.Unlock()
	delete(l.faults.links, l)
}

// clientConn is the client's end. Its Close notifies the lanes even when they do not read.
type clientConn struct {
	net.Conn
	link *link
}

func (c *clientConn) Close() error {
	err := c.Conn.Close()
	c.link.clientGone()
	return err
}
