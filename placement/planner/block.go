package planner

import (
	"cmp"
	"slices"
)

// block is an obstacle in the book: it can be lifted, to see what would be, and is then put back.
type block struct {
	kind  ObstacleKind
	held  *held
	stock *stock
	pos   int
}

func lift(blocks []block)    { move(blocks, true) }
func putBack(blocks []block) { move(blocks, false) }

// move takes all of them out of the way, or puts them back there.
func move(blocks []block, away bool) {
	for _, o := range blocks {
		switch {
		case o.kind == ObstacleHeld && away:
			o.held.leave()
		case o.kind == ObstacleHeld:
			o.held.enter()
		case o.kind == ObstacleNode:
			o.stock.open = away
		case o.kind == ObstacleDevice:
			o.stock.change(o.pos, o.stock.used[o.pos], away)
		}
	}
}

// blocks is all in scope that can be in the way of g, what is least to be waited for first: nodes and devices out of
// order, then reservations.
func (b *Book) blocks(g *gang, sc scope) []block {
	if sc.preempt {
		return append(b.heldBlocks(g, sc), b.clearing()...)
	}
	var nodes, devices []block
	for _, s := range b.stocks {
		if !s.open {
			nodes = append(nodes, block{kind: ObstacleNode, stock: s})
		}
		for pos := range s.node.Devices {
			if !s.node.Devices[pos].fit() {
				devices = append(devices, block{kind: ObstacleDevice, stock: s, pos: pos})
			}
		}
	}
	return slices.Concat(nodes, devices, b.heldBlocks(g, sc))
}

// clearing is the devices that are only waiting to be seen empty. They come last: who waits for them sends nobody away.
func (b *Book) clearing() []block {
	var devices []block
	for _, s := range b.stocks {
		for pos := range s.node.Devices {
			if d := &s.node.Devices[pos]; d.Clearing && d.Cordoned == "" && !d.fit() {
				devices = append(devices, block{kind: ObstacleDevice, stock: s, pos: pos})
			}
		}
	}
	return devices
}

// heldBlocks is the reservations in scope, those that are to be kept first: the ones that have not been told to go, of
// the smaller if few are to go, of the higher priority if it is about preemption, on the fuller nodes, the larger, the older. What g is laid over
// stays.
func (b *Book) heldBlocks(g *gang, sc scope) []block {
	type weighed struct {
		*held
		room int
	}
	var kept []weighed
	for _, h := range b.held {
		stays := h.trial || g.host != nil && h.group() == g.host.group()
		if !stays && (!sc.preempt || h.Leaving || h.Priority < sc.below) {
			kept = append(kept, weighed{h, h.roomBeside()})
		}
	}
	slices.SortFunc(kept, func(x, y weighed) int {
		size, urgency := 0, 0
		if sc.preempt {
			urgency = cmp.Compare(y.Priority, x.Priority)
		}
		if sc.fewest {
			size = cmp.Compare(len(x.spots), len(y.spots))
		}
		return cmp.Or(
			falseFirst(x.Leaving, y.Leaving),
			size,
			urgency,
			cmp.Compare(x.room, y.room),
			cmp.Compare(len(y.spots), len(x.spots)),
			x.older(y.held),
		)
	})
	blocks := make([]block, len(kept))
	for i, w := range kept {
		blocks[i] = block{kind: ObstacleHeld, held: w.held}
	}
	return blocks
}

// roomBeside is the most free devices on any node of h: where there are many, few more are missing.
func (h *held) roomBeside() int {
	most := 0
	for _, spot := range h.spots {
		most = max(most, spot.stock.idle)
	}
	return most
}

// obstacle is the block in public terms.
func (o block) obstacle(g ground) Obstacle {
	if o.kind == ObstacleHeld {
		h := o.held
		return Obstacle{
			Kind:        o.kind,
			Reservation: h.ID,
			Namespace:   h.Namespace,
			Holder:      h.Holder,
			Leaving:     h.Leaving,
			Since:       h.Since,
			Devices:     g.shared(h),
		}
	}
	n := o.stock.node
	if o.kind == ObstacleNode {
		return Obstacle{Kind: o.kind, Node: n.ID, Why: n.condition(), Since: n.Since}
	}
	d := &n.Devices[o.pos]
	return Obstacle{Kind: o.kind, Node: n.ID, Why: d.condition(), Devices: []Slot{{Node: n.ID, NodeRank: n.Rank, Index: d.Index, UUID: d.UUID, Share: Whole}}}
}
