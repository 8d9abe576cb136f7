package bus

import (
	"crypto/tls"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// Config selects the server of a Bus and the limits of its connection. The zero Config is a private server embedded in
// this process, without a listener and with a temporary store that Close removes.
type Config struct {
	// Name is the name of this process in the server's reports. Zero: "troupe".
	Name string

	// URLs are the addresses of an external NATS, or of another process's embedded server. Zero: embed a server.
	URLs []string
	// Token authenticates to an external server. TokenFile is a file that holds it, or a user and its password on two lines. At most
	// one of the two.
	Token     string
	TokenFile string
	// CredsFile is a NATS credentials file for an external server.
	CredsFile string
	// TLS configures the authentication of an external server and of this client.
	TLS TLSConfig
	// Wait retries an external server that does not answer yet, until the context ends. Zero: the first failure is
	// returned.
	Wait bool

	// Server configures the embedded server. It must be zero when URLs are given.
	Server ServerConfig

	// OutageLimit is the time that calls stay pending while the server is unreachable; then they fail as unavailable.
	// Zero: two minutes.
	OutageLimit time.Duration
	// Budget bounds the bytes of large bodies in flight to this connection. It must stay well under the 64 MiB at which
	// a server cuts a connection. Zero: 16 MiB.
	Budget int64
	// MaxBody is the largest body that is accepted. Zero: 8 GiB.
	MaxBody int64

	// Values bounds the values that are kept for references.
	Values ValuesConfig

	// Logger logs the events of the connection. Zero: warnings and errors to standard error.
	Logger *slog.Logger
	// OnError is called for each asynchronous error of the connection (a slow consumer, a permission refused). It
	// must not block. Zero: such errors are logged and counted.
	OnError func(error)

	user, password string // of TokenFile

	// InProcess replaces the connection to the server, for tests that drop, duplicate and delay messages.
	InProcess nats.InProcessConnProvider
}

// NoSpill as ValuesConfig.SpillDir refuses values past the bound.
const NoSpill = "0"

// ValuesConfig bounds the values that a session keeps for references: values of Put, and results that stay with their worker.
type ValuesConfig struct {
	// Limit bounds their memory, in bytes. Zero: 30 % of the memory of the host, or of the control group of this process.
	Limit int64
	// SpillDir is the folder of the files of values past Limit; the files have no names and end with this process. Zero:
	// /var/tmp. NoSpill: Put refuses such values, and results are sent to their callers at once.
	SpillDir string
	// Direct has bodies go straight between hosts. Zero: over the bus.
	Direct DirectConfig
	// Shared has bodies for receivers without a memory of their own come through the memory that the processes of the host share. Zero: each process
	// pulls them for itself.
	Shared SharedConfig
}

// ValuesConfigOf is the configuration of a Go program that the environment chooses. env is usually os.Getenv.
func ValuesConfigOf(env func(string) string) ValuesConfig {
	return ValuesConfig{Direct: DirectConfigOf(env), Shared: SharedConfig{On: env("TROUPE_SHM") != "0", Dir: env("TROUPE_SHM_DIR")}}
}

// SharedConfig is the shared memory of the host.
type SharedConfig struct {
	On  bool   // TROUPE_SHM=0 turns it off
	Dir string // TROUPE_SHM_DIR; zero: that of shm.Config
}

// DirectConfig is how bodies go straight between processes that share no memory, past the server.
type DirectConfig struct {
	On bool
	// Dir is the folder in which the processes of the host find the data port of their node. It is the folder of their shared memory. Zero: each process has a port of its own.
	Dir string
	// Listen is the host of this process's own data port. Zero: the address from which it reaches the server.
	Listen string
	// Plain has this process's own data port serve without TLS.
	Plain bool
}

// DirectConfigOf is the configuration that the environment chooses: TROUPE_DATA=0 turns it off, TROUPE_DATA_LISTEN is Listen, and TROUPE_DATA_PLAIN=1
// is Plain. env is usually os.Getenv.
func DirectConfigOf(env func(string) string) DirectConfig {
	return DirectConfig{On: env("TROUPE_DATA") != "0", Listen: env("TROUPE_DATA_LISTEN"), Plain: env("TROUPE_DATA_PLAIN") == "1"}
}

// TLSConfig is the client's TLS configuration. The zero TLSConfig uses TLS only if the URL or the server asks for it,
// with the system's root certificates.
type TLSConfig struct {
	CAFile   string // trusted roots, instead of the system's
	CertFile string // the client's certificate, and
	KeyFile  string // its key
	// Fingerprint is the SHA-256 of the server's certificate in hexadecimal. When set, only that certificate is
	// accepted, with any signature.
	Fingerprint string
}

// ServerConfig is the embedded server.
type ServerConfig struct {
	// Listen is HOST:PORT for other processes; port 0 selects a free one. Zero: no listener, in-process connections
	// only.
	Listen string
	// StoreDir is the folder of JetStream's files. Zero: a temporary folder, removed by Close.
	StoreDir string
	// MaxMemory and MaxStore bound JetStream. Zero: 256 MiB and 16 GiB.
	MaxMemory int64
	MaxStore  int64
	// SyncAlways syncs every write to disk before it is acknowledged. It costs about three quarters of the write rate.
	SyncAlways bool
	// Token, when set, is required of every connection. TLS, when set, is required of every connection over the
	// network.
	Token string
	TLS   *tls.Config
	// Cluster makes the server a member of a cluster. Nil: it has the store alone.
	Cluster *ClusterConfig
	// Replaceable says that the process is replaced when Bus.StoreStuck is closed. The store is then closed and opened again
	// after a full disk up to 16 times in one process, because nats-server keeps some memory each time. Zero: without a bound.
	Replaceable bool
	// HangStore is for tests of a store that is stuck: if it is set, the store does not close after a failed write, and
	// counts as stuck after this time instead of 30 s.
	HangStore time.Duration
}

const (
	defaultBudget      = 16 << 20
	defaultMaxBody     = 8 << 30
	defaultOutageLimit = 2 * time.Minute
)

func (c Config) withDefaults() Config {
	if c.Name == "" {
		c.Name = "troupe"
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	}
	if c.OutageLimit == 0 {
		c.OutageLimit = defaultOutageLimit
	}
	if c.Budget == 0 {
		c.Budget = defaultBudget
	}
	if c.MaxBody == 0 {
		c.MaxBody = defaultMaxBody
	}
	if c.Server.MaxMemory == 0 {
		c.Server.MaxMemory = 256 << 20
	}
	if c.Server.MaxStore == 0 {
		c.Server.MaxStore = 16 << 30
	}
	return c
}

// validate reports all mistakes at once.
func (c Config) validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, Errorf(CodeInvalid, format, args...)) }
	if len(c.URLs) > 0 && c.Server != (ServerConfig{}) {
		bad("bus.Config: URLs %s and Server are both set; leave Server empty to use an external server", c.where())
	}
	if c.InProcess != nil && c.Server != (ServerConfig{}) {
		bad("bus.Config: InProcess and Server are both set; the server behind InProcess cannot be configured here")
	}
	if len(c.URLs) == 0 && c.InProcess == nil {
		for _, f := range []struct {
			name string
			set  bool
		}{{"Token", c.Token != ""}, {"TokenFile", c.TokenFile != ""}, {"CredsFile", c.CredsFile != ""}, {"TLS", c.TLS != TLSConfig{}}} {
			if f.set {
				bad("bus.Config: %s is for an external server, and there are no URLs; the embedded one has Server.Token and Server.TLS", f.name)
			}
		}
	}
	if cluster := c.Server.Cluster; cluster != nil {
		cluster.validate(bad)
		if c.Server.Listen == "" || c.Server.StoreDir == "" || c.Server.Token == "" {
			bad("bus.Config: Server.Cluster needs Server.Listen, StoreDir and Token")
		}
	}
	if c.Token != "" && c.TokenFile != "" {
		bad("bus.Config: Token and TokenFile are both set; choose one")
	}
	if (c.TLS.CertFile == "") != (c.TLS.KeyFile == "") {
		bad("bus.Config: TLS.CertFile and TLS.KeyFile go together")
	}
	if c.Budget < 0 || c.Budget > 48<<20 {
		bad("bus.Config: Budget %d: must be between 1 byte and 48 MiB, under the 64 MiB at which servers cut a connection", c.Budget)
	}
	if c.Values.Limit < 0 {
		bad("bus.Config: Values.Limit %d: must not be negative", c.Values.Limit)
	}
	if dir := c.Values.SpillDir; dir != "" && dir != NoSpill && !filepath.IsAbs(dir) {
		bad("bus.Config: Values.SpillDir %q: must be an absolute path, or %q to refuse values past the bound", dir, NoSpill)
	}
	if c.MaxBody < 0 {
		bad("bus.Config: MaxBody %d: must not be negative", c.MaxBody)
	}
	if c.OutageLimit < 0 {
		bad("bus.Config: OutageLimit %s: must not be negative", c.OutageLimit)
	}
	for _, u := range c.URLs {
		switch _, err := parseURL(u); {
		case strings.TrimSpace(u) == "":
			bad("bus.Config: an empty URL; give nats://HOST:PORT")
		case err != nil: // the error quotes the URL with its password
			bad("bus.Config: URL %q cannot be read; give nats://HOST:PORT, and the special characters of a password as %%XX", Redact(u))
		}
	}
	return errors.Join(errs...)
}
