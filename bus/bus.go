package bus

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/bits"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"troupe/bus/wire"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Bus is one connection to NATS, with the embedded server behind it if there is one. It is safe for concurrent use.
type Bus struct {
	cfg    Config
	conn   atomic.Pointer[conn] // the current connection, see reopen
	srv    *embedded            // nil for an external server
	owned  bool                 // Close closes the connection
	budget *Budget              // bytes of large bodies in flight to this connection

	link        link
	answering   answering
	asyncErrors atomic.Uint64
	malformed   atomic.Uint64
	dropped     *atomic.Uint64            // slow consumer events, shared with the connections that Dial makes
	dialled     atomic.Pointer[batchConn] // the newest socket
	wire        atomic.Pointer[batchConn] // the same, while the bus may write to it directly
	beforeRead  atomic.Pointer[func()]    // see BeforeRead

	serverConn   atomic.Pointer[serverConn] // the newest
	several      atomic.Bool                // there is another server to go to
	dialFailures atomic.Int32               // since a server spoke

	mu       sync.Mutex // guards what follows
	sessions map[*Session]struct{}
	closed   bool
	refusals refusals

	subscribing   sync.Mutex // guards subscriptions and changes of conn; held while NATS subscribes, which may take seconds
	subscriptions map[*Subscription]struct{}

	closingCh chan struct{} // closed by Close
	watchDone chan struct{}
}

// conn is a connection to NATS. The bus replaces it when NATS has closed it unasked.
type conn struct {
	nc       *nats.Conn
	js       jetstream.JetStream
	statusCh chan nats.Status
	before   uint64 // times that the connections before this one connected again, or were replaced
}

// Open connects as cfg says. The zero Config starts a private embedded server. ctx bounds the opening only; the bus is
// open until Close.
func Open(ctx context.Context, cfg Config) (*Bus, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	if file := cfg.TokenFile; file != "" {
		token, err := ReadFile(file, maxTokenFile)
		if err != nil {
			return nil, Errorf(CodeInvalid, "token file: %w", err)
		}
		cfg.Token, cfg.TokenFile = strings.TrimSpace(string(token)), ""
		if cfg.Token == "" {
			return nil, Errorf(CodeInvalid, "token file %s is empty", file)
		}
		if user, password, two := strings.Cut(cfg.Token, "\n"); two {
			cfg.Token, cfg.user, cfg.password = "", strings.TrimSpace(user), strings.TrimSpace(password)
		}
	}
	if len(cfg.URLs) > 0 || cfg.InProcess != nil {
		return dial(ctx, cfg)
	}
	srv, err := startServer(ctx, cfg.Name, cfg.Server, cfg.Logger)
	if err != nil {
		return nil, err
	}
	cfg.InProcess, cfg.Token = srv.srv, cfg.Server.Token
	b, err := dial(ctx, cfg)
	if err != nil {
		srv.stop()
		return nil, err
	}
	b.srv = srv
	return b, nil
}

// Wrap makes a Bus from a connection that belongs to the caller: its handlers stay, and Close does not close it.
func Wrap(nc *nats.Conn, cfg Config) (*Bus, error) {
	if nc == nil || nc.IsClosed() {
		return nil, Errorf(CodeClosed, "bus.Wrap: the connection is closed")
	}
	return newBus(nc, cfg.withDefaults(), false)
}

// Dial opens another connection to the same server, for a worker with a connection of its own. The embedded server
// stays with the Bus that started it.
func (b *Bus) Dial(ctx context.Context, name string) (*Bus, error) {
	cfg := b.cfg
	cfg.Name = name
	if len(cfg.URLs) == 0 && cfg.InProcess == nil {
		return nil, Errorf(CodeInvalid, "bus.Dial: this bus wraps a connection and does not know how it was made")
	}
	return dialInto(ctx, cfg, b.dropped)
}

func dial(ctx context.Context, cfg Config) (*Bus, error) {
	return dialInto(ctx, cfg, new(atomic.Uint64))
}

func dialInto(ctx context.Context, cfg Config, dropped *atomic.Uint64) (*Bus, error) {
	b := &Bus{cfg: cfg, dropped: dropped, owned: true}
	b.several.Store(len(cfg.URLs) > 1)
	opts, err := b.options()
	if err != nil {
		return nil, err
	}
	nc, err := connect(ctx, cfg, opts)
	if err != nil {
		return nil, err
	}
	return b.init(nc)
}

func newBus(nc *nats.Conn, cfg Config, owned bool) (*Bus, error) {
	return (&Bus{cfg: cfg, dropped: new(atomic.Uint64), owned: owned}).init(nc)
}

func (b *Bus) init(nc *nats.Conn) (*Bus, error) {
	c, err := b.newConn(nc)
	if err != nil {
		return nil, err
	}
	b.conn.Store(c)
	b.budget = NewBudget(b.cfg.Budget)
	b.sessions, b.subscriptions = map[*Session]struct{}{}, map[*Subscription]struct{}{}
	b.link.begin(nc)
	b.answering.askCh = make(chan struct{}, 1)
	b.closingCh, b.watchDone = make(chan struct{}), make(chan struct{})
	Go(b.watchLink)
	b.noteServers(nc.Servers(), nc.ConnectedClusterName())
	return b, nil
}

// newConn checks a connection that was just made. If it is not fit, and the bus owns it, it is closed.
func (b *Bus) newConn(nc *nats.Conn) (*conn, error) {
	js, err := jetstream.New(nc)
	switch {
	case err != nil:
		err = Errorf(CodeInternal, "jetstream: %w", err)
	case nc.MaxPayload() < minPayload:
		err = Errorf(CodeInvalid, "the server at %s accepts messages of %d bytes; Troupe needs at least %d (set max_payload)", nc.ConnectedUrlRedacted(), nc.MaxPayload(), minPayload)
	}
	if err != nil {
		if b.owned {
			nc.Close()
		}
		return nil, err
	}
	if b.owned {
		b.adopt(nc)
	}
	return &conn{nc: nc, js: js, statusCh: nc.StatusChanged()}, nil // before its state is read: no event is missed
}

// connect dials once, or until ctx ends when cfg.Wait says so.
func connect(ctx context.Context, cfg Config, opts nats.Options) (*nats.Conn, error) {
	waits := Backoff{First: 50 * time.Millisecond, Most: 2 * time.Second}.Start()
	for {
		nc, err := connectOnce(ctx, cfg, opts)
		if err == nil || !cfg.Wait || !errors.Is(err, ErrUnavailable) {
			return nc, err
		}
		if waits.Wait(ctx) != nil {
			return nil, err // the server's own failure, which says more than the end of ctx
		}
	}
}

// connectOnce returns when ctx ends, which NATS itself cannot. A connection that is made too late is closed.
func connectOnce(ctx context.Context, cfg Config, opts nats.Options) (*nats.Conn, error) {
	type result struct {
		nc  *nats.Conn
		err error
	}
	resultCh := make(chan result, 1)
	Go(func() {
		nc, err := opts.Connect()
		resultCh <- result{nc, err}
	})
	select {
	case r := <-resultCh:
		return r.nc, connectError(cfg, r.err)
	case <-ctx.Done():
		Go(func() {
			if r := <-resultCh; r.nc != nil {
				r.nc.Close()
			}
		})
		return nil, Errorf(CodeOf(ctx.Err()), "connect to %s: the server has not answered yet: %w", cfg.where(), ctx.Err())
	}
}

// where lists the servers for messages, without the secrets in their URLs.
func (c Config) where() string {
	if len(c.URLs) == 0 {
		return "the server in this process"
	}
	return Redact(c.URLs...)
}

func connectError(cfg Config, err error) error {
	where := cfg.where()
	var badCert *tls.CertificateVerificationError
	switch {
	case err == nil:
		return nil
	case authFailed(err):
		return Errorf(CodeRefused, "connect to %s: the server refused the connection: %s (%w)", where, cfg.remedy(err, time.Now()), err)
	case errors.As(err, &badCert) && cfg.TLS.Fingerprint == "" && cfg.TLS.CAFile == "":
		return Errorf(CodeRefused, "connect to %s: the certificate of the server is signed by no known authority; give the SHA-256 fingerprint that `troupe up` prints: --fingerprint or TROUPE_FINGERPRINT (%w)", where, err)
	case errors.Is(err, ErrRefused), errors.As(err, &badCert):
		return Errorf(CodeRefused, "connect to %s: the server's certificate is not accepted: %w", where, err)
	case errors.Is(err, nats.ErrSecureConnWanted):
		return Errorf(CodeRefused, "connect to %s: TLS is required here and the server does not offer it: %w", where, err)
	case errors.Is(err, nats.ErrNoServers), errors.Is(err, nats.ErrTimeout), errors.Is(err, syscall.ECONNRESET), errors.Is(err, io.EOF):
		return Errorf(CodeUnavailable, "connect to %s: no server answers there; is it running? (%w)", where, err)
	}
	return Errorf(CodeUnavailable, "connect to %s: %w", where, err)
}

// options is the connection policy: reconnect for ever, drop messages that are published while disconnected, and report
// every asynchronous error.
func (b *Bus) options() (nats.Options, error) {
	cfg, out := b.cfg, nats.GetDefaultOptions()
	for _, u := range cfg.URLs {
		out.Servers = append(out.Servers, strings.TrimSpace(u))
	}
	opts := []nats.Option{
		nats.Name(cfg.Name),
		nats.MaxReconnects(-1),
		nats.IgnoreAuthErrorAbort(), // turnedAway decides
		nats.ReconnectBufSize(-1),
		nats.CustomReconnectDelay(reconnectDelay),
		nats.PingInterval(5 * time.Second),
		nats.MaxPingsOutstanding(2),
		nats.Timeout(dialTimeout),
		nats.ErrorHandler(b.asyncError),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				cfg.Logger.Warn("bus: disconnected; reconnecting", "error", err)
			}
		}),
		nats.ReconnectHandler(func(nc *nats.Conn) {
			b.adopt(nc)
			b.noteServers(nc.Servers(), nc.ConnectedClusterName())
			cfg.Logger.Info("bus: reconnected", "server", nc.ConnectedUrlRedacted())
		}),
		nats.DiscoveredServersHandler(func(nc *nats.Conn) { b.noteServers(nc.Servers(), nc.ConnectedClusterName()) }),
		nats.SetCustomDialer(&dialer{b}),
	}
	if cfg.InProcess != nil {
		opts = append(opts, nats.InProcessServer(cfg.InProcess))
	}
	if cfg.Token != "" {
		opts = append(opts, nats.Token(cfg.Token))
	}
	if c, ok := ReadCredential(cfg.Token); ok {
		opts = append(opts, nats.CustomInboxPrefix(c.inboxPrefix()))
	}
	if cfg.user != "" {
		opts = append(opts, nats.UserInfo(cfg.user, cfg.password))
	}
	if cfg.CredsFile != "" {
		if _, err := readCreds(cfg.CredsFile); err != nil {
			return out, err
		}
		opts = append(opts, nats.UserCredentials(cfg.CredsFile))
	}
	tlsOpts, err := cfg.TLS.options()
	if err != nil {
		return out, err
	}
	for _, opt := range append(opts, tlsOpts...) {
		if err := opt(&out); err != nil {
			return out, Errorf(CodeInvalid, "bus.Config: %w", err)
		}
	}
	return out, nil
}

// reconnectDelay begins with milliseconds, because a restarted server is back soon, and then backs off with jitter,
// because a thousand clients reconnect together.
func reconnectDelay(attempts int) time.Duration {
	d := min(20*time.Millisecond<<min(attempts, 7), 2*time.Second)
	return d/2 + rand.N(d/2)
}

func (t TLSConfig) options() ([]nats.Option, error) {
	var opts []nats.Option
	if t.CAFile != "" {
		opts = append(opts, nats.RootCAs(t.CAFile))
	}
	if t.CertFile != "" {
		opts = append(opts, nats.ClientCert(t.CertFile, t.KeyFile))
	}
	if t.Fingerprint != "" {
		want, err := hex.DecodeString(strings.ReplaceAll(strings.ToLower(t.Fingerprint), ":", ""))
		if err != nil || len(want) != sha256.Size {
			return nil, Errorf(CodeInvalid, "TLS fingerprint %q: give the SHA-256 of the certificate, 64 hexadecimal digits", wire.Clip(t.Fingerprint))
		}
		opts = append(opts, nats.Secure(pinned(want)))
	}
	return opts, nil
}

// pinned accepts only the certificate with that fingerprint. Chain and name are not checked: the fingerprint is the
// stronger check, and self-signed certificates have neither.
func pinned(want []byte) *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS12,
		InsecureSkipVerify: true, //nolint:gosec // VerifyPeerCertificate is stricter
		VerifyPeerCertificate: func(raw [][]byte, _ [][]*x509.Certificate) error {
			if len(raw) > 0 {
				if got := sha256.Sum256(raw[0]); subtle.ConstantTimeCompare(got[:], want) == 1 {
					return nil
				}
			}
			return Errorf(CodeRefused, "the fingerprint of the server's certificate is not the configured one")
		},
	}
}

// asyncError logs and counts the asynchronous errors of the connection.
func (b *Bus) asyncError(nc *nats.Conn, sub *nats.Subscription, err error) {
	if errors.Is(err, net.ErrClosed) { // a write beside the end of the connection, which is reported where it was ended
		b.cfg.Logger.Debug("bus: a write to a connection that has ended", "error", err)
		return
	}
	b.asyncErrors.Add(1)
	if authFailed(err) {
		first, why := b.turnedAway(nc, err)
		if !first {
			return // logged before
		}
		err = fmt.Errorf("the server refuses the connection: %s (%w)", why, err)
	}
	if c, ok := ReadCredential(b.cfg.Token); ok && errors.Is(err, nats.ErrPermissionViolation) {
		err = fmt.Errorf("the credential of this process (%s %s%s) does not permit it; docs/security.md lists what it permits (%w)", c.Kind, c.Namespace, c.Node, err)
	}
	subject := ""
	if sub != nil {
		subject = sub.Subject
	}
	b.cfg.Logger.Error("bus: asynchronous error", "error", err, "subject", subject)
	if b.cfg.OnError != nil {
		b.cfg.OnError(Errorf(CodeInternal, "bus: %w (subject %q)", err, subject))
	}
	if errors.Is(err, nats.ErrSlowConsumer) {
		b.dropped.Add(1)
		b.eachSession((*Session).sweepNow) // messages were dropped: find out which
	}
}

// AsyncErrors counts the asynchronous errors since the bus was opened.
func (b *Bus) AsyncErrors() uint64 { return b.asyncErrors.Load() }

// Dropped counts how often a subscription began to drop messages because its buffer was full, on this connection and on
// those that Dial made from it. NATS reports that once until the subscription has caught up. It is zero unless a
// consumer is too slow, or messages are larger than documented.
func (b *Bus) Dropped() uint64 { return b.dropped.Load() }

// Malformed counts a message that cannot be read and is dropped, and logs some of them: the first, the second, the fourth, …
func (b *Bus) Malformed(what string, err error) {
	if n := b.malformed.Add(1); bits.OnesCount64(n) == 1 {
		b.cfg.Logger.Warn("bus: a malformed message is dropped", "message", what, "error", err, "dropped so far", n)
	}
}

// MalformedCount counts the malformed messages that were dropped.
func (b *Bus) MalformedCount() uint64 { return b.malformed.Load() }

func (b *Bus) eachSession(do func(*Session)) {
	b.mu.Lock()
	all := slices.Collect(maps.Keys(b.sessions))
	b.mu.Unlock()
	for _, s := range all {
		do(s)
	}
}

// Conn is the NATS connection, for bus and its subpackages. Its handlers belong to the bus. It is another one after NATS has closed
// it unasked, so it is not kept.
func (b *Bus) Conn() *nats.Conn { return b.conn.Load().nc }

// JetStream is the connection's JetStream context.
func (b *Bus) JetStream() jetstream.JetStream { return b.conn.Load().js }

// Done is closed when the bus has been closed and its connection has ended.
func (b *Bus) Done() <-chan struct{} { return b.watchDone }

// Logger is the logger of Config.
func (b *Bus) Logger() *slog.Logger { return b.cfg.Logger }

// Budget bounds the bytes of large bodies in flight to this connection.
func (b *Bus) Budget() *Budget { return b.budget }

// MaxBody is the largest body that is accepted.
func (b *Bus) MaxBody() int64 { return b.cfg.MaxBody }

// ValuesConfig bounds the values of a session of this bus.
func (b *Bus) ValuesConfig() ValuesConfig { return b.cfg.Values }

// LocalHost is the address of this machine from which the server is reached, and so an address for other clients of that server. No packet is sent.
func (b *Bus) LocalHost() string {
	if b.srv != nil {
		host, _, _ := net.SplitHostPort(b.cfg.Server.Listen) // checked when it was opened
		return cmp.Or(host, "127.0.0.1")
	}
	conn, err := net.Dial("udp", b.Conn().ConnectedAddr())
	if err != nil {
		return "127.0.0.1"
	}
	defer func() { _ = conn.Close() }() // nothing was written to it
	return conn.LocalAddr().(*net.UDPAddr).IP.String()
}

// OutageLimit is how long calls stay pending while the server is unreachable.
func (b *Bus) OutageLimit() time.Duration { return b.cfg.OutageLimit }

// Embedded reports whether the server runs in this process.
func (b *Bus) Embedded() bool { return b.srv != nil }

// URL is the address of the embedded server's listener, or of the external server; empty for a server without a
// listener.
func (b *Bus) URL() string {
	if b.srv == nil {
		return b.Conn().ConnectedUrlRedacted()
	}
	if b.cfg.Server.Listen == "" {
		return ""
	}
	return b.srv.srv.ClientURL()
}

// Refused counts the connections that the embedded server has refused for missing or wrong credentials or certificates.
func (b *Bus) Refused() uint64 {
	if b.srv == nil {
		return 0
	}
	return b.srv.refused.Load()
}

// Close closes every session, the connection if the bus owns it, and the embedded server. It may be called more than
// once.
func (b *Bus) Close() error {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return nil
	}
	b.closed = true
	b.mu.Unlock()
	close(b.closingCh) // from here on the connection is not replaced
	b.eachSession((*Session).Close)
	b.subscribing.Lock()
	c := b.conn.Load()
	b.subscribing.Unlock()
	if b.owned {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_ = c.nc.FlushWithContext(ctx) // send pending messages; a dead server must not block Close
		cancel()
		c.nc.Close()
	}
	c.nc.RemoveStatusListener(c.statusCh)
	<-b.watchDone
	if b.srv != nil {
		b.srv.stop()
	}
	return nil
}
