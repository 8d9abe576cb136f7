package nodes

import (
	"encoding/json"
	"os"

	"troupe/bus"
)

// AssignmentEnv names the file with a worker's assignment. Only its owner can read it; the agent removes it with the
// worker.
const AssignmentEnv = "TROUPE_ASSIGNMENT"

// AssignmentFile is the content of an assignment file: how the worker connects to the bus, and the assignment made by its
// driver.
type AssignmentFile struct {
	Node        string   `json:"node"`
	Name        string   `json:"name"` // of the worker, for display
	URLs        []string `json:"urls"`
	TokenFile   string   `json:"token_file,omitempty"`
	Token       string   `json:"token,omitempty"` // a credential of the worker, instead of a TokenFile
	CredsFile   string   `json:"creds_file,omitempty"`
	CAFile      string   `json:"ca_file,omitempty"`
	Fingerprint string   `json:"fingerprint,omitempty"`
	Assignment  []byte   `json:"assignment"` // opaque to the agent
}

// BusConfig is the configuration of the worker's connection.
func (a AssignmentFile) BusConfig() bus.Config {
	return bus.Config{
		Name: a.Name, URLs: a.URLs, TokenFile: a.TokenFile, Token: a.Token, CredsFile: a.CredsFile,
		TLS: bus.TLSConfig{CAFile: a.CAFile, Fingerprint: a.Fingerprint},
	}
}

// ReadAssignmentFile reads an assignment file. A worker program calls it with the value of AssignmentEnv.
func ReadAssignmentFile(path string) (AssignmentFile, error) {
	var a AssignmentFile
	data, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(data, &a)
	}
	if err != nil {
		return a, bus.Errorf(bus.CodeInvalid, "read the assignment file in %s=%s: %w; the agent that starts a worker sets this variable", AssignmentEnv, path, err)
	}
	return a, nil
}
