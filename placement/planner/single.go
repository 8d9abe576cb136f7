package planner

import (
	"cmp"
	"slices"
)

// halfFull is the load up to which a node is filled before the next is used.
const halfFull = 0.5

// placeSingle assigns a gang of one bundle by the strategies that spread many small requests over the nodes.
func (g *gang) placeSingle(d *draftPlan, cands []candidate) bool {
	kind := &g.kinds[0]
	if preferred := preferredOf(cands, kind.bundle); preferred != nil {
		cands = preferred
	}
	var able []candidate
	for _, cand := range cands {
		if cand.fits(kind.bundle, 1) > 0 {
			able = append(able, cand)
		}
	}
	if len(able) == 0 {
		return false
	}
	able = firstChoice(able, kind.bundle)
	chosen := able[uint(g.request.Turn)%uint(len(able))]
	if g.strategy == Hybrid {
		chosen = leastBusy(able, kind.bundle)
	}
	d.assignBundles(chosen, kind, 1)
	return true
}

// preferredOf returns the preferred node alone, if it takes work and could hold the bundle.
func preferredOf(cands []candidate, b *Bundle) []candidate {
	for i, cand := range cands {
		if b.Prefer != "" && cand.info.ID == b.Prefer && cand.open && cand.couldFit(b) {
			return cands[i : i+1]
		}
	}
	return nil
}

// firstChoice returns the nodes that match the most preferred of the alternatives that any of them matches.
func firstChoice(able []candidate, b *Bundle) []candidate {
	if len(b.Where) < 2 {
		return able
	}
	best := len(b.Where)
	for _, cand := range able {
		best = min(best, cand.choice(b))
	}
	return slices.DeleteFunc(able, func(cand candidate) bool { return cand.choice(b) > best })
}

// leastBusy returns the first node that is at most half full, or else the least full one. Nodes with devices come last
// for a bundle that needs none.
func leastBusy(able []candidate, b *Bundle) candidate {
	best := able[0]
	for _, cand := range able[1:] {
		wasted := cmp.Compare(cand.waste(b), best.waste(b))
		if b.Devices > 0 {
			wasted = 0
		}
		if cmp.Or(wasted, cmp.Compare(max(cand.load(), halfFull), max(best.load(), halfFull)), cmp.Compare(cand.order, best.order)) < 0 {
			best = cand
		}
	}
	return best
}
