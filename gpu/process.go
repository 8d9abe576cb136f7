package gpu

import "fmt"

// ProcessKind is what a process does with a device.
type ProcessKind string

const (
	Compute  ProcessKind = "compute"
	Graphics ProcessKind = "graphics" // a display server and its clients
)

// Process is an operating system process with a context on a device.
type Process struct {
	PID    int         `json:"pid" msgpack:"pid"`                           // as the driver reports it, which in a container may belong to another PID namespace
	Name   string      `json:"name,omitempty" msgpack:"name,omitempty"`     // "" if the driver may not read it
	Memory *Bytes      `json:"memory,omitempty" msgpack:"memory,omitempty"` // device memory in use
	Kind   ProcessKind `json:"kind" msgpack:"kind"`
}

// String describes the process: "process 4242 (python3, 3.1 GiB)".
func (p Process) String() string {
	name := p.Name
	if name == "" {
		name = "name unknown"
	}
	if p.Memory == nil {
		return fmt.Sprintf("process %d (%s)", p.PID, name)
	}
	return fmt.Sprintf("process %d (%s, %s GiB)", p.PID, name, gib(*p.Memory))
}
