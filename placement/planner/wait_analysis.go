package planner

import (
	"slices"
)

// outlook is what a gang that finds no room now can expect.
type waitAnalysis struct {
	blockers []blocker // once these are gone it fits
	workers  []Worker  // where it would then be
	reasons  []Reason  // why it does not, if nothing at all is enough
}

// scope is what an outlook may think away.
type analysisScope struct {
	preempt       bool // only reservations of a lower priority, those that are leaving and what they left, and no repairs
	belowPriority int
	fewest        bool // rather one large reservation than several small ones
}

// outlook looks for a small set of obstacles without which g fits: none of them can be left out, as far as the budget
// for finding that out goes. It reports false if lifting all of them would not be enough. The book is left as it was.
func (pl *Planner) analyzeWait(g *gang, sc analysisScope) (waitAnalysis, bool) {
	all := pl.blockers(g, sc)
	removeBlockers(all)
	g.searchSteps = maxSearchSteps
	would, ok := pl.place(g)
	if !ok {
		defer restoreBlockers(all)
		if sc.preempt {
			return waitAnalysis{}, false
		}
		return waitAnalysis{reasons: pl.reasonsForNever(g)}, false
	}
	p := blockerSearch{planner: pl, gang: g, result: would, placementsLeft: maxAnalysisPlacements}
	needed := p.minimize(all)
	restoreBlockers(needed)
	if p.placementsLeft <= 0 {
		area := footprintOf(p.result.workers)
		needed = slices.DeleteFunc(needed, func(b blocker) bool { return !area.overlaps(b) })
	}
	return waitAnalysis{blockers: needed, workers: p.result.workers}, true
}

// possible reports whether g would fit if every obstacle were gone and, if not, why.
func (pl *Planner) canEverFit(g *gang) ([]Reason, bool) {
	all := pl.blockers(g, analysisScope{})
	removeBlockers(all)
	defer restoreBlockers(all)
	g.searchSteps = maxSearchSteps
	if _, ok := pl.place(g); ok {
		return nil, true
	}
	return pl.reasonsForNever(g), false
}

// waitsFor is the needed obstacles in public terms.
func (analysis waitAnalysis) waitsFor() []Obstacle {
	area := footprintOf(analysis.workers)
	obstacles := make([]Obstacle, len(analysis.blockers))
	for i, block := range analysis.blockers {
		obstacles[i] = block.public(area)
	}
	return obstacles
}

// needs reports whether h is one of the obstacles.
func (analysis waitAnalysis) includes(alloc *allocation) bool {
	return slices.ContainsFunc(analysis.blockers, func(b blocker) bool { return b.allocation == alloc })
}

// probeBudget bounds how often a gang is placed to find out what it waits for. Beyond it, the answer may name more
// obstacles than need be; it is still enough that all of them go.
const maxAnalysisPlacements = 256

// probe finds out which of the lifted obstacles a gang cannot do without.
type blockerSearch struct {
	planner        *Planner
	gang           *gang
	result         gangPlacement // where the gang is if no more is lifted than needed so far
	placementsLeft int
}

// needed puts back all of blocks, which are lifted, but those that the gang cannot fit beside, and returns these.
// Because it halves the blocks, about k·log(n/k) placements find k out of n.
func (p *blockerSearch) minimize(blocks []blocker) []blocker {
	if len(blocks) == 0 || p.placementsLeft <= 0 {
		return blocks
	}
	p.placementsLeft--
	restoreBlockers(blocks)
	if would, ok := p.planner.place(p.gang); ok {
		p.result = would
		return nil
	}
	removeBlockers(blocks)
	if len(blocks) == 1 {
		return blocks
	}
	half := len(blocks) / 2
	return slices.Concat(p.minimize(blocks[:half]), p.minimize(blocks[half:]))
}

// ground is what workers stand on.
type footprint struct {
	nodes        map[string]bool
	computeNodes map[string]bool // nodes where they take CPUs or memory
	devices      map[deviceKey]bool
}

type deviceKey struct{ node, uuid string }

func footprintOf(workers []Worker) footprint {
	area := footprint{map[string]bool{}, map[string]bool{}, map[deviceKey]bool{}}
	for i := range workers {
		w := &workers[i]
		area.nodes[w.Node] = true
		if w.CPUs > 0 || w.Memory > 0 {
			area.computeNodes[w.Node] = true
		}
		for _, slot := range w.Slots {
			area.nodes[slot.Node] = true
			area.devices[deviceKey{slot.Node, slot.UUID}] = true
		}
	}
	return area
}

// feels reports whether the obstacle lies on the ground.
func (area footprint) overlaps(b blocker) bool {
	switch b.kind {
	case ObstacleNode:
		return area.nodes[b.node.info.ID]
	case ObstacleDevice:
		return area.devices[deviceKey{b.node.info.ID, b.node.info.Devices[b.pos].UUID}]
	}
	return len(area.sharedDevices(b.allocation)) > 0 || slices.ContainsFunc(b.allocation.Workers, func(w Worker) bool {
		return area.computeNodes[w.Node] && (w.CPUs > 0 || w.Memory > 0)
	})
}

// shared is the devices that the ground and a reservation have in common.
func (area footprint) sharedDevices(alloc *allocation) []Slot {
	var slots []Slot
	for _, dev := range alloc.devices {
		if area.devices[deviceKey{dev.slot.Node, dev.slot.UUID}] {
			slots = append(slots, *dev.slot)
		}
	}
	return slots
}
