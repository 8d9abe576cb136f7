package flow

import (
	"slices"

	"troupe/pipeline/spec"
)

// RetryState is the failed attempts of an item, as stored in the log: written when an attempt fails, deleted with the
// item. A group's is kept with its first item.
type RetryState struct {
	Failures []Failure `json:"failures,omitempty"`
	Losses   int       `json:"losses,omitempty"`
	Shared   int       `json:"shared,omitempty"`
}

// FailedItem is an item with the retry state that a commit writes. The state never changes; the item's own is replaced
// by the next failure, maybe before the commit is encoded.
type FailedItem struct {
	Item  *Entry
	State *RetryState
}

const (
	keptFailures = 8   // newest failures kept with their text; of older ones only the count matters
	keptStack    = 800 // bytes
)

// saveRetryState stores the failed attempts of the work.
func (f *Flow) saveRetryState(w *Work) {
	e := w.Entries[0]
	e.Retries = &RetryState{Failures: w.failures, Losses: w.losses, Shared: w.sharedLosses}
	f.enqueue(&change{retried: []FailedItem{{e, e.Retries}}})
}

// restoreRetries takes over failed attempts from before the engine was started.
func (w *Work) restoreRetries() {
	for _, e := range w.Entries {
		if e.Retries == nil {
			continue
		}
		w.losses, w.sharedLosses = max(w.losses, e.Retries.Losses), max(w.sharedLosses, e.Retries.Shared)
		if len(e.Retries.Failures) > len(w.failures) {
			w.failures = e.Retries.Failures
		}
	}
}

// Truncated is a copy without long texts.
func (t *RetryState) Truncated() RetryState {
	out := RetryState{Failures: make([]Failure, len(t.Failures)), Losses: t.Losses, Shared: t.Shared}
	for i, f := range t.Failures {
		if i < len(t.Failures)-keptFailures {
			f = Failure{At: f.At, Code: f.Code}
		}
		f.Stack, f.Error = truncate(f.Stack, keptStack), truncate(f.Error, keptStack)
		out.Failures[i] = f
	}
	return out
}

// CountCrash charges a loss to every item that functions were running when the previous engine was killed, so that an
// item that kills the engine becomes a dead letter in the end.
func (f *Flow) CountCrash(r *Checkpoint) {
	if r == nil || r.Closed {
		return
	}
	c := &change{}
	for _, s := range f.streams {
		hands := r.Streams[s.spec.Name].Running
		for p, l := range s.lanes {
			l.suspectUpTo = l.head
			if p >= len(hands) {
				continue
			}
			for _, n := range hands[p].All() {
				if l.done.Contains(n) {
					continue
				}
				if l.retries[n] == nil {
					l.retries[n] = &RetryState{}
				}
				l.retries[n].Losses++
				c.retried = append(c.retried, FailedItem{&Entry{Lane: l, Ordinal: n}, l.retries[n]})
			}
		}
	}
	for len(c.retried) > spec.MaxGroup { // limit of one commit
		f.enqueue(&change{retried: c.retried[:spec.MaxGroup:spec.MaxGroup]})
		c.retried = c.retried[spec.MaxGroup:]
	}
	f.enqueue(c)
}

// runningOrdinals is the ordinals per lane that functions are running; nil: none.
func (f *Flow) runningOrdinals(s *StreamState) []SeqRanges {
	numbers := make([][]uint64, len(s.lanes))
	some := false
	for _, st := range f.Stages {
		if st.Spec.Func == nil || !slices.Contains(st.inputs, s) {
			continue
		}
		for _, t := range st.running {
			for _, e := range t.Entries {
				if e.Lane.stream == s {
					numbers[e.Lane.Priority], some = append(numbers[e.Lane.Priority], e.Ordinal), true
				}
			}
		}
	}
	if !some {
		return nil
	}
	out := make([]SeqRanges, len(s.lanes))
	for p, all := range numbers {
		slices.Sort(all)
		for _, n := range all {
			out[p] = out[p].Append(n)
		}
	}
	return out
}

// mayHaveCrashedEngine reports whether the work may have killed the previous engine. Such work is started only after a
// checkpoint that lists it as running.
func (s *StageState) mayHaveCrashedEngine(w *Work) bool {
	if s.Spec.Func == nil {
		return false
	}
	for _, e := range w.Entries {
		if e.Ordinal <= e.Lane.suspectUpTo {
			return true
		}
	}
	return false
}
