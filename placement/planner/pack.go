package planner

import "slices"

// pack puts all bundles of c on as few sites as possible: what fits beside the rest of the gang, and then the smallest
// sites that will do, so that large ones stay whole for large gangs.
func (d *draft) pack(sites []site, c *class) bool {
	left := len(c.ranks) - d.packBeside(sites, c)
	if left == 0 || d.putOnBest(sites, c, left) {
		return true
	}
	able := withoutDevices(candidates(sites, c, left), c, left)
	slices.SortFunc(able, candidate.bySize)
	sizes := make([]int, len(able))
	for i := range able {
		sizes[i] = able[i].fits
	}
	chosen := fewest(sizes, left)
	for _, i := range chosen {
		n := min(left, able[i].fits)
		d.put(able[i].site, c, n)
		left -= n
	}
	return chosen != nil
}

// packBeside puts as many bundles of c as possible where other bundles of the gang already lie, and returns how many.
func (d *draft) packBeside(sites []site, c *class) int {
	put := 0
	if len(d.placements) == 0 {
		return put
	}
	for _, s := range sites {
		if s.load == 0 {
			continue
		}
		if n := s.fits(c.bundle, len(c.ranks)-put); n > 0 {
			d.put(s, c, n)
			put += n
		}
	}
	return put
}

// withoutDevices leaves nodes with devices alone when the bundles need none and the other nodes have room for them.
func withoutDevices(able []candidate, c *class, need int) []candidate {
	if c.bundle.Devices > 0 {
		return able
	}
	var bare []candidate
	room := 0
	for _, a := range able {
		if len(a.node.Devices) == 0 {
			bare = append(bare, a)
			room += a.fits
		}
	}
	if room < need {
		return able
	}
	return bare
}
