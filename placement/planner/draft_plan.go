package planner

import "slices"

// draft is a plan in the making. What it puts somewhere it takes out of the stock there at once, so that the next
// bundle sees what is left, and undo gives it back: after undo(0) every stock is as it was.
type draftPlan struct {
	within      Within // the neighbourhood to keep together
	assignments []assignment
}

// placement is one bundle in its place.
type assignment struct {
	kind    *bundleKind
	node    *nodeState // where the worker runs
	devices []deviceRef
	share   Share // of each spot
}

// spot is one device, by the position on its node.
type deviceRef struct {
	node *nodeState
	pos  int
}

// put lays n bundles of c, which fit, on a site: together in one neighbourhood if they can be.
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

// lay puts one bundle of c on the given devices of a stock.
func (d *draftPlan) assign(s *nodeState, kind *bundleKind, positions []int) {
	refs := make([]deviceRef, len(positions))
	for i, pos := range positions {
		refs[i] = deviceRef{s, pos}
	}
	d.assignDevices(s, kind, refs)
}

// laySpots puts one bundle of c on devices of any stocks, to run on one of them.
func (d *draftPlan) assignDevices(runs *nodeState, kind *bundleKind, refs []deviceRef) {
	p := assignment{kind: kind, node: runs, devices: refs, share: min(kind.bundle.Devices, Whole)}
	p.apply(+1)
	d.assignments = append(d.assignments, p)
}

// undo gives back what was put since there were mark placements.
func (d *draftPlan) undo(mark int) {
	for _, p := range slices.Backward(d.assignments[mark:]) {
		p.apply(-1)
	}
	d.assignments = d.assignments[:mark]
}

// take takes what the placement needs out of the stocks, or with -1 gives it back.
func (p *assignment) apply(sign Share) {
	b := p.kind.bundle
	p.node.cpus -= sign * b.CPUs
	p.node.memory -= int64(sign) * b.Memory
	p.node.gangBundles += int(sign)
	for i, ref := range p.devices {
		ref.node.use(ref.pos, sign*p.share)
		if ref.node != p.node && (i == 0 || p.devices[i-1].node != ref.node) {
			ref.node.gangBundles += int(sign)
		}
	}
}

// inRankOrder sorts the placements by node, NUMA node and index, the order in which bundles alike get their ranks.
func (d *draftPlan) inRankOrder() {
	slices.SortStableFunc(d.assignments, func(a, b assignment) int {
		if a.node != b.node {
			return a.node.order - b.node.order
		}
		return a.firstPosition() - b.firstPosition()
	})
}

// first is the position of the placement's first device; -1 without devices.
func (p *assignment) firstPosition() int {
	if len(p.devices) == 0 {
		return -1
	}
	return p.devices[0].pos
}

// workers are the placements by rank. The bundles of a class get its ranks in the order of the placements.
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

// worker is the placement as a plan states it, in the given memory.
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
	}
}
