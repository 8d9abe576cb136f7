package planner

import (
	"fmt"
	"slices"

	"troupe/placement/internal/text"
)

// colocationTarget returns the reservation that r is colocated with.
func (pl *Planner) colocationTarget(r *Request) (*allocation, error) {
	if alloc := pl.byReservation[r.Colocate]; alloc != nil && alloc.Namespace == r.Namespace {
		return alloc, nil
	}
	var names []string
	for _, alloc := range pl.allocations {
		if alloc.Namespace == r.Namespace {
			names = append(names, alloc.ID)
		}
	}
	exists := "there are none"
	if len(names) > 0 {
		exists = "there are " + text.Join(", ", names)
	}
	if r.Namespace != "" {
		exists += " in namespace " + r.Namespace
	}
	return nil, &RequestError{ErrUnknownReservation, fmt.Sprintf("reservation %q is unknown", text.Clip(r.Colocate)), exists}
}

// colocatedView returns the nodes of alloc as a gang colocated with it sees them: the devices of alloc are free,
// whatever else is colocated with them, and no other devices exist. CPUs and memory are those of the nodes. The node
// states are copies, numbered within the reservation.
func (pl *Planner) colocatedView(alloc *allocation) []*nodeState {
	var nodes []*nodeState
	for number, id := range alloc.Nodes() {
		if live := pl.byID[id]; live != nil {
			nodes = append(nodes, live.restrictedTo(alloc, number))
		}
	}
	return nodes
}

// restrictedTo returns a copy of s whose only available devices are those of alloc.
func (s *nodeState) restrictedTo(alloc *allocation, number int) *nodeState {
	c := *s
	n := len(s.used)
	c.idNumber = number
	c.freeCount, c.partlyUsed = 0, 0
	c.grantable, c.free, c.visible = newBitset(n), newBitset(n), newBitset(n)
	c.used = slices.Repeat([]Share{Whole}, n)
	for _, dev := range alloc.devices {
		if dev.node == s {
			c.visible.set(dev.pos, true)
			c.setDevice(dev.pos, c.used[dev.pos]-dev.slot.Share, s.grantable.has(dev.pos))
		}
	}
	return &c
}

// placeColocated places the gang on the nodes of the reservation it is colocated with: by rank if both have the same
// shape.
func (g *gang) placeColocated(d *draftPlan, nodes []*nodeState) (gangPlacement, bool) {
	if g.strategy == Pack && g.sameShapeAsTarget() {
		if g.placeByRank(d, nodes) {
			return gangPlacement{workers: d.workers(g)}, true
		}
		d.undo(0)
	}
	return g.placeAnywhere(d, candidatesOf(nodes))
}

// sameShapeAsTarget reports whether every bundle asks for as many devices as the worker of the same rank holds, or
// every bundle asks for none.
func (g *gang) sameShapeAsTarget() bool {
	bundles, workers := g.request.Bundles, g.colocated.Workers
	if len(bundles) != len(workers) {
		return false
	}
	same, none := true, true
	for i := range bundles {
		var holds Share
		for _, slot := range workers[i].Slots {
			holds += slot.Share
		}
		same = same && bundles[i].Devices == holds
		none = none && bundles[i].Devices == 0
	}
	return same || none
}

// placeByRank places every bundle where the worker of the same rank is.
func (g *gang) placeByRank(d *draftPlan, nodes []*nodeState) bool {
	byID := make(map[string]*nodeState, len(nodes))
	for _, s := range nodes {
		byID[s.info.ID] = s
	}
	classOf := g.kindOfRank()
	for rank := range g.colocated.Workers {
		w := &g.colocated.Workers[rank]
		kind := classOf[rank]
		runs := byID[w.Node]
		refs, ok := devicesOf(w, byID)
		if !ok || runs == nil || !runs.open || !runs.matches(kind.bundle) || !(candidate{nodeState: runs}).canRun(kind.bundle) {
			return false
		}
		if kind.bundle.Devices == 0 {
			refs = nil
		}
		d.assignDevices(runs, kind, refs)
	}
	return true
}

// devicesOf returns the devices of a worker; false if one of them is not available.
func devicesOf(w *Worker, byID map[string]*nodeState) ([]deviceRef, bool) {
	refs := make([]deviceRef, 0, len(w.Slots))
	for i := range w.Slots {
		slot := &w.Slots[i]
		s := byID[slot.Node]
		if s == nil || !s.open {
			return nil, false
		}
		pos := s.position(slot)
		if pos < 0 || !s.grantable.has(pos) {
			return nil, false
		}
		refs = append(refs, deviceRef{s, pos})
	}
	return refs, true
}

// kindOfRank returns the kind of every bundle, by rank.
func (g *gang) kindOfRank() []*bundleKind {
	of := make([]*bundleKind, len(g.request.Bundles))
	for i := range g.kinds {
		for _, rank := range g.kinds[i].ranks {
			of[rank] = &g.kinds[i]
		}
	}
	return of
}
