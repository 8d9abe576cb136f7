package planner

import (
	"cmp"
	"slices"
)

// spread assigns each bundle to the node with the fewest bundles of the gang so far.
func (d *draftPlan) spread(cands []candidate, kind *bundleKind) bool {
	able := rankCandidates(cands, kind, len(kind.ranks))
	slices.SortFunc(able, ranked.byScore)
	for left := len(kind.ranks); left > 0; {
		level, any := leastLoaded(able)
		if !any {
			return false
		}
		for i := range able {
			if a := &able[i]; left > 0 && a.fits > 0 && a.gangBundles == level {
				d.assignBundles(a.candidate, kind, 1)
				a.fits--
				left--
			}
		}
	}
	return true
}

// leastLoaded returns the smallest number of bundles of the gang on a candidate that has room.
func leastLoaded(able []ranked) (load int, any bool) {
	for _, a := range able {
		if a.fits > 0 && (!any || a.gangBundles < load) {
			load, any = a.gangBundles, true
		}
	}
	return load, any
}

// spreadStrictly assigns each bundle to a node of its own, by score.
func (d *draftPlan) spreadStrictly(cands []candidate, kind *bundleKind) bool {
	able := rankCandidates(cands, kind, 1)
	slices.SortFunc(able, ranked.byScore)
	left := len(kind.ranks)
	for _, a := range able {
		if left > 0 && a.gangBundles == 0 {
			d.assignBundles(a.candidate, kind, 1)
			left--
		}
	}
	return left == 0
}

// placeSpanning assigns bundles that may span nodes: to one node if possible, otherwise to as few as possible.
func (g *gang) placeSpanning(d *draftPlan, cands []candidate, kind *bundleKind) bool {
	for range kind.ranks {
		if open := g.eligible(cands); !d.placeOnBest(open, kind, 1) && !d.span(open, kind) {
			return false
		}
	}
	return true
}

// eligible returns the candidates on which another bundle may be placed.
func (g *gang) eligible(cands []candidate) []candidate {
	if g.strategy != StrictSpread {
		return cands
	}
	return slices.DeleteFunc(slices.Clone(cands), func(cand candidate) bool { return cand.gangBundles > 0 })
}

// span assigns one bundle to several nodes. The worker runs on the first of them that has the CPUs and the memory.
// Bundles that must stay in a group of devices do not span nodes.
func (d *draftPlan) span(cands []candidate, kind *bundleKind) bool {
	donors := spanningCandidates(cands, kind)
	k := kind.bundle.devices()
	chosen := fewestCandidates(donors, k)
	if len(chosen) == 0 {
		return false
	}
	runner := slices.IndexFunc(chosen, func(cand candidate) bool { return cand.canRun(kind.bundle) })
	if runner < 0 {
		if chosen, runner = withRunner(donors, k, kind.bundle), 0; chosen == nil {
			return false
		}
	}
	first := chosen[runner]
	refs := d.takeFree(nil, first, k)
	for _, cand := range slices.Delete(chosen, runner, runner+1) {
		refs = d.takeFree(refs, cand, k)
	}
	d.assignDevices(first.nodeState, kind, refs)
	return true
}

// takeFree appends free devices of a candidate until refs has k.
func (d *draftPlan) takeFree(refs []deviceRef, cand candidate, k int) []deviceRef {
	for _, pos := range cand.pickWhole(nil, min(k-len(refs), cand.freeCount), d.within) {
		refs = append(refs, deviceRef{cand.nodeState, pos})
	}
	return refs
}

// spanningCandidates returns the candidates with free devices for a spanning bundle, those with the fewest first.
func spanningCandidates(cands []candidate, kind *bundleKind) []candidate {
	var donors []candidate
	for _, cand := range cands {
		if cand.open && cand.freeCount > 0 && cand.groups == nil && cand.matches(kind.bundle) {
			donors = append(donors, cand)
		}
	}
	slices.SortFunc(donors, func(a, b candidate) int { return cmp.Or(a.freeCount-b.freeCount, a.order-b.order) })
	return donors
}

// fewestCandidates returns the fewest candidates with k free devices together, by rank; nil if all together have too
// few.
func fewestCandidates(cands []candidate, k int) []candidate {
	sizes := make([]int, len(cands))
	for i, cand := range cands {
		sizes[i] = cand.freeCount
	}
	var chosen []candidate
	for _, i := range fewest(sizes, k) {
		chosen = append(chosen, cands[i])
	}
	slices.SortFunc(chosen, func(a, b candidate) int { return a.order - b.order })
	return chosen
}

// withRunner returns the largest candidate on which the worker can run, followed by the fewest others that complete k
// devices.
func withRunner(cands []candidate, k int, b *Bundle) []candidate {
	for i, cand := range slices.Backward(cands) {
		if !cand.canRun(b) {
			continue
		}
		others := fewestCandidates(slices.Delete(slices.Clone(cands), i, i+1), k-cand.freeCount)
		if others == nil {
			return nil
		}
		return append([]candidate{cand}, others...)
	}
	return nil
}

// canRun reports whether the CPUs, the memory and the declared resources of b are free.
func (cand candidate) canRun(b *Bundle) bool {
	return cand.cpus >= b.CPUs && cand.memory >= b.Memory && contains(cand.freeResources(), b.Resources)
}
