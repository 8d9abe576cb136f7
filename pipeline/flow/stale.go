package flow

import (
	"troupe/pipeline/spec"
)

import "slices"

// filterStale removes aborted and stale items from the work, as the stage declares. It reports false when nothing is
// left to start now.
func (f *Flow) filterStale(s *StageState, w *Work) bool {
	if s.Spec.Stale == nil && !slices.ContainsFunc(w.Entries, func(e *Entry) bool { return e.aborted }) {
		return true
	}
	var fresh []*Entry
	for _, e := range w.Entries {
		if e.aborted {
			s.aborted++
			f.enqueue(&change{done: []*Entry{e}})
			continue
		}
		if !s.Spec.Stale.IsStale(e.Version, f.Version) {
			fresh = append(fresh, e)
			continue
		}
		if s.Spec.Stale.Then == spec.HandOver && s.Spec.Stale.To == "" {
			e.Stale = true
			fresh = append(fresh, e)
			continue
		}
		e.Lane.stream.stale++
		f.handleStale(s, e)
	}
	if len(fresh) == len(w.Entries) {
		return true
	}
	if w.Grouped && len(fresh) > 0 { // the rest of the group waits until it is complete again
		f.regroup(s, w.group, fresh)
	}
	return false
}

// handleStale drops, requeues or forwards a stale item.
func (f *Flow) handleStale(s *StageState, e *Entry) {
	c := &change{done: []*Entry{e}}
	if rule := s.Spec.Stale; rule.Then != spec.Drop {
		to := e.Lane.stream
		if rule.To != "" {
			to = f.StreamNamed(rule.To)
		}
		it := e.Item
		it.Rounds += roundsAdded(s)
		if rule.Then == spec.Requeue {
			it.Version = f.Version
		}
		c.puts = append(c.puts, f.newEntry(to, it))
	}
	f.enqueue(c)
}

// regroup puts the rest of a group back, to be handed over when it is complete again.
func (f *Flow) regroup(s *StageState, key string, entries []*Entry) {
	delete(s.groups.closed, key)
	for _, e := range entries {
		if g := s.groups.add(e, f.Now); g != nil {
			s.runnable.push(workOf(g))
		}
	}
}

func roundsAdded(s *StageState) int {
	if s.Spec.Rounds > 0 {
		return 1
	}
	return 0
}
