package flow

import (
	"slices"

	"troupe/bus"
	"troupe/pipeline/spec"
)

// join gives the stage one more worker.
func (f *Flow) AddWorker(s *StageState, name string, credits int) *WorkerSlots {
	return s.Workers.Add(name, credits)
}

// part takes a worker out. Its tasks are given back at once, as what end says: lost if it died, with so many other tasks in the
// hands of workers that died with it.
func (f *Flow) RemoveWorker(s *StageState, h *WorkerSlots, end ResultKind, others int, why error) {
	s.requeue(s.Workers.Remove(h))
	var tasks []*Task
	for _, t := range s.running {
		if t.Worker == h {
			tasks = append(tasks, t)
		}
	}
	slices.SortFunc(tasks, func(a, b *Task) int { return int(b.Id) - int(a.Id) }) // each goes to the front
	s.parked = 0
	for _, o := range s.Workers.All {
		s.parked += o.queue.len()
	}
	for _, q := range s.keys {
		if q != nil {
			s.parked += q.len()
		}
	}
	for _, t := range tasks {
		if end == Revoked {
			f.Cancels = append(f.Cancels, Cancellation{Task: t})
		}
		f.Finish(Result{TaskID: t.Id, Stage: s, Kind: end, Err: why, onlyTask: len(tasks)+others == 1})
	}
}

// abort ends an item wherever it is: the handler that has it is cancelled and may hand back what it has; an item that
// waits is dropped when its turn comes. It reports false when it is not in memory.
func (f *Flow) Abort(id string) bool {
	found := false
	for _, s := range f.Stages {
		for _, t := range s.running {
			if !t.aborted && slices.ContainsFunc(t.Entries, func(e *Entry) bool { return e.ID == id }) {
				t.aborted, found = true, true
				f.Cancels = append(f.Cancels, Cancellation{Task: t, Abort: true})
			}
		}
		s.eachWaiting(func(w *Work) {
			for _, e := range w.Entries {
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
func (s *StageState) eachWaiting(do func(*Work)) {
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
	for _, h := range s.Workers.All {
		for _, w := range h.queue.all() {
			do(w)
		}
		if h.isolated != nil && !h.isolatedStarted {
			do(h.isolated)
		}
	}
}

// stop hands nothing more out and takes nothing more in; those who wait to put are told.
func (f *Flow) Stop() {
	f.stopped, f.IntakeClosed = true, true
	f.RejectPuts()
}

// refuse tells those who wait to put that nothing more is taken in.
func (f *Flow) RejectPuts() {
	for _, s := range f.streams {
		for s.waiting.len() > 0 {
			p, _ := s.waiting.pop()
			f.Replies = append(f.Replies, Reply{p.Token, bus.Errorf(bus.CodeClosed, "the pipeline takes nothing more: it is being drained or shut down")})
		}
	}
}

// taking is items that somebody outside has taken out of a sink.
type takenItems struct{ entries []*Entry }

// takeOut takes up to n items out of a sink.
func (f *Flow) Take(name string, n int) (id uint64, items []spec.Item) {
	s := f.StreamNamed(name)
	t := &takenItems{}
	for len(t.entries) < n {
		e, ok := s.popNext()
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
func (f *Flow) Settle(id uint64, done bool, token any) bool {
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
		e.Lane.ready.pushFront(e)
		e.Lane.readyBytes += Weight(&e.Item)
	}
	f.Replies = append(f.Replies, Reply{token, nil})
	return true
}

// setPaused pauses or resumes a stage; the token is answered when the record says so.
func (f *Flow) SetPaused(s *StageState, paused bool, token any) {
	s.paused = paused
	f.enqueue(&change{tokens: []any{token}})
}

// setVersion sets the version; the token is answered when it is stored.
func (f *Flow) SetVersion(v spec.Version, token any) {
	f.Version = v
	f.enqueue(&change{tokens: []any{token}})
}

// closeIntake refuses puts from now on.
func (f *Flow) CloseIntake() {
	f.IntakeClosed = true
	f.RejectPuts()
}

// finalCheckpoint enqueues the last record of this engine; it reports false when that was done before.
func (f *Flow) FinalCheckpoint() bool {
	if f.finalEnqueued {
		return false
	}
	f.finalEnqueued = true
	f.enqueue(&change{})
	return true
}

// failQueued answers everything that waits to be stored with an error.
func (f *Flow) FailQueued(err error) {
	for f.queue.len() > 0 {
		c, _ := f.queue.pop()
		for _, token := range c.tokens {
			f.Replies = append(f.Replies, Reply{token, err})
		}
	}
}

// revokeAll takes every task back from its worker.
func (f *Flow) RevokeAll() {
	for _, s := range f.Stages {
		for _, h := range slices.Clone(s.Workers.All) {
			f.RemoveWorker(s, h, Revoked, 0, nil)
		}
	}
}

// isSink says that a stream is declared as one.
func (f *Flow) IsSink(name string) bool {
	s := f.StreamNamed(name)
	return s != nil && s.spec.Sink
}
