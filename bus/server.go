package bus

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// closedClients bounds the closed connections that the server remembers for its reports: about 2 KiB each. Every worker
// process has one, and the server's default is 10,000.
const closedClients = 64

// serverPing is how often the server asks an idle connection for a sign of life. Without the second answer it ends the connection. A
// connection that does not authenticate ends after two seconds, where a token is required.
const serverPing = 20 * time.Second

// embedded is a nats-server inside this process.
type embedded struct {
	srv        *server.Server
	log        *slog.Logger
	tempDir    string // removed by stop; empty: the store belongs to the user
	stopCopies func() // nil if none are kept
	refused    atomic.Uint64
	guard      *storeGuard
	member     *Member        // nil: the server is not a member of a cluster
	auth       *authenticator // nil: the server asks for no token
}

// startServer returns a server that accepts connections, or an error that names the address and the store.
func startServer(ctx context.Context, name string, cfg ServerConfig, log *slog.Logger) (*embedded, error) {
	opts := &server.Options{
		ServerName:         strings.Join(strings.Fields(name), "-"), // must not contain spaces
		DontListen:         cfg.Listen == "",
		NoSigs:             true,
		JetStream:          true,
		StoreDir:           cfg.StoreDir,
		JetStreamMaxMemory: cfg.MaxMemory,
		JetStreamMaxStore:  cfg.MaxStore,
		SyncAlways:         cfg.SyncAlways,
		TLSConfig:          cfg.TLS,
		TLSTimeout:         5,
		MaxClosedClients:   closedClients,
		PingInterval:       serverPing,
		MaxPingsOut:        2,
	}
	opts.MaxConn, _ = connectionLimits(descriptors())
	if cfg.Listen != "" {
		host, port, err := splitListen(cfg.Listen)
		if err != nil {
			return nil, err
		}
		opts.Host, opts.Port = host, port
	}
	e := &embedded{}
	if cfg.Token != "" {
		e.auth = &authenticator{token: cfg.Token, most: opts.MaxConn / 2}
		opts.CustomClientAuthentication = e.auth
	}
	if cfg.Cluster != nil {
		password, err := newSystemPassword()
		if err != nil {
			return nil, err
		}
		if err := cfg.Cluster.apply(opts, password); err != nil {
			return nil, err
		}
		e.member = &Member{name: cfg.Cluster.Member, password: password}
		e.auth.password = password
	}
	if cfg.StoreDir == "" {
		dir, err := os.MkdirTemp("", "troupe-")
		if err != nil {
			return nil, Errorf(CodeUnavailable, "create a folder for the embedded server: %w", err)
		}
		opts.StoreDir, e.tempDir = dir, dir
	} else if err := repairStreams(cfg.StoreDir, log); err != nil {
		return nil, Errorf(CodeUnavailable, "embedded server with store %s: %w", cfg.StoreDir, err)
	}
	e.log = log
	if e.auth != nil {
		e.auth.log = log
	}
	if err := e.start(ctx, opts, newStoreGuard(opts.StoreDir, cfg, log)); err != nil {
		e.stop()
		return nil, err
	}
	if e.tempDir == "" {
		e.keepCopies(cfg.StoreDir, log)
	}
	return e, nil
}

// keepCopies keeps copies of the streams' configurations until the server stops.
func (e *embedded) keepCopies(store string, log *slog.Logger) {
	ctx, cancel := context.WithCancel(context.Background())
	doneCh := make(chan struct{})
	Go(func() {
		defer close(doneCh)
		keepCopies(ctx, store, log)
	})
	e.stopCopies = func() { cancel(); <-doneCh }
}

func (e *embedded) start(ctx context.Context, opts *server.Options, guard *storeGuard) error {
	if err := ctx.Err(); err != nil {
		return Errorf(CodeOf(err), "embedded server: %w", err)
	}
	srv, err := server.NewServer(opts)
	if err != nil {
		return Errorf(CodeInvalid, "embedded server%s: %w", serverPlace(opts), err)
	}
	e.srv = srv
	if e.auth != nil {
		e.auth.srv = srv
	}
	if e.member != nil {
		e.member.srv = srv
	}
	fatalCh := make(chan string, 1)
	srv.SetLoggerV2(&serverLog{log: e.log, fatalCh: fatalCh, refused: &e.refused, guard: guard, auth: e.auth}, false, false, false)
	Go(srv.Start)
	if err := awaitReady(ctx, srv, opts, fatalCh); err != nil {
		return err
	}
	guard.start(srv)
	e.guard = guard
	return nil
}

// awaitReady polls the server, because its own wait cannot be cancelled.
func awaitReady(ctx context.Context, srv *server.Server, opts *server.Options, fatalCh <-chan string) error {
	timeout := time.After(time.Minute)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !srv.ReadyForConnections(time.Millisecond) {
		select {
		case why := <-fatalCh:
			return Errorf(CodeUnavailable, "embedded server%s: %s", serverPlace(opts), why)
		case <-timeout:
			return Errorf(CodeUnavailable, "embedded server%s: not ready after a minute", serverPlace(opts))
		case <-ctx.Done():
			return Errorf(CodeOf(ctx.Err()), "embedded server: %w", ctx.Err())
		case <-tick.C:
		}
	}
	return nil
}

// serverPlace is the address and the store of a server, for messages.
func serverPlace(opts *server.Options) string {
	if opts.DontListen {
		return " with store " + opts.StoreDir
	}
	return " on " + net.JoinHostPort(opts.Host, strconv.Itoa(opts.Port)) + " with store " + opts.StoreDir
}

// endLimit is how long a server may take to end. One whose store is stuck does not end by itself.
const endLimit = time.Minute

// stop shuts the server down, waits until it has ended, and removes a temporary store.
func (e *embedded) stop() {
	if e.stopCopies != nil {
		e.stopCopies()
	}
	if e.guard != nil {
		e.guard.stop()
	}
	if e.srv != nil {
		e.shutdown()
	}
	if e.tempDir != "" {
		_ = os.RemoveAll(e.tempDir) // a leftover temporary file is harmless
	}
}

// shutdown ends the server. It gives up on a server that hangs; its files are then as after a crash.
func (e *embedded) shutdown() {
	doneCh := make(chan struct{})
	Go(func() {
		defer close(doneCh)
		e.awaitQuiet(time.Second)
		if e.member != nil {
			e.srv.LameDuckShutdown() // hands over what the server leads, and tells its clients to go to another one
		}
		e.srv.Shutdown()
		e.srv.WaitForShutdown()
	})
	limit := endLimit
	if e.guard != nil && e.guard.isStuck() {
		limit = shutdownLimit
	}
	select {
	case <-doneCh:
	case <-time.After(limit):
		e.log.Error("bus: the embedded server does not end; it is abandoned", "after", limit)
	}
}

// awaitQuiet waits for JetStream requests that are being served: a stream that is created while the server shuts down
// leaks its open files.
func (e *embedded) awaitQuiet(limit time.Duration) {
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(time.Millisecond) {
		stats, err := e.srv.Jsz(&server.JSzOptions{})
		if err != nil || stats.API.Inflight == 0 {
			return
		}
	}
}

func splitListen(listen string) (string, int, error) {
	host, portText, err := net.SplitHostPort(listen)
	if err != nil {
		return "", 0, Errorf(CodeInvalid, "listen address %q: give HOST:PORT, as in 127.0.0.1:4222", listen)
	}
	port, err := strconv.Atoi(portText)
	if err != nil || port < 0 || port > 65535 {
		return "", 0, Errorf(CodeInvalid, "listen address %q: the port must be a number from 0 to 65535", listen)
	}
	if port == 0 {
		port = server.RANDOM_PORT
	}
	return host, port, nil
}

// serverLog forwards the server's log, and a fatal line to startServer: the server does not return such an error.
type serverLog struct {
	log     *slog.Logger
	fatalCh chan string
	refused *atomic.Uint64 // connections
	guard   *storeGuard
	auth    *authenticator
}

func (l *serverLog) Noticef(format string, v ...any) { l.log.Debug(fmt.Sprintf(format, v...)) }
func (l *serverLog) Debugf(string, ...any)           {}
func (l *serverLog) Tracef(string, ...any)           {}
func (l *serverLog) Errorf(format string, v ...any) {
	msg := fmt.Sprintf(format, v...)
	if strings.Contains(msg, server.ErrAuthentication.Error()) || strings.Contains(msg, "handshake error") {
		l.refused.Add(1) // the server has no counter for these
	}
	if strings.HasPrefix(msg, "Error trying to connect to route") { // a member that is down: Member.Peers tells
		l.log.Debug("nats-server: " + msg)
		return
	}
	if l.auth.heard(l.log, msg) {
		return
	}
	l.guard.heard(msg)
	l.log.Error("nats-server: " + msg)
}

// Warnf drops warnings about settings that Troupe makes on purpose.
func (l *serverLog) Warnf(format string, v ...any) {
	msg := fmt.Sprintf(format, v...)
	for _, intended := range []string{"Plaintext passwords", "JetStream maximum", "hostname of solicited routes"} {
		if strings.Contains(msg, intended) {
			return
		}
	}
	l.guard.heard(msg)
	l.log.Warn("nats-server: " + msg)
}

func (l *serverLog) Fatalf(format string, v ...any) {
	select {
	case l.fatalCh <- fmt.Sprintf(format, v...):
	default:
	}
}
