package protocol

import "troupe/gpu"

const (
	// LeaseBucket is the key-value bucket of the nodes' leases.
	LeaseBucket = "troupe_nodes"

	// NoStamp is Report.Answered of an agent that has received no ReportRequest with a stamp yet.
	NoStamp = 1
)

// LeaseKey returns node.<name>: the key of a node's lease. The value of the key is a Report.
func LeaseKey(node string) string { return "node." + node }

// Report is the state of a node: its resources, the health of its devices, and the workers that run there. The agent
// sends it to the placement service, which passes it on in answers about nodes.
type Report struct {
	Node    string            `json:"node" msgpack:"node"`
	Session string            `json:"session" msgpack:"session"` // differs each time the agent starts
	Seq     uint64            `json:"seq" msgpack:"seq"`         // grows with each report of the session
	Labels  map[string]string `json:"labels,omitempty" msgpack:"labels,omitempty"`
	CPUs    int               `json:"cpus" msgpack:"cpus"`
	Memory  gpu.Bytes         `json:"memory" msgpack:"memory"`
	Source  string            `json:"source,omitempty" msgpack:"source,omitempty"` // of the devices, as gpu.Inventory.String describes it
	Devices []gpu.Device      `json:"devices" msgpack:"devices"`

	// Resources are the amounts of other resources that the node declares, in thousandths by name.
	Resources map[string]int64 `json:"resources,omitempty" msgpack:"resources,omitempty"`

	// Foreign lists, by device UUID, the processes on a device that the agent did not start.
	Foreign map[string][]gpu.Process `json:"foreign,omitempty" msgpack:"foreign,omitempty"`

	// Running lists the grants under which workers of the agent run, sorted by reservation and token. RunningComplete
	// states that the list is complete. It is false for agents of versions without this field, and for lists that
	// LimitRunning has cut.
	Running         []RunningGrant `json:"running,omitempty" msgpack:"running,omitempty"`
	RunningComplete bool           `json:"running_complete,omitempty" msgpack:"running_complete,omitempty"`

	// Idle states that the agent runs no worker, under a grant or without one. It is false for agents of versions without this field.
	Idle bool `json:"idle,omitempty" msgpack:"idle,omitempty"`

	// Answered is the stamp of the newest ReportRequest that the agent had received before it made this report; NoStamp
	// if it had received none. Zero: the agent's version does not support stamps.
	Answered uint64 `json:"answered,omitempty" msgpack:"answered,omitempty"`
}

// Unfit returns the reasons why a device of the report must not be granted: its health and foreign processes. The list is
// empty for a device that may be granted.
func (r *Report) Unfit(d gpu.Device) []string {
	reasons := d.Unfit()
	for _, p := range r.Foreign[d.UUID] {
		reasons = append(reasons, p.String()+" is on it")
	}
	return reasons
}

// Rows returns the devices of the report as rows of a table, without holders.
func (r *Report) Rows() []gpu.Row {
	rows := make([]gpu.Row, len(r.Devices))
	for i, d := range r.Devices {
		rows[i] = gpu.Row{Node: r.Node, Device: d, Foreign: r.Foreign[d.UUID]}
	}
	return rows
}

// Heartbeat is sent by an agent at a fixed interval. It carries the report every few heartbeats and after each change.
type Heartbeat struct {
	Node    string  `msgpack:"node"`
	Session string  `msgpack:"session"`
	Bye     bool    `msgpack:"bye,omitempty"`    // the agent has ended all workers and exits
	Report  *Report `msgpack:"report,omitempty"` // the newest
}

// ReportRequest is sent by the placement service to a node. It asks for a report and may order the agent to kill workers.
// An empty message is a request too. Repeated and delayed deliveries are harmless: a kill order names reservation and
// token, so it never matches the workers of a later grant.
type ReportRequest struct {
	// Stamp comes back as Report.Answered of every report that is made after the request was received. Zero: none.
	Stamp uint64      `msgpack:"stamp,omitempty"`
	Ended []KillOrder `msgpack:"ended,omitempty"`
}

// KillOrder names a grant that has ended: the agent kills all workers that run under exactly this token.
type KillOrder struct {
	Reservation string `msgpack:"reservation"`
	Token       uint64 `msgpack:"token"`
	Why         string `msgpack:"why,omitempty"`
}
