package nodes

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"troupe/bus"
	"troupe/gpu"
	"troupe/nodes/proctree"
)

// inherited lists the variables that a worker gets from the agent's environment. LD_LIBRARY_PATH is included because
// GPU containers find their driver by it. A trailing star matches any suffix.
var inherited = []string{"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_*", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "TROUPE_DATA*"}

// reservedVariables lists the variables that only an agent may set, deviceNames those that a launch may set with Program.OwnVariables.
var (
	reservedVariables = []string{proctree.MarkerEnv, AssignmentEnv, SpareEnv, gpu.SimUseEnv}
	deviceNames       = []string{"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"}
)

func isInherited(name string) bool {
	return slices.ContainsFunc(inherited, func(pattern string) bool {
		prefix, star := strings.CutSuffix(pattern, "*")
		return name == pattern || star && strings.HasPrefix(name, prefix)
	})
}

// environment merges a worker's environment from the agent's, the launch's, the worker's own, and the variables that
// the agent adds: devices, marker, assignment. Later ones win; a reserved name in a launch is an error, and so is a variable of
// devices unless ownDevices is set.
func environment(agent []string, launch, worker, added map[string]string, ownDevices bool) ([]string, error) {
	env := map[string]string{"PYTHONUNBUFFERED": "1"} // otherwise the last lines of a killed worker are lost
	for _, entry := range agent {
		if name, value, ok := strings.Cut(entry, "="); ok && isInherited(name) {
			env[name] = value
		}
	}
	for _, part := range []map[string]string{launch, worker} {
		for name, value := range part {
			if err := checkVariable(name, value, ownDevices); err != nil {
				return nil, err
			}
			env[name] = value
		}
	}
	maps.Copy(env, added)
	out := make([]string, 0, len(env))
	for _, name := range slices.Sorted(maps.Keys(env)) {
		out = append(out, name+"="+env[name])
	}
	return out, nil
}

func checkVariable(name, value string, ownDevices bool) error {
	switch {
	case name == "" || strings.ContainsAny(name, "=\x00"):
		return bus.Errorf(bus.CodeInvalid, "environment: %q is not a valid name of a variable", name)
	case strings.ContainsRune(value, 0):
		return bus.Errorf(bus.CodeInvalid, "environment: the value of %s contains a zero byte", name)
	case slices.Contains(reservedVariables, name):
		return bus.Errorf(bus.CodeInvalid, "environment: %s is set by the node's agent; remove it", name)
	case !ownDevices && slices.Contains(deviceNames, name):
		return bus.Errorf(bus.CodeInvalid, "environment: %s is set by the node's agent from the granted devices; remove it", name)
	}
	return nil
}

// deviceVariables is the environment that makes the given devices visible.
func deviceVariables(all []gpu.Device, uuids []string, form gpu.Form) (map[string]string, error) {
	var mine []gpu.Device
	for _, uuid := range uuids {
		i := slices.IndexFunc(all, func(d gpu.Device) bool { return d.UUID == uuid })
		if i < 0 {
			return nil, bus.Errorf(bus.CodeNotFound, "device %s does not exist", uuid)
		}
		mine = append(mine, all[i])
	}
	env, err := gpu.Visible(mine, form)
	if err != nil {
		return nil, bus.Errorf(bus.CodeInvalid, "%w", err)
	}
	return env, nil
}

// locate finds a program as a shell does in the given folder and environment.
func locate(name, dir string, env []string) (string, error) {
	if strings.Contains(name, "/") {
		path := name
		if !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		return path, executable(path)
	}
	path := ""
	for _, entry := range env {
		if value, ok := strings.CutPrefix(entry, "PATH="); ok {
			path = value
		}
	}
	for folder := range strings.SplitSeq(path, ":") {
		if !filepath.IsAbs(folder) {
			continue // a relative PATH entry would find programs in the worker's folder by accident
		}
		if full := filepath.Join(folder, name); executable(full) == nil {
			return full, nil
		}
	}
	return "", bus.Errorf(bus.CodeNotFound, "program %q not found in PATH=%s", name, path)
}

func executable(path string) error {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return bus.Errorf(bus.CodeNotFound, "program %s not found: %w", path, err)
	case info.IsDir() || info.Mode().Perm()&0o111 == 0:
		return bus.Errorf(bus.CodeInvalid, "%s is not executable (mode %v)", path, info.Mode())
	}
	return nil
}
