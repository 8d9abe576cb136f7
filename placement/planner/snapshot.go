package planner

import (
	"cmp"
	"slices"
	"time"
)

// Snapshot is all that a decision depends on: the nodes, what is held on them, and the time.
type Snapshot struct {
	Now          time.Time     `json:"now" msgpack:"now"`
	Nodes        []Node        `json:"nodes" msgpack:"nodes"`
	Reservations []Reservation `json:"reservations,omitempty" msgpack:"reservations,omitempty"`

	// DevicesPerNode is the stride of global device ids: id = node rank × DevicesPerNode + index. Zero is the largest
	// index on any node, plus one, which moves when nodes of another size come and go; whoever hands out ids fixes it.
	DevicesPerNode int `json:"devices_per_node,omitempty" msgpack:"devices_per_node,omitempty"`
}

// Node is a machine as the planner sees it. The order of nodes is the order of their ranks, which are unique and need
// not be dense.
type Node struct {
	ID       string            `json:"id" msgpack:"id"`
	Rank     int               `json:"rank" msgpack:"rank"`
	Labels   map[string]string `json:"labels,omitempty" msgpack:"labels,omitempty"`
	CPUs     Share             `json:"cpus,omitempty" msgpack:"cpus,omitempty"`
	Memory   int64             `json:"memory,omitempty" msgpack:"memory,omitempty"` // bytes
	Devices  []Device          `json:"devices,omitempty" msgpack:"devices,omitempty"`
	State    NodeState         `json:"state,omitempty" msgpack:"state,omitempty"`
	Cordoned string            `json:"cordoned,omitempty" msgpack:"cordoned,omitempty"` // who wants nothing new on it, since when and why; empty: nobody
	Why      string            `json:"why,omitempty" msgpack:"why,omitempty"`           // why it is not ready, for reasons
	Since    time.Time         `json:"since,omitzero" msgpack:"since,omitempty"`        // since when it is not
}

// NodeState says whether a node may be given work, as far as the node itself is concerned.
type NodeState string

const (
	NodeReady    NodeState = ""         // it beats and its devices were shown clean
	NodeLost     NodeState = "lost"     // its heartbeats stopped; what it holds stays held until its lease is over
	NodeUnproven NodeState = "unproven" // it came back, or has just come, and has not yet shown its devices clean
)

// open reports whether the node may be given new work.
func (n *Node) open() bool { return n.State == NodeReady && n.Cordoned == "" }

// Device is one accelerator of a node, named by its UUID and numbered by its Index there.
type Device struct {
	UUID   string `json:"uuid" msgpack:"uuid"`
	Index  int    `json:"index" msgpack:"index"`
	NUMA   int    `json:"numa,omitempty" msgpack:"numa,omitempty"`
	Island int    `json:"island,omitempty" msgpack:"island,omitempty"` // devices with the same number reach each other over NVLink
	Unfit  string `json:"unfit,omitempty" msgpack:"unfit,omitempty"`   // why it must not be granted ("XID 79", "process 4711 is on it"); empty: it may

	// Clearing says that it is unfit only because it has not been seen empty since its last use, which should be soon: so
	// nobody else is sent away for what it has room for.
	Clearing bool `json:"clearing,omitempty" msgpack:"clearing,omitempty"`

	Cordoned string `json:"cordoned,omitempty" msgpack:"cordoned,omitempty"` // as of a Node
}

// fit reports whether the device may be granted.
func (d *Device) grantable() bool { return d.Unfit == "" && d.Cordoned == "" }

// condition is why it may not be, in words.
func (d *Device) describeState() string {
	switch {
	case d.Cordoned == "":
		return d.Unfit
	case d.Unfit == "":
		return "cordoned " + d.Cordoned
	}
	return d.Unfit + "; cordoned " + d.Cordoned
}

// Reservation is a granted gang: what the ledger keeps and the book counts.
type Reservation struct {
	ID        string    `json:"id" msgpack:"id"`
	Namespace string    `json:"namespace,omitempty" msgpack:"namespace,omitempty"`
	Holder    string    `json:"holder,omitempty" msgpack:"holder,omitempty"` // who asked, in words: a role
	Priority  int       `json:"priority,omitempty" msgpack:"priority,omitempty"`
	Since     time.Time `json:"since,omitzero" msgpack:"since,omitempty"`
	Workers   []Worker  `json:"workers" msgpack:"workers"`

	// Over is the first of the reservations that share their devices on purpose, when this one was laid over it. Those
	// with one Over, and the first itself, count once; the devices are free when the last of them is gone.
	SharesWith string `json:"over,omitempty" msgpack:"over,omitempty"`

	// Leaving is set when the holder has been told to go; preemption counts on its devices.
	Leaving bool `json:"leaving,omitempty" msgpack:"leaving,omitempty"`
}

// group is the name under which r shares devices.
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

// inRankOrder is devices by NUMA node and index: the order in which ranks are given. The caller's slice is left alone.
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
