package gpu

// Report is what a node says of itself: what it has, how that is, and what is on it that should not be. It travels from
// the node's agent to the placement service, and from there to whoever asks.
type Report struct {
	Node    string            `json:"node" msgpack:"node"`
	Session string            `json:"session" msgpack:"session"` // new each time the agent starts
	Seq     uint64            `json:"seq" msgpack:"seq"`         // grows with each reading of the session
	Labels  map[string]string `json:"labels,omitempty" msgpack:"labels,omitempty"`
	CPUs    int               `json:"cpus" msgpack:"cpus"`
	Memory  Bytes             `json:"memory" msgpack:"memory"`
	Source  string            `json:"source,omitempty" msgpack:"source,omitempty"` // where the devices come from, in words
	Devices []Device          `json:"devices" msgpack:"devices"`

	// Foreign is the processes on each device, by UUID, that the agent did not start. Only it can tell.
	Foreign map[string][]Process `json:"foreign,omitempty" msgpack:"foreign,omitempty"`

	// Running is the reservations under which workers of the agent run, by reservation and token. RunningComplete says
	// that these are all: false where nothing is known (an agent of an older version), or where there are too many.
	Running         []Running `json:"running,omitempty" msgpack:"running,omitempty"`
	RunningComplete bool      `json:"running_complete,omitempty" msgpack:"running_complete,omitempty"`

	// Answered is the stamp of the newest question that had been heard before this report was made; NotAsked if there was
	// none. Zero: the agent is of a version that does not answer stamps.
	Answered uint64 `json:"answered,omitempty" msgpack:"answered,omitempty"`
}

// Beat is a node's sign of life. Every so often, and whenever something has changed, it carries the report.
type Beat struct {
	Node    string  `msgpack:"node"`
	Session string  `msgpack:"session"`
	Bye     bool    `msgpack:"bye,omitempty"`    // the agent ends in order, and nothing of it is left
	Report  *Report `msgpack:"report,omitempty"` // the newest
}

// Unfit says why the device with this UUID must not be granted, by its health and by what is on it; nothing means that
// it may be.
func (r *Report) Unfit(d Device) []string {
	reasons := d.Unfit()
	for _, p := range r.Foreign[d.UUID] {
		reasons = append(reasons, p.String()+" is on it")
	}
	return reasons
}

// Rows is the report as rows of the table, held by nobody.
func (r *Report) Rows() []Row {
	rows := make([]Row, len(r.Devices))
	for i, d := range r.Devices {
		rows[i] = Row{Node: r.Node, Device: d, Foreign: r.Foreign[d.UUID]}
	}
	return rows
}

// NodeKey is node.<name>: the key of a node's lease, whose value is a Report.
func NodeKey(name string) string { return "node." + name }

// NodesBucket is the bucket of the nodes' leases.
const NodesBucket = "troupe_nodes"
