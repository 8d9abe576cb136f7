package planner

// stock is one node with what is still free on it. Devices are only ever changed through change, so that the counts stay
// true.
type nodeState struct {
	info     *Node // Devices in rank order; not changed
	layout   *layout
	order    int // its place among the stocks
	idNumber int // its number in global device ids: the node's rank, or its place in a reservation
	labelSet int // the same for nodes with the same labels

	open   bool // the node may be given work
	cpus   Share
	memory int64

	// By position.
	used      []Share
	grantable bitset    // those that may be granted at all
	free      bitset    // those that are fit and wholly unused
	claims    [][]claim // who holds a part; nil until somebody does
	visible   bitset    // in a copy laid over a reservation, the devices of that; nil: all of the node's

	freeCount   int // how many are free
	partlyUsed  int // how many are fit and partly used
	gangBundles int // how many bundles of the gang being placed lie here; zero between plans
}

// claim is one reservation's hold on a device.
type claim struct {
	allocation *allocation
	share      Share
}

// newStock is node with nothing held on it, and with a layout that may be shared; nil: it makes its own.
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

// change sets what is used of a device and whether it is fit.
func (s *nodeState) setDevice(pos int, used Share, fit bool) {
	s.adjustCounts(pos, -1)
	s.used[pos] = used
	s.grantable.set(pos, fit)
	s.adjustCounts(pos, +1)
}

// count adds the device's state to the counts, or takes it out.
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

// use adds to what is used of a device; a negative share gives back.
func (s *nodeState) use(pos int, share Share) {
	s.setDevice(pos, s.used[pos]+share, s.grantable.has(pos))
}

// left is what can still be had of a device.
func (s *nodeState) available(pos int) Share {
	if !s.grantable.has(pos) {
		return 0
	}
	return Whole - s.used[pos]
}

// offers reports whether a device is to be seen here at all.
func (s *nodeState) isVisible(pos int) bool { return s.visible == nil || s.visible.has(pos) }

// position is where the device of a slot is; -1 if the node does not have it.
func (s *nodeState) position(slot *Slot) int {
	devices := s.info.Devices
	if i := slot.Index; i >= 0 && i < len(devices) && devices[i].UUID == slot.UUID {
		return i // where it is on nearly every machine
	}
	for pos := range devices {
		if devices[pos].UUID == slot.UUID {
			return pos
		}
	}
	return -1
}

// admits reports whether b may lie here at all, however empty the node.
func (s *nodeState) matches(b *Bundle) bool {
	if b.Node != "" && b.Node != s.info.ID {
		return false
	}
	return len(b.Labels) == 0 || s.hasLabels(b.Labels)
}

// carries reports whether the node has all of these labels.
func (s *nodeState) hasLabels(labels map[string]string) bool {
	for key, value := range labels {
		if has, ok := s.info.Labels[key]; !ok || has != value {
			return false
		}
	}
	return true
}

// holds reports whether b could lie here if all of the node were free.
func (s *nodeState) couldFit(b *Bundle) bool {
	return s.matches(b) && b.Devices <= Wholes(len(s.info.Devices)) && b.CPUs <= s.info.CPUs && b.Memory <= s.info.Memory
}
