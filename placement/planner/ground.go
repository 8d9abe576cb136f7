package planner

import "slices"

// ground is what workers stand on.
type ground struct {
	nodes   map[string]bool
	crowded map[string]bool // nodes where they take CPUs or memory
	devices map[deviceKey]bool
}

type deviceKey struct{ node, uuid string }

func groundOf(workers []Worker) ground {
	g := ground{map[string]bool{}, map[string]bool{}, map[deviceKey]bool{}}
	for i := range workers {
		w := &workers[i]
		g.nodes[w.Node] = true
		if w.CPUs > 0 || w.Memory > 0 {
			g.crowded[w.Node] = true
		}
		for _, slot := range w.Slots {
			g.nodes[slot.Node] = true
			g.devices[deviceKey{slot.Node, slot.UUID}] = true
		}
	}
	return g
}

// feels reports whether the obstacle lies on the ground.
func (g ground) feels(o block) bool {
	switch o.kind {
	case ObstacleNode:
		return g.nodes[o.stock.node.ID]
	case ObstacleDevice:
		return g.devices[deviceKey{o.stock.node.ID, o.stock.node.Devices[o.pos].UUID}]
	}
	return len(g.shared(o.held)) > 0 || slices.ContainsFunc(o.held.Workers, func(w Worker) bool {
		return g.crowded[w.Node] && (w.CPUs > 0 || w.Memory > 0)
	})
}

// shared is the devices that the ground and a reservation have in common.
func (g ground) shared(h *held) []Slot {
	var slots []Slot
	for _, spot := range h.spots {
		if g.devices[deviceKey{spot.slot.Node, spot.slot.UUID}] {
			slots = append(slots, *spot.slot)
		}
	}
	return slots
}
