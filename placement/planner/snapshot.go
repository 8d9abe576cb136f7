package planner

import (
	"cmp"
	"slices"
	"time"
)

// Snapshot is the input of a decision: the nodes, the reservations and the time.
type Snapshot struct {
	Now          time.Time     `json:"now" msgpack:"now"`
	Nodes        []Node        `json:"nodes" msgpack:"nodes"`
	Reservations []Reservation `json:"reservations,omitempty" msgpack:"reservations,omitempty"`

	// DevicesPerNode is the stride of global device ids: id = node rank × DevicesPerNode + index. Zero: the largest
	// index on any node plus one, which changes when nodes of another size come and go.
	DevicesPerNode int `json:"devices_per_node,omitempty" msgpack:"devices_per_node,omitempty"`
}

// Node is a machine with devices. Nodes are ordered by rank; ranks are unique and may have gaps.
type Node struct {
	ID      string            `json:"id" msgpack:"id"`
	Rank    int               `json:"rank" msgpack:"rank"`
	Labels  map[string]string `json:"labels,omitempty" msgpack:"labels,omitempty"`
	CPUs    Share             `json:"cpus,omitempty" msgpack:"cpus,omitempty"`
	Memory  int64             `json:"memory,omitempty" msgpack:"memory,omitempty"` // bytes
	Devices []Device          `json:"devices,omitempty" msgpack:"devices,omitempty"`

	// Resources are the amounts of resources that the node declares by name.
	Resources map[string]Share `json:"resources,omitempty" msgpack:"resources,omitempty"`

	State    NodeState `json:"state,omitempty" msgpack:"state,omitempty"`
	Cordoned string    `json:"cordoned,omitempty" msgpack:"cordoned,omitempty"` // as in Cordon.String; empty: not cordoned
	Why      string    `json:"why,omitempty" msgpack:"why,omitempty"`           // why it is not ready
	Since    time.Time `json:"since,omitzero" msgpack:"since,omitempty"`        // since when it is not ready
}

// NodeState is whether a node may be given work, cordons aside.
type NodeState string

const (
	NodeReady    NodeState = ""         // it sends heartbeats and its devices are verified
	NodeLost     NodeState = "lost"     // heartbeats have stopped; its reservations remain until its lease expires
	NodeUnproven NodeState = "unproven" // it is new or has returned, and its devices are not verified yet
)

// open reports whether the node takes new work.
func (n *Node) open() bool { return n.State == NodeReady && n.Cordoned == "" }

// Device is one accelerator of a node.
type Device struct {
	UUID   string `json:"uuid" msgpack:"uuid"`
	Index  int    `json:"index" msgpack:"index"`
	NUMA   int    `json:"numa,omitempty" msgpack:"numa,omitempty"`
	Island int    `json:"island,omitempty" msgpack:"island,omitempty"` // devices with the same number are connected by NVLink
	Unfit  string `json:"unfit,omitempty" msgpack:"unfit,omitempty"`   // why it must not be granted ("XID 79", "process 4711 is on it"); empty: it may be

	// Clearing states that the device is unfit only until a report shows it empty after its last use, which is expected
	// soon. Preemption counts on such a device.
	Clearing bool `json:"clearing,omitempty" msgpack:"clearing,omitempty"`

	Cordoned string `json:"cordoned,omitempty" msgpack:"cordoned,omitempty"` // as in Node
}

// grantable reports whether the device may be granted.
func (d *Device) grantable() bool { return d.Unfit == "" && d.Cordoned == "" }

// describeState returns why it may not be granted.
func (d *Device) describeState() string {
	switch {
	case d.Cordoned == "":
		return d.Unfit
	case d.Unfit == "":
		return "cordoned " + d.Cordoned
	}
	return d.Unfit + "; cordoned " + d.Cordoned
}

// Reservation is a granted gang.
type Reservation struct {
	ID        string    `json:"id" msgpack:"id"`
	Namespace string    `json:"namespace,omitempty" msgpack:"namespace,omitempty"`
	Holder    string    `json:"holder,omitempty" msgpack:"holder,omitempty"` // description of the owner, such as a role
	Priority  int       `json:"priority,omitempty" msgpack:"priority,omitempty"`
	Since     time.Time `json:"since,omitzero" msgpack:"since,omitempty"`
	Workers   []Worker  `json:"workers" msgpack:"workers"`

	// SharesWith is the first reservation of the group that this one is colocated with. The reservations of a group
	// count once, and their devices are free when the last of them is released.
	SharesWith string `json:"over,omitempty" msgpack:"over,omitempty"`

	// Parent is the reservation whose bundle ParentBundle provides the resources of the only worker; empty: the nodes do.
	Parent       string `json:"parent,omitempty" msgpack:"parent,omitempty"`
	ParentBundle int    `json:"parent_bundle,omitempty" msgpack:"parent_bundle,omitempty"`

	// Volatile and Standby are as in Request. A volatile reservation is not in the ledger.
	Volatile bool    `json:"volatile,omitempty" msgpack:"volatile,omitempty"`
	Standby  Standby `json:"standby,omitzero" msgpack:"standby,omitempty"`

	// Leaving states that the reservation is preempted and in its grace period; preemption counts on its devices.
	Leaving bool `json:"leaving,omitempty" msgpack:"leaving,omitempty"`
}

// groupName returns the name of the group of reservations that share devices.
func (r *Reservation) groupName() string {
	if r.SharesWith != "" {
		return r.SharesWith
	}
	return r.ID
}

// Nodes returns the names of the nodes on which r has a worker or a device, by rank, each once.
func (r *Reservation) Nodes() []string {
	type ranked struct {
		rank int
		name string
	}
	var all []ranked
	for i := range r.Workers {
		w := &r.Workers[i]
		all = append(all, ranked{w.NodeRank, w.Node})
		for _, slot := range w.Slots {
			if slot.Node != w.Node {
				all = append(all, ranked{slot.NodeRank, slot.Node})
			}
		}
	}
	slices.SortFunc(all, func(a, b ranked) int { return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.name, b.name)) })
	var names []string
	for _, n := range slices.Compact(all) {
		if !slices.Contains(names, n.name) {
			names = append(names, n.name)
		}
	}
	return names
}

// inRankOrder returns devices by NUMA node and index, the order of ranks. It does not change the argument.
func inRankOrder(devices []Device) []Device {
	before := func(a, b Device) int {
		if a.NUMA != b.NUMA {
			return a.NUMA - b.NUMA
		}
		return a.Index - b.Index
	}
	if slices.IsSortedFunc(devices, before) {
		return devices
	}
	devices = slices.Clone(devices)
	slices.SortFunc(devices, before)
	return devices
}
