package nodes

import (
	"errors"
	"log/slog"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"troupe/bus"
	"troupe/gpu"
	"troupe/nodes/evidence"
	"troupe/nodes/protocol"
)

const (
	reportEvery    = 5  // every fifth heartbeat carries the report if a reading has changed
	reportAtLeast  = 30 // every thirtieth carries it
	leaveTimeout   = 2 * time.Second
	recheckTimeout = 10 * time.Second // how long a server that is back may take to answer whether it has the lease

)

// Config configures the reporter of one node.
type Config struct {
	// Bus is the connection; the caller closes it.
	Bus *bus.Bus
	// Name is the unique name of the node. Zero: the host's, with invalid characters replaced.
	Name string
	// Labels can be selected by requests.
	Labels map[string]string
	// CPUs and Memory are the node's capacity beside its devices. Zero: the machine's.
	CPUs   int
	Memory gpu.Bytes
	// NoCPUs declares that the node offers no CPUs to requests.
	NoCPUs bool
	// Resources are the amounts of other resources that the node declares, in thousandths by name.
	Resources map[string]int64
	// Inventory lists the devices; the caller closes it. Zero: no devices.
	Inventory gpu.Inventory
	// OwnFunc reports whether this agent started a process. Run's goroutine calls it. Zero: none.
	OwnFunc func(pid int) bool
	// Lease is how long grants on the node outlive the agent. Zero: 15 s, the minimum on a busy server.
	Lease time.Duration
	// Beat is the interval of heartbeats. Zero: a second.
	Beat time.Duration
	// Read is the interval of reading the devices, which costs milliseconds per device on a real driver. A failed
	// device is read at once. Zero: Beat.
	Read time.Duration
	// RunningFunc returns the reservations under which workers run here; RunningCh, if set, signals a possible change.
	// EndFunc receives grants that have ended: it kills the workers that run under exactly these tokens, and must not
	// block. Zero: the report says nothing about workers, and no worker is killed.
	RunningFunc func() []protocol.RunningGrant
	// IdleFunc reports whether no worker runs here at all. Zero: that is not known.
	IdleFunc  func() bool
	RunningCh <-chan struct{}
	EndFunc   func([]protocol.KillOrder)
	// reportedFunc is called when the last result of RunningFunc has been reported.
	reportedFunc func()
	// RegisteredFunc is called once, when the lease is acquired for the first time. It must not block.
	RegisteredFunc func()
	// Logger receives errors and warnings. Zero: the logger of Bus.
	Logger *slog.Logger

	identity string // of the agent's folder: an earlier holder of the name with the same identity is dead
}

func (c Config) withDefaults() Config {
	if c.Name == "" {
		c.Name = HostName()
	}
	if c.CPUs == 0 && !c.NoCPUs {
		c.CPUs = runtime.NumCPU()
	}
	if c.Memory == 0 {
		c.Memory = hostMemory()
	}
	if c.Inventory == nil {
		c.Inventory = gpu.None{Reason: "no inventory is configured"}
	}
	if c.OwnFunc == nil {
		c.OwnFunc = func(int) bool { return false }
	}
	if c.Lease == 0 {
		c.Lease = evidence.NodeLease
	}
	if c.Beat == 0 {
		c.Beat = evidence.NodeBeat
	}
	if c.Read == 0 {
		c.Read = c.Beat
	}
	if c.Logger == nil && c.Bus != nil {
		c.Logger = c.Bus.Logger()
	}
	return c
}

func (c Config) validate() error {
	errs := []error{bus.CheckName("node", c.Name)}
	bad := func(format string, args ...any) { errs = append(errs, bus.Errorf(bus.CodeInvalid, format, args...)) }
	if c.Bus == nil {
		bad("nodes.Config: Bus is not set")
	}
	if c.CPUs < 0 || c.Beat < 0 || c.Read < 0 {
		bad("nodes.Config: CPUs %d, Beat %v and Read %v must not be negative", c.CPUs, c.Beat, c.Read)
	}
	for _, name := range slices.Sorted(maps.Keys(c.Resources)) {
		if name == "" || c.Resources[name] < 0 {
			bad("nodes.Config: resource %q has the amount %d; give a name, and thousandths from 0", name, c.Resources[name])
		}
	}
	if c.Lease < time.Second {
		bad("nodes.Config: Lease %v: set at least 1s, the resolution of the server", c.Lease)
	}
	for _, key := range slices.Sorted(maps.Keys(c.Labels)) {
		errs = append(errs, bus.CheckLabel(key))
	}
	return errors.Join(errs...)
}

// HostName is the host's name as a node name: invalid characters become dashes.
func HostName() string {
	host, err := os.Hostname()
	if err != nil || host == "" {
		return "localhost"
	}
	name := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' {
			return r
		}
		return '-'
	}, host)
	return name[:min(len(name), 64)]
}

// hostMemory is the memory of the machine; zero: unknown.
func hostMemory() gpu.Bytes {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); len(fields) == 3 && fields[0] == "MemTotal:" {
			kib, _ := strconv.ParseUint(fields[1], 10, 64) // zero: unknown
			return gpu.Bytes(kib) * gpu.KiB
		}
	}
	return 0
}
