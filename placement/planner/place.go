package planner

import (
	"slices"
)

// place assigns the whole gang to the nodes, or nothing, and reports which. It tries the requested topology first and,
// unless that is required, then without it. unmet describes the part of the topology that is not met.
func (g *gang) place(d *draftPlan, nodes []candidate) (unmet string, ok bool) {
	t := g.request.Topology
	d.within = t.Within
	for _, division := range g.partitions(nodes) {
		for _, aff := range g.affinities() {
			for _, part := range division.parts {
				if g.placeByStrategy(d, aff.restrict(part, t.Within), aff == gangAffinity) {
					return unmetTopology(division.label, aff, t), true
				}
			}
		}
	}
	return "", false
}

// placeByStrategy assigns the whole gang by its strategy, or nothing. If the greedy order fails for a gang of several
// kinds, a bounded search follows.
func (g *gang) placeByStrategy(d *draftPlan, cands []candidate, onOneNode bool) bool {
	mark := len(d.assignments)
	if g.placeGreedy(d, cands, onOneNode) {
		return true
	}
	d.undo(mark)
	return len(g.kinds) > 1 && g.search(d, cands, onOneNode)
}

func (g *gang) placeGreedy(d *draftPlan, cands []candidate, onOneNode bool) bool {
	if g.strategy == Hybrid || g.strategy == Rotate {
		return g.placeSingle(d, cands)
	}
	if g.strategy == Pack || g.strategy == StrictPack || onOneNode {
		if g.placeOnOne(d, cands) {
			return true
		}
		if g.strategy == StrictPack || onOneNode {
			return false
		}
	}
	for i := range g.kinds {
		if !g.placeKind(d, cands, &g.kinds[i]) {
			return false
		}
	}
	return true
}

// placeKind assigns all bundles of a kind by a strategy that allows several nodes.
func (g *gang) placeKind(d *draftPlan, cands []candidate, kind *bundleKind) bool {
	switch {
	case kind.bundle.spans():
		return g.placeSpanning(d, cands, kind)
	case g.strategy == Spread:
		return d.spread(cands, kind)
	case g.strategy == StrictSpread:
		return d.spreadStrictly(cands, kind)
	}
	return d.pack(cands, kind)
}

// placeOnOne assigns the whole gang to the best candidate that has room for all of it.
func (g *gang) placeOnOne(d *draftPlan, cands []candidate) bool {
	if len(g.kinds) == 1 {
		return d.placeOnBest(cands, &g.kinds[0], len(g.kinds[0].ranks))
	}
	var able []ranked
	for _, cand := range cands {
		if g.fitsEach(cand) {
			able = append(able, ranked{candidate: cand, score: cand.score(g.kinds[0].bundle)})
		}
	}
	slices.SortStableFunc(able, ranked.byScore)
	for _, a := range able {
		if g.placeAllOn(d, a.candidate) {
			return true
		}
	}
	return false
}

// fitsEach reports whether each kind alone fits.
func (g *gang) fitsEach(cand candidate) bool {
	for i := range g.kinds {
		if n := len(g.kinds[i].ranks); cand.fits(g.kinds[i].bundle, n) < n {
			return false
		}
	}
	return true
}

func (g *gang) placeAllOn(d *draftPlan, cand candidate) bool {
	mark := len(d.assignments)
	for i := range g.kinds {
		kind := &g.kinds[i]
		if cand.fits(kind.bundle, len(kind.ranks)) < len(kind.ranks) {
			d.undo(mark)
			return false
		}
		d.assignBundles(cand, kind, len(kind.ranks))
	}
	return true
}

// placeOnBest assigns n bundles to the best candidate that has room for all of them.
func (d *draftPlan) placeOnBest(cands []candidate, kind *bundleKind, n int) bool {
	var best ranked
	for _, cand := range cands {
		if cand.fits(kind.bundle, n) < n {
			continue
		}
		if a := cand.score(kind.bundle); best.nodeState == nil || a.compare(best.score) < 0 {
			best = ranked{candidate: cand, score: a}
		}
	}
	if best.nodeState == nil {
		return false
	}
	d.assignBundles(best.candidate, kind, n)
	return true
}

// ranked is a candidate with the number of bundles that fit and its score.
type ranked struct {
	candidate
	fits  int
	score score
}

// rankCandidates returns the candidates on which at least one bundle fits, each with up to limit bundles.
func rankCandidates(cands []candidate, kind *bundleKind, limit int) []ranked {
	able := make([]ranked, 0, len(cands))
	for _, cand := range cands {
		if n := cand.fits(kind.bundle, limit); n > 0 {
			able = append(able, ranked{cand, n, cand.score(kind.bundle)})
		}
	}
	return able
}

func (a ranked) byScore(b ranked) int { return a.score.compare(b.score) }

// bySize orders by the number of bundles that fit, ascending.
func (a ranked) bySize(b ranked) int {
	if a.fits != b.fits {
		return a.fits - b.fits
	}
	return a.byScore(b)
}

// pack assigns all bundles of a kind to as few nodes as possible: first to nodes that the gang uses already, then to
// the smallest nodes that suffice, so that large ones stay whole for large gangs.
func (d *draftPlan) pack(cands []candidate, kind *bundleKind) bool {
	left := len(kind.ranks) - d.packNextToGang(cands, kind)
	if left == 0 || d.placeOnBest(cands, kind, left) {
		return true
	}
	able := preferNodesWithoutDevices(rankCandidates(cands, kind, left), kind, left)
	slices.SortFunc(able, ranked.bySize)
	sizes := make([]int, len(able))
	for i := range able {
		sizes[i] = able[i].fits
	}
	chosen := fewest(sizes, left)
	for _, i := range chosen {
		n := min(left, able[i].fits)
		d.assignBundles(able[i].candidate, kind, n)
		left -= n
	}
	return chosen != nil
}

// packNextToGang assigns bundles to the nodes that the gang uses already, and returns how many.
func (d *draftPlan) packNextToGang(cands []candidate, kind *bundleKind) int {
	put := 0
	if len(d.assignments) == 0 {
		return put
	}
	for _, cand := range cands {
		if cand.gangBundles == 0 {
			continue
		}
		if n := cand.fits(kind.bundle, len(kind.ranks)-put); n > 0 {
			d.assignBundles(cand, kind, n)
			put += n
		}
	}
	return put
}

// preferNodesWithoutDevices drops nodes with devices if the bundles need none and the other nodes have room for them.
func preferNodesWithoutDevices(able []ranked, kind *bundleKind, need int) []ranked {
	if kind.bundle.Devices > 0 {
		return able
	}
	var bare []ranked
	room := 0
	for _, a := range able {
		if len(a.info.Devices) == 0 {
			bare = append(bare, a)
			room += a.fits
		}
	}
	if room < need {
		return able
	}
	return bare
}
