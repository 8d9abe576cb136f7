package planner

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Planner is a snapshot that is kept up to date, with an index of free resources, so that a plan takes microseconds.
// Its decisions depend on its contents only: a planner made from Snapshot decides the same.
//
// A Planner is owned by one goroutine. Plan and Schedule change it while they run and restore it before they return.
type Planner struct {
	Now time.Time // the time of decisions, set by the owner

	nodes          []*nodeState // by rank
	candidates     []candidate  // of the same nodes, unrestricted
	byID           map[string]*nodeState
	byRank         map[int]*nodeState
	labelSets      map[string]int // numbers of label sets, in the order in which they were first seen
	devicesPerNode int            // as set by the snapshot; zero: derived

	allocations   []*allocation // by age
	byReservation map[string]*allocation
	groups        map[string]int   // number of reservations by group
	usage         map[string]Share // devices held by namespace; shared devices count once
}

// New returns a planner for a snapshot. It keeps the snapshot's nodes and reservations and does not change them. An
// inconsistent snapshot is refused.
func New(s Snapshot) (*Planner, error) {
	pl := &Planner{
		Now:            s.Now,
		nodes:          make([]*nodeState, 0, len(s.Nodes)),
		byID:           make(map[string]*nodeState, len(s.Nodes)),
		byRank:         make(map[int]*nodeState, len(s.Nodes)),
		labelSets:      map[string]int{},
		devicesPerNode: s.DevicesPerNode,
		byReservation:  make(map[string]*allocation, len(s.Reservations)),
		groups:         make(map[string]int, len(s.Reservations)),
		usage:          map[string]Share{},
	}
	if err := pl.addNodes(s.Nodes); err != nil {
		return nil, err
	}
	for _, r := range s.Reservations {
		if err := pl.Restore(r); err != nil {
			return nil, fmt.Errorf("read the snapshot: %w", err)
		}
	}
	return pl, nil
}

// addNodes fills an empty planner.
func (pl *Planner) addNodes(nodes []Node) error {
	var last *nodeState
	for i := range nodes {
		if err := pl.checkNode(&nodes[i], nil); err != nil {
			return err
		}
		last = pl.nodeStateFor(nodes[i], last)
		pl.nodes = append(pl.nodes, last)
		pl.byID[last.info.ID], pl.byRank[last.info.Rank] = last, last
	}
	slices.SortFunc(pl.nodes, func(x, y *nodeState) int { return cmp.Compare(x.info.Rank, y.info.Rank) })
	pl.renumber()
	return nil
}

// nodeStateFor returns the state of a node without allocations. like is a state, or nil, whose layout and label set may
// be shared.
func (pl *Planner) nodeStateFor(n Node, like *nodeState) *nodeState {
	n.Devices = inRankOrder(n.Devices)
	var shared *layout
	if like != nil && sameLayout(n.Devices, like.info.Devices) {
		shared = like.layout
	}
	s := newNodeState(&n, shared)
	if like != nil && maps.Equal(n.Labels, like.info.Labels) {
		s.labelSet = like.labelSet
	} else {
		s.labelSet = pl.labelSetOf(n.Labels)
	}
	return s
}

// labelSetOf returns the number of a set of labels.
func (pl *Planner) labelSetOf(labels map[string]string) int {
	if len(labels) == 0 {
		return -1
	}
	var key strings.Builder
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		fmt.Fprintf(&key, "%q=%q,", name, labels[name])
	}
	kin, seen := pl.labelSets[key.String()]
	if !seen {
		kin = len(pl.labelSets)
		pl.labelSets[key.String()] = kin
	}
	return kin
}

// renumber sets the order of the node states.
func (pl *Planner) renumber() {
	for i, s := range pl.nodes {
		s.order = i
	}
	pl.candidates = candidatesOf(pl.nodes)
}

// checkNode refuses a node that is inconsistent or conflicts with a node other than the one it replaces.
func (pl *Planner) checkNode(n *Node, replaced *nodeState) error {
	if same := pl.byID[n.ID]; same != replaced {
		return &SnapshotError{n.ID, "the node is listed twice"}
	}
	if other := pl.byRank[n.Rank]; other != nil && other != replaced {
		return &SnapshotError{n.ID, fmt.Sprintf("its rank %d is that of node %q", n.Rank, other.info.ID)}
	}
	for name, amount := range n.Resources {
		if amount < 0 {
			return &SnapshotError{n.ID, fmt.Sprintf("it has %s of resource %q", amount, name)}
		}
	}
	if n.CPUs < 0 || n.Memory < 0 || n.Rank < 0 {
		return &SnapshotError{n.ID, fmt.Sprintf("it has rank %d, %s CPUs and %d bytes", n.Rank, n.CPUs, n.Memory)}
	}
	for i := range n.Devices {
		if err := checkDevice(n.ID, n.Devices[:i], &n.Devices[i]); err != nil {
			return err
		}
	}
	return nil
}

// checkDevice refuses a device with the index or the UUID of an earlier one.
func checkDevice(node string, before []Device, d *Device) error {
	if d.Index < 0 {
		return &SnapshotError{node, fmt.Sprintf("device %q has index %d", d.UUID, d.Index)}
	}
	for i := range before {
		if before[i].Index == d.Index || before[i].UUID == d.UUID {
			return &SnapshotError{node, fmt.Sprintf("devices %d and %d (%q and %q) have the same index or UUID", before[i].Index, d.Index, before[i].UUID, d.UUID)}
		}
	}
	return nil
}

// Snapshot returns the contents of the planner: nodes by rank, reservations by age. The workers belong to the planner
// and must not be changed.
func (pl *Planner) Snapshot() Snapshot {
	s := Snapshot{Now: pl.Now, DevicesPerNode: pl.devicesPerNode, Nodes: make([]Node, len(pl.nodes)), Reservations: make([]Reservation, len(pl.allocations))}
	for i, node := range pl.nodes {
		s.Nodes[i] = *node.info
	}
	for i, alloc := range pl.allocations {
		s.Reservations[i] = alloc.Reservation
	}
	return s
}

// SetNode adds or replaces a node. Reservations keep their devices there: a device that is absent counts again when it
// returns.
func (pl *Planner) SetNode(n Node) error {
	old := pl.byID[n.ID]
	if err := pl.checkNode(&n, old); err != nil {
		return err
	}
	pl.replaceNode(n.ID, pl.nodeStateFor(n, old))
	return nil
}

// RemoveNode removes a node. Reservations with workers there remain, without their devices on it.
func (pl *Planner) RemoveNode(id string) { pl.replaceNode(id, nil) }

// replaceNode replaces the state of a node, or removes it if fresh is nil, and allocates again what is held there.
func (pl *Planner) replaceNode(id string, fresh *nodeState) {
	var there []*allocation
	for _, alloc := range pl.allocations {
		if alloc.usesNode(id) {
			pl.charge(alloc.Namespace, -alloc.free())
			there = append(there, alloc)
		}
	}
	if old := pl.byID[id]; old != nil {
		delete(pl.byID, id)
		delete(pl.byRank, old.info.Rank)
		pl.nodes = slices.Delete(pl.nodes, old.order, old.order+1)
	}
	if fresh != nil {
		pl.byID[id], pl.byRank[fresh.info.Rank] = fresh, fresh
		at, _ := slices.BinarySearchFunc(pl.nodes, fresh.info.Rank, func(s *nodeState, rank int) int { return cmp.Compare(s.info.Rank, rank) })
		pl.nodes = slices.Insert(pl.nodes, at, fresh)
	}
	pl.renumber()
	for _, alloc := range there {
		pl.resolve(alloc)
		pl.charge(alloc.Namespace, alloc.allocate())
	}
}

// Grant adds a reservation. It refuses an id that is in use, and devices that another reservation holds, whatever the
// plan said. Absent nodes and devices are no error.
func (pl *Planner) Grant(r Reservation) error {
	if pl.groups[r.ID] > 0 { // the first reservation of a group is gone, but not all that share with it
		return fmt.Errorf("reservation %q: %w", r.ID, ErrDuplicate)
	}
	return pl.Restore(r)
}

// Restore is Grant without the check of the group: the first reservation of a group may be restored after the others.
func (pl *Planner) Restore(r Reservation) error {
	if pl.byReservation[r.ID] != nil {
		return fmt.Errorf("reservation %q: %w", r.ID, ErrDuplicate)
	}
	if err := r.checkSlots(); err != nil {
		return err
	}
	alloc := &allocation{Reservation: r}
	pl.resolve(alloc)
	more := alloc.allocate()
	if err := alloc.conflict(); err != nil {
		alloc.free()
		return err
	}
	pl.charge(alloc.Namespace, more)
	at, _ := slices.BinarySearchFunc(pl.allocations, alloc, (*allocation).compareAge)
	pl.allocations = slices.Insert(pl.allocations, at, alloc)
	pl.byReservation[r.ID] = alloc
	pl.groups[alloc.groupName()]++
	return nil
}

// Release removes a reservation and returns it. Releasing an unknown id changes nothing.
func (pl *Planner) Release(id string) (Reservation, bool) {
	alloc := pl.byReservation[id]
	if alloc == nil {
		return Reservation{}, false
	}
	pl.charge(alloc.Namespace, -alloc.free())
	at, _ := slices.BinarySearchFunc(pl.allocations, alloc, (*allocation).compareAge)
	pl.allocations = slices.Delete(pl.allocations, at, at+1)
	delete(pl.byReservation, id)
	if pl.groups[alloc.groupName()]--; pl.groups[alloc.groupName()] == 0 {
		delete(pl.groups, alloc.groupName())
	}
	return alloc.Reservation, true
}

// charge adds devices to the usage of a namespace.
func (pl *Planner) charge(namespace string, devices Share) {
	if pl.usage[namespace] += devices; pl.usage[namespace] == 0 {
		delete(pl.usage, namespace)
	}
}

// Reservation returns the reservation with this id.
func (pl *Planner) Reservation(id string) (Reservation, bool) {
	alloc := pl.byReservation[id]
	if alloc == nil {
		return Reservation{}, false
	}
	return alloc.Reservation, true
}

// NameTaken reports whether a reservation, or a group of reservations that share devices, has this name.
func (pl *Planner) NameTaken(id string) bool { return pl.groups[id] > 0 || pl.byReservation[id] != nil }

// OverQuota returns the quota that granting r would exceed; nil if there is none.
func (pl *Planner) OverQuota(r *Request, p Policy) *QuotaError {
	return p.overQuota(r, pl.usage[r.Namespace])
}

// deviceStride returns the stride of global device ids.
func (pl *Planner) deviceStride() int {
	if pl.devicesPerNode > 0 {
		return pl.devicesPerNode
	}
	most := 0
	for _, s := range pl.nodes {
		for i := range s.info.Devices {
			most = max(most, s.info.Devices[i].Index+1)
		}
	}
	return most
}
