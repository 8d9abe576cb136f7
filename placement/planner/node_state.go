package planner

import (
	"maps"
	"slices"
)

// nodeState is one node with its free resources. Devices are changed through setDevice only, which keeps the counts.
type nodeState struct {
	info     *Node // with Devices in rank order; immutable
	layout   *layout
	order    int // index in Planner.nodes
	idNumber int // in global device ids: the node's rank, or its number within a reservation
	labelSet int // equal for nodes with the same labels

	open   bool // the node is ready and not cordoned
	cpus   Share
	memory int64

	resources map[string]Share // free; nil until the first allocation: all of info.Resources

	// By device position.
	used      []Share
	grantable bitset    // healthy and not cordoned
	free      bitset    // grantable and unused
	claims    [][]claim // by allocations; nil until the first one
	visible   bitset    // in a copy for a colocated gang, the devices of its reservation; nil: all

	freeCount   int // of devices
	partlyUsed  int // grantable devices that are partly used
	gangBundles int // bundles of the gang that is being placed; zero between plans
}

// claim is the share of a device that one allocation holds.
type claim struct {
	allocation *allocation
	share      Share
}

// newNodeState returns node without allocations. shared is a layout to reuse; nil: a new one is made.
func newNodeState(node *Node, shared *layout) *nodeState {
	n := len(node.Devices)
	words := (n + 63) / 64
	sets := make(bitset, 2*words)
	s := &nodeState{
		info:      node,
		layout:    shared,
		idNumber:  node.Rank,
		open:      node.open(),
		cpus:      node.CPUs,
		memory:    node.Memory,
		used:      make([]Share, n),
		grantable: sets[:words:words],
		free:      sets[words:],
	}
	if shared == nil {
		s.layout = newLayout(node.Devices)
	}
	for pos := range node.Devices {
		s.setDevice(pos, 0, node.Devices[pos].grantable())
	}
	return s
}

// setDevice sets the used share of a device and whether it may be granted.
func (s *nodeState) setDevice(pos int, used Share, fit bool) {
	s.adjustCounts(pos, -1)
	s.used[pos] = used
	s.grantable.set(pos, fit)
	s.adjustCounts(pos, +1)
}

// adjustCounts adds the device to the counts, or removes it from them.
func (s *nodeState) adjustCounts(pos, by int) {
	switch {
	case !s.grantable.has(pos):
	case s.used[pos] == 0:
		s.freeCount += by
		s.free.set(pos, by > 0)
	case s.used[pos] < Whole:
		s.partlyUsed += by
	}
}

// use changes the used share of a device; a negative share frees.
func (s *nodeState) use(pos int, share Share) {
	s.setDevice(pos, s.used[pos]+share, s.grantable.has(pos))
}

// available returns the share of a device that can be granted.
func (s *nodeState) available(pos int) Share {
	if !s.grantable.has(pos) {
		return 0
	}
	return Whole - s.used[pos]
}

func (s *nodeState) isVisible(pos int) bool { return s.visible == nil || s.visible.has(pos) }

// position returns the position of a slot's device; -1 if the node does not have it.
func (s *nodeState) position(slot *Slot) int {
	devices := s.info.Devices
	if i := slot.Index; i >= 0 && i < len(devices) && devices[i].UUID == slot.UUID {
		return i // the common case
	}
	for pos := range devices {
		if devices[pos].UUID == slot.UUID {
			return pos
		}
	}
	return -1
}

// matches reports whether b may be placed on the node, regardless of free resources.
func (s *nodeState) matches(b *Bundle) bool {
	if b.Node != "" && b.Node != s.info.ID || slices.Contains(b.Avoid, s.info.ID) {
		return false
	}
	return (len(b.Labels) == 0 || s.hasLabels(b.Labels)) && s.choice(b) >= 0
}

// load returns the used part of the fullest of CPUs, memory and devices.
func (s *nodeState) load() float64 {
	most := 0.0
	for _, r := range [...]struct{ free, total float64 }{
		{float64(s.cpus), float64(s.info.CPUs)}, {float64(s.memory), float64(s.info.Memory)}, {float64(s.freeShare()), float64(Wholes(len(s.info.Devices)))},
	} {
		if r.total > 0 {
			most = max(most, 1-r.free/r.total)
		}
	}
	return most
}

// freeShare returns the share of devices that is not used.
func (s *nodeState) freeShare() Share {
	free := Wholes(len(s.used))
	for _, used := range s.used {
		free -= used
	}
	return free
}

func (s *nodeState) hasLabels(labels map[string]string) bool {
	for key, value := range labels {
		if has, ok := s.info.Labels[key]; !ok || has != value {
			return false
		}
	}
	return true
}

// couldFit reports whether b would fit on the node if all of it were free.
func (s *nodeState) couldFit(b *Bundle) bool {
	return s.matches(b) && b.Devices <= Wholes(len(s.info.Devices)) && b.CPUs <= s.info.CPUs && b.Memory <= s.info.Memory &&
		contains(s.info.Resources, b.Resources)
}

// contains reports whether have has all of want.
func contains(have, want map[string]Share) bool {
	for name, amount := range want {
		if have[name] < amount {
			return false
		}
	}
	return true
}

// freeResources returns the free amounts of declared resources. The caller does not change them.
func (s *nodeState) freeResources() map[string]Share {
	if s.resources == nil {
		return s.info.Resources
	}
	return s.resources
}

// useResources takes amounts of declared resources; with -1 it returns them.
func (s *nodeState) useResources(amounts map[string]Share, sign Share) {
	if len(amounts) == 0 {
		return
	}
	if s.resources == nil {
		s.resources = maps.Clone(s.info.Resources)
		if s.resources == nil {
			s.resources = map[string]Share{}
		}
	}
	for name, amount := range amounts {
		s.resources[name] -= sign * amount
	}
}
