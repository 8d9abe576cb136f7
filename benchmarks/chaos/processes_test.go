package chaos

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"troupe/gpu"
	"troupe/nodes/proctree"
)

// workerProcess is a process of a worker's tree, as the kernel shows it: no agent and no network is needed to see it.
type workerProcess struct {
	PID     int
	Marker  string
	Role    string
	Devices []string // UUIDs
	Key     string   // the reservation, or the first of those that are laid over each other
}

// workerProcesses are the processes whose marker begins with one of those.
func workerProcesses(markers []string) []workerProcess {
	paths, _ := filepath.Glob("/proc/[0-9]*/environ") // the pattern is a good one
	var out []workerProcess
	for _, path := range paths {
		env, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		p := workerProcess{}
		for entry := range bytes.SplitSeq(env, []byte{0}) {
			name, value, _ := strings.Cut(string(entry), "=")
			switch name {
			case proctree.MarkerEnv:
				p.Marker = value
			case "CLUSTER_NAME":
				p.Role = value
			case gpu.SimUseEnv:
				p.use(value)
			}
		}
		if p.Marker == "" || !hasAnyPrefix(p.Marker, markers) {
			continue
		}
		p.PID, _ = strconv.Atoi(filepath.Base(filepath.Dir(path))) // the pattern says that it is a number
		if !ended(p.PID) {
			out = append(out, p)
		}
	}
	return out
}

func (p *workerProcess) use(text string) {
	var use gpu.SimUse
	if json.Unmarshal([]byte(text), &use) != nil {
		return
	}
	p.Key = use.Key
	for _, d := range use.Devices {
		p.Devices = append(p.Devices, d.UUID)
	}
}

func hasAnyPrefix(text string, prefixes []string) bool {
	for _, p := range prefixes {
		if strings.HasPrefix(text, p) {
			return true
		}
	}
	return false
}
