package nodes

import (
	"context"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/nodes/protocol"
)

// HostInfo is what an agent reports about itself and its machine, for tools of operators.
type HostInfo struct {
	Version string    `msgpack:"version" json:"version"` // of the agent
	PID     int       `msgpack:"pid" json:"pid"`
	Now     time.Time `msgpack:"now" json:"now"` // by the clock of the machine
	Since   time.Time `msgpack:"since" json:"since"`

	// Disks are the file systems of the agent's folder and of its logs, and SharedMemory is /dev/shm. A size that cannot be
	// read is zero.
	Disks        []DiskSpace `msgpack:"disks" json:"disks"`
	SharedMemory DiskSpace   `msgpack:"shm" json:"shared_memory"`

	// The limits of the agent, which its workers inherit.
	OpenFiles    ResourceLimit `msgpack:"nofile" json:"open_files"`
	Processes    ResourceLimit `msgpack:"nproc" json:"processes"`
	LockedMemory ResourceLimit `msgpack:"memlock" json:"locked_memory"`

	// DataAddresses are where other hosts read large values of this one, HOST:PORT; none: over the bus.
	DataAddresses []string `msgpack:"data,omitempty" json:"data_addresses,omitempty"`
}

// DiskSpace is a file system, in bytes.
type DiskSpace struct {
	Path  string `msgpack:"path" json:"path"`
	Total uint64 `msgpack:"total" json:"total"`
	Free  uint64 `msgpack:"free" json:"free"` // for processes without privileges
}

// Unlimited is the value of a ResourceLimit that does not exist.
const Unlimited = uint64(unix.RLIM_INFINITY)

// ResourceLimit is a limit of getrlimit(2).
type ResourceLimit struct {
	Soft uint64 `msgpack:"soft" json:"soft"`
	Hard uint64 `msgpack:"hard" json:"hard"`
}

// ClockReading is the difference between two clocks. The truth is within Error of Offset.
type ClockReading struct {
	Offset time.Duration // positive: the other clock is ahead
	Error  time.Duration
}

// Host asks the agent of a node about its machine and reads its clock.
func (c *Client) Host(ctx context.Context, node string) (HostInfo, ClockReading, error) {
	sent := time.Now()
	r, err := c.ask(ctx, request{Op: opHost, Node: node})
	took := time.Since(sent)
	if err == nil && r.HostInfo == nil {
		err = bus.Errorf(bus.CodeMalformed, "the answer of node %s has no host", node)
	}
	if err != nil {
		return HostInfo{}, ClockReading{}, err
	}
	return *r.HostInfo, ClockReading{Offset: r.HostInfo.Now.Sub(sent.Add(took / 2)).Round(time.Microsecond), Error: took / 2}, nil
}

func (a *Agent) hostInfo() *HostInfo {
	info := &HostInfo{Version: a.cfg.Version, PID: unix.Getpid(), Since: a.since, SharedMemory: diskSpace("/dev/shm")}
	if a.cfg.DataFunc != nil {
		info.DataAddresses = a.cfg.DataFunc()
	}
	for _, dir := range []string{a.cfg.Dir, a.cfg.LogDir} {
		info.Disks = append(info.Disks, diskSpace(dir))
	}
	for which, limit := range map[int]*ResourceLimit{unix.RLIMIT_NOFILE: &info.OpenFiles, unix.RLIMIT_NPROC: &info.Processes, unix.RLIMIT_MEMLOCK: &info.LockedMemory} {
		var r unix.Rlimit
		if unix.Getrlimit(which, &r) == nil {
			*limit = ResourceLimit{Soft: r.Cur, Hard: r.Max}
		}
	}
	info.Now = time.Now().UTC() // last, closest to the answer
	return info
}

func diskSpace(path string) DiskSpace {
	var s unix.Statfs_t
	if unix.Statfs(path, &s) != nil {
		return DiskSpace{Path: path}
	}
	block := uint64(s.Bsize) //nolint:gosec // the kernel's
	return DiskSpace{Path: path, Total: s.Blocks * block, Free: s.Bavail * block}
}

// Leases lists the leases of the nodes; the key is the node's name.
func Leases(ctx context.Context, b *bus.Bus) ([]kv.HeldLease, error) {
	bucket, err := kv.Open(ctx, b, kv.Config{Bucket: protocol.LeaseBucket, Memory: true, Leases: true})
	if err != nil {
		return nil, err
	}
	all, err := bucket.Leases(ctx)
	for i := range all {
		all[i].Key = strings.TrimPrefix(all[i].Key, protocol.LeaseKey(""))
	}
	return all, err
}
