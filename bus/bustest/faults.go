package bustest

import (
	"net"
	"sync"
	"sync/atomic"

	"github.com/nats-io/nats.go"
)

// Faults is a way to a server that can be made bad at run time. It is an in-process connection provider: give it to
// bus.Config.InProcess or nats.InProcessServer. All its connections share one rule, so connections that are to suffer
// differently get a Faults each. Connections must not use TLS.
type Faults struct {
	inner nats.InProcessConnProvider
	rule  atomic.Pointer[Rule]

	mu    sync.Mutex // guards what follows
	links map[*link]struct{}
	made  int
	thaw  chan struct{} // nil unless frozen; closed by Thaw
}

// NewFaults stands before inner. At first everything passes.
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

// Cut closes all connections at once, with what was in flight on them. Clients see the end of the stream; new
// connections are served as before.
func (f *Faults) Cut() {
	for _, l := range f.all() {
		l.close()
	}
}

// Freeze stops everything in both directions: once it returns no byte arrives anywhere. As with a host that hangs, the
// ends of a connection are not told, and can still write about a MiB each before they block. New connections
// freeze too. A client that is closed while frozen loses what was in flight.
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

// Thaw lets everything go on where it stopped.
func (f *Faults) Thaw() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.thaw != nil {
		close(f.thaw)
		f.thaw = nil
	}
}

// Connections counts those that are open.
func (f *Faults) Connections() int { return len(f.all()) }

// InProcessConn connects to the server behind.
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

// frozen is nil, or closed at the next thaw.
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

// close ends the connection for both sides at once; the lanes end by themselves.
func (l *link) close() {
	l.clientGone()
	_ = l.near.Close()
	_ = l.server.Close()
	l.faults.mu.Lock()
	defer l.faults.mu.Unlock()
	delete(l.faults.links, l)
}

// clientConn is the client's end. The lanes learn of its closing even when they are not reading.
type clientConn struct {
	net.Conn
	link *link
}

func (c *clientConn) Close() error {
	err := c.Conn.Close()
	c.link.clientGone()
	return err
}
