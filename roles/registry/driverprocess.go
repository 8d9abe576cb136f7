package registry

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"troupe/nodes"
)

// driverProcess is the process that holds a driver's lease, as the value of the lease describes it.
type driverProcess struct {
	Name  string        `json:"name"`            // for display
	Host  string        `json:"host,omitempty"`  // see thisHost; empty: unknown
	PID   int           `json:"pid,omitempty"`   // in the pid namespace of Host
	Start uint64        `json:"start,omitempty"` // start time of the process, in ticks since boot: together with PID it identifies the process
	Lease time.Duration `json:"lease,omitempty"`
	// Worker is the worker that holds the lease, because it has created roles; nil: a driver.
	Worker *nodes.WorkerID `json:"worker,omitempty"`
}

// readDriverProcess reads the value of a lease; one that cannot be read describes no process.
func readDriverProcess(value []byte) (h driverProcess) {
	if json.Unmarshal(value, &h) != nil {
		return driverProcess{}
	}
	return h
}

// visible reports whether the process is visible from this one.
func (h driverProcess) visible() bool {
	return h.Host != "" && h.Host == thisHost() && h.PID > 0 && h.Start > 0
}

// dead reports whether a visible process has certainly exited: its pid is free, was reused, or is a zombie. Its absence
// in /proc proves nothing: processes of other users may be hidden.
func (h driverProcess) dead() bool {
	if errors.Is(syscall.Kill(h.PID, 0), syscall.ESRCH) {
		return true
	}
	start, err := startedAt(h.PID)
	return errors.Is(err, errZombie) || err == nil && start != h.Start
}

var errZombie = errors.New("the process is a zombie")

// thisHost identifies the scope of a pid: the machine, its boot, and the pid namespace. Empty: unknown.
var thisHost = sync.OnceValue(func() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	space, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return ""
	}
	machine, _ := os.ReadFile("/etc/machine-id") // a container may have none
	return strings.Join([]string{string(bytes.TrimSpace(machine)), string(bytes.TrimSpace(boot)), space}, "/")
})

// startedAt is the start time of a process, in ticks since boot.
func startedAt(pid int) (uint64, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, rest, found := strings.Cut(string(stat[bytes.LastIndexByte(stat, ')')+1:]), " ") // the name may contain anything
	fields := strings.Fields(rest)
	if !found || len(fields) < 20 {
		return 0, fmt.Errorf("/proc/%d/stat is malformed", pid)
	}
	if fields[0] == "Z" || fields[0] == "X" {
		return 0, errZombie
	}
	return strconv.ParseUint(fields[19], 10, 64)
}
