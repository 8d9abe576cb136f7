package planner

import "slices"

// layout is how the devices of a node lie to each other, by position. Nodes built alike share one; it never changes.
type layout struct {
	islandsFirst [][]bitset // the islands, then the NUMA nodes
	numasFirst   [][]bitset // the other way round
}

func newLayout(devices []Device) *layout {
	islands := groupPositions(devices, func(d *Device) int { return d.Island })
	numas := groupPositions(devices, func(d *Device) int { return d.NUMA })
	return &layout{islandsFirst: [][]bitset{islands, numas}, numasFirst: [][]bitset{numas, islands}}
}

// grouped is the positions of the devices for each value of key, the group of the first device first.
func groupPositions(devices []Device, key func(*Device) int) []bitset {
	var keys []int
	var groups []bitset
	for pos := range devices {
		k := key(&devices[pos])
		at := slices.Index(keys, k)
		if at < 0 {
			at = len(keys)
			keys, groups = append(keys, k), append(groups, newBitset(len(devices)))
		}
		groups[at].set(pos, true)
	}
	return groups
}

// lieAlike reports whether devices have the same layout.
func sameLayout(a, b []Device) bool {
	return slices.EqualFunc(a, b, func(x, y Device) bool { return x.NUMA == y.NUMA && x.Island == y.Island })
}

// levels are the kinds of neighbourhood, the one to keep together first.
func (l *layout) levels(w Within) [][]bitset {
	if w == NUMA {
		return l.numasFirst
	}
	return l.islandsFirst
}

// choose appends k devices of pool to dst. They come from the smallest neighbourhood that has k of them, so that the
// larger ones stay whole, and otherwise from as few as possible.
func choose(dst []int, pool bitset, k int, levels [][]bitset) []int {
	if len(levels) == 0 {
		return pool.appendLowest(dst, k)
	}
	if len(levels[0]) <= 1 {
		return choose(dst, pool, k, levels[1:])
	}
	if one := smallest(pool, k, levels[0]); one != nil {
		return choose(dst, pool.and(one), k, levels[1:])
	}
	groups, sizes := ascending(pool, levels[0])
	for _, i := range fewest(sizes, k) {
		n := min(k, sizes[i])
		dst = choose(dst, pool.and(groups[i]), n, levels[1:])
		k -= n
	}
	return dst
}

// narrow is the part of pool that lies in the smallest neighbourhood with k devices, and inside that in the smallest
// of the next kind; nil if no single one has k.
func narrow(pool bitset, k int, levels [][]bitset) bitset {
	var within bitset
	for _, groups := range levels {
		if one := smallest(pool, k, groups); one != nil && len(groups) > 1 {
			pool = pool.and(one)
			within = pool
		}
	}
	return within
}

// smallest is the group that has the fewest devices of pool, but at least k; nil if none has. Ties fall to the first.
func smallest(pool bitset, k int, groups []bitset) bitset {
	var best bitset
	least := 0
	for _, group := range groups {
		if n := pool.countIn(group); n >= k && (best == nil || n < least) {
			best, least = group, n
		}
	}
	return best
}

// ascending is groups by how much of pool they have.
func ascending(pool bitset, groups []bitset) (sorted []bitset, sizes []int) {
	sorted = slices.Clone(groups)
	slices.SortStableFunc(sorted, func(a, b bitset) int { return pool.countIn(a) - pool.countIn(b) })
	for _, group := range sorted {
		sizes = append(sizes, pool.countIn(group))
	}
	return sorted, sizes
}

// fewest chooses out of sizes, which ascend, as few as add up to need and, among those, the smallest: large ones are
// left whole. It returns their indexes, ascending; nil if all together are too little.
//
// With n to choose, each in turn is the smallest from which the n-1 largest can still finish.
func fewest(sizes []int, need int) []int {
	n, sum := 0, 0
	for ; sum < need; n++ {
		if n == len(sizes) {
			return nil
		}
		sum += sizes[len(sizes)-1-n]
	}
	chosen := make([]int, 0, n)
	i := 0
	for ; n > 0; n-- { // sum is that of the n largest
		sum -= sizes[len(sizes)-n]
		for sizes[i]+sum < need {
			i++
		}
		chosen = append(chosen, i)
		need -= sizes[i]
		i++
	}
	return chosen
}
