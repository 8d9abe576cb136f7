package nodes

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"troupe/bus"
	"troupe/gpu"
)

// inherited is what a worker has of its agent's environment: where programs and libraries are, whose files, which
// language and zone. LD_LIBRARY_PATH is among them because GPU containers find their driver by it. Names that end with a
// star stand for all that begin so.
var inherited = []string{"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_*", "TZ", "TMPDIR", "LD_LIBRARY_PATH"}

// ours are the names that only an agent may set.
var ours = []string{MarkerEnv, AssignmentEnv, gpu.SimUseEnv, "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"}

func isInherited(name string) bool {
	return slices.ContainsFunc(inherited, func(pattern string) bool {
		prefix, star := strings.CutSuffix(pattern, "*")
		return name == pattern || star && strings.HasPrefix(name, prefix)
	})
}

// environment is a worker's, from the agent's own, the launch's and the worker's part, and what the agent adds: the
// devices, the marker and the assignment. Later ones win, except that nobody may set what is the agent's to say.
func environment(agent []string, launch, worker, added map[string]string) ([]string, error) {
	env := map[string]string{"PYTHONUNBUFFERED": "1"} // or the last lines of a killed worker are lost
	for _, entry := range agent {
		if name, value, ok := strings.Cut(entry, "="); ok && isInherited(name) {
			env[name] = value
		}
	}
	for _, part := range []map[string]string{launch, worker} {
		for name, value := range part {
			if err := checkVariable(name, value); err != nil {
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

func checkVariable(name, value string) error {
	switch {
	case name == "" || strings.ContainsAny(name, "=\x00"):
		return bus.Errorf(bus.CodeInvalid, "environment: %q cannot be the name of a variable", name)
	case strings.ContainsRune(value, 0):
		return bus.Errorf(bus.CodeInvalid, "environment: the value of %s has a zero byte, which no process can be given", name)
	case slices.Contains(ours, name):
		return bus.Errorf(bus.CodeInvalid, "environment: %s is set by the node's agent, from the devices that were granted; leave it out", name)
	}
	return nil
}

// deviceVariables is what a worker is shown of the node's devices.
func deviceVariables(all []gpu.Device, uuids []string, form gpu.Form) (map[string]string, error) {
	var mine []gpu.Device
	for _, uuid := range uuids {
		i := slices.IndexFunc(all, func(d gpu.Device) bool { return d.UUID == uuid })
		if i < 0 {
			return nil, bus.Errorf(bus.CodeNotFound, "there is no device %s", uuid)
		}
		mine = append(mine, all[i])
	}
	env, err := gpu.Visible(mine, form)
	if err != nil {
		return nil, bus.Errorf(bus.CodeInvalid, "%w", err)
	}
	return env, nil
}

// locate finds a program as a shell would in the given folder and environment.
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
			continue // the worker's folder is no place for programs by accident
		}
		if full := filepath.Join(folder, name); executable(full) == nil {
			return full, nil
		}
	}
	return "", bus.Errorf(bus.CodeNotFound, "there is no program %q in PATH=%s", name, path)
}

func executable(path string) error {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return bus.Errorf(bus.CodeNotFound, "there is no program %s: %w", path, err)
	case info.IsDir() || info.Mode().Perm()&0o111 == 0:
		return bus.Errorf(bus.CodeInvalid, "%s is no program that can be run (mode %v)", path, info.Mode())
	}
	return nil
}
