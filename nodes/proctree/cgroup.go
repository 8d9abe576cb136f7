package proctree

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Cgroups is the parent of one control group per worker, where the system permits it: a process that leaves its process
// group, its session and its environment stays in its control group. Zero: no control groups; markers and sessions must
// do.
type Cgroups struct{ dir string }

// OpenCgroups returns the parent group of an agent's workers, inside the agent's own group. It is created with the
// first worker. Empty groups of killed agents are removed.
func OpenCgroups(identity string) Cgroups {
	own, ok := ownCgroup()
	if !ok {
		return Cgroups{}
	}
	others, _ := filepath.Glob(filepath.Join(own, cgroupPrefix+"*")) // the pattern is valid
	for _, other := range others {
		workers, _ := filepath.Glob(filepath.Join(other, "*", "cgroup.procs"))
		for _, procs := range workers {
			_ = os.Remove(filepath.Dir(procs)) // fails unless empty
		}
		_ = os.Remove(other)
	}
	return Cgroups{filepath.Join(own, cgroupPrefix+identity)}
}

const cgroupPrefix = "troupe-"

// ownCgroup is the folder of this process in the cgroup v2 hierarchy.
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

// unified finds the folder of a group in the mount table: "36 25 0:31 ROOT POINT OPTIONS - cgroup2 …".
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

// Make creates a group for one worker and opens it for the fork; nil: none.
func (g Cgroups) Make(name string) (path string, folder *os.File) {
	if g.dir == "" {
		return "", nil
	}
	if err := os.Mkdir(g.dir, 0o755); err == nil {
		_ = os.WriteFile(filepath.Join(g.dir, "cgroup.subtree_control"), []byte("+memory"), 0) // only where the controller is delegated
	}
	path = filepath.Join(g.dir, name)
	if err := os.Mkdir(path, 0o755); err != nil {
		return "", nil
	}
	folder, err := os.Open(path)
	if err != nil {
		_ = os.Remove(path) // an empty group is removed by the next agent
		return "", nil
	}
	return path, folder
}

// cgroupPIDs is the processes in a group.
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

// OOMKilled reports whether the OOM killer has killed a process of the group; known is false without the memory
// controller.
func OOMKilled(path string) (oom, known bool) {
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

// RemoveCgroup removes a group, and waits up to a second for it to become empty.
func RemoveCgroup(path string) {
	for end := time.Now().Add(time.Second); path != ""; time.Sleep(time.Millisecond) {
		if err := os.Remove(path); err == nil || errors.Is(err, os.ErrNotExist) || time.Now().After(end) {
			return
		}
	}
}

// Clear kills the processes in the groups of an earlier agent, and removes the groups.
func (g Cgroups) Clear() {
	if g.dir == "" {
		return
	}
	old, _ := filepath.Glob(filepath.Join(g.dir, "*", "cgroup.procs")) // the pattern is valid
	for _, procs := range old {
		path := filepath.Dir(procs)
		for _, pid := range cgroupPIDs(path) {
			killPID(pid)
		}
		RemoveCgroup(path)
	}
}

// Remove removes the agent's empty group.
func (g Cgroups) Remove() { RemoveCgroup(g.dir) }
