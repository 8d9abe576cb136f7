package nodes

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"troupe/bus"
)

const (
	defaultStopGrace = 5 * time.Second
	registration     = 5 * time.Second // how long an agent waits for one node's lease before it turns to the next
)

// Access is how the workers of an agent reach the bus. Secrets are named by file, so that they are in no environment and
// on no command line.
type Access struct {
	URLs        []string `json:"urls"`
	TokenFile   string   `json:"token_file,omitempty"`
	CredsFile   string   `json:"creds_file,omitempty"`
	CAFile      string   `json:"ca_file,omitempty"`
	Fingerprint string   `json:"fingerprint,omitempty"`
}

// AgentConfig is the agent of one machine.
type AgentConfig struct {
	// Bus is the connection; it stays the caller's.
	Bus *bus.Bus
	// Nodes are what the agent stands for: the machine, or several simulated ones. Bus, Logger and OwnFunc are the agent's
	// to fill in. Zero: one node with the host's name and no devices.
	Nodes []Config
	// Dir is the agent's run folder: its identity, the workers' assignments and folders, the tokens it has seen. The next
	// agent in the same folder ends what a killed one left. Only one can be in it. Zero: a temporary one, removed at the
	// end, and then nobody finds what a killed agent left.
	Dir string
	// LogDir is where the output of workers is kept. Zero: "logs" in Dir.
	LogDir string
	// LogFile is how long a worker's file may be before another is begun, of which three are kept; LogTotal how much may be in
	// LogDir, where the files of the longest dead go first. Zero: 16 MiB and 1 GiB.
	LogFile, LogTotal int64
	// SimClaims is the folder in which workers claim simulated devices, see gpu.SimUse. Zero: they are not asked to.
	SimClaims string
	// Host is the address at which the other nodes reach this machine. Zero: the one from which it reaches the bus.
	Host string
	// Program is what a launch without a command starts. Zero: this program with the argument "worker".
	Program []string
	// Access is how workers reach the bus. Zero: at Bus's URL, which must not need credentials then.
	Access Access
	// OwnProcess says that nothing else in this process starts programs: the agent then adopts and reaps what its workers
	// leave behind. Otherwise what they leave is ended all the same, and reaped by the system.
	OwnProcess bool
	// Grace is how long workers may take to end when the agent does. Zero: five seconds.
	Grace time.Duration
	// ReadyFunc is called once, when the nodes are registered. It must not block.
	ReadyFunc func()
	// Logger receives what goes wrong. Zero: the bus's.
	Logger *slog.Logger
}

func (c AgentConfig) withDefaults() AgentConfig {
	if len(c.Nodes) == 0 {
		c.Nodes = []Config{{}}
	}
	if c.Grace == 0 {
		c.Grace = defaultStopGrace
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
		c.Host = hostToward(c.Access.URLs)
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

// makeDirs makes the run folder, and says what removes it if it is temporary.
func (c *AgentConfig) makeDirs() (remove func(), err error) {
	remove = func() {}
	if c.Dir == "" {
		dir, err := os.MkdirTemp("", "troupe-agent-")
		if err != nil {
			return nil, bus.Errorf(bus.CodeUnavailable, "make the agent's run folder: %w", err)
		}
		c.Dir, remove = dir, func() { _ = os.RemoveAll(dir) } // nothing can be done about a temporary file that stays
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
