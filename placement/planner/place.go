package planner

import (
	"slices"
)

// place puts the whole gang on the nodes, or nothing, and reports which. The topology it asks for is tried first;
// unless it is required, the gang is then placed without. unmet is what had to be let go.
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

// arrange puts the whole gang on the sites by its strategy, or nothing. If the straight way fails for a gang of
// several kinds of bundle, a search of bounded length follows, because the order of kinds may be what failed.
func (g *gang) placeByStrategy(d *draftPlan, cands []candidate, onOneNode bool) bool {
	mark := len(d.assignments)
	if g.placeGreedy(d, cands, onOneNode) {
		return true
	}
	d.undo(mark)
	return len(g.kinds) > 1 && g.search(d, cands, onOneNode)
}

func (g *gang) placeGreedy(d *draftPlan, cands []candidate, onOneNode bool) bool {
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

// putClass puts all bundles of a class by the strategy, which is none that wants them on one node.
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

// onOne puts the whole gang on the fullest site that takes it.
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

// fitsEach reports whether each class would fit by itself.
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

// putOnBest puts n bundles of c on the fullest site that takes them all.
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

// candidate is a site with the number of bundles it takes and how well they fill it.
type ranked struct {
	candidate
	fits  int
	score score
}

// candidates are the sites that take bundles of c, each up to limit of them.
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

// bySize puts those that take the fewest first.
func (a ranked) bySize(b ranked) int {
	if a.fits != b.fits {
		return a.fits - b.fits
	}
	return a.byScore(b)
}

// pack puts all bundles of c on as few sites as possible: what fits beside the rest of the gang, and then the smallest
// sites that will do, so that large ones stay whole for large gangs.
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

// packBeside puts as many bundles of c as possible where other bundles of the gang already lie, and returns how many.
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

// withoutDevices leaves nodes with devices alone when the bundles need none and the other nodes have room for them.
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
