package planner

import "slices"

// layout is the NVLink islands and NUMA nodes of a node's devices, by position. It is immutable; nodes with the same
// layout share one.
type layout struct {
	islandsFirst [][]bitset // the islands, then the NUMA nodes
	numasFirst   [][]bitset // the NUMA nodes, then the islands
}

func newLayout(devices []Device) *layout {
	islands := groupPositions(devices, func(d *Device) int { return d.Island })
	numas := groupPositions(devices, func(d *Device) int { return d.NUMA })
	return &layout{islandsFirst: [][]bitset{islands, numas}, numasFirst: [][]bitset{numas, islands}}
}

// groupPositions returns the positions of the devices for each value of key, in the order of each group's first device.
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

func sameLayout(a, b []Device) bool {
	return slices.EqualFunc(a, b, func(x, y Device) bool { return x.NUMA == y.NUMA && x.Island == y.Island })
}

// levels returns the groups of devices by level, the level to keep together first.
func (l *layout) levels(w Within) [][]bitset {
	if w == NUMA {
		return l.numasFirst
	}
	return l.islandsFirst
}

// choose appends k devices of pool to dst. They come from the smallest group that has k of them, so that larger groups
// stay whole, and otherwise from as few groups as possible.
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

// narrow returns the part of pool in the smallest group with k devices and, inside it, in the smallest group of the
// next level; nil if no group has k.
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

// smallest returns the group with the fewest devices of pool, but at least k; nil if there is none. Ties go to the
// first.
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

// ascending sorts groups by their number of devices in pool.
func ascending(pool bitset, groups []bitset) (sorted []bitset, sizes []int) {
	sorted = slices.Clone(groups)
	slices.SortStableFunc(sorted, func(a, b bitset) int { return pool.countIn(a) - pool.countIn(b) })
	for _, group := range sorted {
		sizes = append(sizes, pool.countIn(group))
	}
	return sorted, sizes
}

// fewest chooses from sizes, which ascend, as few as add up to need and, among those, the smallest, so that large ones
// stay whole. It returns their indexes, ascending; nil if all sizes together are too small.
//
// With n left to choose, the next choice is the smallest size with which the n-1 largest still add up to need.
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
