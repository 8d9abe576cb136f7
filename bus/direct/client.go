package direct

import (
	"bufio"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"troupe/bus"
)

// ErrUnreachable says that a server cannot be reached: its addresses were tried now, or less than a minute ago.
var ErrUnreachable = errors.New("no address of the data port can be reached")

const (
	dialLimit     = time.Second      // for all addresses together
	failedFor     = time.Minute      // a server that could not be reached, or stood still, is not asked again
	mostFailed    = 4096             // of which a client knows
	progressLimit = 3 * time.Second  // without a byte
	relayLimit    = time.Second      // the same from a receiver that passes the body on: there are others
	keepIdle      = 20 * time.Second // an open connection waits for the next body; less than idleFor
	mostIdle      = 16               // open connections of a client
	streams       = 4                // connections for one large body
	largeBody     = 8 << 20          // a smaller one comes on one connection
)

// Client pulls bodies. It is safe for concurrent use.
type Client struct {
	id       identity
	progress time.Duration

	mu     sync.Mutex // guards what follows
	closed bool
	idle   []*stream // oldest first
	failed map[string]time.Time
}

// NewClient makes the client of this process.
func NewClient() (*Client, error) {
	id, err := newIdentity()
	if err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "the certificate of a receiver: %w", err)
	}
	return &Client{id: id, progress: progressLimit, failed: map[string]time.Time{}}, nil
}

// Fingerprint is what a ticket for this client names.
func (c *Client) Fingerprint() []byte { return c.id.fingerprint[:] }

// Close closes the connections that wait.
func (c *Client) Close() {
	c.mu.Lock()
	c.closed = true
	idle := c.idle
	c.idle = nil
	c.mu.Unlock()
	for _, s := range idle {
		s.close()
	}
}

// Pull reads what is missing of the body of a ticket. arrived has what is there, and is told what arrives; nil: nothing is there. moved, which may be
// nil, is called with the bytes of each piece, from several goroutines. After an error the first got bytes are there, and nothing is written any more.
func (c *Client) Pull(ctx context.Context, t Ticket, body []byte, arrived *Arrived, moved func(n int)) (got int, err error) {
	if err := t.check(len(body)); err != nil {
		return 0, err
	}
	if arrived == nil {
		arrived = NewArrived(len(body))
	}
	if c.hasFailed(&t) {
		return 0, ErrUnreachable
	}
	first, err := c.stream(ctx, &t, t.Addresses)
	if err != nil {
		c.fail(ctx, t.name())
		if errors.Is(err, context.DeadlineExceeded) {
			c.fail(ctx, t.hosts())
		}
		return 0, err
	}
	running, cancel := context.WithCancel(ctx)
	defer cancel()
	dialing, enough := context.WithCancel(running)
	defer enough()
	p := &pull{client: c, ticket: &t, body: body, arrived: arrived, moved: moved, fail: cancel}
	var group sync.WaitGroup
	if len(body) >= largeBody {
		for range streams - 1 {
			group.Go(bus.Guard(func() {
				if s, err := c.stream(dialing, &t, []string{first.address}); err == nil { // the others take its share
					p.run(running, s)
				}
			}))
		}
	}
	p.run(running, first)
	enough()
	group.Wait()
	if got = arrived.Prefix(); got == len(body) {
		return got, nil
	}
	if p.err == nil {
		p.err = io.ErrUnexpectedEOF
	}
	if errors.As(p.err, new(refusal)) {
		return got, p.err // the next ticket may be good
	}
	c.fail(ctx, t.name())
	return got, p.err
}

func (c *Client) hasFailed(t *Ticket) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range []string{t.name(), t.hosts()} {
		if at, ok := c.failed[name]; ok && time.Since(at) < failedFor {
			return true
		}
	}
	return false
}

// name tells servers apart: it has the fingerprint and the addresses.
func (t *Ticket) name() string { return string(t.Server) + strings.Join(t.Addresses, " ") }

// hosts are the addresses without their ports: where a firewall drops what comes to one, it drops what comes to the others.
func (t *Ticket) hosts() string {
	var hosts []string
	for _, a := range t.Addresses {
		host, _, _ := net.SplitHostPort(a)
		hosts = append(hosts, host)
	}
	if t.Relay { // its port is another one each time, which a firewall may close while the data port is open
		hosts = append(hosts, "relay")
	}
	return "hosts " + strings.Join(hosts, " ")
}

// fail remembers that a server, or a host, did not answer, unless the caller gave up.
func (c *Client) fail(ctx context.Context, name string) {
	if ctx.Err() != nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.failed) >= mostFailed {
		clear(c.failed)
	}
	c.failed[name] = time.Now()
}

// stream is a connection to a server.
type stream struct {
	server   string // name of the ticket
	address  string
	progress *progressConn
	conn     net.Conn
	nonce    [nonceSize]byte
	number   uint64    // of the next request
	since    time.Time // when it began to wait
}

func (s *stream) close() { dropped(s.progress.Conn) }

// stream is an open connection to the server of a ticket: one that waits, or the first new one to any of the addresses.
func (c *Client) stream(ctx context.Context, t *Ticket, addresses []string) (*stream, error) {
	if s := c.takeIdle(t.name()); s != nil {
		return s, nil
	}
	ctx, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	type result struct {
		stream *stream
		err    error
	}
	resultCh := make(chan result, len(addresses))
	for _, address := range addresses {
		bus.Go(func() {
			s, err := c.open(ctx, t, address)
			resultCh <- result{s, err}
		})
	}
	var errs []error
	for i := range addresses {
		r := <-resultCh
		if r.err != nil {
			errs = append(errs, r.err)
			continue
		}
		cancel()
		left := len(addresses) - i - 1
		bus.Go(func() {
			for range left {
				if late := <-resultCh; late.stream != nil {
					late.stream.close()
				}
			}
		})
		return r.stream, nil
	}
	return nil, errors.Join(append([]error{ErrUnreachable}, errs...)...)
}

func (c *Client) takeIdle(server string) *stream {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := len(c.idle) - 1; i >= 0; i-- {
		s := c.idle[i]
		if s.server != server || time.Since(s.since) > keepIdle {
			continue
		}
		c.idle = append(c.idle[:i], c.idle[i+1:]...)
		return s
	}
	return nil
}

// keep has a connection wait for the next body.
func (c *Client) keep(s *stream) {
	s.since = time.Now()
	c.mu.Lock()
	var old []*stream
	if c.closed {
		old = append(old, s)
	} else {
		c.idle = append(c.idle, s)
	}
	for len(c.idle) > 0 && (len(c.idle) > mostIdle || time.Since(c.idle[0].since) > keepIdle) {
		old = append(old, c.idle[0])
		c.idle = c.idle[1:]
	}
	c.mu.Unlock()
	for _, s := range old {
		s.close()
	}
}

// open connects to one address.
func (c *Client) open(ctx context.Context, t *Ticket, address string) (*stream, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	s := &stream{server: t.name(), address: address, progress: &progressConn{Conn: conn, limit: c.progress}}
	if t.Relay {
		s.progress.limit = min(c.progress, relayLimit)
	}
	s.conn = s.progress
	ended := context.AfterFunc(ctx, bus.Guard(s.close))
	if len(t.Server) > 0 {
		s.progress.buffered = bufio.NewReaderSize(rawReader{s.progress}, readBuffer)
		secure := tls.Client(s.progress, c.id.config(func(fingerprint [keySize]byte) error {
			if !equal(fingerprint[:], t.Server) {
				return errors.New("the certificate is not the one of the ticket")
			}
			return nil
		}))
		s.conn = secure
		err = secure.HandshakeContext(ctx)
	}
	if err == nil {
		_, err = io.ReadFull(s.conn, s.nonce[:])
	}
	if !ended() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func fingerprintOf(conn *tls.Conn) [keySize]byte {
	return sha256.Sum256(conn.ConnectionState().PeerCertificates[0].Raw)
}
