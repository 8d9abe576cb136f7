package planner

import "slices"

// searchBudget bounds the searches of one decision by the sites they look at: some milliseconds.
const maxSearchSteps = 1 << 16

// search looks for any arrangement of a gang with several kinds of bundle, bundle by bundle and backwards out of dead
// ends. It finds one if there is one and the budget suffices: {4,2,2} and {3,3,2} fill two nodes of eight, which largest
// first never finds.
func (g *gang) search(d *draftPlan, cands []candidate, onOneNode bool) bool {
	s := search{gang: g, draft: d}
	for i := range g.kinds {
		for range g.kinds[i].ranks {
			s.steps = append(s.steps, &g.kinds[i])
		}
	}
	if !onOneNode && g.strategy != StrictPack {
		return s.searchOver(cands)
	}
	for i := range cands {
		if s.searchOver(cands[i : i+1]) {
			return true
		}
	}
	return false
}

type search struct {
	gang  *gang
	draft *draftPlan
	sites []candidate
	steps []*bundleKind // one for each bundle
}

// over searches the given sites, unless they are too little in all.
func (s *search) searchOver(cands []candidate) bool {
	s.sites = cands
	return s.gang.totalSuffices(cands) && s.placeFrom(0, 0)
}

// roomInAll reports whether the sites together have what the gang takes, which does not mean that it fits.
func (g *gang) totalSuffices(cands []candidate) bool {
	var devices, cpus Share
	var memory int64
	for _, cand := range cands {
		if cand.open {
			devices += cand.availableTotal()
			cpus += max(0, cand.cpus)
			memory += max(0, cand.memory)
		}
	}
	for i := range g.kinds {
		n, b := len(g.kinds[i].ranks), g.kinds[i].bundle
		devices -= Share(n) * b.Devices
		cpus -= Share(n) * b.CPUs
		memory -= int64(n) * b.Memory
	}
	return devices >= 0 && cpus >= 0 && memory >= 0
}

// leftInAll is what can still be had of all devices.
func (s *nodeState) availableTotal() Share {
	sum := Wholes(s.freeCount)
	if s.partlyUsed == 0 {
		return sum
	}
	for pos, used := range s.used {
		if used > 0 {
			sum += max(0, s.available(pos))
		}
	}
	return sum
}

// from puts the bundles from step on. Bundles alike are interchangeable, so each lies on the same site as the one
// before it, or on a later one: first.
func (s *search) placeFrom(step, first int) bool {
	if step == len(s.steps) {
		return true
	}
	if step > 0 && s.steps[step] != s.steps[step-1] {
		first = 0
	}
	var tried []equivalence
	for i, cand := range s.sites[first:] {
		if s.gang.searchSteps--; s.gang.searchSteps < 0 {
			return false
		}
		like := equivalenceOf(cand)
		if s.accepts(cand, s.steps[step]) && !slices.Contains(tried, like) {
			if s.try(cand, step, first+i) {
				return true
			}
			tried = append(tried, like)
		}
	}
	return s.trySpanning(step)
}

func (s *search) accepts(cand candidate, kind *bundleKind) bool {
	if s.gang.strategy == StrictSpread && cand.gangBundles > 0 {
		return false
	}
	return cand.fits(kind.bundle, 1) == 1
}

// try puts the bundle of a step on one site, in every way that makes a difference, and goes on from there.
func (s *search) try(cand candidate, step, index int) bool {
	kind := s.steps[step]
	mark := len(s.draft.assignments)
	if !kind.bundle.partial() {
		s.draft.assignBundles(cand, kind, 1)
		return s.placeFrom(step+1, index) || s.backtrack(mark)
	}
	for _, pos := range cand.distinctPartDevices(kind.bundle.Devices) {
		s.draft.assign(cand.nodeState, kind, []int{pos})
		if s.placeFrom(step+1, index) {
			return true
		}
		s.backtrack(mark)
	}
	return false
}

func (s *search) backtrack(mark int) bool {
	s.draft.undo(mark)
	return false
}

// trySpanning lays the bundle of a step over several nodes, if it may, and goes on from there.
func (s *search) trySpanning(step int) bool {
	mark := len(s.draft.assignments)
	if kind := s.steps[step]; !kind.bundle.spans() || s.gang.strategy == StrictPack || !s.draft.span(s.gang.eligible(s.sites), kind) {
		return false
	}
	return s.placeFrom(step+1, 0) || s.backtrack(mark)
}

// distinctFor is one device for each different remainder that has room for a part.
func (cand candidate) distinctPartDevices(share Share) []int {
	var distinct []int
	var seen []Share
	for pos, used := range cand.used {
		if cand.available(pos) >= share && cand.inGroups(pos) && !slices.Contains(seen, used) {
			distinct, seen = append(distinct, pos), append(seen, used)
		}
	}
	return distinct
}

// likeness is all that makes a difference between two sites to the rest of a search. Sites whose devices are not all
// alike are like themselves only.
type equivalence struct {
	labelSet, freeCount int
	cpus                Share
	memory              int64
	loaded              bool
	unique              *nodeState
}

func equivalenceOf(cand candidate) equivalence {
	like := equivalence{labelSet: cand.labelSet, freeCount: cand.freeCount, cpus: cand.cpus, memory: cand.memory, loaded: cand.gangBundles > 0}
	if cand.partlyUsed > 0 || cand.groups != nil {
		like.unique = cand.nodeState
	}
	return like
}
