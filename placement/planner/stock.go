package planner

// stock is one node with what is still free on it. Devices are only ever changed through change, so that the counts stay
// true.
type stock struct {
	node   *Node // Devices in rank order; not changed
	layout *layout
	order  int // its place among the stocks
	number int // its number in global device ids: the node's rank, or its place in a reservation
	kin    int // the same for nodes with the same labels

	open   bool // the node may be given work
	cpus   Share
	memory int64

	// By position.
	used   []Share
	fit    bitset    // those that may be granted at all
	free   bitset    // those that are fit and wholly unused
	claims [][]claim // who holds a part; nil until somebody does
	only   bitset    // in a copy laid over a reservation, the devices of that; nil: all of the node's

	idle    int // how many are free
	chipped int // how many are fit and partly used
	load    int // how many bundles of the gang being placed lie here; zero between plans
}

// claim is one reservation's hold on a device.
type claim struct {
	held  *held
	share Share
}

// newStock is node with nothing held on it, and with a layout that may be shared; nil: it makes its own.
func newStock(node *Node, shared *layout) *stock {
	n := len(node.Devices)
	words := (n + 63) / 64
	sets := make(bitset, 2*words)
	s := &stock{
		node:   node,
		layout: shared,
		number: node.Rank,
		open:   node.open(),
		cpus:   node.CPUs,
		memory: node.Memory,
		used:   make([]Share, n),
		fit:    sets[:words:words],
		free:   sets[words:],
	}
	if shared == nil {
		s.layout = newLayout(node.Devices)
	}
	for pos := range node.Devices {
		s.change(pos, 0, node.Devices[pos].fit())
	}
	return s
}

// change sets what is used of a device and whether it is fit.
func (s *stock) change(pos int, used Share, fit bool) {
	s.count(pos, -1)
	s.used[pos] = used
	s.fit.set(pos, fit)
	s.count(pos, +1)
}

// count adds the device's state to the counts, or takes it out.
func (s *stock) count(pos, by int) {
	switch {
	case !s.fit.has(pos):
	case s.used[pos] == 0:
		s.idle += by
		s.free.set(pos, by > 0)
	case s.used[pos] < Whole:
		s.chipped += by
	}
}

// use adds to what is used of a device; a negative share gives back.
func (s *stock) use(pos int, share Share) { s.change(pos, s.used[pos]+share, s.fit.has(pos)) }

// left is what can still be had of a device.
func (s *stock) left(pos int) Share {
	if !s.fit.has(pos) {
		return 0
	}
	return Whole - s.used[pos]
}

// offers reports whether a device is to be seen here at all.
func (s *stock) offers(pos int) bool { return s.only == nil || s.only.has(pos) }

// position is where the device of a slot is; -1 if the node does not have it.
func (s *stock) position(slot *Slot) int {
	devices := s.node.Devices
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
func (s *stock) admits(b *Bundle) bool {
	if b.Node != "" && b.Node != s.node.ID {
		return false
	}
	return len(b.Labels) == 0 || s.carries(b.Labels)
}

// carries reports whether the node has all of these labels.
func (s *stock) carries(labels map[string]string) bool {
	for key, value := range labels {
		if has, ok := s.node.Labels[key]; !ok || has != value {
			return false
		}
	}
	return true
}

// holds reports whether b could lie here if all of the node were free.
func (s *stock) holds(b *Bundle) bool {
	return s.admits(b) && b.Devices <= Wholes(len(s.node.Devices)) && b.CPUs <= s.node.CPUs && b.Memory <= s.node.Memory
}
