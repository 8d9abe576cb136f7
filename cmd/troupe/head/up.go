package head

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/cmd/troupe/metrics"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/nodes/evidence"
	"troupe/placement"
	"troupe/roles"
	"troupe/roles/sessions"
	"troupe/weights"
)

// upFlags are the flags of up.
type upFlags struct {
	listen   string
	store    string
	nats     []string
	creds    string
	noAgent  bool
	grace    time.Duration
	stdin    bool
	metrics  string
	replicas int
	audit    time.Duration
	limit    string
	logDir   string
	cluster  clusterFlags
	node     nodeFlags
	logging  cli.LoggingFlags
}

func newUp(c command) *cobra.Command {
	var flags upFlags
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Run the head on this machine until a signal ends it",
		Long: `Up runs the head: an embedded NATS server with its store, on loopback by default, and the placement service. Every connection
needs the token in STORE/token, which only its owner can read; commands of the same user find it. On an address beyond
loopback the server uses TLS with a self-signed certificate, whose fingerprint clients check, and the command with which other
machines join is printed.

The agent of this machine runs beside the head, as a process of its own (--gpus auto asks the driver for the devices). The agent
and its workers outlive a head that is killed, and the next head on the same store takes them over: port, token, certificate and
store are kept. INT, TERM and HUP also end the agent and its workers; a second signal a second later ends the head at once.

The store is bounded by --store-limit. When the limit is reached or the disk is full, requests that need the store are refused
at once ("no space left in the head's store"); running workers and calls continue. The head accepts writes again when there is
space; if its store cannot be closed and opened again, it replaces itself, under the same process id.

With --cluster, three heads on three machines have one store between them, and any two of them go on when the third is lost. --init on one
of them makes the bundle, a file with the secrets of the cluster, which the others are given with --bundle. The store knows its cluster: later
starts need none of these flags.

With --nats the head uses an external NATS server, with the credentials file of --creds or TROUPE_CREDS, or with TROUPE_TOKEN.`,
		Example: `  troupe up
  troupe up --listen 127.0.0.1:9000 --store ./run
  troupe up --gpus sim:2x8             # two simulated nodes of eight devices
  troupe up --listen 0.0.0.0:7422      # prints how other machines join
  troupe up --cluster a,b,c --init --bundle cluster.bundle     # on a, then copy the bundle to b and c
  troupe up --bundle cluster.bundle                            # on b and c
  troupe up --nats nats://a:4222,nats://b:4222 --creds troupe.creds`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if len(flags.nats) > 0 && cmd.Flags().Changed("listen") {
				return cli.Usagef("--nats and --listen exclude each other: an external NATS server has its own address")
			}
			if len(flags.nats) > 0 && flags.limit != "" {
				return cli.Usagef("--nats and --store-limit exclude each other: an external NATS server has its own limit (max_file_store)")
			}
			var err error
			if flags.logging, err = c.SetLogging(flags.logging); err != nil {
				return err
			}
			h, err := c.newHead(flags)
			if err != nil {
				return err
			}
			if err := c.joinCluster(h, flags, cmd.Flags().Changed("listen")); err != nil {
				return err
			}
			ctx := cmd.Context()
			if flags.stdin {
				ctx = untilClosed(ctx, cmd.InOrStdin())
			}
			if flags.stdin && !cmd.Flags().Changed("grace") && h.agent != nil { // the head and its program end together
				h.agent.Grace, h.agent.Wait = evidence.LaunchGrace, evidence.LaunchGrace
			}
			h.replaceable = true
			if err := c.up(ctx, h, nil); err != nil || !h.again {
				return err
			}
			return runInstalled()
		},
	}
	flags.add(cmd)
	c.JSONFlag(cmd, "say on one line of JSON where the head is, once it is ready")
	return cmd
}

func (f *upFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.listen, "listen", defaultListen, "address to listen on, HOST:PORT; port 0 is a free port, the same at the next start")
	cmd.Flags().StringVar(&f.store, "store", "", "folder for state and secrets (default in the user's state folder)")
	cmd.Flags().StringSliceVar(&f.nats, "nats", nil, "URLs of an external NATS server to use instead")
	cmd.Flags().StringVar(&f.creds, "creds", "", "credentials file for --nats (default $TROUPE_CREDS)")
	cmd.Flags().BoolVar(&f.noAgent, "no-agent", false, "run no agent for this machine")
	cmd.Flags().DurationVar(&f.grace, "grace", evidence.HeadGrace, "how long the agent keeps its workers while the head is gone")
	cmd.Flags().BoolVar(&f.stdin, "with-stdin", false, "end when standard input is closed, for a head that belongs to another program")
	cmd.Flags().StringVar(&f.metrics, "metrics", "", "address to serve the dashboard, health checks and Prometheus metrics at, HOST:PORT, plain HTTP (default none)")
	cmd.Flags().IntVar(&f.replicas, "replicas", 0, "copies of ledger, registry, leases and events in a NATS cluster, 1 to 5 (default one per server, up to 3)")
	cmd.Flags().DurationVar(&f.audit, "audit-kept", 0, "how long the audit trail is kept (default 90 days, or as before; the oldest entries go at 32 MiB)")
	cmd.Flags().StringVar(&f.limit, "store-limit", "", "limit of the store, such as 10GiB (default 16GiB)")
	cmd.Flags().StringVar(&f.logDir, "log-dir", "", "folder for the output of workers (default in the store)")
	f.cluster.add(cmd)
	f.node.add(cmd)
	f.logging.Add(cmd)
}

// untilClosed ends the context when the input is closed, which also happens when the program at its other end is killed.
func untilClosed(ctx context.Context, in io.Reader) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		defer cancel()
		_, _ = io.Copy(io.Discard, in) // an error also means the end
	}()
	return ctx
}

// hangStoreEnv is for tests alone: a time, as in bus.ServerConfig.HangStore.
const hangStoreEnv = "TROUPE_TEST_HANG_STORE"

// minStore is the space that ledger, logs, events and registry reserve.
const minStore = 1 << 30

// head is the configuration of a head, and its state once it runs.
type head struct {
	at     listenAddress
	nats   []string
	store  string
	agent  *agentSpec // nil for none; without Access and Dir
	creds  string
	secret string // user and password, or token, of the URLs of --nats: for the token file alone
	file   cli.HeadFile
	level  slog.LevelVar // raised at the end, when the parts of the head lose each other

	metrics  string // address; empty: none
	replicas int    // as in kv.Config
	limit    int64  // bytes of the store; zero: the default of bus

	auditKept time.Duration // as in nodes.CreateAuditStream

	cluster    *clusterFile // nil: the head is alone
	bundle     *bundle      // of a member whose store is new; nil: there is none yet, or the store is not new
	bundlePath string       // where the first member writes it
	restore    string       // backup that the first member restores; empty: none
	first      bool         // it has made the cluster

	grows bool // the store is that of a head alone, and becomes that of a member
	again bool // the head has ended to be started again; its agent runs on

	ranBefore   bool // a head has run on the store
	replaceable bool // the process runs this head alone: it may replace itself
}

// newHead checks the flags. It opens nothing.
func (c command) newHead(f upFlags) (*head, error) {
	h := &head{nats: f.nats, file: cli.HeadFile{HeadFile: nodes.HeadFile{PID: os.Getpid()}}}
	h.level.Set(slog.LevelWarn)
	var err error
	if h.creds, err = c.credsFile(f.creds); err != nil {
		return nil, err
	}
	if h.at, err = parseListen(f.listen); err != nil {
		return nil, err
	}
	if h.metrics = f.metrics; h.metrics != "" {
		if _, _, err := net.SplitHostPort(h.metrics); err != nil {
			return nil, cli.Usagef("--metrics %q: give HOST:PORT, as in 127.0.0.1:9422", h.metrics)
		}
	}
	switch h.replicas = cmp.Or(f.replicas, bus.AllReplicas); {
	case f.replicas < 0 || f.replicas > 5:
		return nil, cli.Usagef("--replicas %d: give 1 to 5", f.replicas)
	case f.replicas > 1 && len(f.nats) == 0:
		return nil, cli.Usagef("--replicas %d: the head's own server is one server; use --nats with the URLs of a NATS cluster", f.replicas)
	}
	if h.auditKept = f.audit; f.audit < 0 {
		return nil, cli.Usagef("--audit-kept %v: must be positive, such as 2160h", f.audit)
	}
	if f.limit != "" {
		limit, err := gpu.ParseBytes(f.limit)
		if err != nil {
			return nil, cli.Usagef("--store-limit: %w", err)
		}
		if h.limit = int64(limit); h.limit < minStore {
			return nil, cli.Usagef("--store-limit %s: must be %s or more, which the head's own streams reserve", f.limit, gpu.Bytes(minStore))
		}
	}
	for _, u := range f.nats {
		if err := cli.CheckURL(u); err != nil {
			return nil, cli.Usagef("--nats %q: %w", bus.Redact(u), err)
		}
	}
	if h.nats, h.secret, err = bus.SplitSecret(f.nats); err != nil {
		return nil, cli.Usagef("--nats: %w", err)
	}
	spec, err := f.node.spec()
	if err != nil {
		return nil, err
	}
	spec.Grace, spec.Wait, spec.Logging = f.grace, f.grace, f.logging
	if f.logDir != "" {
		if spec.LogDir, err = filepath.Abs(f.logDir); err != nil {
			return nil, err
		}
	}
	if f.grace < 0 {
		return nil, cli.Usagef("--grace %v must not be negative", f.grace)
	}
	if spec.Confine && len(f.nats) > 0 {
		return nil, cli.Usagef("--confine-workers: an external NATS server does not know the credentials of workers; leave it out, or use the head's own server")
	}
	if h.file.Name = spec.Name; !f.noAgent {
		h.agent = &spec
	}
	h.store, err = c.storeDir(f.store)
	return h, err
}

// up runs the head until ctx ends or, if inside is not nil, until inside returns, whose error it returns. It takes the port and
// the lock of the store, in this order, before it writes anything, so that it does not change the files of a running head.
func (c command) up(ctx context.Context, h *head, inside func(context.Context, *bus.Bus) error) (err error) {
	c.Unread = nil // a head runs on when its output is closed
	defer manageBallast(ctx)()
	if len(h.nats) == 0 {
		h.at = h.at.kept(h.store)
		if err := h.at.checkFree(c.Env); err != nil {
			return err
		}
	}
	unlock, err := lockStore(h.store)
	if err != nil {
		return err
	}
	defer unlock()
	if err := awaitReplaced(ctx, h.store); err != nil {
		return err
	}
	shrinks := h.cluster != nil && len(h.cluster.Left) > 0 && h.cluster.alone()
	switch {
	case h.grows:
		err = c.growInStore(ctx, h)
	case shrinks:
		h.cluster.Members = []string{h.cluster.Own}
		err = bus.LeaveCluster(h.store)
	}
	if err != nil {
		return err
	}
	b, err := c.openHead(ctx, h)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	switch {
	case b.Member() != nil:
		if err := c.formCluster(ctx, b, h); err != nil {
			return ignoreEnd(ctx, err)
		}
	case shrinks:
		if err := h.shrinkInStore(ctx, b); err != nil {
			return err
		}
	}
	if h.ranBefore {
		if err := expectLedger(ctx, b); err != nil {
			return err
		}
	}
	service, err := startPlacement(ctx, b, h.id(), h.replicas)
	if err != nil {
		return err
	}
	defer service.stop()
	log := c.Logger(&h.level)
	status, err := serveStatus(ctx, b, log, h, service.desk.Leads)
	if err != nil {
		return err
	}
	defer status.close()
	orders, orderCh, err := h.serveOrders(b, log)
	if err != nil {
		return err
	}
	defer func() { _ = orders.Unsubscribe() }() // fails only if the connection is closed
	var standby func() bool                     // nil: no other head leads
	if b.Member() != nil {
		replaces, err := serveReplace(b, h.store, service.desk.Leads, log)
		if err != nil {
			return err
		}
		defer func() { _ = replaces.Unsubscribe() }() // fails only if the connection is closed
		standby = func() bool { return !service.desk.Leads() }
	}
	if h.metrics != "" {
		token, err := h.pageToken()
		if err != nil {
			return err
		}
		where, stop, err := metrics.Serve(h.metrics, token, b, standby, log)
		if err != nil {
			return fmt.Errorf("--metrics %s: %w", h.metrics, err)
		}
		defer stop()
		h.metrics = where
	}
	if len(h.nats) == 0 {
		stopCredentials, err := serveCredentials(ctx, b, h.replicas, log)
		if err != nil {
			return err
		}
		defer stopCredentials()
		stopDoors, err := serveDoors(ctx, b, service.desk)
		if err != nil {
			return err
		}
		defer stopDoors()
	}
	if h.agent != nil {
		agent, err := startAgent(ctx, b, h.agentSpec(), h.grows || shrinks, log)
		if err != nil {
			return err
		}
		defer func() {
			if h.again {
				agent.leave()
			} else {
				agent.stop()
			}
		}()
		defer h.level.Set(slog.LevelError)
	}
	withdraw, err := h.file.Announce(c.Env)
	if err != nil {
		return fmt.Errorf("announce the head: %w", err)
	}
	defer withdraw()
	defer roles.GC{Bus: b, Logger: log}.Start(ctx)()
	id, err := keptID(h.store)
	if err != nil {
		return err
	}
	stopSessions, err := sessions.Serve(ctx, sessions.Config{Bus: b, Desk: service.desk, Replicas: h.replicas, Head: id, Logger: log})
	if err != nil {
		return err
	}
	defer stopSessions()
	defer weights.Serve(ctx, weights.Config{Bus: b, Leader: service.desk, Replicas: h.replicas, Logger: log})()
	status.ready.Store(true)
	if inside != nil {
		return inside(ctx, b)
	}
	log.Info("troupe: the head is ready", "url", bus.Redact(strings.Split(h.file.URL, ",")...), "store", h.store, "version", cli.Version)
	if err := c.sayReady(h, ownLedger(ctx, b)); err != nil {
		return err
	}
	if _, err := daemon.SdNotify(false, daemon.SdNotifyReady); err != nil { // nothing happens without systemd
		log.Warn("troupe: systemd was not told that the head is ready", "error", err)
	}
	defer func() { _, _ = daemon.SdNotify(false, daemon.SdNotifyStopping) }() // it is ending in any case
	select {
	case <-ctx.Done():
	case err := <-service.failedCh:
		return err
	case <-b.StoreStuck():
		return replaceHead(b, log)
	case o := <-orderCh:
		h.again = o == orderRestart
	}
	switch {
	case c.JSON:
	case h.again:
		c.Printf("troupe: the head restarts\n")
	default:
		c.Printf("troupe: the head is closing\n")
	}
	return nil
}

// expectLedger makes the placement service doubt a ledger that is missing although a head has run on the store: the disk was lost. It grants
// nothing until nodes and drivers have had time to say what they hold.
func expectLedger(ctx context.Context, b *bus.Bus) error {
	var state bus.ServerState
	ask, cancel := context.WithTimeout(ctx, storeLimit)
	defer cancel()
	err := bus.Retry(ask, bus.Backoff{}, func() (err error) { // a cluster may be without a leader for a moment
		attempt, cancel := b.Attempt(ask, storeAttempt)
		defer cancel()
		if state, err = b.ServerState(attempt); err == nil && state.NoQuorum {
			return bus.ErrUnavailable
		}
		return err
	})
	if err != nil {
		return err
	}
	for _, s := range state.Streams {
		if s.Name == placement.LedgerStream {
			return nil
		}
	}
	return placement.DistrustLedger(ctx, b, "a head has run on this store, which has lost its ledger")
}

// pageToken is the token that the page asks for beyond loopback, which is the head's; empty on loopback.
func (h *head) pageToken() (string, error) {
	at, err := parseListen(h.metrics)
	if err != nil || at.loopback {
		return "", err
	}
	if h.file.TokenFile == "" {
		return "", cli.Usagef("--metrics %s: beyond loopback the page asks for the head's token, and a head with --creds has none; use 127.0.0.1, or give TROUPE_TOKEN", h.metrics)
	}
	data, err := os.ReadFile(h.file.TokenFile)
	token := strings.TrimSpace(string(data))
	if strings.Contains(token, "\n") {
		return "", cli.Usagef("--metrics %s: beyond loopback the page asks for the head's token, and NATS is reached with a user and a password; use 127.0.0.1", h.metrics)
	}
	return token, err
}

// openHead starts the embedded server, or connects to the external one.
func (c command) openHead(ctx context.Context, h *head) (*bus.Bus, error) {
	cfg := bus.Config{Name: "troupe-head", Logger: c.Logger(&h.level)}
	if len(h.nats) > 0 {
		cfg.URLs, cfg.CredsFile, cfg.TLS.Fingerprint = h.nats, h.creds, c.Env("TROUPE_FINGERPRINT")
		h.file.URL, h.file.CredsFile, h.file.Fingerprint = strings.Join(h.nats, ","), h.creds, cfg.TLS.Fingerprint
		if secret := cmp.Or(h.secret, c.Env("TROUPE_TOKEN")); secret != "" && h.creds == "" {
			h.file.TokenFile = filepath.Join(h.store, "token")
			cfg.TokenFile = h.file.TokenFile
			if err := nodes.WritePrivate(h.file.TokenFile, []byte(secret+"\n")); err != nil {
				return nil, err
			}
		}
		if file := c.Env("TROUPE_TOKEN_FILE"); file != "" && cfg.TokenFile == "" && h.creds == "" {
			path, err := filepath.Abs(file)
			if err != nil {
				return nil, err
			}
			cfg.TokenFile, h.file.TokenFile = path, path
		}
		b, err := bus.Open(ctx, cfg)
		if err != nil {
			return nil, cli.NeedsAccess(cfg, err, "--creds FILE, TROUPE_CREDS, TROUPE_TOKEN_FILE or TROUPE_TOKEN")
		}
		if err := b.CheckJetStream(ctx); err != nil {
			return nil, errors.Join(err, b.Close())
		}
		return b, nil
	}
	_, err := os.Stat(portFile(h.store))
	h.ranBefore = err == nil
	cfg.Server = bus.ServerConfig{Listen: h.at.text, StoreDir: h.store, MaxStore: h.limit, SyncAlways: true, Replaceable: h.replaceable}
	given := c.Env("TROUPE_TOKEN")
	if h.cluster != nil {
		given = "" // that of the bundle
		if err := h.found(); err != nil {
			return nil, err
		}
	}
	if cfg.Server.Token, h.file.TokenFile, err = keptToken(h.store, given); err != nil {
		return nil, fmt.Errorf("token in %s: %w", h.store, err)
	}
	if !h.at.loopback {
		if cfg.Server.TLS, h.file.Fingerprint, err = keptCertificate(h.store); err != nil {
			return nil, err
		}
	}
	if h.cluster != nil {
		cfg.Server.Cluster = h.cluster.config(h.at, cfg.Server.TLS)
	}
	cfg.Server.HangStore, _ = time.ParseDuration(c.Env(hangStoreEnv)) // zero, unless a test sets it
	b, err := bus.Open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	h.file.URL = localURL(b.URL())
	if h.cluster != nil {
		h.file.URL = strings.Join(h.cluster.urls(), ",")
		return b, nil // it has run once the cluster has formed
	}
	return b, keepPort(h.store, h.file.URL)
}

// credsFile is the absolute path of the credentials file of the flag or the environment; empty for none.
func (c command) credsFile(flag string) (string, error) {
	file := cmp.Or(flag, c.Env("TROUPE_CREDS"))
	if file == "" {
		return "", nil
	}
	return filepath.Abs(file)
}

// agentSpec is the spec of the agent of this machine.
func (h *head) agentSpec() agentSpec {
	spec := *h.agent
	spec.Dir, spec.Own = filepath.Join(h.store, "agent"), true
	spec.Access = nodes.Access{URLs: strings.Split(h.file.URL, ","), TokenFile: h.file.TokenFile, CredsFile: h.file.CredsFile, Fingerprint: h.file.Fingerprint}
	switch {
	case h.cluster != nil:
		spec.Host = advertised(h.cluster.Own)
	case len(h.nats) == 0 && !h.at.loopback:
		spec.Host = advertised(h.at.text)
	}
	return spec
}

func (c command) sayReady(h *head, ledger placement.LedgerStatus) error {
	if c.JSON {
		return c.PrintJSON(struct {
			cli.HeadFile
			Store   string `json:"store"`
			Metrics string `json:"metrics,omitempty"`
			Doubt   string `json:"doubt,omitempty"` // why nothing is granted
		}{h.file, h.store, h.metrics, ledger.Doubt})
	}
	if ledger.Doubt != "" {
		c.Printf("troupe: the head is up at %s, its store is %s, but it grants nothing: %s; Ctrl-C ends it\n", bus.Redact(strings.Split(h.file.URL, ",")...), h.store, ledger)
	} else {
		c.Printf("troupe: the head is ready at %s, its store is %s; Ctrl-C ends it\n", bus.Redact(strings.Split(h.file.URL, ",")...), h.store)
	}
	if h.file.Fingerprint != "" && len(h.nats) == 0 {
		c.Printf("troupe: on another machine, with the token of %s in a file (or on standard input, \"-\"):\n  %s\n", h.file.TokenFile, h.joinLine())
	}
	return nil
}

// joinLine is the command with which another machine joins.
func (h *head) joinLine() string {
	if h.cluster != nil {
		return fmt.Sprintf("troupe join %s --fingerprint %s --token-file FILE", h.file.URL, h.file.Fingerprint)
	}
	port := h.file.URL[strings.LastIndex(h.file.URL, ":")+1:]
	return fmt.Sprintf("troupe join tls://%s --fingerprint %s --token-file FILE", net.JoinHostPort(advertised(h.at.text), port), h.file.Fingerprint)
}

// storeDir is the absolute path of the store.
func (c command) storeDir(store string) (string, error) {
	if store != "" {
		return filepath.Abs(store)
	}
	dir, err := nodes.StateDir(c.Env)
	return filepath.Join(dir, "store"), err
}

// localURL is the URL for this machine of a server that may listen on every address.
func localURL(url string) string {
	return strings.NewReplacer("0.0.0.0", "127.0.0.1", "[::]", "[::1]").Replace(url)
}

// portFile has the port of the last head on the store.
func portFile(store string) string { return filepath.Join(store, "port") }

// keepPort writes portFile.
func keepPort(store, url string) error {
	return nodes.WritePrivate(portFile(store), []byte(url[strings.LastIndex(url, ":")+1:]+"\n"))
}

// kept replaces port 0 by the port of the last head on this store, if that is free: its agent and its drivers connect to it.
func (a listenAddress) kept(store string) listenAddress {
	if a.port != 0 {
		return a
	}
	data, err := os.ReadFile(portFile(store))
	if err != nil {
		return a
	}
	host, _, err := net.SplitHostPort(a.text)
	port, err2 := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil || err2 != nil {
		return a
	}
	b := listenAddress{text: net.JoinHostPort(host, strconv.Itoa(port)), port: port, loopback: a.loopback}
	if l, err := net.Listen("tcp", b.text); err == nil {
		_ = l.Close() // it only tested the port
		return b
	}
	return a
}

// advertised is the address at which other machines reach a head that listens there.
func advertised(listen string) string {
	host, _, err := net.SplitHostPort(listen)
	if ip := net.ParseIP(host); err == nil && (ip == nil || !ip.IsUnspecified()) && host != "" {
		return host
	}
	addrs, _ := net.InterfaceAddrs() // without addresses, the host name is used
	for _, addr := range addrs {
		if ip, ok := addr.(*net.IPNet); ok && ip.IP.IsGlobalUnicast() && ip.IP.To4() != nil {
			return ip.IP.String()
		}
	}
	return nodes.HostName()
}

// ledgerAnswer bounds the wait of a starting head for the status of its ledger.
const ledgerAnswer = 2 * time.Second

// ownLedger is the status of the head's ledger; zero if the service does not answer in time.
func ownLedger(ctx context.Context, b *bus.Bus) placement.LedgerStatus {
	client, err := placement.NewClient(b, "")
	if err != nil {
		return placement.LedgerStatus{}
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, ledgerAnswer)
	defer cancel()
	status, err := client.Ledger(ctx)
	if err != nil {
		return placement.LedgerStatus{}
	}
	return status
}
