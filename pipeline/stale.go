package pipeline

import "slices"

// stale says whether an item of that version is too old for the bound.
func (s *StaleSpec) stale(item, current Version) bool { return s != nil && item < current-s.Bound }

// sift takes out of the work what was aborted, and what is too old, as the stage declares. It reports false when nothing is left to hand out
// now.
func (f *flow) sift(s *stage, w *work) bool {
	if s.spec.Stale == nil && !slices.ContainsFunc(w.entries, func(e *entry) bool { return e.aborted }) {
		return true
	}
	var fresh []*entry
	for _, e := range w.entries {
		if e.aborted {
			s.aborted++
			f.enqueue(&change{done: []*entry{e}})
			continue
		}
		if !s.spec.Stale.stale(e.Version, f.version) {
			fresh = append(fresh, e)
			continue
		}
		if s.spec.Stale.Then == HandOver && s.spec.Stale.To == "" {
			e.Stale = true
			fresh = append(fresh, e)
			continue
		}
		e.lane.stream.stale++
		f.outdated(s, e)
	}
	if len(fresh) == len(w.entries) {
		return true
	}
	if w.grouped && len(fresh) > 0 { // the group is short now and goes on gathering
		f.regroup(s, w.group, fresh)
	}
	return false // single work of a stale item is over
}

// outdated does with a stale item what the stage declares.
func (f *flow) outdated(s *stage, e *entry) {
	c := &change{done: []*entry{e}}
	if spec := s.spec.Stale; spec.Then != Drop {
		to := e.lane.stream
		if spec.To != "" {
			to = f.streamOf(spec.To)
		}
		it := e.Item
		it.Rounds += rounds(s)
		if spec.Then == Requeue {
			it.Version = f.version
		}
		c.puts = append(c.puts, f.move(to, it))
	}
	f.enqueue(c)
}

// regroup puts what is left of a group back, so that it is handed over when it is complete again.
func (f *flow) regroup(s *stage, key string, entries []*entry) {
	delete(s.groups.closed, key)
	for _, e := range entries {
		if g := s.groups.add(e, f.now); g != nil {
			s.runnable.push(workOf(g))
		}
	}
}

func rounds(s *stage) int {
	if s.spec.Rounds > 0 {
		return 1
	}
	return 0
}
