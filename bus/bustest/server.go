package bustest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// Options configures a test server. The zero Options has no listener and default limits.
type Options struct {
	// Listen adds a TCP listener on 127.0.0.1. Its port stays the same after restarts.
	Listen bool
	// StoreDir is the folder of JetStream's files. Zero: a temporary folder of the test.
	StoreDir string
	// User and Password, when set, are required of every connection.
	User, Password string
	// NoJetStream turns JetStream off.
	NoJetStream bool
	// MaxPayload is the size limit of a message, and MaxPending the bytes that the server buffers for a slow connection
	// before it cuts it. Zero: the server's defaults, 1 MiB and 64 MiB.
	MaxPayload int32
	MaxPending int64

	configure func(*server.Options) // set by the other server types of this package
}

// Server is a nats-server with JetStream in this process, for any number of connections: use it as Config.InProcess. It
// ends with the test.
type Server struct {
	t    testing.TB
	opts Options
	port int

	mu  sync.Mutex
	srv *server.Server // the running server, or the last one; nil before the first is ready
}

// StartServer returns a running server.
func StartServer(t testing.TB, opts Options) *Server {
	t.Helper()
	if opts.StoreDir == "" {
		opts.StoreDir = t.TempDir()
	}
	s := &Server{t: t, opts: opts}
	if opts.Listen {
		s.port = FreePort(t)
	}
	t.Cleanup(s.Stop)
	s.start()
	return s
}

// FreePort is a port below the ephemeral range, which no other test is given: an abstract Unix socket of its number is
// held until the test ends.
func FreePort(t testing.TB) int {
	t.Helper()
	for range 100 {
		port := 20000 + rand.N(12000)
		claim, err := net.Listen("unix", fmt.Sprintf("@troupe-test-port-%d", port))
		if err != nil {
			continue
		}
		if l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			_ = l.Close()
			t.Cleanup(func() { _ = claim.Close() })
			return port
		}
		_ = claim.Close()
	}
	t.Fatal("bustest: no free port between 20000 and 32000")
	return 0
}

func (s *Server) start() {
	s.t.Helper()
	opts := &server.Options{
		ServerName: "bustest",
		Host:       "127.0.0.1",
		Port:       s.port,
		DontListen: !s.opts.Listen,
		NoSigs:     true,
		NoLog:      true,
		JetStream:  !s.opts.NoJetStream,
		StoreDir:   s.opts.StoreDir,
		MaxPayload: s.opts.MaxPayload,
		MaxPending: s.opts.MaxPending,
		Username:   s.opts.User,
		Password:   s.opts.Password,

		JetStreamMaxMemory: 256 << 20,
		JetStreamMaxStore:  4 << 30,
	}
	if s.opts.configure != nil {
		s.opts.configure(opts)
	}
	srv, err := server.NewServer(opts)
	if err != nil {
		s.t.Fatalf("bustest: %v", err)
	}
	srv.Start()
	if !srv.ReadyForConnections(time.Minute) {
		srv.Shutdown()
		s.t.Fatalf("bustest: nats-server on port %d with store %s is not ready after a minute", s.port, s.opts.StoreDir)
	}
	s.mu.Lock() // not earlier: an in-process connection would arrive before JetStream is ready
	s.srv = srv
	s.mu.Unlock()
}

// NATS is the running server, for its statistics.
func (s *Server) NATS() *server.Server {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.srv
}

// InProcessConn connects to the running server. It fails while there is none.
func (s *Server) InProcessConn() (net.Conn, error) { return s.NATS().InProcessConn() }

// URL is the address of the listener; empty without one.
func (s *Server) URL() string {
	if !s.opts.Listen {
		return ""
	}
	return fmt.Sprintf("nats://127.0.0.1:%d", s.port)
}

// Stop shuts the server down and waits for its end. Its store stays. Connections are cut, and new ones refused.
func (s *Server) Stop() {
	if srv := s.NATS(); srv != nil {
		srv.Shutdown()
		srv.WaitForShutdown()
	}
}

// Restart stops the server if it runs and starts it again with the same store and port. Call it from the test's own
// goroutine.
func (s *Server) Restart() {
	s.t.Helper()
	s.Stop()
	s.start()
}

// Dial is a connection provider for a NATS URL, for NewFaults in front of a server in another process.
type Dial string

func (d Dial) InProcessConn() (net.Conn, error) {
	u, err := url.Parse(string(d))
	if err != nil {
		return nil, err
	}
	return net.DialTimeout("tcp", u.Host, 5*time.Second)
}
