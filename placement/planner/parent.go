package planner

import (
	"fmt"
	"slices"

	"troupe/placement/internal/text"
)

// parentOf returns the reservation from whose bundles r takes its resources. A bundle that does not exist, or that is
// too small for r even when nothing else uses it, is an error.
func (pl *Planner) parentOf(r *Request) (*allocation, error) {
	parent := pl.byReservation[r.Parent]
	if parent == nil || parent.Namespace != r.Namespace {
		return nil, &RequestError{ErrUnknownReservation, fmt.Sprintf("reservation %q is unknown", text.Clip(r.Parent)), "it has ended, or was never granted"}
	}
	if parent.Parent != "" {
		return nil, &RequestError{ErrBadParent, fmt.Sprintf("reservation %q is inside reservation %q itself", text.Clip(r.Parent), text.Clip(parent.Parent)), "give the outer one"}
	}
	if n := len(parent.Workers); r.ParentBundle >= n {
		return nil, &RequestError{ErrBadParent, fmt.Sprintf("reservation %q has no bundle %d", text.Clip(r.Parent), r.ParentBundle), fmt.Sprintf("it has %d", n)}
	}
	for i := range parent.Workers {
		if r.ParentBundle >= 0 && r.ParentBundle != i {
			continue
		}
		if _, ok := newBundleRoom(&parent.Workers[i]).pick(&r.Bundles[0]); ok {
			return parent, nil
		}
	}
	short := fmt.Sprintf("no bundle of reservation %q has %s", text.Clip(r.Parent), r.Bundles[0].describe())
	if r.ParentBundle >= 0 {
		short = fmt.Sprintf("bundle %d of reservation %q does not have %s", r.ParentBundle, text.Clip(r.Parent), r.Bundles[0].describe())
	}
	return nil, &RequestError{ErrBundleTooLarge, short, "ask for less, or reserve larger bundles"}
}

// parentWaitText returns what a request inside a reservation waits for.
func (g *gang) parentWaitText() string {
	r := g.request
	if r.ParentBundle < 0 {
		return fmt.Sprintf("it waits for %s of any bundle of reservation %s", r.Bundles[0].describe(), text.Clip(r.Parent))
	}
	return fmt.Sprintf("it waits for %s of bundle %d of reservation %s", r.Bundles[0].describe(), r.ParentBundle, text.Clip(r.Parent))
}

// placeInParent places the only bundle of the gang in the first bundle of its parent that has room on a ready node.
func (g *gang) placeInParent(pl *Planner) (gangPlacement, bool) {
	b := &g.request.Bundles[0]
	for i := range g.parent.Workers {
		if g.request.ParentBundle >= 0 && g.request.ParentBundle != i {
			continue
		}
		source := &g.parent.Workers[i]
		node := pl.byID[source.Node]
		if node == nil || node.info.State != NodeReady || !node.matches(b) {
			continue
		}
		room := newBundleRoom(source)
		for _, alloc := range pl.allocations {
			if alloc.Parent == g.parent.ID && alloc.ParentBundle == i {
				room.take(&alloc.Workers[0])
			}
		}
		slots, ok := room.pick(b)
		if !ok || slices.ContainsFunc(slots, func(s Slot) bool { return !pl.slotGrantable(&s) }) {
			continue
		}
		w := Worker{Rank: g.request.FirstRank, NodeRank: source.NodeRank, Node: source.Node, Devices: make([]int, len(slots)), Slots: slots, CPUs: b.CPUs, Memory: b.Memory, Resources: b.Resources}
		for j := range slots {
			w.Devices[j] = slots[j].Index
		}
		return gangPlacement{workers: []Worker{w}, parentBundle: i}, true
	}
	return gangPlacement{}, false
}

// slotGrantable reports whether the device of a slot is present and may be granted.
func (pl *Planner) slotGrantable(slot *Slot) bool {
	s := pl.byID[slot.Node]
	if s == nil {
		return false
	}
	pos := s.position(slot)
	return pos >= 0 && s.grantable.has(pos)
}

// bundleRoom is what is free in one bundle of a reservation.
type bundleRoom struct {
	cpus      Share
	memory    int64
	resources map[string]Share
	slots     []Slot // Share is the free part
}

// newBundleRoom returns the room of a bundle that nothing uses.
func newBundleRoom(w *Worker) *bundleRoom {
	room := &bundleRoom{cpus: w.CPUs, memory: w.Memory, resources: make(map[string]Share, len(w.Resources)), slots: slices.Clone(w.Slots)}
	for name, amount := range w.Resources {
		room.resources[name] = amount
	}
	return room
}

// take removes what a worker uses.
func (room *bundleRoom) take(w *Worker) {
	room.cpus -= w.CPUs
	room.memory -= w.Memory
	for name, amount := range w.Resources {
		room.resources[name] -= amount
	}
	for i := range w.Slots {
		at := slices.IndexFunc(room.slots, func(s Slot) bool { return s.UUID == w.Slots[i].UUID && s.Node == w.Slots[i].Node })
		if at >= 0 {
			room.slots[at].Share -= w.Slots[i].Share
		}
	}
}

// pick returns the slots for b: unused whole devices, or a part of the device that leaves the smallest remainder. It
// reports false if there is no room.
func (room *bundleRoom) pick(b *Bundle) ([]Slot, bool) {
	if room.cpus < b.CPUs || room.memory < b.Memory || !contains(room.resources, b.Resources) {
		return nil, false
	}
	if b.Devices == 0 {
		return nil, true
	}
	if b.partial() {
		best := -1
		for i := range room.slots {
			if room.slots[i].Share >= b.Devices && (best < 0 || room.slots[i].Share < room.slots[best].Share) {
				best = i
			}
		}
		if best < 0 {
			return nil, false
		}
		slot := room.slots[best]
		slot.Share = b.Devices
		return []Slot{slot}, true
	}
	var slots []Slot
	for i := range room.slots {
		if len(slots) < b.devices() && room.slots[i].Share == Whole {
			slots = append(slots, room.slots[i])
		}
	}
	return slots, len(slots) == b.devices()
}
