package planner

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"troupe/placement/internal/text"
)

// Obstacle is something that a waiting request waits for: a reservation to be released, a node to be back, a device to
// be fit again.
type Obstacle struct {
	Kind ObstacleKind `json:"kind" msgpack:"kind"`

	Reservation string    `json:"reservation,omitempty" msgpack:"reservation,omitempty"` // who holds it
	Namespace   string    `json:"namespace,omitempty" msgpack:"namespace,omitempty"`
	Holder      string    `json:"holder,omitempty" msgpack:"holder,omitempty"`
	Leaving     bool      `json:"leaving,omitempty" msgpack:"leaving,omitempty"` // it has been told to go
	Since       time.Time `json:"since,omitzero" msgpack:"since,omitempty"`

	Node    string `json:"node,omitempty" msgpack:"node,omitempty"` // of a node or a device
	Why     string `json:"why,omitempty" msgpack:"why,omitempty"`
	Devices []Slot `json:"devices,omitempty" msgpack:"devices,omitempty"` // those that are in the way; none where CPUs or memory are
}

// ObstacleKind says which.
type ObstacleKind string

const (
	ObstacleHeld   ObstacleKind = "held"   // a reservation holds what is needed
	ObstacleNode   ObstacleKind = "node"   // a node is cordoned, lost or unproven
	ObstacleDevice ObstacleKind = "device" // a device is unfit or cordoned
)

// String is the obstacle in words, without the time: that is for whoever knows what now is.
func (o Obstacle) String() string {
	switch o.Kind {
	case ObstacleNode:
		return fmt.Sprintf("node %s: %s", o.Node, o.Why)
	case ObstacleDevice:
		return fmt.Sprintf("device %d of node %s: %s", o.Devices[0].Index, o.Node, o.Why)
	}
	what := "CPUs or memory"
	if len(o.Devices) > 0 {
		what = formatDevices(o.Devices)
	}
	return fmt.Sprintf("%s held by %s", what, ReservationName(o.Reservation, o.Holder, o.Namespace))
}

// devicesInWords is "n0: 0, 1; n1: 0".
func formatDevices(slots []Slot) string {
	var nodes []string
	for _, onNode := range byNode(slots) {
		text := onNode[0].Node + ":"
		for i, slot := range onNode {
			if i > 0 {
				text += ","
			}
			text += fmt.Sprintf(" %d", slot.Index)
		}
		nodes = append(nodes, text)
	}
	return "devices " + text.Join("; ", nodes)
}

// chunked is slots by node, in their order.
func byNode(slots []Slot) [][]Slot {
	var chunks [][]Slot
	for len(slots) > 0 {
		n := 1
		for n < len(slots) && slots[n].Node == slots[0].Node {
			n++
		}
		chunks = append(chunks, slots[:n])
		slots = slots[n:]
	}
	return chunks
}

// named is a reservation in words: "actor_train (r-17 of namespace default)".
func ReservationName(id, holder, namespace string) string {
	if namespace != "" {
		id += " of namespace " + namespace
	}
	if holder == "" {
		return id
	}
	return fmt.Sprintf("%s (%s)", holder, id)
}

// block is an obstacle in the book: it can be lifted, to see what would be, and is then put back.
type blocker struct {
	kind       ObstacleKind
	allocation *allocation
	node       *nodeState
	pos        int
}

func removeBlockers(blocks []blocker)  { toggleBlockers(blocks, true) }
func restoreBlockers(blocks []blocker) { toggleBlockers(blocks, false) }

// move takes all of them out of the way, or puts them back there.
func toggleBlockers(blocks []blocker, away bool) {
	for _, b := range blocks {
		switch {
		case b.kind == ObstacleHeld && away:
			b.allocation.free()
		case b.kind == ObstacleHeld:
			b.allocation.allocate()
		case b.kind == ObstacleNode:
			b.node.open = away
		case b.kind == ObstacleDevice:
			b.node.setDevice(b.pos, b.node.used[b.pos], away)
		}
	}
}

// blocks is all in scope that can be in the way of g, what is least to be waited for first: nodes and devices out of
// order, then reservations.
func (pl *Planner) blockers(g *gang, sc analysisScope) []blocker {
	if sc.preempt {
		return append(pl.allocationBlockers(g, sc), pl.clearingBlockers()...)
	}
	var nodes, devices []blocker
	for _, s := range pl.nodes {
		if !s.open {
			nodes = append(nodes, blocker{kind: ObstacleNode, node: s})
		}
		for pos := range s.info.Devices {
			if !s.info.Devices[pos].grantable() {
				devices = append(devices, blocker{kind: ObstacleDevice, node: s, pos: pos})
			}
		}
	}
	return slices.Concat(nodes, devices, pl.allocationBlockers(g, sc))
}

// clearing is the devices that are only waiting to be seen empty. They come last: who waits for them sends nobody away.
func (pl *Planner) clearingBlockers() []blocker {
	var devices []blocker
	for _, s := range pl.nodes {
		for pos := range s.info.Devices {
			if d := &s.info.Devices[pos]; d.Clearing && d.Cordoned == "" && !d.grantable() {
				devices = append(devices, blocker{kind: ObstacleDevice, node: s, pos: pos})
			}
		}
	}
	return devices
}

// heldBlocks is the reservations in scope, those that are to be kept first: the ones that have not been told to go, of
// the smaller if few are to go, of the higher priority if it is about preemption, on the fuller nodes, the larger, the older. What g is laid over
// stays.
func (pl *Planner) allocationBlockers(g *gang, sc analysisScope) []blocker {
	type weighed struct {
		*allocation
		room int
	}
	var kept []weighed
	for _, alloc := range pl.allocations {
		stays := alloc.tentative || g.colocated != nil && alloc.groupName() == g.colocated.groupName()
		if !stays && (!sc.preempt || alloc.Leaving || alloc.Priority < sc.belowPriority) {
			kept = append(kept, weighed{alloc, alloc.mostFreeBeside()})
		}
	}
	slices.SortFunc(kept, func(x, y weighed) int {
		size, urgency := 0, 0
		if sc.preempt {
			urgency = cmp.Compare(y.Priority, x.Priority)
		}
		if sc.fewest {
			size = cmp.Compare(len(x.devices), len(y.devices))
		}
		return cmp.Or(
			falseFirst(x.Leaving, y.Leaving),
			size,
			urgency,
			cmp.Compare(x.room, y.room),
			cmp.Compare(len(y.devices), len(x.devices)),
			x.compareAge(y.allocation),
		)
	})
	blocks := make([]blocker, len(kept))
	for i, w := range kept {
		blocks[i] = blocker{kind: ObstacleHeld, allocation: w.allocation}
	}
	return blocks
}

// roomBeside is the most free devices on any node of h: where there are many, few more are missing.
func (alloc *allocation) mostFreeBeside() int {
	most := 0
	for _, dev := range alloc.devices {
		most = max(most, dev.node.freeCount)
	}
	return most
}

// obstacle is the block in public terms.
func (b blocker) public(area footprint) Obstacle {
	if b.kind == ObstacleHeld {
		alloc := b.allocation
		return Obstacle{
			Kind:        b.kind,
			Reservation: alloc.ID,
			Namespace:   alloc.Namespace,
			Holder:      alloc.Holder,
			Leaving:     alloc.Leaving,
			Since:       alloc.Since,
			Devices:     area.sharedDevices(alloc),
		}
	}
	n := b.node.info
	if b.kind == ObstacleNode {
		return Obstacle{Kind: b.kind, Node: n.ID, Why: n.describeState(), Since: n.Since}
	}
	d := &n.Devices[b.pos]
	return Obstacle{Kind: b.kind, Node: n.ID, Why: d.describeState(), Devices: []Slot{{Node: n.ID, NodeRank: n.Rank, Index: d.Index, UUID: d.UUID, Share: Whole}}}
}
