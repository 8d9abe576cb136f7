package planner

import "slices"

// draftPlan is an incomplete plan. Each assignment takes its resources out of the node states at once, so that the next
// bundle sees what is left. undo returns them: after undo(0) every node state is as before.
type draftPlan struct {
	within      Within // the group of devices to keep together
	assignments []assignment
}

// assignment is one bundle on its node and devices.
type assignment struct {
	kind    *bundleKind
	node    *nodeState // that the worker runs on
	devices []deviceRef
	share   Share // of each device
}

// deviceRef is one device by its position on a node.
type deviceRef struct {
	node *nodeState
	pos  int
}

// assignBundles assigns n bundles to a candidate with room for them, inside one group of devices if possible.
func (d *draftPlan) assignBundles(cand candidate, kind *bundleKind, n int) {
	k := kind.bundle.devices()
	if n > 1 && k > 0 {
		cand = cand.narrowed(n*k, d.within)
	}
	var buffer [16]int
	for range n {
		positions := buffer[:0]
		if kind.bundle.partial() {
			positions = append(positions, cand.pickPart(kind.bundle.Devices, d.within))
		} else {
			positions = cand.pickWhole(positions, k, d.within)
		}
		d.assign(cand.nodeState, kind, positions)
	}
}

// assign assigns one bundle to devices of one node.
func (d *draftPlan) assign(s *nodeState, kind *bundleKind, positions []int) {
	refs := make([]deviceRef, len(positions))
	for i, pos := range positions {
		refs[i] = deviceRef{s, pos}
	}
	d.assignDevices(s, kind, refs)
}

// assignDevices assigns one bundle to devices of any nodes; the worker runs on one of them.
func (d *draftPlan) assignDevices(runs *nodeState, kind *bundleKind, refs []deviceRef) {
	p := assignment{kind: kind, node: runs, devices: refs, share: min(kind.bundle.Devices, Whole)}
	p.apply(+1)
	d.assignments = append(d.assignments, p)
}

// undo removes the assignments made after the first mark ones.
func (d *draftPlan) undo(mark int) {
	for _, p := range slices.Backward(d.assignments[mark:]) {
		p.apply(-1)
	}
	d.assignments = d.assignments[:mark]
}

// apply takes the resources of the assignment out of the node states; with -1 it returns them.
func (p *assignment) apply(sign Share) {
	b := p.kind.bundle
	p.node.cpus -= sign * b.CPUs
	p.node.memory -= int64(sign) * b.Memory
	p.node.useResources(b.Resources, sign)
	p.node.gangBundles += int(sign)
	for i, ref := range p.devices {
		ref.node.use(ref.pos, sign*p.share)
		if ref.node != p.node && (i == 0 || p.devices[i-1].node != ref.node) {
			ref.node.gangBundles += int(sign)
		}
	}
}

// inRankOrder sorts the assignments by node, NUMA node and index: the order in which equal bundles get their ranks.
func (d *draftPlan) inRankOrder() {
	slices.SortStableFunc(d.assignments, func(a, b assignment) int {
		if a.node != b.node {
			return a.node.order - b.node.order
		}
		return a.firstPosition() - b.firstPosition()
	})
}

// firstPosition returns the position of the first device; -1 without devices.
func (p *assignment) firstPosition() int {
	if len(p.devices) == 0 {
		return -1
	}
	return p.devices[0].pos
}

// workers returns the workers by rank. The bundles of a kind get its ranks in the order of the assignments.
func (d *draftPlan) workers(g *gang) []Worker {
	total := 0
	for i := range d.assignments {
		total += len(d.assignments[i].devices)
	}
	indices, slots := make([]int, total), make([]Slot, total)
	workers := make([]Worker, len(d.assignments))
	given := make([]int, len(g.kinds))
	for i := range d.assignments {
		p := &d.assignments[i]
		rank := p.kind.ranks[given[p.kind.index]]
		given[p.kind.index]++
		n := len(p.devices)
		workers[rank] = p.worker(g.request.FirstRank+rank, indices[:n:n], slots[:n:n])
		indices, slots = indices[n:], slots[n:]
	}
	return workers
}

// worker returns the assignment as a Worker that uses the given slices.
func (p *assignment) worker(rank int, indices []int, slots []Slot) Worker {
	for i, ref := range p.devices {
		node := ref.node.info
		device := &node.Devices[ref.pos]
		indices[i] = device.Index
		slots[i] = Slot{Node: node.ID, NodeRank: node.Rank, Index: device.Index, UUID: device.UUID, Share: p.share}
	}
	return Worker{
		Rank:     rank,
		NodeRank: p.node.info.Rank,
		Node:     p.node.info.ID,
		Devices:  indices,
		Slots:    slots,
		CPUs:     p.kind.bundle.CPUs,
		Memory:   p.kind.bundle.Memory,

		Resources: p.kind.bundle.Resources,
	}
}
