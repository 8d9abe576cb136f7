package planner

import "slices"

// candidate is a node on which bundles may be placed, restricted to groups of devices: each bundle stays inside one
// group. Nil groups mean the whole node.
type candidate struct {
	*nodeState
	groups []bitset
}

// candidatesOf returns unrestricted candidates.
func candidatesOf(nodes []*nodeState) []candidate {
	cands := make([]candidate, len(nodes))
	for i, s := range nodes {
		cands[i].nodeState = s
	}
	return cands
}

// fits returns how many bundles equal to b fit now, up to limit.
func (cand candidate) fits(b *Bundle, limit int) int {
	if !cand.open || !cand.matches(b) {
		return 0
	}
	n := limit
	if b.CPUs > 0 {
		n = min(n, int(cand.cpus/b.CPUs))
	}
	if b.Memory > 0 {
		n = min(n, int(cand.memory/b.Memory))
	}
	for name, amount := range b.Resources {
		if amount > 0 {
			n = min(n, int(max(cand.freeResources()[name], 0)/amount))
		}
	}
	switch {
	case b.Devices == 0:
	case b.partial():
		n = min(n, cand.partSlots(b.Devices))
	default:
		n = min(n, cand.wholeSlots(b.devices()))
	}
	return max(n, 0)
}

// wholeSlots returns how many disjoint sets of k free devices exist, each inside one group.
func (cand candidate) wholeSlots(k int) int {
	if cand.groups == nil {
		return cand.freeCount / k
	}
	n := 0
	for _, group := range cand.groups {
		n += cand.free.countIn(group) / k
	}
	return n
}

// partSlots returns how many parts of the given size fit.
func (cand candidate) partSlots(share Share) int {
	n := cand.freeDevices() * int(Whole/share)
	if cand.partlyUsed == 0 {
		return n
	}
	for pos, used := range cand.used {
		if used > 0 && cand.inGroups(pos) {
			n += int(cand.available(pos) / share)
		}
	}
	return n
}

// freeDevices returns the number of free devices in the groups.
func (cand candidate) freeDevices() int {
	if cand.groups == nil {
		return cand.freeCount
	}
	n := 0
	for _, group := range cand.groups {
		n += cand.free.countIn(group)
	}
	return n
}

func (cand candidate) inGroups(pos int) bool {
	if cand.groups == nil {
		return true
	}
	for _, group := range cand.groups {
		if group.has(pos) {
			return true
		}
	}
	return false
}

// bestPartlyUsed returns the partly used device on which a part of this size leaves the smallest remainder; -1 if none
// has room.
func (cand candidate) bestPartlyUsed(share Share) int {
	best := -1
	if cand.partlyUsed == 0 {
		return best
	}
	for pos, used := range cand.used {
		if used > 0 && cand.available(pos) >= share && cand.inGroups(pos) && (best < 0 || used > cand.used[best]) {
			best = pos
		}
	}
	return best
}

// pickPart returns the device for a part of this size: a partly used one if possible, otherwise a free one.
func (cand candidate) pickPart(share Share, w Within) int {
	if pos := cand.bestPartlyUsed(share); pos >= 0 {
		return pos
	}
	var one [1]int
	return cand.pickWhole(one[:0], 1, w)[0]
}

// pickWhole appends k free devices to dst, in rank order. The caller has checked that as many exist, inside one group
// if there are groups.
func (cand candidate) pickWhole(dst []int, k int, w Within) []int {
	switch {
	case k == 0:
		return dst
	case k == cand.freeCount:
		return cand.free.appendLowest(dst, k)
	}
	pool := cand.free
	if cand.groups != nil {
		pool = pool.and(smallest(pool, k, cand.groups))
	}
	dst = choose(dst, pool, k, cand.layout.levels(w))
	slices.Sort(dst)
	return dst
}

// narrowed returns the candidate restricted to one group that has all the devices needed, if such a group exists.
func (cand candidate) narrowed(need int, w Within) candidate {
	var one bitset
	if cand.groups == nil {
		one = narrow(cand.free, need, cand.layout.levels(w))
	} else {
		one = smallest(cand.free, need, cand.groups)
	}
	if one == nil {
		return cand
	}
	return candidate{cand.nodeState, []bitset{one}}
}

// waste is 1 if b would use up a scarcer resource than it needs: a node with devices for a bundle without, or a free
// device for a part.
func (cand candidate) waste(b *Bundle) int {
	switch {
	case b.Devices == 0 && len(cand.info.Devices) > 0:
		return 1
	case b.partial() && cand.bestPartlyUsed(b.Devices) < 0:
		return 1
	}
	return 0
}

// score orders candidates by how well a bundle fills them, the best first: the preferred node, without waste, then with the fewest free
// devices, then by rank. Empty nodes and islands come last, so they stay whole.
type score struct {
	other, waste, freeDevices, freeCount, order int // other is zero for a preferred node, and larger for other alternatives
}

func (cand candidate) score(b *Bundle) score {
	s := score{cand.choice(b), cand.waste(b), cand.freeDevices(), cand.freeCount, cand.order}
	if b.Prefer != "" && b.Prefer != cand.info.ID {
		s.other++
	}
	return s
}

func (a score) compare(other score) int {
	switch {
	case a.other != other.other:
		return a.other - other.other
	case a.waste != other.waste:
		return a.waste - other.waste
	case a.freeDevices != other.freeDevices:
		return a.freeDevices - other.freeDevices
	case a.freeCount != other.freeCount:
		return a.freeCount - other.freeCount
	}
	return a.order - other.order
}
