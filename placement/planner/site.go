package planner

import "slices"

// site is a stock as a place for bundles, confined to the given neighbourhoods: each bundle inside one of them.
// Without groups, anywhere on the node.
type site struct {
	*stock
	groups []bitset
}

// sitesOf is stocks as places for bundles, anywhere on them.
func sitesOf(stocks []*stock) []site {
	sites := make([]site, len(stocks))
	for i, s := range stocks {
		sites[i].stock = s
	}
	return sites
}

// fits is how many bundles like b find room now, up to limit.
func (s site) fits(b *Bundle, limit int) int {
	if !s.open || !s.admits(b) {
		return 0
	}
	n := limit
	if b.CPUs > 0 {
		n = min(n, int(s.cpus/b.CPUs))
	}
	if b.Memory > 0 {
		n = min(n, int(s.memory/b.Memory))
	}
	switch {
	case b.Devices == 0:
	case b.partial():
		n = min(n, s.partsFor(b.Devices))
	default:
		n = min(n, s.wholesFor(b.devices()))
	}
	return max(n, 0)
}

// wholesFor is how many times k free devices are there, each time inside one group.
func (s site) wholesFor(k int) int {
	if s.groups == nil {
		return s.idle / k
	}
	n := 0
	for _, group := range s.groups {
		n += s.free.countIn(group) / k
	}
	return n
}

// partsFor is how many parts of the given size are there.
func (s site) partsFor(share Share) int {
	n := s.spare() * int(Whole/share)
	if s.chipped == 0 {
		return n
	}
	for pos, used := range s.used {
		if used > 0 && s.within(pos) {
			n += int(s.left(pos) / share)
		}
	}
	return n
}

// spare is how many free devices the site has.
func (s site) spare() int {
	if s.groups == nil {
		return s.idle
	}
	n := 0
	for _, group := range s.groups {
		n += s.free.countIn(group)
	}
	return n
}

func (s site) within(pos int) bool {
	if s.groups == nil {
		return true
	}
	for _, group := range s.groups {
		if group.has(pos) {
			return true
		}
	}
	return false
}

// chip is the partly used device that a part of this size leaves the least of; -1 if none has so much left.
func (s site) chip(share Share) int {
	best := -1
	if s.chipped == 0 {
		return best
	}
	for pos, used := range s.used {
		if used > 0 && s.left(pos) >= share && s.within(pos) && (best < 0 || used > s.used[best]) {
			best = pos
		}
	}
	return best
}

// part is the device to take a part of this size from: a partly used one, or else one that is whole.
func (s site) part(share Share, w Within) int {
	if pos := s.chip(share); pos >= 0 {
		return pos
	}
	var one [1]int
	return s.wholes(one[:0], 1, w)[0]
}

// wholes appends k free devices to dst, in rank order. There must be as many, inside one group where there are groups.
func (s site) wholes(dst []int, k int, w Within) []int {
	switch {
	case k == 0:
		return dst
	case k == s.idle:
		return s.free.appendLowest(dst, k)
	}
	pool := s.free
	if s.groups != nil {
		pool = pool.and(smallest(pool, k, s.groups))
	}
	dst = choose(dst, pool, k, s.layout.levels(w))
	slices.Sort(dst)
	return dst
}

// gathered is s confined to one neighbourhood that has all the devices needed, if there is one.
func (s site) gathered(need int, w Within) site {
	var one bitset
	if s.groups == nil {
		one = narrow(s.free, need, s.layout.levels(w))
	} else {
		one = smallest(s.free, need, s.groups)
	}
	if one == nil {
		return s
	}
	return site{s.stock, []bitset{one}}
}

// waste is 1 where b would use up something better than it needs: devices' company for a bundle without any, a whole
// device for a part.
func (s site) waste(b *Bundle) int {
	switch {
	case b.Devices == 0 && len(s.node.Devices) > 0:
		return 1
	case b.partial() && s.chip(b.Devices) < 0:
		return 1
	}
	return 0
}

// aptness is how well a bundle fills a site, the best first: without waste, then where the least is free, then the
// lower rank. Whole nodes and whole islands come last and so stay whole.
type aptness struct {
	waste, spare, idle, order int
}

func (s site) aptness(b *Bundle) aptness { return aptness{s.waste(b), s.spare(), s.idle, s.order} }

func (a aptness) compare(other aptness) int {
	switch {
	case a.waste != other.waste:
		return a.waste - other.waste
	case a.spare != other.spare:
		return a.spare - other.spare
	case a.idle != other.idle:
		return a.idle - other.idle
	}
	return a.order - other.order
}
