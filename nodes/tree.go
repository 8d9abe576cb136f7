package nodes

import (
	"bytes"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// MarkerEnv is in the environment of every process of a worker's tree: the agent's identity, a dot, and the worker's
// id. A process that leaves its group, its session and its parent keeps it.
const MarkerEnv = "TROUPE_WORKER"

// markerOf is the marker of a process; empty: none, exited, or of another user.
func markerOf(pid int) string {
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
		if m := markerOf(pid); m != "" && want(m) {
			found[m] = append(found[m], pid)
		}
	}
	return found
}

// sessionOf is the session of a process, and whether it is a zombie; ok is false if the process does not exist.
func sessionOf(pid int) (session int, zombie, ok bool) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, false, false
	}
	_, rest, ok := strings.Cut(string(stat[bytes.LastIndexByte(stat, ')')+1:]), " ")
	fields := strings.Fields(rest) // state, parent, group, session, …
	if !ok || len(fields) < 4 {
		return 0, false, false
	}
	session, err = strconv.Atoi(fields[3])
	return session, fields[0] == "Z" || fields[0] == "X", err == nil
}

// killMarked kills every process whose marker matches, and those forked meanwhile, until there is none or most has
// passed. It returns the survivors.
func killMarked(want func(marker string) bool, most time.Duration) map[string][]int {
	for end, pause := time.Now().Add(most), time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
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
