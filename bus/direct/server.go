package direct

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"troupe/bus"
)

// Config is the settings of a Server.
type Config struct {
	// Listen is HOST:PORT. An empty host: all addresses of the machine; port 0: a free one.
	Listen string
	// Addresses are those that receivers try, HOST or HOST:PORT. Zero: those of Listen.
	Addresses []string
	// Plain serves without TLS: for networks that are private. Zero: TLS 1.3 with certificates that both ends pin.
	Plain bool
	// OpenFunc finds a body; no bytes: it is not there. It may wait until ctx ends. The bytes are read until release is called.
	OpenFunc func(ctx context.Context, body Body) (found Found, release func())
	// Connections is the most at a time; others are closed at once, and their receivers pull over the bus. Zero: 256.
	Connections int
	// Progress is how long a connection may stand still in the middle of something. Zero: 5 s.
	Progress time.Duration
	// Logger is told of connections that are refused. Zero: slog.Default.
	Logger *slog.Logger
}

// Found is a body that a server reads.
type Found struct {
	Bytes   []byte
	Arrived *Arrived // what is there of it, while it arrives; nil: all

	SentFunc func(n int) // is told of each piece, by several goroutines; may be nil
}

const (
	defaultConnections = 256
	defaultProgress    = 5 * time.Second
	idleFor            = 30 * time.Second // a connection without a request is closed
)

// Server answers requests for bodies.
type Server struct {
	Issuer
	cfg      Config
	tls      *tls.Config // nil: plain
	listener net.Listener

	mu     sync.Mutex // guards what follows
	closed bool
	conns  map[net.Conn]struct{}
	group  sync.WaitGroup
}

// Serve listens, and answers until Close.
func Serve(cfg Config) (*Server, error) {
	cfg.Connections, cfg.Progress = cmp.Or(cfg.Connections, defaultConnections), cmp.Or(cfg.Progress, defaultProgress)
	cfg.Logger = cmp.Or(cfg.Logger, slog.Default())
	s := &Server{cfg: cfg, conns: map[net.Conn]struct{}{}}
	var fingerprint []byte
	if !cfg.Plain {
		id, err := newIdentity()
		if err != nil {
			return nil, bus.Errorf(bus.CodeUnavailable, "the certificate of the data port: %w", err)
		}
		fingerprint = id.fingerprint[:]
		s.tls = id.config(func([keySize]byte) error { return nil }) // each request is compared with the receiver's
	}
	var err error
	if s.listener, err = net.Listen("tcp", cfg.Listen); err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "listen on the data port %s: %w (--data-listen)", cfg.Listen, err)
	}
	addresses, err := announced(cfg.Addresses, s.listener.Addr().(*net.TCPAddr))
	if err != nil {
		dropListener(s.listener)
		return nil, err
	}
	s.Issuer = newIssuer(addresses, fingerprint)
	s.group.Add(1)
	bus.Go(func() {
		defer s.group.Done()
		s.accept()
	})
	return s, nil
}

func dropListener(l net.Listener) { _ = l.Close() } // nothing was accepted

// Close ends all transfers.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	for conn := range s.conns {
		dropped(conn)
	}
	s.mu.Unlock()
	dropListener(s.listener)
	s.group.Wait()
}

func (s *Server) accept() {
	for {
		conn, err := s.listener.Accept()
		if err != nil {
			s.mu.Lock()
			closed := s.closed
			s.mu.Unlock()
			if closed {
				return
			}
			s.cfg.Logger.Warn("direct: a connection cannot be accepted", "error", err)
			time.Sleep(100 * time.Millisecond) // out of descriptors, for instance
			continue
		}
		s.mu.Lock()
		if s.closed || len(s.conns) >= s.cfg.Connections {
			s.mu.Unlock()
			dropped(conn)
			continue
		}
		s.conns[conn] = struct{}{}
		s.group.Add(1)
		s.mu.Unlock()
		bus.Go(func() {
			defer s.group.Done()
			err := s.serve(conn)
			dropped(conn)
			s.mu.Lock()
			delete(s.conns, conn)
			s.mu.Unlock()
			if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
				s.cfg.Logger.Debug("direct: a connection has ended", "peer", conn.RemoteAddr(), "error", err)
			}
		})
	}
}

// session is one connection at the server.
type session struct {
	*Server
	progress *progressConn
	conn     net.Conn // progress, or TLS over it
	receiver [keySize]byte
	nonce    [nonceSize]byte
	accepted []byte // the grant of the last good request: it is not compared with the clock again

	// The body of that grant is held from one request to the next, until the receiver ends it: the first claim of it costs more than a range.
	found   Found
	release func() // nil: none is held
}

// hold finds the body of a grant, if it is not held already; false: it is not there.
func (c *session) hold(ctx context.Context, b Body) bool {
	if c.release != nil {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Progress)
	defer cancel()
	found, release := c.cfg.OpenFunc(ctx, b)
	if found.Bytes == nil {
		return false
	}
	c.found, c.release = found, release
	return int64(len(found.Bytes)) == b.Length
}

// letGo ends the use of the body that is held.
func (c *session) letGo() {
	if c.release != nil {
		c.release()
		c.found, c.release = Found{}, nil
	}
}

func (s *Server) serve(conn net.Conn) error {
	c := &session{Server: s, progress: &progressConn{Conn: conn, limit: s.cfg.Progress}}
	c.conn = c.progress
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if s.tls != nil {
		secure := tls.Server(c.progress, s.tls)
		c.conn = secure
		hurry, cancel := context.WithTimeout(ctx, s.cfg.Progress)
		defer cancel()
		if err := secure.HandshakeContext(hurry); err != nil {
			return err
		}
		c.receiver = fingerprintOf(secure)
	}
	_, _ = rand.Read(c.nonce[:]) // it never fails
	if _, err := c.conn.Write(c.nonce[:]); err != nil {
		return err
	}
	defer c.letGo()
	for number := uint64(0); ; number++ {
		if err := c.answer(ctx, number); err != nil {
			return err
		}
	}
}

// answer reads one request and answers it.
func (c *session) answer(ctx context.Context, number uint64) error {
	var request [requestSize]byte
	if err := c.progress.flush(); err != nil {
		return err
	}
	c.progress.limit = idleFor
	if _, err := io.ReadFull(c.conn, request[:]); err != nil {
		return err
	}
	c.progress.limit = c.cfg.Progress
	g, why := c.check(request[:], number)
	if why != 0 {
		return c.refuse(why)
	}
	offset, length := rangeOf(request[:])
	if length == 0 {
		c.letGo()
		return nil
	}
	if !c.hold(ctx, g.body) {
		return c.refuse(refusedGone)
	}
	for at, end := int(offset), int(offset+length); at < end; {
		next := min((at/pieceSize+1)*pieceSize, end)
		if err := c.await(at, next); err != nil {
			return err
		}
		if err := writePiece(c.conn, c.found.Bytes[at:next]); err != nil {
			return err
		}
		if c.found.SentFunc != nil {
			c.found.SentFunc(next - at)
		}
		at = next
	}
	return nil
}

// await waits until a piece has arrived, and tells the receiver meanwhile that this server lives.
func (c *session) await(from, to int) error {
	if c.found.Arrived == nil {
		return nil
	}
	for limit := time.Duration(0); ; limit = aliveEvery {
		there, never := c.found.Arrived.wait(from, to, limit)
		if there {
			return nil
		}
		if never {
			return c.refuse(refusedGone)
		}
		if limit > 0 {
			if err := writeRefusal(c.conn, 0); err != nil {
				return err
			}
		}
		if err := c.progress.flush(); err != nil {
			return err
		}
	}
}

func (c *session) refuse(why refusal) error {
	if err := writeRefusal(c.conn, why); err != nil {
		return err
	}
	return errors.Join(c.progress.flush(), why)
}

func rangeOf(request []byte) (offset, length uint64) {
	return binary.LittleEndian.Uint64(request[grantSize:]), binary.LittleEndian.Uint64(request[grantSize+8:])
}

// check decides whether a request is permitted; zero: it is.
func (c *session) check(request []byte, number uint64) (grant, refusal) {
	shown, asked, given := request[:grantSize], request[:grantSize+rangeSize], request[grantSize+rangeSize:]
	key := mac(c.Key, shown)
	if !equal(given, proof(key, c.nonce[:], number, asked)) {
		return grant{}, refusedTicket
	}
	g, err := decodeGrant(shown)
	if err != nil || c.tls != nil && g.receiver != c.receiver {
		return grant{}, refusedTicket
	}
	if !equal(c.accepted, shown) && time.Now().After(g.expires) {
		return grant{}, refusedExpired
	}
	if !equal(c.accepted, shown) {
		c.letGo()
	}
	c.accepted = append(c.accepted[:0], shown...)
	offset, length := rangeOf(request)
	if size := uint64(g.body.Length); length > size || offset > size-length {
		return grant{}, refusedRange
	}
	return g, 0
}
