package pipeline

import (
	"slices"

	"troupe/bus"
)

// join gives the stage one more worker.
func (f *flow) join(s *stage, name string, credits int) *hand { return s.hands.add(name, credits) }

// part takes a worker out. Its tasks are given back at once, as what end says: lost if it died, with so many other tasks in the
// hands of workers that died with it.
func (f *flow) part(s *stage, h *hand, end ending, others int, why error) {
	s.giveBack(s.hands.remove(h))
	var tasks []*task
	for _, t := range s.running {
		if t.hand == h {
			tasks = append(tasks, t)
		}
	}
	slices.SortFunc(tasks, func(a, b *task) int { return int(b.id) - int(a.id) }) // each goes to the front
	s.held = 0
	for _, o := range s.hands.all {
		s.held += o.queue.len()
	}
	for _, q := range s.keys {
		if q != nil {
			s.held += q.len()
		}
	}
	for _, t := range tasks {
		if end == returned {
			f.cancels = append(f.cancels, cancellation{task: t})
		}
		f.finish(outcome{task: t.id, stage: s, ending: end, err: why, alone: len(tasks)+others == 1})
	}
}

// abort ends an item wherever it is: the handler that has it is cancelled and may hand back what it has; an item that
// waits is dropped when its turn comes. It reports false when it is not in memory.
func (f *flow) abort(id string) bool {
	found := false
	for _, s := range f.stages {
		for _, t := range s.running {
			if !t.aborted && slices.ContainsFunc(t.entries, func(e *entry) bool { return e.ID == id }) {
				t.aborted, found = true, true
				f.cancels = append(f.cancels, cancellation{task: t, abort: true})
			}
		}
		s.eachWaiting(func(w *work) {
			for _, e := range w.entries {
				found = found || e.ID == id
				e.aborted = e.aborted || e.ID == id
			}
		})
	}
	for _, st := range f.streams {
		for _, l := range st.lanes {
			for _, e := range l.ready.all() {
				found = found || e.ID == id
				e.aborted = e.aborted || e.ID == id
			}
		}
	}
	return found
}

// eachWaiting visits the work that is in the stage and in nobody's hand.
func (s *stage) eachWaiting(do func(*work)) {
	for _, w := range s.runnable.all() {
		do(w)
	}
	for _, w := range s.delayed {
		do(w)
	}
	for _, q := range s.keys {
		if q != nil {
			for _, w := range q.all() {
				do(w)
			}
		}
	}
	for _, h := range s.hands.all {
		for _, w := range h.queue.all() {
			do(w)
		}
		if h.solo != nil && !h.soloOut {
			do(h.solo)
		}
	}
}

// stop hands nothing more out and takes nothing more in; those who wait to put are told.
func (f *flow) stop() {
	f.stopped, f.closed = true, true
	f.refuse()
}

// refuse tells those who wait to put that nothing more is taken in.
func (f *flow) refuse() {
	for _, s := range f.streams {
		for s.waiting.len() > 0 {
			p, _ := s.waiting.pop()
			f.answers = append(f.answers, answer{p.token, bus.Errorf(bus.CodeClosed, "the pipeline takes nothing more: it is being drained or shut down")})
		}
	}
}

// taking is items that somebody outside has taken out of a sink.
type taking struct{ entries []*entry }

// takeOut takes up to n items out of a sink.
func (f *flow) takeOut(s *stream, n int) (id uint64, items []Item) {
	t := &taking{}
	for len(t.entries) < n {
		e, ok := s.next()
		if !ok {
			break
		}
		t.entries = append(t.entries, e)
		items = append(items, e.Item)
	}
	if len(items) == 0 {
		return 0, nil
	}
	f.nextTask++
	f.taken[f.nextTask] = t
	return f.nextTask, items
}

// takenOut ends a taking: the items are done, or go back to where they were.
func (f *flow) takenOut(id uint64, done bool, token any) bool {
	t := f.taken[id]
	if t == nil {
		return false
	}
	delete(f.taken, id)
	if done {
		f.enqueue(&change{done: t.entries, tokens: []any{token}})
		return true
	}
	for _, e := range slices.Backward(t.entries) {
		e.lane.ready.pushFront(e)
		e.lane.readyBytes += weight(&e.Item)
	}
	f.answers = append(f.answers, answer{token, nil})
	return true
}
