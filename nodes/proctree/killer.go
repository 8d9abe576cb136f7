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
	var took time.Duration // the last scan
	var at time.Time       // of the next one
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
			if soon := time.Now().Add(took); len(asks) == 0 || soon.Before(at) {
				at = soon
			}
			asks[ask.marker] = ask
			pause = leastPause
			continue // for requests that arrive at the same time
		case <-nextCh:
		}
		begun := time.Now()
		if killOnce(asks, known) == 0 {
			known, took = markers{}, 0
			continue
		}
		took = min(time.Since(begun), mostPause)
		at = time.Now().Add(max(pause, took))
		pause = min(2*pause, mostPause)
	}
}

// killOnce scans once, kills what it finds, answers requests without survivors or past their time, and returns the
// number of pending requests.
func killOnce(asks map[string]killRequest, known markers) int {
	found := treesOf(asks, known)
	for _, marker := range slices.Collect(maps.Keys(asks)) {
		ask, left := asks[marker], found[marker]
		for _, pid := range left {
			killPID(pid)
		}
		if len(left) == 0 || time.Now().After(ask.until) {
			ask.leftCh <- left
			delete(asks, marker)
		}
	}
	return len(asks)
}

// markers holds what was read of processes: which process has a number, and since when. A process without a marker is read again: one that
// executes another program has no environment for a moment.
type markers map[[2]int]string

func (m markers) of(pid, since int) string {
	if marker, known := m[[2]int{pid, since}]; known {
		return marker
	}
	marker := MarkerOf(pid)
	if marker != "" {
		m[[2]int{pid, since}] = marker
	}
	return marker
}

// treesOf finds the live processes of each request, by marker.
func treesOf(asks map[string]killRequest, known markers) map[string][]int {
	sessions, members := map[int]string{}, map[int]string{}
	for marker, ask := range asks {
		sessions[ask.session] = marker
		for _, pid := range cgroupPIDs(ask.cgroup) {
			members[pid] = marker
		}
	}
	found := map[string][]int{}
	for _, pid := range pids() {
		session, since, zombie, ok := sessionOf(pid)
		if !ok || zombie {
			continue
		}
		marker, mine := sessions[session]
		if !mine {
			marker, mine = members[pid]
		}
		if !mine {
			marker = known.of(pid, since)
			_, mine = asks[marker]
		}
		if mine {
			found[marker] = append(found[marker], pid)
		}
	}
	return found
}

// MarkerEnv is in the environment of every process of a worker's tree: the agent's identity, a dot, and the worker's
// id. A process that leaves its group, its session and its parent keeps it.
const MarkerEnv = "TROUPE_WORKER"

// MarkerOf is the marker of a process; empty: none, exited, or of another user.
func MarkerOf(pid int) string {
	env, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil {
		return ""
	}
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

// marked is the live processes whose marker matches, by marker.
func marked(want func(marker string) bool) map[string][]int {
	found := map[string][]int{}
	self := os.Getpid()
	for _, pid := range pids() {
		if pid == self {
			continue
		}
		if m := MarkerOf(pid); m != "" && want(m) {
			found[m] = append(found[m], pid)
		}
	}
	return found
}

// sessionOf is the session of a process, when it began by the clock of the system, and whether it is a zombie; ok is false if the process
// does not exist.
func sessionOf(pid int) (session, since int, zombie, ok bool) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, 0, false, false
	}
	_, rest, ok := strings.Cut(string(stat[bytes.LastIndexByte(stat, ')')+1:]), " ")
	fields := strings.Fields(rest) // state, parent, group, session, …; the beginning is the twentieth
	if !ok || len(fields) < 20 {
		return 0, 0, false, false
	}
	session, err = strconv.Atoi(fields[3])
	since, failed := strconv.Atoi(fields[19])
	return session, since, fields[0] == "Z" || fields[0] == "X", err == nil && failed == nil
}

// KillMarked kills every process whose marker matches, and those forked meanwhile, until there is none or the limit has
// passed. It returns the survivors.
func KillMarked(want func(marker string) bool, limit time.Duration) map[string][]int {
	for end, pause := time.Now().Add(limit), time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		found := marked(want)
		if len(found) == 0 || time.Now().After(end) {
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
