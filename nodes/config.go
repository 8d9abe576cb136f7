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
	"troupe/nodes/protocol"
)

const (
	defaultLease = 15 * time.Second
	defaultBeat  = time.Second
	fullEvery    = 5 // a beat in so many carries the report even if nothing has changed
	lastActs     = 2 * time.Second
	recheckMost  = 10 * time.Second       // for a server that has just come back to say whether it knows us
	recheckPause = 100 * time.Millisecond // between two questions
)

// Config is one node as its agent knows it.
type Config struct {
	// Bus is the connection; it stays the caller's.
	Bus *bus.Bus
	// Name is the node's name, which no other may have. Zero: the host's, as far as it is a name.
	Name string
	// Labels are what requests may ask of a node.
	Labels map[string]string
	// CPUs and Memory are what the node offers beside its devices. Zero: what the machine has.
	CPUs   int
	Memory gpu.Bytes
	// Inventory is where its devices come from; it stays the caller's. Zero: none.
	Inventory gpu.Inventory
	// OwnFunc reports whether a process is one that this agent started. It is called from Run's goroutine. Zero: none is.
	OwnFunc func(pid int) bool
	// Lease is how long what is granted here outlives the agent. Zero: 15 s, the least that is sane on a busy server.
	Lease time.Duration
	// Beat is the time between two signs of life. Zero: a second.
	Beat time.Duration
	// Read is the time between two readings of the devices; one costs milliseconds per device on a real driver. A
	// device that fails is read at once. Zero: as often as it beats.
	Read time.Duration
	// RunningFunc is the reservations under which workers run here; RunningCh, if any, says that this may have changed.
	// EndFunc is told of grants that are over: it ends the workers that run under exactly these tokens, and must not
	// block. Zero: nothing is said about workers, and nobody ends them.
	RunningFunc func() []protocol.RunningGrant
	RunningCh   <-chan struct{}
	EndFunc     func([]protocol.KillOrder)
	// toldFunc is called when what RunningFunc last said has been reported.
	toldFunc func()
	// RegisteredFunc is called once, when the lease is taken for the first time. It must not block.
	RegisteredFunc func()
	// Logger receives what goes wrong. Zero: the bus's.
	Logger *slog.Logger

	identity string // of the agent's folder: what held the name under it before is dead
}

func (c Config) withDefaults() Config {
	if c.Name == "" {
		c.Name = HostName()
	}
	if c.CPUs == 0 {
		c.CPUs = runtime.NumCPU()
	}
	if c.Memory == 0 {
		c.Memory = hostMemory()
	}
	if c.Inventory == nil {
		c.Inventory = gpu.None{Reason: "none were asked for"}
	}
	if c.OwnFunc == nil {
		c.OwnFunc = func(int) bool { return false }
	}
	if c.Lease == 0 {
		c.Lease = defaultLease
	}
	if c.Beat == 0 {
		c.Beat = defaultBeat
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
	if c.Lease < time.Second {
		bad("nodes.Config: Lease %v: the server counts in seconds; give one or more", c.Lease)
	}
	for _, key := range slices.Sorted(maps.Keys(c.Labels)) {
		errs = append(errs, bus.CheckName("label", key))
	}
	return errors.Join(errs...)
}

// HostName is the host's name as a node's: what a name may not have becomes a dash.
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

// hostMemory is what the machine has, or zero where that cannot be read.
func hostMemory() gpu.Bytes {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); len(fields) == 3 && fields[0] == "MemTotal:" {
			kib, _ := strconv.ParseUint(fields[1], 10, 64) // unreadable is none
			return gpu.Bytes(kib) * gpu.KiB
		}
	}
	return 0
}
