package planner

import (
	"cmp"
	"slices"
)

// spread puts all bundles of c, each where the fewest bundles of the gang lie so far.
func (d *draft) spread(sites []site, c *class) bool {
	able := candidates(sites, c, len(c.ranks))
	slices.SortFunc(able, candidate.byAptness)
	for left := len(c.ranks); left > 0; {
		level, any := lightest(able)
		if !any {
			return false
		}
		for i := range able {
			if a := &able[i]; left > 0 && a.fits > 0 && a.load == level {
				d.put(a.site, c, 1)
				a.fits--
				left--
			}
		}
	}
	return true
}

// lightest is the least load among the candidates that still take something.
func lightest(able []candidate) (load int, any bool) {
	for _, a := range able {
		if a.fits > 0 && (!any || a.load < load) {
			load, any = a.load, true
		}
	}
	return load, any
}

// spreadStrictly puts each bundle of c on a node of its own, the fullest ones that take it.
func (d *draft) spreadStrictly(sites []site, c *class) bool {
	able := candidates(sites, c, 1)
	slices.SortFunc(able, candidate.byAptness)
	left := len(c.ranks)
	for _, a := range able {
		if left > 0 && a.load == 0 {
			d.put(a.site, c, 1)
			left--
		}
	}
	return left == 0
}

// putSpanning puts the bundles of a class that may span nodes: on one node if one takes them, and otherwise over as
// few as possible.
func (g *gang) putSpanning(d *draft, sites []site, c *class) bool {
	for range c.ranks {
		if open := g.unused(sites); !d.putOnBest(open, c, 1) && !d.span(open, c) {
			return false
		}
	}
	return true
}

// unused is the sites on which another bundle may lie.
func (g *gang) unused(sites []site) []site {
	if g.strategy != StrictSpread {
		return sites
	}
	return slices.DeleteFunc(slices.Clone(sites), func(s site) bool { return s.load > 0 })
}

// span puts one bundle of c over several nodes. The worker runs on the first of them that has the CPUs and the memory.
// Where bundles must lie in a neighbourhood, none spans nodes.
func (d *draft) span(sites []site, c *class) bool {
	able := donors(sites, c)
	k := c.bundle.devices()
	chosen := chosenBy(able, k)
	if len(chosen) == 0 {
		return false
	}
	runner := slices.IndexFunc(chosen, func(s site) bool { return s.runs(c.bundle) })
	if runner < 0 {
		if chosen, runner = aroundRunner(able, k, c.bundle), 0; chosen == nil {
			return false
		}
	}
	first := chosen[runner]
	spots := d.donate(nil, first, k)
	for _, s := range slices.Delete(chosen, runner, runner+1) {
		spots = d.donate(spots, s, k)
	}
	d.laySpots(first.stock, c, spots)
	return true
}

// donate appends free devices of a site to spots, until there are k.
func (d *draft) donate(spots []spot, s site, k int) []spot {
	for _, pos := range s.wholes(nil, min(k-len(spots), s.idle), d.within) {
		spots = append(spots, spot{s.stock, pos})
	}
	return spots
}

// donors are the sites that can give devices to a spanning bundle, the fewest first.
func donors(sites []site, c *class) []site {
	var able []site
	for _, s := range sites {
		if s.open && s.idle > 0 && s.groups == nil && s.admits(c.bundle) {
			able = append(able, s)
		}
	}
	slices.SortFunc(able, func(a, b site) int { return cmp.Or(a.idle-b.idle, a.order-b.order) })
	return able
}

// chosenBy is the fewest of the sites that have k devices together, by rank; nil if all have not.
func chosenBy(able []site, k int) []site {
	sizes := make([]int, len(able))
	for i, s := range able {
		sizes[i] = s.idle
	}
	var chosen []site
	for _, i := range fewest(sizes, k) {
		chosen = append(chosen, able[i])
	}
	slices.SortFunc(chosen, func(a, b site) int { return a.order - b.order })
	return chosen
}

// aroundRunner is the largest site on which the worker can run, and then the fewest others that make up k devices.
func aroundRunner(able []site, k int, b *Bundle) []site {
	for i, s := range slices.Backward(able) {
		if !s.runs(b) {
			continue
		}
		others := chosenBy(slices.Delete(slices.Clone(able), i, i+1), k-s.idle)
		if others == nil {
			return nil
		}
		return append([]site{s}, others...)
	}
	return nil
}

// runs reports whether the worker of b, without its devices, finds room.
func (s site) runs(b *Bundle) bool { return s.cpus >= b.CPUs && s.memory >= b.Memory }
