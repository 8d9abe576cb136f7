package planner

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"troupe/placement/internal/text"
)

// Obstacle is something that a waiting request waits for: the release of a reservation, the return of a node, or the
// repair of a device.
type Obstacle struct {
	Kind ObstacleKind `json:"kind" msgpack:"kind"`

	Reservation string    `json:"reservation,omitempty" msgpack:"reservation,omitempty"` // that holds the devices
	Namespace   string    `json:"namespace,omitempty" msgpack:"namespace,omitempty"`
	Holder      string    `json:"holder,omitempty" msgpack:"holder,omitempty"`
	Leaving     bool      `json:"leaving,omitempty" msgpack:"leaving,omitempty"` // it is preempted and in its grace period
	Since       time.Time `json:"since,omitzero" msgpack:"since,omitempty"`

	Node    string `json:"node,omitempty" msgpack:"node,omitempty"` // of a node or a device
	Why     string `json:"why,omitempty" msgpack:"why,omitempty"`
	Devices []Slot `json:"devices,omitempty" msgpack:"devices,omitempty"` // that the request needs; empty if it needs CPUs or memory
}

// ObstacleKind is the kind of an Obstacle.
type ObstacleKind string

const (
	ObstacleHeld   ObstacleKind = "held"   // a reservation holds resources that the request needs
	ObstacleNode   ObstacleKind = "node"   // a node is cordoned, lost or unproven
	ObstacleDevice ObstacleKind = "device" // a device is unfit or cordoned
)

// String describes the obstacle without times.
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

// formatDevices returns "n0: 0, 1; n1: 0".
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

// byNode splits slots into runs on the same node.
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

// ReservationName describes a reservation: "actor_train (r-17 of namespace default)".
func ReservationName(id, holder, namespace string) string {
	if namespace != "" {
		id += " of namespace " + namespace
	}
	if holder == "" {
		return id
	}
	return fmt.Sprintf("%s (%s)", holder, id)
}

// blocker is an obstacle in the planner's state. It can be removed to find out whether a gang would fit, and is then
// restored.
type blocker struct {
	kind       ObstacleKind
	allocation *allocation
	node       *nodeState
	pos        int
}

func removeBlockers(blocks []blocker)  { toggleBlockers(blocks, true) }
func restoreBlockers(blocks []blocker) { toggleBlockers(blocks, false) }

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

// blockers returns everything in scope that can block g. The earlier a blocker is in the list, the sooner it is
// restored: nodes and devices that need repair come first, then reservations.
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

// clearingBlockers returns the devices that only wait for verification. They come last: waiting for them evicts no
// reservation.
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

// allocationBlockers returns the reservations in scope, those to keep first: those that are not leaving; the smaller
// ones if the number of victims is minimized; in a preemption those of higher priority; then those on fuller nodes, the
// larger, the older. Reservations that share devices with the target of g are left out.
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

// mostFreeBeside returns the largest number of free devices on any node of alloc: where many are free, few more are
// missing.
func (alloc *allocation) mostFreeBeside() int {
	most := 0
	for _, dev := range alloc.devices {
		most = max(most, dev.node.freeCount)
	}
	return most
}

// public returns the blocker as an Obstacle.
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
