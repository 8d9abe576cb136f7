package proctree

import (
	"bytes"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"troupe/bus"
)

const SurvivorTimeout = 5 * time.Second // how long a process may survive SIGKILL while it waits for a device

// Killer kills the rest of workers' process trees. One scan of all processes serves all pending requests.
type Killer struct {
	requestCh chan killRequest
	doneCh    chan struct{}
}

type killRequest struct {
	marker  string
	session int
	cgroup  string
	until   time.Time
	leftCh  chan []int // holds one
}

func NewKiller() *Killer {
	s := &Killer{requestCh: make(chan killRequest), doneCh: make(chan struct{})}
	bus.Go(s.run)
	return s
}

func (s *Killer) Close() {
	close(s.requestCh)
	<-s.doneCh
}

// Kill kills every process with the marker, of the session or in the control group, and returns those that survive.
func (s *Killer) Kill(marker string, session int, cgroup string) []int {
	leftCh := make(chan []int, 1)
	s.requestCh <- killRequest{marker, session, cgroup, time.Now().Add(SurvivorTimeout), leftCh}
	return <-leftCh
}

const (
	leastPause = 2 * time.Millisecond // between scans
	mostPause  = 50 * time.Millisecond
)

// run scans while there are requests. Among thousands of processes a scan takes a while: as long again is left to others before the next one,
// which serves all requests that have arrived meanwhile.
func (s *Killer) run() {
	defer close(s.doneCh)
	asks, known, pause := map[string]killRequest{}, markers{}, leastPause
	var at time.Time // of the next scan
	for {
		var nextCh <-chan time.Time
		if len(asks) > 0 {
			nextCh = time.After(time.Until(at))
		}
		select {
		case ask, ok := <-s.requestCh:
			if !ok {
				return
			}
			asks[ask.marker] = ask
			pause = leastPause
			continue // for requests that arrive at the same time
		case <-nextCh:
		}
		s.takeWaiting(asks)
		begun := time.Now()
		if killOnce(asks, known) == 0 {
			known = markers{}
		}
		at = time.Now().Add(min(max(pause, time.Since(begun)), mostPause))
		pause = min(2*pause, mostPause)
	}
}

// takeWaiting adds the requests that wait, each in a goroutine of its own.
func (s *Killer) takeWaiting(asks map[string]killRequest) {
	for {
		select {
		case ask, ok := <-s.requestCh:
			if !ok {
				return // run meets the closed channel again
			}
			asks[ask.marker] = ask
		default:
			return
		}
	}
}

// killOnce scans once, kills what it finds, answers requests without survivors or past their time, and returns the
// number of pending requests.
func killOnce(asks map[string]killRequest, known markers) int {
	found, unclear := treesOf(asks, known)
	for _, marker := range slices.Collect(maps.Keys(asks)) {
		ask, left := asks[marker], found[marker]
		for _, pid := range left {
			killPID(pid)
		}
		if len(left) == 0 && !unclear || time.Now().After(ask.until) {
			ask.leftCh <- left
			delete(asks, marker)
		}
	}
	return len(asks)
}

// treesOf finds the live processes of each request, by marker; unclear: there is one that may have a marker, and does not show it yet.
func treesOf(asks map[string]killRequest, known markers) (found map[string][]int, unclear bool) {
	sessions, members := map[int]string{}, map[int]string{}
	for marker, ask := range asks {
		sessions[ask.session] = marker
		for _, pid := range cgroupPIDs(ask.cgroup) {
			members[pid] = marker
		}
	}
	found = map[string][]int{}
	all := pids()
	for _, pid := range all {
		session, err := unix.Getsid(pid)
		if err != nil {
			continue // it has ended
		}
		marker, mine := sessions[session]
		if !mine {
			marker, mine = members[pid]
		}
		if !mine {
			var executing bool
			marker, executing = known.of(pid)
			_, mine = asks[marker]
			unclear = unclear || executing
		}
		if mine && !zombie(pid) {
			found[marker] = append(found[marker], pid)
		}
	}
	known.keep(all)
	return found, unclear
}

// markers is what earlier scans have read. A process without a marker is read again: it may have none for a moment.
type markers map[int]string

// of is the marker of a process. One that is about to execute another program has memory, which a thread of the kernel has not, and no
// environment yet.
func (m markers) of(pid int) (marker string, executing bool) {
	const size, envEnd = 20, 48
	if marker, known := m[pid]; known {
		return marker, false
	}
	for range 2 { // it may be about to at the first look, and have done so at the second
		env, err := readProc(pid, "environ", environSize)
		if marker = markerIn(env); marker != "" {
			m[pid] = marker
			return marker, false
		}
		if err != nil || len(env) > 0 {
			return "", false
		}
		if stat := statOf(pid); len(stat) <= envEnd || stat[size] == "0" {
			return "", false
		} else if stat[envEnd] == "0" {
			return "", true
		}
	}
	return "", false
}

// keep forgets processes that have ended: their numbers may be given again, though not before the next scan.
func (m markers) keep(alive []int) {
	if len(m) == 0 {
		return
	}
	listed := make(map[int]bool, len(alive))
	for _, pid := range alive {
		listed[pid] = true
	}
	maps.DeleteFunc(m, func(pid int, _ string) bool { return !listed[pid] })
}

// MarkerEnv is in the environment of every process of a worker's tree: the agent's identity, a dot, and the worker's
// id. A process that leaves its group, its session and its parent keeps it.
const MarkerEnv = "TROUPE_WORKER"

const environSize = 16 << 10 // of most

// MarkerOf is the marker of a process; empty: none, exited, or of another user.
func MarkerOf(pid int) string {
	env, err := readProc(pid, "environ", environSize)
	if err != nil {
		return ""
	}
	return markerIn(env)
}

func markerIn(env []byte) string {
	prefix := []byte(MarkerEnv + "=")
	for entry := range bytes.SplitSeq(env, []byte{0}) {
		if value, ok := bytes.CutPrefix(entry, prefix); ok {
			return string(value)
		}
	}
	return ""
}

// pids is all processes.
func pids() []int {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	names, _ := dir.Readdirnames(-1) // a partial list is used as it is
	_ = dir.Close()
	var out []int
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			out = append(out, pid)
		}
	}
	return out
}

// marked is the live processes whose marker matches, by marker; unclear: as treesOf says.
func marked(want func(marker string) bool) (found map[string][]int, unclear bool) {
	found = map[string][]int{}
	self := os.Getpid()
	for _, pid := range pids() {
		if pid == self {
			continue
		}
		m, executing := markers{}.of(pid)
		if m != "" && want(m) {
			found[m] = append(found[m], pid)
		}
		unclear = unclear || executing
	}
	return found, unclear
}

// zombie reports whether a process has ended, and nobody has waited for it yet.
func zombie(pid int) bool {
	stat := statOf(pid)
	return len(stat) == 0 || stat[0] == "Z" || stat[0] == "X"
}

// statOf is what the kernel says of a process, from its state on; empty: it is gone.
func statOf(pid int) []string {
	stat, err := readProc(pid, "stat", 1024)
	if err != nil {
		return nil
	}
	return strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:])) // the name before it may hold anything
}

// readProc reads a file of a process, of that size at most if it can be, with as few system calls as possible.
func readProc(pid int, name string, size int) (data []byte, err error) {
	fd, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/"+name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }() // nothing was written
	data = make([]byte, 0, size)
	for {
		n, err := unix.Read(fd, data[len(data):cap(data)])
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, err
		}
		data = data[:len(data)+n]
		if len(data) < cap(data) {
			return data, nil
		}
		data = slices.Grow(data, cap(data))
	}
}

// KillMarked kills every process whose marker matches, and those forked meanwhile, until there is none or the limit has
// passed. It returns the survivors.
func KillMarked(want func(marker string) bool, limit time.Duration) map[string][]int {
	for end, pause := time.Now().Add(limit), time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		found, unclear := marked(want)
		if len(found) == 0 && !unclear || time.Now().After(end) {
			return found
		}
		for _, list := range found {
			for _, pid := range list {
				killPID(pid)
			}
		}
		time.Sleep(pause)
	}
}

// killPID kills a process. Callers scan again for survivors.
func killPID(pid int) { _ = syscall.Kill(pid, syscall.SIGKILL) }
