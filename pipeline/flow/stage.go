package flow

import (
	"slices"
	"time"

	"troupe/bus"
	"troupe/pipeline/spec"
)

// maxParked bounds the items that a stage takes from its streams without being able to start them.
const maxParked = 2048

// Work is the argument of one handler call: an item or a group.
type Work struct {
	Entries      []*Entry
	key          string
	group        string
	Grouped      bool
	failures     []Failure
	losses       int       // workers that died while this was their only task, or engines that died with it running
	sharedLosses int       // workers that died with this and other tasks
	retryAt      time.Time // not retried before
}

// Failure is one failed attempt.
type Failure struct {
	At     time.Time `json:"at"`
	Worker string    `json:"worker"`
	Code   bus.Code  `json:"code"`
	Error  string    `json:"error"`
	Stack  string    `json:"stack,omitempty"`
}

// Task is work that was given to a worker.
type Task struct {
	*Work
	ID      uint64
	Stage   *StageState
	Worker  *WorkerSlots
	started time.Time
	version spec.Version // of the pipeline, when the task started
	aborted bool
}

// StageState is one declared stage: its waiting work, its running tasks and its workers.
type StageState struct {
	Spec            spec.StageSpec
	inputs          []*StreamState
	Outputs         []*StreamState
	blockingOutputs []*StreamState // outputs that block the stage while they are full; never those of a cycle

	Workers  WorkerPool
	runnable fifo[*Work]             // next to start, in order
	keys     map[string]*fifo[*Work] // ordered stages: work that waits behind running work of the same key; a nil queue: nothing waits
	parked   int                     // work in keys and in the queues of workers
	delayed  []*Work                 // failed work, by time of the next attempt
	groups   *grouper                // nil: the stage does not group
	running  map[uint64]*Task
	paused   bool

	Restarting int        // ranks whose restart is awaited
	Death      *RoleDeath // why the stage has no workers; nil: it has, or may get them. A value that is set is not changed.

	handled, failed, lost, aborted, dead uint64
	times                                histogram
	rate                                 rate // of Handled results
}

func newStage(spec spec.StageSpec) *StageState {
	s := &StageState{Spec: spec, keys: map[string]*fifo[*Work]{}, running: map[uint64]*Task{}}
	if spec.Group != nil {
		s.groups = newGrouper(*spec.Group)
	}
	return s
}

// Unfinished is the number of items in the stage's streams that are not completed.
func (s *StageState) Unfinished() int {
	n := 0
	for _, in := range s.inputs {
		n += in.items
	}
	return n
}

// outputsHaveRoom reports whether every blocking output has room for one more item.
func (s *StageState) outputsHaveRoom() bool {
	for _, out := range s.blockingOutputs {
		if !out.hasOutputRoom() {
			return false
		}
	}
	return true
}

// output finds an output stream by name; an empty name is the only output.
func (s *StageState) output(name string) (*StreamState, error) {
	if name == "" && len(s.Outputs) == 1 {
		return s.Outputs[0], nil
	}
	i := slices.IndexFunc(s.Outputs, func(o *StreamState) bool { return o.spec.Name == name })
	switch {
	case i >= 0:
		return s.Outputs[i], nil
	case len(s.Outputs) == 0:
		return nil, bus.Errorf(bus.CodeInvalid, "stage %s has no outputs, but its handler returned one; declare a stream in out", s.Spec.Name)
	case name == "":
		return nil, bus.Errorf(bus.CodeInvalid, "stage %s has several outputs (%v), but its handler did not choose one; set To", s.Spec.Name, s.Spec.Out)
	}
	return nil, bus.Errorf(bus.CodeInvalid, "stage %s has no output %q; it has %v", s.Spec.Name, name, s.Spec.Out)
}

// enterKey reports whether ordered work may run now. If work of the same key is running, it queues behind that.
func (s *StageState) enterKey(w *Work) bool {
	if !s.Spec.Ordered || w.key == "" {
		return true
	}
	behind, busy := s.keys[w.key]
	if !busy {
		s.keys[w.key] = nil
		return true
	}
	if behind == nil {
		behind = &fifo[*Work]{}
		s.keys[w.key] = behind
	}
	behind.push(w)
	s.parked++
	return false
}

// leaveKey ends the turn of ordered work; the next work of its key becomes runnable.
func (s *StageState) leaveKey(w *Work) {
	if !s.Spec.Ordered || w.key == "" {
		return
	}
	behind := s.keys[w.key]
	if behind == nil || behind.len() == 0 {
		delete(s.keys, w.key)
		return
	}
	next, _ := behind.pop()
	s.parked--
	s.runnable.push(next)
}

// chooseWorker finds a worker. Work that is pinned to a busy worker is queued for that worker, and taken is true.
func (s *StageState) chooseWorker(w *Work) (slots *WorkerSlots, taken bool) {
	if !s.Spec.Sticky || w.key == "" {
		return s.Workers.LeastLoaded(), false
	}
	slots = s.Workers.Pinned(w.key)
	if slots == nil {
		if slots = s.Workers.LeastLoaded(); slots != nil {
			s.Workers.Pin(w.key, slots)
		}
		return slots, false
	}
	if slots.Free() > 0 {
		return slots, false
	}
	slots.queue.push(w)
	s.parked++
	return nil, true
}

// nextPinned returns work that was queued for a worker which now has a free slot.
func (s *StageState) nextPinned() (*Work, *WorkerSlots) {
	if s.parked == 0 || !s.Spec.Sticky {
		return nil, nil
	}
	for _, slots := range s.Workers.All {
		if slots.Free() > 0 && slots.queue.len() > 0 {
			w, _ := slots.queue.pop()
			s.parked--
			return w, slots
		}
	}
	return nil, nil
}

// requeue makes the work of a removed worker runnable again, before other work.
func (s *StageState) requeue(works []*Work) {
	for _, w := range slices.Backward(works) {
		s.runnable.pushFront(w)
	}
}

// delay parks failed work until its next attempt.
func (s *StageState) delay(w *Work, until time.Time) {
	w.retryAt = until
	i, _ := slices.BinarySearchFunc(s.delayed, w, func(a, b *Work) int {
		if a.retryAt.After(b.retryAt) {
			return 1
		}
		return -1 // after equal times
	})
	s.delayed = slices.Insert(s.delayed, i, w)
}

// wake makes delayed work and due groups runnable.
func (s *StageState) wake(now time.Time) {
	for len(s.delayed) > 0 && !now.Before(s.delayed[0].retryAt) {
		s.runnable.push(s.delayed[0])
		s.delayed = slices.Delete(s.delayed, 0, 1)
	}
	if s.groups != nil {
		for _, g := range s.groups.due(now) {
			s.runnable.push(workOf(g))
		}
	}
}

func workOf(g *group) *Work {
	w := &Work{Entries: g.entries, group: g.key, Grouped: true}
	w.restoreRetries()
	return w
}

// nextWake is when wake has something to do; zero: not for now.
func (s *StageState) nextWake() time.Time {
	var t time.Time
	if len(s.delayed) > 0 {
		t = s.delayed[0].retryAt
	}
	if s.groups != nil {
		if g := s.groups.next(); t.IsZero() || !g.IsZero() && g.Before(t) {
			t = g
		}
	}
	return t
}

// waiting is the number of items that were taken from the streams and have not been started.
func (s *StageState) waiting() int {
	n := s.parked + len(s.delayed) + s.runnable.len()
	for _, slots := range s.Workers.All {
		if slots.isolated != nil && !slots.isolatedStarted {
			n++
		}
	}
	if s.groups != nil {
		n += s.groups.size
	}
	return n
}
