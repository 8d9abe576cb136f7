package planner

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Book is a snapshot kept up to date: the nodes, what is held on them and what is free, indexed so that a plan costs
// microseconds. What it answers depends on what is in it, never on how that came about: a book made afresh from
// Snapshot plans the same.
//
// A Book is owned by one goroutine. Plan and Schedule try things out in it and leave it as it was.
type Book struct {
	Now time.Time // the time of the decisions; its owner sets it

	stocks []*stock // by rank of the node
	sites  []site   // the same, as places for bundles
	byID   map[string]*stock
	byRank map[int]*stock
	kin    map[string]int // labels of nodes, numbered as they were first seen
	stride int            // devices per node of global ids, as set; zero: derived

	held   []*held // by age
	byName map[string]*held
	groups map[string]int   // how many reservations share under a name
	usage  map[string]Share // devices held, by namespace; what is shared on purpose counts once
}

// NewBook is a book of a snapshot, whose nodes and reservations it keeps and does not change. It refuses a snapshot
// that contradicts itself.
func NewBook(s Snapshot) (*Book, error) {
	b := &Book{
		Now:    s.Now,
		stocks: make([]*stock, 0, len(s.Nodes)),
		byID:   make(map[string]*stock, len(s.Nodes)),
		byRank: make(map[int]*stock, len(s.Nodes)),
		kin:    map[string]int{},
		stride: s.DevicesPerNode,
		byName: make(map[string]*held, len(s.Reservations)),
		groups: make(map[string]int, len(s.Reservations)),
		usage:  map[string]Share{},
	}
	if err := b.addNodes(s.Nodes); err != nil {
		return nil, err
	}
	for _, r := range s.Reservations {
		if err := b.Restore(r); err != nil {
			return nil, fmt.Errorf("read the snapshot: %w", err)
		}
	}
	return b, nil
}

// addNodes fills an empty book.
func (b *Book) addNodes(nodes []Node) error {
	var last *stock
	for i := range nodes {
		if err := b.checkNode(&nodes[i], nil); err != nil {
			return err
		}
		last = b.newStock(nodes[i], last)
		b.stocks = append(b.stocks, last)
		b.byID[last.node.ID], b.byRank[last.node.Rank] = last, last
	}
	slices.SortFunc(b.stocks, func(x, y *stock) int { return cmp.Compare(x.node.Rank, y.node.Rank) })
	b.number()
	return nil
}

// newStock is an empty stock of a node; like is one, or nil, that it may have things in common with.
func (b *Book) newStock(n Node, like *stock) *stock {
	n.Devices = inRankOrder(n.Devices)
	var shared *layout
	if like != nil && lieAlike(n.Devices, like.node.Devices) {
		shared = like.layout
	}
	s := newStock(&n, shared)
	if like != nil && maps.Equal(n.Labels, like.node.Labels) {
		s.kin = like.kin
	} else {
		s.kin = b.kinOf(n.Labels)
	}
	return s
}

// kinOf numbers a set of labels.
func (b *Book) kinOf(labels map[string]string) int {
	if len(labels) == 0 {
		return -1
	}
	var key strings.Builder
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		fmt.Fprintf(&key, "%q=%q,", name, labels[name])
	}
	kin, seen := b.kin[key.String()]
	if !seen {
		kin = len(b.kin)
		b.kin[key.String()] = kin
	}
	return kin
}

// number tells the stocks their order.
func (b *Book) number() {
	for i, s := range b.stocks {
		s.order = i
	}
	b.sites = sitesOf(b.stocks)
}

// checkNode refuses a node that contradicts itself or another one than the one it replaces.
func (b *Book) checkNode(n *Node, replaced *stock) error {
	if same := b.byID[n.ID]; same != replaced {
		return &SnapshotError{n.ID, "it is there twice"}
	}
	if other := b.byRank[n.Rank]; other != nil && other != replaced {
		return &SnapshotError{n.ID, fmt.Sprintf("its rank %d is that of node %q", n.Rank, other.node.ID)}
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

// checkDevice refuses a device that cannot be told from those before it.
func checkDevice(node string, before []Device, d *Device) error {
	if d.Index < 0 {
		return &SnapshotError{node, fmt.Sprintf("device %q has index %d", d.UUID, d.Index)}
	}
	for i := range before {
		if before[i].Index == d.Index || before[i].UUID == d.UUID {
			return &SnapshotError{node, fmt.Sprintf("devices %d and %d, %q and %q, are one", before[i].Index, d.Index, before[i].UUID, d.UUID)}
		}
	}
	return nil
}

// Snapshot is what the book holds now. Nodes are by rank, reservations by age; the workers are the book's own and must
// not be changed.
func (b *Book) Snapshot() Snapshot {
	s := Snapshot{Now: b.Now, DevicesPerNode: b.stride, Nodes: make([]Node, len(b.stocks)), Reservations: make([]Reservation, len(b.held))}
	for i, stock := range b.stocks {
		s.Nodes[i] = *stock.node
	}
	for i, h := range b.held {
		s.Reservations[i] = h.Reservation
	}
	return s
}

// SetNode adds a node or replaces what is known of it. What is held there stays held: a device that is gone counts
// again when it comes back.
func (b *Book) SetNode(n Node) error {
	old := b.byID[n.ID]
	if err := b.checkNode(&n, old); err != nil {
		return err
	}
	b.replace(n.ID, b.newStock(n, old))
	return nil
}

// RemoveNode forgets a node. What is held there stays in the book, without its devices.
func (b *Book) RemoveNode(id string) { b.replace(id, nil) }

// replace puts fresh, unless it is nil, in the place of the stock of a node, and counts again what is held there.
func (b *Book) replace(id string, fresh *stock) {
	var there []*held
	for _, h := range b.held {
		if h.touches(id) {
			b.charge(h.Namespace, -h.leave())
			there = append(there, h)
		}
	}
	if old := b.byID[id]; old != nil {
		delete(b.byID, id)
		delete(b.byRank, old.node.Rank)
		b.stocks = slices.Delete(b.stocks, old.order, old.order+1)
	}
	if fresh != nil {
		b.byID[id], b.byRank[fresh.node.Rank] = fresh, fresh
		at, _ := slices.BinarySearchFunc(b.stocks, fresh.node.Rank, func(s *stock, rank int) int { return cmp.Compare(s.node.Rank, rank) })
		b.stocks = slices.Insert(b.stocks, at, fresh)
	}
	b.number()
	for _, h := range there {
		b.resolve(h)
		b.charge(h.Namespace, h.enter())
	}
}

// Grant enters a reservation. It refuses one whose id is in use, and one that holds what another holds, whatever the
// plan it came from said. Nodes and devices that are not there are no obstacle.
func (b *Book) Grant(r Reservation) error {
	if b.groups[r.ID] > 0 { // the first of a group is gone, but not what was laid over it
		return fmt.Errorf("reservation %q: %w", r.ID, ErrDuplicate)
	}
	return b.Restore(r)
}

// add is Grant for a reservation that is known to be new to its group: the first of a group may come after the others.
func (b *Book) Restore(r Reservation) error {
	if b.byName[r.ID] != nil {
		return fmt.Errorf("reservation %q: %w", r.ID, ErrDuplicate)
	}
	if err := r.checkSlots(); err != nil {
		return err
	}
	h := &held{Reservation: r}
	b.resolve(h)
	more := h.enter()
	if err := h.conflict(); err != nil {
		h.leave()
		return err
	}
	b.charge(h.Namespace, more)
	at, _ := slices.BinarySearchFunc(b.held, h, (*held).older)
	b.held = slices.Insert(b.held, at, h)
	b.byName[r.ID] = h
	b.groups[h.group()]++
	return nil
}

// Release removes a reservation and returns it. Releasing what is not there changes nothing.
func (b *Book) Release(id string) (Reservation, bool) {
	h := b.byName[id]
	if h == nil {
		return Reservation{}, false
	}
	b.charge(h.Namespace, -h.leave())
	at, _ := slices.BinarySearchFunc(b.held, h, (*held).older)
	b.held = slices.Delete(b.held, at, at+1)
	delete(b.byName, id)
	if b.groups[h.group()]--; b.groups[h.group()] == 0 {
		delete(b.groups, h.group())
	}
	return h.Reservation, true
}

// charge counts devices towards what a namespace holds.
func (b *Book) charge(namespace string, devices Share) {
	if b.usage[namespace] += devices; b.usage[namespace] == 0 {
		delete(b.usage, namespace)
	}
}

// Reservation is the one with this id.
func (b *Book) Reservation(id string) (Reservation, bool) {
	h := b.byName[id]
	if h == nil {
		return Reservation{}, false
	}
	return h.Reservation, true
}

// NameTaken reports whether a reservation, or a group of reservations that share devices, has this name.
func (b *Book) NameTaken(id string) bool { return b.groups[id] > 0 || b.byName[id] != nil }

// OverQuota returns the quota that granting r would exceed; nil if there is none.
func (b *Book) OverQuota(r *Request, p Policy) *QuotaError {
	return p.overQuota(r, b.usage[r.Namespace])
}

// perNode is the stride of global device ids.
func (b *Book) perNode() int {
	if b.stride > 0 {
		return b.stride
	}
	most := 0
	for _, s := range b.stocks {
		for i := range s.node.Devices {
			most = max(most, s.node.Devices[i].Index+1)
		}
	}
	return most
}
