package nodes

import (
	"errors"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"troupe/bus"
)

const (
	defaultStopGrace = 5 * time.Second
	defaultForkIdle  = 5 * time.Minute
	registrationWait = 5 * time.Second // how long an agent waits for one node's lease before it registers the next
)

// Access is how the workers of an agent connect to the bus. Secrets are named by file, so that they appear in no
// environment and on no command line.
type Access struct {
	URLs        []string `json:"urls"`
	TokenFile   string   `json:"token_file,omitempty"`
	CredsFile   string   `json:"creds_file,omitempty"`
	CAFile      string   `json:"ca_file,omitempty"`
	Fingerprint string   `json:"fingerprint,omitempty"`
}

// AgentConfig configures the agent of one machine.
type AgentConfig struct {
	// Bus is the connection; the caller closes it.
	Bus *bus.Bus
	// Nodes are the machine, or several simulated nodes. The agent sets Bus, Logger and OwnFunc. Zero: one node with
	// the host's name and no devices.
	Nodes []Config
	// Dir is the agent's run folder: its identity, the workers' assignments and folders, the fencing tokens it has
	// seen. One agent uses it at a time, and kills the processes that an earlier agent of the same folder left. Zero: a
	// temporary folder, removed at the end; orphans of a killed agent are not found then.
	Dir string
	// LogDir is where the output of workers is kept. Zero: "logs" in Dir.
	LogDir string
	// LogFile is the size at which a worker's log file is rotated (three rotated files are kept), LogTotal the size of
	// LogDir, where the oldest files are removed first. Zero: 16 MiB and 1 GiB.
	LogFile, LogTotal int64
	// SimClaims is the folder in which workers claim simulated devices, see gpu.SimUse. Zero: workers claim nothing.
	SimClaims string
	// Host is the address at which the other nodes reach this machine. Zero: the one from which it reaches the bus.
	Host string
	// Program is started by a launch without a command. Zero: this executable with the argument "worker".
	Program []string
	// Access is how workers connect to the bus. Zero: the URL of Bus, which must not need credentials then.
	Access Access
	// ConfineWorkers has workers connect with a credential of their own (bus.WorkerCredential), made from the token of Bus, instead of
	// the secrets of Access.
	ConfineWorkers bool
	// OwnProcess says that nothing else in this process starts child processes: the agent is then a subreaper and reaps
	// orphaned descendants of its workers. Otherwise init reaps them.
	OwnProcess bool
	// Grace is the time between SIGINT and SIGTERM when the agent stops its workers. Zero: five seconds.
	Grace time.Duration
	// ForkIdle is how long a fork server (Program.Fork) is kept without a new worker. Zero: five minutes.
	ForkIdle time.Duration
	// Version is that of the program, for display. Zero: unknown.
	Version string
	// ReadyFunc is called once, when the nodes are registered. It must not block.
	ReadyFunc func()
	// ExitFunc is called with each worker whose process has exited, before the rest of its process tree is killed. It must
	// not block. Zero: none.
	ExitFunc func(WorkerID)
	// DataFunc are the addresses of the data port of the machine; nil: it has none.
	DataFunc func() []string
	// Logger receives errors and warnings. Zero: the logger of Bus.
	Logger *slog.Logger
}

func (c AgentConfig) withDefaults() AgentConfig {
	if len(c.Nodes) == 0 {
		c.Nodes = []Config{{}}
	}
	if c.Grace == 0 {
		c.Grace = defaultStopGrace
	}
	if c.ForkIdle == 0 {
		c.ForkIdle = defaultForkIdle
	}
	if c.LogFile == 0 {
		c.LogFile = 16 << 20
	}
	if c.LogTotal == 0 {
		c.LogTotal = 1 << 30
	}
	if c.Bus == nil {
		return c
	}
	if c.Logger == nil {
		c.Logger = c.Bus.Logger()
	}
	if len(c.Access.URLs) == 0 && c.Bus.URL() != "" {
		c.Access.URLs = []string{c.Bus.URL()}
	}
	if c.Host == "" {
		c.Host = addressToward(c.Access.URLs)
	}
	return c
}

func (c AgentConfig) validate() error {
	var errs []error
	if c.Bus == nil {
		errs = append(errs, bus.Errorf(bus.CodeInvalid, "nodes.AgentConfig: Bus is not set"))
	}
	if c.Grace < 0 {
		errs = append(errs, bus.Errorf(bus.CodeInvalid, "nodes.AgentConfig: Grace %v must not be negative", c.Grace))
	}
	return errors.Join(errs...)
}

// makeDirs makes the run folder; remove deletes it if it is temporary.
func (c *AgentConfig) makeDirs() (remove func(), err error) {
	remove = func() {}
	if c.Dir == "" {
		dir, err := os.MkdirTemp("", "troupe-agent-")
		if err != nil {
			return nil, bus.Errorf(bus.CodeUnavailable, "make the agent's run folder: %w", err)
		}
		c.Dir, remove = dir, func() { _ = os.RemoveAll(dir) } // a leftover temporary folder does no harm
	}
	if c.Dir, err = filepath.Abs(c.Dir); err != nil {
		return nil, err
	}
	if c.LogDir == "" {
		c.LogDir = filepath.Join(c.Dir, "logs")
	}
	for _, dir := range []string{c.Dir, filepath.Join(c.Dir, workersDir)} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, bus.Errorf(bus.CodeInvalid, "the agent's folder: %w", err)
		}
	}
	return remove, nil
}

const loopback = "127.0.0.1"

// addressToward is this machine's address on the route to the first reachable URL; loopback if there is none. Nothing is
// sent: the kernel chooses the source address.
func addressToward(urls []string) string {
	for _, text := range urls {
		if !strings.Contains(text, "://") {
			text = "nats://" + text
		}
		u, err := url.Parse(text)
		if err != nil || u.Hostname() == "" {
			continue
		}
		port := u.Port()
		if port == "" {
			port = "4222"
		}
		conn, err := net.Dial("udp", net.JoinHostPort(u.Hostname(), port))
		if err != nil {
			continue
		}
		host, _, err := net.SplitHostPort(conn.LocalAddr().String())
		_ = conn.Close() // nothing was sent
		if err == nil {
			return host
		}
	}
	return loopback
}
