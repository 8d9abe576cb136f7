package flow

import (
	"slices"

	"troupe/bus"
	"troupe/pipeline/spec"
)

// AddWorker adds a worker to the stage.
func (f *Flow) AddWorker(s *StageState, name string, credits int) *WorkerSlots {
	s.Death = nil
	return s.Workers.Add(name, credits)
}

// RemoveWorker removes a worker. Its tasks end as end says; others is the number of tasks of other workers that died
// with it.
func (f *Flow) RemoveWorker(s *StageState, slots *WorkerSlots, end ResultKind, others int, why error) {
	s.requeue(s.Workers.Remove(slots))
	var tasks []*Task
	for _, t := range s.running {
		if t.Worker == slots {
			tasks = append(tasks, t)
		}
	}
	slices.SortFunc(tasks, func(a, b *Task) int { return int(b.ID) - int(a.ID) }) // each is pushed to the front
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
		f.Finish(Result{TaskID: t.ID, Stage: s, Kind: end, Err: why, onlyTask: len(tasks)+others == 1})
	}
}

// Abort aborts an item: a running handler is cancelled and may return a partial result; a waiting item is dropped when
// its turn comes. It reports false when the item is not in memory.
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

// eachWaiting visits the work of the stage that is not running.
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
	for _, slots := range s.Workers.All {
		for _, w := range slots.queue.all() {
			do(w)
		}
		if slots.isolated != nil && !slots.isolatedStarted {
			do(slots.isolated)
		}
	}
}

// Stop starts no more tasks and accepts no more puts.
func (f *Flow) Stop() {
	f.stopped, f.IntakeClosed = true, true
	f.RejectPuts()
}

// RejectPuts answers all waiting puts with an error.
func (f *Flow) RejectPuts() {
	for _, s := range f.streams {
		for s.waiting.len() > 0 {
			p, _ := s.waiting.pop()
			f.Replies = append(f.Replies, Reply{p.Token, bus.Errorf(bus.CodeClosed, "the pipeline accepts no items: it is being drained or shut down")})
		}
	}
}

// takenItems is items that a client has taken from a sink.
type takenItems struct{ entries []*Entry }

// Take takes up to n items from a sink; id 0: there is none.
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

// Settle ends a take: the items are completed, or go back to the front of the sink. It reports false when the take is
// not known.
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

// SetPaused pauses or resumes a stage; the token is answered when that is committed.
func (f *Flow) SetPaused(s *StageState, paused bool, token any) {
	s.paused = paused
	f.enqueue(&change{tokens: []any{token}})
}

// SetVersion sets the version; the token is answered when it is committed.
func (f *Flow) SetVersion(v spec.Version, token any) {
	f.Version = v
	f.enqueue(&change{tokens: []any{token}})
}

// CloseIntake rejects puts from now on.
func (f *Flow) CloseIntake() {
	f.IntakeClosed = true
	f.RejectPuts()
}

// FinalCheckpoint enqueues the last checkpoint of this engine; it reports false if that was done before.
func (f *Flow) FinalCheckpoint() bool {
	if f.finalEnqueued {
		return false
	}
	f.finalEnqueued = true
	f.enqueue(&change{})
	return true
}

// FailQueued answers everything that waits for a commit with an error.
func (f *Flow) FailQueued(err error) {
	for f.queue.len() > 0 {
		c, _ := f.queue.pop()
		for _, token := range c.tokens {
			f.Replies = append(f.Replies, Reply{token, err})
		}
	}
}

// RevokeAll takes every task back from its worker.
func (f *Flow) RevokeAll() {
	for _, s := range f.Stages {
		for _, slots := range slices.Clone(s.Workers.All) {
			f.RemoveWorker(s, slots, Revoked, 0, nil)
		}
	}
}

// IsSink reports whether there is a sink of this name.
func (f *Flow) IsSink(name string) bool {
	s := f.StreamNamed(name)
	return s != nil && s.spec.Sink
}
