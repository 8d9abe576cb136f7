package planner

import "slices"

// draft is a plan in the making. What it puts somewhere it takes out of the stock there at once, so that the next
// bundle sees what is left, and undo gives it back: after undo(0) every stock is as it was.
type draft struct {
	within     Within // the neighbourhood to keep together
	placements []placement
}

// placement is one bundle in its place.
type placement struct {
	class *class
	runs  *stock // where the worker runs
	spots []spot
	share Share // of each spot
}

// spot is one device, by the position on its node.
type spot struct {
	stock *stock
	pos   int
}

// put lays n bundles of c, which fit, on a site: together in one neighbourhood if they can be.
func (d *draft) put(s site, c *class, n int) {
	k := c.bundle.devices()
	if n > 1 && k > 0 {
		s = s.gathered(n*k, d.within)
	}
	var buffer [16]int
	for range n {
		positions := buffer[:0]
		if c.bundle.partial() {
			positions = append(positions, s.part(c.bundle.Devices, d.within))
		} else {
			positions = s.wholes(positions, k, d.within)
		}
		d.lay(s.stock, c, positions)
	}
}

// lay puts one bundle of c on the given devices of a stock.
func (d *draft) lay(s *stock, c *class, positions []int) {
	spots := make([]spot, len(positions))
	for i, pos := range positions {
		spots[i] = spot{s, pos}
	}
	d.laySpots(s, c, spots)
}

// laySpots puts one bundle of c on devices of any stocks, to run on one of them.
func (d *draft) laySpots(runs *stock, c *class, spots []spot) {
	p := placement{class: c, runs: runs, spots: spots, share: min(c.bundle.Devices, Whole)}
	p.take(+1)
	d.placements = append(d.placements, p)
}

// undo gives back what was put since there were mark placements.
func (d *draft) undo(mark int) {
	for _, p := range slices.Backward(d.placements[mark:]) {
		p.take(-1)
	}
	d.placements = d.placements[:mark]
}

// take takes what the placement needs out of the stocks, or with -1 gives it back.
func (p *placement) take(sign Share) {
	b := p.class.bundle
	p.runs.cpus -= sign * b.CPUs
	p.runs.memory -= int64(sign) * b.Memory
	p.runs.load += int(sign)
	for i, spot := range p.spots {
		spot.stock.use(spot.pos, sign*p.share)
		if spot.stock != p.runs && (i == 0 || p.spots[i-1].stock != spot.stock) {
			spot.stock.load += int(sign)
		}
	}
}

// inRankOrder sorts the placements by node, NUMA node and index, the order in which bundles alike get their ranks.
func (d *draft) inRankOrder() {
	slices.SortStableFunc(d.placements, func(a, b placement) int {
		if a.runs != b.runs {
			return a.runs.order - b.runs.order
		}
		return a.first() - b.first()
	})
}

// first is the position of the placement's first device; -1 without devices.
func (p *placement) first() int {
	if len(p.spots) == 0 {
		return -1
	}
	return p.spots[0].pos
}

// workers are the placements by rank. The bundles of a class get its ranks in the order of the placements.
func (d *draft) workers(g *gang) []Worker {
	total := 0
	for i := range d.placements {
		total += len(d.placements[i].spots)
	}
	indices, slots := make([]int, total), make([]Slot, total)
	workers := make([]Worker, len(d.placements))
	given := make([]int, len(g.classes))
	for i := range d.placements {
		p := &d.placements[i]
		rank := p.class.ranks[given[p.class.index]]
		given[p.class.index]++
		n := len(p.spots)
		workers[rank] = p.worker(g.request.FirstRank+rank, indices[:n:n], slots[:n:n])
		indices, slots = indices[n:], slots[n:]
	}
	return workers
}

// worker is the placement as a plan states it, in the given memory.
func (p *placement) worker(rank int, indices []int, slots []Slot) Worker {
	for i, spot := range p.spots {
		node := spot.stock.node
		device := &node.Devices[spot.pos]
		indices[i] = device.Index
		slots[i] = Slot{Node: node.ID, NodeRank: node.Rank, Index: device.Index, UUID: device.UUID, Share: p.share}
	}
	return Worker{
		Rank:     rank,
		NodeRank: p.runs.node.Rank,
		Node:     p.runs.node.ID,
		Devices:  indices,
		Slots:    slots,
		CPUs:     p.class.bundle.CPUs,
		Memory:   p.class.bundle.Memory,
	}
}
