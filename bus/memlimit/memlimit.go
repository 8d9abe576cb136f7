// Package memlimit finds how much memory this process may use: that of the host, or less if a control group has a limit.
package memlimit

import (
	"os"
	"path"
	"strconv"
	"strings"
)

// assumed is the memory of a system that does not tell.
const assumed = 4 << 30

// Total is the memory of the host, or the lowest limit of the control groups of this process, in bytes.
func Total() int64 {
	total := Info("MemTotal")
	if total == 0 {
		total = assumed
	}
	groups, _ := os.ReadFile("/proc/self/cgroup") // without it there is no limit
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	limit := groupLimit(string(groups), string(mounts), func(name string) string {
		text, _ := os.ReadFile(name) // a group at the top has no such file
		return string(text)
	})
	if limit > 0 && limit < total {
		return limit
	}
	return total
}

// Info is a field of /proc/meminfo in bytes; 0 if it cannot be read.
func Info(field string) int64 {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			n, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
			if err != nil {
				return 0
			}
			return n << 10
		}
	}
	return 0
}

// groupLimit is the lowest limit of the groups in /proc/self/cgroup and of those above them, as far as they are mounted; 0: there is none. read
// is the text of a file, or empty.
func groupLimit(groups, mounts string, read func(name string) string) (lowest int64) {
	for line := range strings.Lines(groups) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3) // hierarchy, controllers, group
		if len(fields) != 3 {
			continue
		}
		file, kind, option := "memory.limit_in_bytes", "cgroup", "memory"
		if fields[0] == "0" && fields[1] == "" {
			file, kind, option = "memory.max", "cgroup2", ""
		} else if !hasField(fields[1], "memory") {
			continue
		}
		point, group := mounted(mounts, kind, option, fields[2])
		if point == "" {
			continue
		}
		for {
			n, err := strconv.ParseInt(strings.TrimSpace(read(path.Join(point, group, file))), 10, 64) // "max" is no number
			if err == nil && n > 0 && (lowest == 0 || n < lowest) {
				lowest = n
			}
			if group == "/" {
				break
			}
			group = path.Dir(group)
		}
	}
	return lowest
}

// mounted is where a hierarchy is mounted, and the place of a group below that: lines are "36 25 0:31 ROOT POINT … - KIND SOURCE OPTIONS".
func mounted(mounts, kind, option, group string) (point, below string) {
	for line := range strings.Lines(mounts) {
		before, after, _ := strings.Cut(line, " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if len(left) < 5 || len(right) < 3 || right[0] != kind || option != "" && !hasField(right[2], option) {
			continue
		}
		root := left[3]
		below, inside := strings.CutPrefix(group, strings.TrimSuffix(root, "/"))
		if !inside || below != "" && below[0] != '/' || strings.Contains(below, "..") {
			below = "" // the group is not visible here: the mounted one is the nearest above it that is
		}
		return left[4], path.Join("/", below)
	}
	return "", ""
}

func hasField(list, field string) bool {
	for f := range strings.SplitSeq(list, ",") {
		if f == field {
			return true
		}
	}
	return false
}
