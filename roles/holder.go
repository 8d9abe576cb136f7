package roles

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
)

// holder is the process behind a driver's lease, as the value of the lease says it.
type holder struct {
	Name  string        `json:"name"`            // for people
	Host  string        `json:"host,omitempty"`  // see thisHost; empty: not known
	PID   int           `json:"pid,omitempty"`   // in the process namespace of Host
	Start uint64        `json:"start,omitempty"` // of the process, in ticks since the host was started: with PID it is one process for ever
	Lease time.Duration `json:"lease,omitempty"`
}

// leaseValue is what this driver writes into its lease.
func (rt *Runtime) leaseValue() []byte {
	h := holder{Name: rt.cfg.Name, Host: thisHost(), PID: os.Getpid(), Lease: rt.cfg.Lease}
	h.Start, _ = startedAt(h.PID) // zero is known to nobody
	value, err := json.Marshal(h)
	if err != nil {
		return []byte(rt.cfg.Name) // a name that JSON does not take
	}
	return value
}

// readHolder reads a lease's value. An older driver's is its name alone.
func readHolder(value []byte) holder {
	var h holder
	if json.Unmarshal(value, &h) != nil {
		return holder{Name: string(value)}
	}
	return h
}

// here reports whether the process can be seen from this one.
func (h holder) here() bool { return h.Host != "" && h.Host == thisHost() && h.PID > 0 && h.Start > 0 }

// dead reports whether it is certain that the process of a holder that is here has ended: its number is free, another
// process has it, or it is a zombie. That /proc does not show it proves nothing: other users' processes may be hidden.
func (h holder) dead() bool {
	if errors.Is(syscall.Kill(h.PID, 0), syscall.ESRCH) {
		return true
	}
	start, err := startedAt(h.PID)
	return errors.Is(err, errZombie) || err == nil && start != h.Start
}

var errZombie = errors.New("the process has ended and was not reaped")

// thisHost identifies what a process number means: the machine, its start, and the process namespace. It is empty where the
// system does not say.
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

// startedAt is when a process was started, in the kernel's ticks.
func startedAt(pid int) (uint64, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, rest, found := strings.Cut(string(stat[bytes.LastIndexByte(stat, ')')+1:]), " ") // the name may hold anything
	fields := strings.Fields(rest)
	if !found || len(fields) < 20 {
		return 0, fmt.Errorf("/proc/%d/stat cannot be read", pid)
	}
	if fields[0] == "Z" || fields[0] == "X" {
		return 0, errZombie
	}
	return strconv.ParseUint(fields[19], 10, 64)
}
