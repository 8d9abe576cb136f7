package nodes

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// cgroups is where the workers of an agent have a control group each, if the system lets us: a process that leaves its
// group, its session and its environment does not leave that. Zero: there are none, and the other means have to do.
type cgroups struct{ dir string }

// openCgroups is the group of an agent's workers beside the agent itself, in its own. It is made with the first worker, and
// those of agents that were killed are removed if nothing is in them: an agent that lives makes its own again.
func openCgroups(identity string) cgroups {
	own, ok := ownCgroup()
	if !ok {
		return cgroups{}
	}
	others, _ := filepath.Glob(filepath.Join(own, cgroupPrefix+"*")) // the pattern is right
	for _, other := range others {
		workers, _ := filepath.Glob(filepath.Join(other, "*", "cgroup.procs"))
		for _, procs := range workers {
			_ = os.Remove(filepath.Dir(procs)) // unless something is in it
		}
		_ = os.Remove(other)
	}
	return cgroups{filepath.Join(own, cgroupPrefix+identity)}
}

const cgroupPrefix = "troupe-"

// ownCgroup is the folder of this process in the unified hierarchy.
func ownCgroup() (string, bool) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", false
	}
	groups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", false
	}
	for line := range strings.Lines(string(groups)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			return unified(string(mounts), path)
		}
	}
	return "", false
}

// unified finds a group's folder by the list of mounts: "36 25 0:31 ROOT POINT OPTIONS - cgroup2 …".
func unified(mounts, path string) (string, bool) {
	for line := range strings.Lines(mounts) {
		before, after, ok := strings.Cut(line, " - ")
		fields := strings.Fields(before)
		if !ok || len(fields) < 5 || !strings.HasPrefix(after, "cgroup2 ") {
			continue
		}
		if rest, ok := strings.CutPrefix(path, strings.TrimSuffix(fields[3], "/")); ok {
			return filepath.Join(fields[4], rest), true
		}
	}
	return "", false
}

// make makes a group for one worker, opened for the start; nil if there is none.
func (g cgroups) make(name string) (path string, folder *os.File) {
	if g.dir == "" {
		return "", nil
	}
	if err := os.Mkdir(g.dir, 0o755); err == nil {
		_ = os.WriteFile(filepath.Join(g.dir, "cgroup.subtree_control"), []byte("+memory"), 0) // only if it was given to us
	}
	path = filepath.Join(g.dir, name)
	if err := os.Mkdir(path, 0o755); err != nil {
		return "", nil
	}
	folder, err := os.Open(path)
	if err != nil {
		_ = os.Remove(path) // it stays empty, and the next agent removes it
		return "", nil
	}
	return path, folder
}

// cgroupPIDs are the processes in a group.
func cgroupPIDs(path string) (pids []int) {
	if path == "" {
		return nil
	}
	data, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
	if err != nil {
		return nil
	}
	for text := range strings.FieldsSeq(string(data)) {
		if pid, err := strconv.Atoi(text); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// cgroupOOM reports whether the kernel has killed a process of the group for want of memory; known is false if the group
// does not say.
func cgroupOOM(path string) (oom, known bool) {
	if path == "" {
		return false, false
	}
	data, err := os.ReadFile(filepath.Join(path, "memory.events"))
	if err != nil {
		return false, false
	}
	for line := range strings.Lines(string(data)) {
		if count, ok := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); ok {
			return count != "0", true
		}
	}
	return false, false
}

// removeCgroup removes an empty group. One that is being emptied is waited for, for a moment.
func removeCgroup(path string) {
	for end := time.Now().Add(time.Second); path != ""; time.Sleep(time.Millisecond) {
		if err := os.Remove(path); err == nil || errors.Is(err, os.ErrNotExist) || time.Now().After(end) {
			return
		}
	}
}

// clear kills what is in the groups of an earlier agent, and removes them.
func (g cgroups) clear() {
	if g.dir == "" {
		return
	}
	old, _ := filepath.Glob(filepath.Join(g.dir, "*", "cgroup.procs")) // the pattern is right
	for _, procs := range old {
		path := filepath.Dir(procs)
		for _, pid := range cgroupPIDs(path) {
			killPID(pid)
		}
		removeCgroup(path)
	}
}

// remove removes the agent's group, which is empty.
func (g cgroups) remove() { removeCgroup(g.dir) }
