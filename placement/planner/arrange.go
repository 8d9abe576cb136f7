package planner

import "slices"

// place puts the whole gang on the nodes, or nothing, and reports which. The topology it asks for is tried first;
// unless it is required, the gang is then placed without. unmet is what had to be let go.
func (g *gang) place(d *draft, nodes []site) (unmet string, ok bool) {
	t := g.request.Topology
	d.within = t.Within
	for _, area := range g.areas(nodes) {
		for _, tie := range g.ties() {
			for _, part := range area.parts {
				if g.arrange(d, tie.confine(part, t.Within), tie == gangTied) {
					return unmetBy(area.label, tie, t), true
				}
			}
		}
	}
	return "", false
}

// arrange puts the whole gang on the sites by its strategy, or nothing. If the straight way fails for a gang of
// several kinds of bundle, a search of bounded length follows, because the order of kinds may be what failed.
func (g *gang) arrange(d *draft, sites []site, onOneSite bool) bool {
	mark := len(d.placements)
	if g.arrangeStraight(d, sites, onOneSite) {
		return true
	}
	d.undo(mark)
	return len(g.classes) > 1 && g.search(d, sites, onOneSite)
}

func (g *gang) arrangeStraight(d *draft, sites []site, onOneSite bool) bool {
	if g.strategy == Pack || g.strategy == StrictPack || onOneSite {
		if g.onOne(d, sites) {
			return true
		}
		if g.strategy == StrictPack || onOneSite {
			return false
		}
	}
	for i := range g.classes {
		if !g.putClass(d, sites, &g.classes[i]) {
			return false
		}
	}
	return true
}

// putClass puts all bundles of a class by the strategy, which is none that wants them on one node.
func (g *gang) putClass(d *draft, sites []site, c *class) bool {
	switch {
	case c.bundle.spans():
		return g.putSpanning(d, sites, c)
	case g.strategy == Spread:
		return d.spread(sites, c)
	case g.strategy == StrictSpread:
		return d.spreadStrictly(sites, c)
	}
	return d.pack(sites, c)
}

// onOne puts the whole gang on the fullest site that takes it.
func (g *gang) onOne(d *draft, sites []site) bool {
	if len(g.classes) == 1 {
		return d.putOnBest(sites, &g.classes[0], len(g.classes[0].ranks))
	}
	var able []candidate
	for _, s := range sites {
		if g.fitsEach(s) {
			able = append(able, candidate{site: s, aptness: s.aptness(g.classes[0].bundle)})
		}
	}
	slices.SortStableFunc(able, candidate.byAptness)
	for _, a := range able {
		if g.putAllOn(d, a.site) {
			return true
		}
	}
	return false
}

// fitsEach reports whether each class would fit by itself.
func (g *gang) fitsEach(s site) bool {
	for i := range g.classes {
		if n := len(g.classes[i].ranks); s.fits(g.classes[i].bundle, n) < n {
			return false
		}
	}
	return true
}

func (g *gang) putAllOn(d *draft, s site) bool {
	mark := len(d.placements)
	for i := range g.classes {
		c := &g.classes[i]
		if s.fits(c.bundle, len(c.ranks)) < len(c.ranks) {
			d.undo(mark)
			return false
		}
		d.put(s, c, len(c.ranks))
	}
	return true
}

// putOnBest puts n bundles of c on the fullest site that takes them all.
func (d *draft) putOnBest(sites []site, c *class, n int) bool {
	var best candidate
	for _, s := range sites {
		if s.fits(c.bundle, n) < n {
			continue
		}
		if a := s.aptness(c.bundle); best.stock == nil || a.compare(best.aptness) < 0 {
			best = candidate{site: s, aptness: a}
		}
	}
	if best.stock == nil {
		return false
	}
	d.put(best.site, c, n)
	return true
}

// candidate is a site with the number of bundles it takes and how well they fill it.
type candidate struct {
	site
	fits    int
	aptness aptness
}

// candidates are the sites that take bundles of c, each up to limit of them.
func candidates(sites []site, c *class, limit int) []candidate {
	able := make([]candidate, 0, len(sites))
	for _, s := range sites {
		if n := s.fits(c.bundle, limit); n > 0 {
			able = append(able, candidate{s, n, s.aptness(c.bundle)})
		}
	}
	return able
}

func (a candidate) byAptness(b candidate) int { return a.aptness.compare(b.aptness) }

// bySize puts those that take the fewest first.
func (a candidate) bySize(b candidate) int {
	if a.fits != b.fits {
		return a.fits - b.fits
	}
	return a.byAptness(b)
}
