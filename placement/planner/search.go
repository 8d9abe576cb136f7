package planner

import "slices"

// searchBudget bounds the searches of one decision by the sites they look at: some milliseconds.
const searchBudget = 1 << 16

// search looks for any arrangement of a gang with several kinds of bundle, bundle by bundle and backwards out of dead
// ends. It finds one if there is one and the budget suffices: {4,2,2} and {3,3,2} fill two nodes of eight, which largest
// first never finds.
func (g *gang) search(d *draft, sites []site, onOneSite bool) bool {
	s := search{gang: g, draft: d}
	for i := range g.classes {
		for range g.classes[i].ranks {
			s.steps = append(s.steps, &g.classes[i])
		}
	}
	if !onOneSite && g.strategy != StrictPack {
		return s.over(sites)
	}
	for i := range sites {
		if s.over(sites[i : i+1]) {
			return true
		}
	}
	return false
}

type search struct {
	gang  *gang
	draft *draft
	sites []site
	steps []*class // one for each bundle
}

// over searches the given sites, unless they are too little in all.
func (s *search) over(sites []site) bool {
	s.sites = sites
	return s.gang.roomInAll(sites) && s.from(0, 0)
}

// roomInAll reports whether the sites together have what the gang takes, which does not mean that it fits.
func (g *gang) roomInAll(sites []site) bool {
	var devices, cpus Share
	var memory int64
	for _, s := range sites {
		if s.open {
			devices += s.leftInAll()
			cpus += max(0, s.cpus)
			memory += max(0, s.memory)
		}
	}
	for i := range g.classes {
		n, b := len(g.classes[i].ranks), g.classes[i].bundle
		devices -= Share(n) * b.Devices
		cpus -= Share(n) * b.CPUs
		memory -= int64(n) * b.Memory
	}
	return devices >= 0 && cpus >= 0 && memory >= 0
}

// leftInAll is what can still be had of all devices.
func (s *stock) leftInAll() Share {
	sum := Wholes(s.idle)
	if s.chipped == 0 {
		return sum
	}
	for pos, used := range s.used {
		if used > 0 {
			sum += max(0, s.left(pos))
		}
	}
	return sum
}

// from puts the bundles from step on. Bundles alike are interchangeable, so each lies on the same site as the one
// before it, or on a later one: first.
func (s *search) from(step, first int) bool {
	if step == len(s.steps) {
		return true
	}
	if step > 0 && s.steps[step] != s.steps[step-1] {
		first = 0
	}
	var tried []likeness
	for i, site := range s.sites[first:] {
		if s.gang.effort--; s.gang.effort < 0 {
			return false
		}
		like := likenessOf(site)
		if s.takes(site, s.steps[step]) && !slices.Contains(tried, like) {
			if s.try(site, step, first+i) {
				return true
			}
			tried = append(tried, like)
		}
	}
	return s.trySpanning(step)
}

func (s *search) takes(at site, c *class) bool {
	if s.gang.strategy == StrictSpread && at.load > 0 {
		return false
	}
	return at.fits(c.bundle, 1) == 1
}

// try puts the bundle of a step on one site, in every way that makes a difference, and goes on from there.
func (s *search) try(at site, step, index int) bool {
	c := s.steps[step]
	mark := len(s.draft.placements)
	if !c.bundle.partial() {
		s.draft.put(at, c, 1)
		return s.from(step+1, index) || s.back(mark)
	}
	for _, pos := range at.distinctFor(c.bundle.Devices) {
		s.draft.lay(at.stock, c, []int{pos})
		if s.from(step+1, index) {
			return true
		}
		s.back(mark)
	}
	return false
}

func (s *search) back(mark int) bool {
	s.draft.undo(mark)
	return false
}

// trySpanning lays the bundle of a step over several nodes, if it may, and goes on from there.
func (s *search) trySpanning(step int) bool {
	mark := len(s.draft.placements)
	if c := s.steps[step]; !c.bundle.spans() || s.gang.strategy == StrictPack || !s.draft.span(s.gang.unused(s.sites), c) {
		return false
	}
	return s.from(step+1, 0) || s.back(mark)
}

// distinctFor is one device for each different remainder that has room for a part.
func (s site) distinctFor(share Share) []int {
	var distinct []int
	var seen []Share
	for pos, used := range s.used {
		if s.left(pos) >= share && s.within(pos) && !slices.Contains(seen, used) {
			distinct, seen = append(distinct, pos), append(seen, used)
		}
	}
	return distinct
}

// likeness is all that makes a difference between two sites to the rest of a search. Sites whose devices are not all
// alike are like themselves only.
type likeness struct {
	kin, idle int
	cpus      Share
	memory    int64
	loaded    bool
	only      *stock
}

func likenessOf(s site) likeness {
	like := likeness{kin: s.kin, idle: s.idle, cpus: s.cpus, memory: s.memory, loaded: s.load > 0}
	if s.chipped > 0 || s.groups != nil {
		like.only = s.stock
	}
	return like
}
