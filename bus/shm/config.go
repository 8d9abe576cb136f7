package shm

import (
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"troupe/bus/memlimit"
)

// ErrUnsupported is the error of Open where the system has no shared memory of this kind.
var ErrUnsupported = errors.New("shared memory between processes needs Linux; bodies travel over the bus")

// Config is the settings of an Arena and of a Reader. The zero Config is ready.
type Config struct {
	// Dir is the directory of the sockets. Processes that share bodies use the same directory. Empty: /tmp/troupe-shm-<uid>. It is created
	// with mode 0700, and refused if another user owns it or can write to it.
	Dir string
	// HostLimit bounds the segments of all processes that use Dir, in bytes. Zero: a third of the memory of the host or the cgroup.
	HostLimit int64
	// Limit bounds the segments of this process. Zero: half of HostLimit.
	Limit int64
	// ReaderLimit bounds what one process may hold of this process's segments. Zero: half of Limit.
	ReaderLimit int64
	// Keep is how long a segment without a body keeps its pages: new pages cost ten times as much as the bytes in them. Zero: 2 minutes.
	Keep time.Duration
	// ClaimLimit is how long a reader waits for the owner's answer. Zero: 2 s.
	ClaimLimit time.Duration
	// FetchLimit is how long a process waits for another one of the host that fetches a body for both and makes no progress. Zero: 5 s.
	FetchLimit time.Duration
	// GoFunc starts a goroutine. Nil: a go statement.
	GoFunc func(do func())
	// Logger is told of what a person should know. Nil: slog.Default.
	Logger *slog.Logger
}

// pageSize is that of the system; regions begin and end at pages.
var pageSize = os.Getpagesize()

const (
	slabSize    = 16 << 20     // a segment for many bodies
	slabMost    = 2 << 20      // the largest region in a slab; a larger one has a segment of its own
	LeastFetch  = slabMost + 1 // the smallest body that comes to a host once (Join): it has a segment of its own
	segmentMost = 1 << 38      // the largest segment that a reader maps
	dirMost     = 64           // bytes of a path to which the name of a socket is added
)

// DefaultDir is the Dir of a zero Config.
func DefaultDir() string { return filepath.Join("/tmp", "troupe-shm-"+strconv.Itoa(os.Getuid())) }

func (c Config) withDefaults() Config {
	if c.Dir == "" {
		c.Dir = DefaultDir()
	}
	if c.HostLimit == 0 {
		c.HostLimit = memlimit.Total() / 3
	}
	if c.Limit == 0 {
		c.Limit = c.HostLimit / 2
	}
	if c.ReaderLimit == 0 {
		c.ReaderLimit = c.Limit / 2
	}
	if c.Keep == 0 {
		c.Keep = 2 * time.Minute
	}
	if c.ClaimLimit == 0 {
		c.ClaimLimit = 2 * time.Second
	}
	if c.FetchLimit == 0 {
		c.FetchLimit = 5 * time.Second
	}
	if c.GoFunc == nil {
		c.GoFunc = startGoroutine
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// check reports everything that is wrong with the settings.
func (c Config) check() error {
	var errs []error
	negative := func(field string, v int64) {
		if v < 0 {
			errs = append(errs, fmt.Errorf("shm.Config.%s is %d; it must not be negative", field, v))
		}
	}
	negative("HostLimit", c.HostLimit)
	negative("Limit", c.Limit)
	negative("ReaderLimit", c.ReaderLimit)
	negative("Keep", int64(c.Keep))
	negative("ClaimLimit", int64(c.ClaimLimit))
	negative("FetchLimit", int64(c.FetchLimit))
	if c.Dir != "" && !filepath.IsAbs(c.Dir) {
		errs = append(errs, fmt.Errorf("shm.Config.Dir is %q; it must be an absolute path", c.Dir))
	}
	if len(c.Dir) > dirMost {
		errs = append(errs, fmt.Errorf("shm.Config.Dir has %d bytes; a path of a socket must be shorter, use one of up to %d", len(c.Dir), dirMost))
	}
	return errors.Join(errs...)
}

// roomFor is the size of the region for a body of n bytes: whole pages, and few sizes, so that a later body of about the same size
// finds a region with warm pages.
func roomFor(n int) int {
	step := max(pageSize, 1<<max(bits.Len(uint(n))-5, 0))
	return max(1, (n+step-1)/step) * step
}

// start runs do in a goroutine.
func (c *Config) start(do func()) { c.GoFunc(do) }
