package nodes

import (
	"encoding/json"
	"os"

	"troupe/bus"
)

// AssignmentEnv names the file in which a worker process finds what it is to do. Only its owner can read it, and it goes
// with the worker.
const AssignmentEnv = "TROUPE_ASSIGNMENT"

// Assigned is what an agent gives to a worker process: how to reach the bus, and what its driver had to say.
type Assigned struct {
	Node        string   `json:"node"`
	Name        string   `json:"name"` // of the worker, for people
	URLs        []string `json:"urls"`
	TokenFile   string   `json:"token_file,omitempty"`
	CredsFile   string   `json:"creds_file,omitempty"`
	CAFile      string   `json:"ca_file,omitempty"`
	Fingerprint string   `json:"fingerprint,omitempty"`
	Assignment  []byte   `json:"assignment"` // the driver's, untouched
}

// BusConfig is how the worker connects.
func (a Assigned) BusConfig() bus.Config {
	return bus.Config{
		Name: a.Name, URLs: a.URLs, TokenFile: a.TokenFile, CredsFile: a.CredsFile,
		TLS: bus.TLSConfig{CAFile: a.CAFile, Fingerprint: a.Fingerprint},
	}
}

// ReadAssigned reads such a file. A driver's program calls it with the value of AssignmentEnv when that is set.
func ReadAssigned(path string) (Assigned, error) {
	var a Assigned
	data, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(data, &a)
	}
	if err != nil {
		return a, bus.Errorf(bus.CodeInvalid, "the assignment in %s=%s cannot be read: %w; it is set by the agent that starts a worker", AssignmentEnv, path, err)
	}
	return a, nil
}
