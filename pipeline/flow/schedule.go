package flow

import (
	"strconv"
	"time"

	"troupe/bus"
)

// Schedule admits waiting puts, starts tasks, and requests reads of items that now fit into memory.
func (f *Flow) Schedule() {
	for _, s := range f.streams {
		for s.waiting.len() > 0 && f.admit(s.waiting.front()) {
			s.waiting.pop()
		}
		f.expire(s)
	}
	for _, s := range f.Stages {
		s.wake(f.Now)
		f.scheduleStage(s)
	}
	for _, s := range f.streams {
		for _, l := range s.lanes {
			if from, to, ok := l.nextRead(f.window); ok {
				l.loading = true
				f.Reads = append(f.Reads, ReadRequest{Lane: l, From: from, To: to, AfterSeq: l.lastSeq, MaxBytes: f.window.bytes - l.readyBytes, Done: l.done.Clone()})
			}
		}
	}
}

// expire drops items that exceed the age bound of the stream.
func (f *Flow) expire(s *StreamState) {
	if s.spec.Age == 0 {
		return
	}
	for _, l := range s.lanes {
		for l.ready.len() > 0 && s.isExpired(&l.ready.front().Item, f.Now) {
			e, _ := l.pop()
			s.expired++
			f.enqueue(&change{done: []*Entry{e}})
		}
	}
}

// maxQueued bounds the messages that wait for a commit: beyond it no task is started, because the log is slower than
// the handlers.
const maxQueued = 8192

// maxPendingBodyBytes is the same bound for large bodies.
const maxPendingBodyBytes = 64 << 20

// canStart reports whether the stage may start a task now.
func (f *Flow) canStart(s *StageState) bool {
	return f.mayStart(s) && s.Workers.freeSlots() > 0 && s.exclusiveWork() == nil
}

// mayStart is canStart without the check for a free worker.
func (f *Flow) mayStart(s *StageState) bool {
	return !s.paused && !f.stopped && f.queued < maxQueued && f.pendingBodyBytes < maxPendingBodyBytes && s.outputsHaveRoom()
}

func (f *Flow) scheduleStage(s *StageState) {
	if f.isolated != nil && s.Spec.Func != nil {
		f.startExclusive(s)
		return
	}
	f.startIsolated(s)
	for f.canStart(s) {
		w, slots := s.nextPinned()
		if w == nil {
			if w = f.nextWork(s); w == nil {
				return
			}
			taken := false
			if slots, taken = s.chooseWorker(w); taken {
				continue
			}
		}
		if !f.filterStale(s, w) {
			s.leaveKey(w)
			continue
		}
		if w.losses >= s.Spec.Losses {
			f.giveUp(s, w)
			continue
		}
		if s.needsIsolation(w) {
			f.isolated = &isolatedRetry{stage: s, work: w}
			f.startExclusive(s)
			return
		}
		if s.needsOwnWorker(w) {
			slots.isolated = w
			f.startIsolated(s)
			continue
		}
		f.start(s, w, slots)
	}
}

// nextWork returns the next work of the stage: requeued work first, then new items.
func (f *Flow) nextWork(s *StageState) *Work {
	for {
		if w, ok := s.runnable.pop(); ok {
			return w
		}
		if s.parked >= maxParked {
			return nil
		}
		e := f.nextEntry(s)
		if e == nil {
			return nil
		}
		if w := f.accept(s, e); w != nil {
			return w
		}
	}
}

// nextEntry takes the next item from the stage's input streams: highest priority first, then the oldest.
func (f *Flow) nextEntry(s *StageState) *Entry {
	var best *Lane
	for _, in := range s.inputs {
		for p := len(in.lanes) - 1; p >= 0; p-- {
			l := in.lanes[p]
			if l.ready.len() == 0 {
				continue
			}
			if best == nil || p > best.Priority || p == best.Priority && l.ready.front().Stored.Before(best.ready.front().Stored) {
				best = l
			}
			break
		}
	}
	if best == nil {
		return nil
	}
	e, _ := best.pop()
	return e
}

// accept brings an item into the stage. It returns work that is complete now, or nil.
func (f *Flow) accept(s *StageState, e *Entry) *Work {
	switch in := e.Lane.stream; {
	case e.aborted:
		s.aborted++
		f.enqueue(&change{done: []*Entry{e}})
		return nil
	case in.isExpired(&e.Item, f.Now):
		in.expired++
		f.enqueue(&change{done: []*Entry{e}})
		return nil
	case s.Spec.Rounds > 0 && e.Rounds >= s.Spec.Rounds:
		s.dead++
		why := Failure{At: f.Now, Code: bus.CodeRefused, Error: "it has passed this stage " + strconv.Itoa(e.Rounds) + " times (rounds)"}
		f.enqueue(&change{done: []*Entry{e}, dead: []*DeadLetter{newDeadLetter(s, e, "rounds", []Failure{why}, f.Now)}})
		return nil
	}
	if s.groups == nil {
		w := &Work{Entries: []*Entry{e}, key: e.Key}
		w.restoreRetries()
		if !s.enterKey(w) {
			return nil
		}
		return w
	}
	if s.groups.isLate(e, f.Now) {
		f.handleLate(s, e)
		return nil
	}
	if !f.filterStale(s, &Work{Entries: []*Entry{e}}) {
		return nil
	}
	if g := s.groups.add(e, f.Now); g != nil {
		return workOf(g)
	}
	return nil
}

func (f *Flow) handleLate(s *StageState, e *Entry) {
	e.Lane.stream.late++
	c := &change{done: []*Entry{e}}
	if s.Spec.Group.Late != "" {
		c.puts = append(c.puts, f.newEntry(f.StreamNamed(s.Spec.Group.Late), e.Item))
	}
	f.enqueue(c)
}

func (f *Flow) start(s *StageState, w *Work, slots *WorkerSlots) {
	f.nextTask++
	t := &Task{Work: w, ID: f.nextTask, Stage: s, Worker: slots, started: f.Now, version: f.Version}
	for _, e := range w.Entries {
		e.Attempt = len(w.failures) + w.losses + 1
	}
	slots.Running++
	s.running[t.ID] = t
	for _, out := range s.blockingOutputs {
		out.reservedOutputs++
	}
	if s.mayHaveCrashedEngine(w) {
		f.enqueue(&change{starts: []*Task{t}})
		return
	}
	f.Starts = append(f.Starts, t)
}

// NextWake is when Schedule has to be called without an event; zero: not for now.
func (f *Flow) NextWake() time.Time {
	var t time.Time
	sooner := func(at time.Time) {
		if !at.IsZero() && (t.IsZero() || at.Before(t)) {
			t = at
		}
	}
	for _, s := range f.Stages {
		sooner(s.nextWake())
	}
	for _, s := range f.streams {
		for _, l := range s.lanes {
			if s.spec.Age > 0 && l.ready.len() > 0 {
				sooner(l.ready.front().Stored.Add(s.spec.Age + time.Millisecond))
			}
		}
	}
	return t
}

// Idle reports whether nothing is running, waiting or queued.
func (f *Flow) Idle() bool {
	if f.queue.len() > 0 {
		return false
	}
	for _, s := range f.streams {
		if !s.spec.Sink && s.items > 0 || s.waiting.len() > 0 {
			return false
		}
	}
	return f.RunningTasks() == 0
}

// RunningTasks is the number of tasks that workers have.
func (f *Flow) RunningTasks() int {
	n := 0
	for _, s := range f.Stages {
		n += len(s.running)
	}
	return n
}
