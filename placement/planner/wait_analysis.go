package planner

import (
	"slices"
)

// waitAnalysis is what a gang that does not fit now waits for.
type waitAnalysis struct {
	blockers []blocker // once these are gone, the gang fits
	workers  []Worker  // of the gang, once it fits
	reasons  []Reason  // why the gang never fits
}

// analysisScope limits what an analysis may assume to be gone.
type analysisScope struct {
	preempt       bool // only reservations of lower priority, those that are leaving, and devices that wait for verification; no repairs
	belowPriority int
	fewest        bool // prefer few large reservations over many small ones
}

// analyzeWait finds a small set of blockers without which g fits. The set is minimal as far as maxAnalysisPlacements
// allows. It reports false if g does not fit without any blockers. The planner is unchanged.
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

// canEverFit reports whether g fits without any blockers, and why not.
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

// waitsFor returns the blockers as obstacles.
func (analysis waitAnalysis) waitsFor() []Obstacle {
	area := footprintOf(analysis.workers)
	obstacles := make([]Obstacle, len(analysis.blockers))
	for i, block := range analysis.blockers {
		obstacles[i] = block.public(area)
	}
	return obstacles
}

// includes reports whether alloc is one of the blockers.
func (analysis waitAnalysis) includes(alloc *allocation) bool {
	return slices.ContainsFunc(analysis.blockers, func(b blocker) bool { return b.allocation == alloc })
}

// maxAnalysisPlacements bounds the placements of one analysis. Beyond it, the analysis may name more blockers than
// necessary; the gang still fits without them.
const maxAnalysisPlacements = 256

// blockerSearch finds which of the removed blockers a gang cannot be placed with.
type blockerSearch struct {
	planner        *Planner
	gang           *gang
	result         gangPlacement // of the gang without the blockers found so far
	placementsLeft int
}

// minimize restores all of the removed blockers with which the gang fits, and returns the others. It halves the list:
// about k·log(n/k) placements find k out of n.
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

// footprint is the set of nodes and devices that a plan uses.
type footprint struct {
	nodes        map[string]bool
	computeNodes map[string]bool // nodes that provide CPUs, memory or declared resources
	devices      map[deviceKey]bool
}

type deviceKey struct{ node, uuid string }

func footprintOf(workers []Worker) footprint {
	area := footprint{map[string]bool{}, map[string]bool{}, map[deviceKey]bool{}}
	for i := range workers {
		w := &workers[i]
		area.nodes[w.Node] = true
		if w.usesNode() {
			area.computeNodes[w.Node] = true
		}
		for _, slot := range w.Slots {
			area.nodes[slot.Node] = true
			area.devices[deviceKey{slot.Node, slot.UUID}] = true
		}
	}
	return area
}

// overlaps reports whether the blocker is on a node or device of the footprint.
func (area footprint) overlaps(b blocker) bool {
	switch b.kind {
	case ObstacleNode:
		return area.nodes[b.node.info.ID]
	case ObstacleDevice:
		return area.devices[deviceKey{b.node.info.ID, b.node.info.Devices[b.pos].UUID}]
	}
	return len(area.sharedDevices(b.allocation)) > 0 || slices.ContainsFunc(b.allocation.Workers, func(w Worker) bool {
		return area.computeNodes[w.Node] && w.usesNode()
	})
}

// usesNode reports whether the worker takes resources of its node beside devices.
func (w *Worker) usesNode() bool { return w.CPUs > 0 || w.Memory > 0 || len(w.Resources) > 0 }

// sharedDevices returns the devices that the footprint and an allocation have in common.
func (area footprint) sharedDevices(alloc *allocation) []Slot {
	var slots []Slot
	for _, dev := range alloc.devices {
		if area.devices[deviceKey{dev.slot.Node, dev.slot.UUID}] {
			slots = append(slots, *dev.slot)
		}
	}
	return slots
}
