package planner

import "slices"

// maxSearchSteps bounds the candidates that the searches of one decision visit: some milliseconds.
const maxSearchSteps = 1 << 16

// search tries all assignments of a gang with several kinds of bundle, with backtracking. It finds one if one exists
// and the budget suffices: {4,2,2} and {3,3,2} fill two nodes of eight, which largest-first never finds.
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

// searchOver searches the given candidates, unless their total is too small.
func (s *search) searchOver(cands []candidate) bool {
	s.sites = cands
	return s.gang.totalSuffices(cands) && s.placeFrom(0, 0)
}

// totalSuffices reports whether the candidates together have the resources of the gang, a necessary condition for a
// fit.
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

// availableTotal returns the sum of the available shares of all devices.
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

// placeFrom assigns the bundles from step on. Equal bundles are interchangeable, so each is placed on the same
// candidate as the one before it or on a later one.
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

// try assigns the bundle of a step to one candidate, in every way that makes a difference, and continues with the next
// step.
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

// trySpanning assigns the bundle of a step to several nodes, if allowed, and continues with the next step.
func (s *search) trySpanning(step int) bool {
	mark := len(s.draft.assignments)
	if kind := s.steps[step]; !kind.bundle.spans() || s.gang.strategy == StrictPack || !s.draft.span(s.gang.eligible(s.sites), kind) {
		return false
	}
	return s.placeFrom(step+1, 0) || s.backtrack(mark)
}

// distinctPartDevices returns one device for each distinct remainder that has room for a part.
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

// equivalence is all that distinguishes two candidates for the rest of a search. A candidate with partly used devices,
// groups or declared resources is equivalent to itself only.
type equivalence struct {
	labelSet, freeCount int
	cpus                Share
	memory              int64
	loaded              bool
	unique              *nodeState
}

func equivalenceOf(cand candidate) equivalence {
	like := equivalence{labelSet: cand.labelSet, freeCount: cand.freeCount, cpus: cand.cpus, memory: cand.memory, loaded: cand.gangBundles > 0}
	if cand.partlyUsed > 0 || cand.groups != nil || len(cand.info.Resources) > 0 {
		like.unique = cand.nodeState
	}
	return like
}
