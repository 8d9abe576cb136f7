package flow

import (
	"slices"
	"time"

	"troupe/bus"
	"troupe/pipeline/spec"
)

// maxHeld is how many items a stage may take out of its streams to look for one it can hand out.
const maxParked = 2048

// work is what one call of a handler gets: an item, or a group of them.
type Work struct {
	Entries      []*Entry
	key          string
	group        string
	Grouped      bool
	failures     []Failure
	losses       int       // workers that died with nothing else in hand, or engines with it
	sharedLosses int       // workers that died with this and other work in hand
	retryAt      time.Time // before then it is not tried again
}

// Failure is one attempt that did not end well.
type Failure struct {
	At     time.Time `json:"at"`
	Worker string    `json:"worker"`
	Code   bus.Code  `json:"code"`
	Error  string    `json:"error"`
	Stack  string    `json:"stack,omitempty"`
}

// task is work in a worker's hand.
type Task struct {
	*Work
	Id      uint64
	Stage   *StageState
	Worker  *WorkerSlots
	started time.Time
	version spec.Version // the pipeline's, when it was handed out
	aborted bool
}

// stage is one declared stage: what waits in it, and who works for it.
type StageState struct {
	Spec            spec.StageSpec
	inputs          []*StreamState
	Outputs         []*StreamState
	blockingOutputs []*StreamState // outputs that hold the stage up while they are full; those of a cycle do not

	Workers  WorkerPool
	runnable fifo[*Work]             // next, in this order
	keys     map[string]*fifo[*Work] // of ordered stages: those behind one that is under way; nil queue: none behind
	parked   int                     // in keys and in the workers' queues
	delayed  []*Work                 // failed, by when they are tried again
	groups   *grouper                // nil: one item at a time
	running  map[uint64]*Task
	paused   bool

	handled, failed, lost, aborted, dead uint64
	times                                histogram
	rate                                 rate // of handled items
}

func newStage(spec spec.StageSpec) *StageState {
	s := &StageState{Spec: spec, keys: map[string]*fifo[*Work]{}, running: map[uint64]*Task{}}
	if spec.Group != nil {
		s.groups = newGrouper(*spec.Group)
	}
	return s
}

// clear says whether the outputs have room for what the next item may give.
func (s *StageState) outputsHaveRoom() bool {
	for _, out := range s.blockingOutputs {
		if !out.hasOutputRoom() {
			return false
		}
	}
	return true
}

// outOf finds an output by name; the only one for no name.
func (s *StageState) output(name string) (*StreamState, error) {
	if name == "" && len(s.Outputs) == 1 {
		return s.Outputs[0], nil
	}
	i := slices.IndexFunc(s.Outputs, func(o *StreamState) bool { return o.spec.Name == name })
	switch {
	case i >= 0:
		return s.Outputs[i], nil
	case len(s.Outputs) == 0:
		return nil, bus.Errorf(bus.CodeInvalid, "stage %s has no outputs, and its handler gave one; declare a stream in out", s.Spec.Name)
	case name == "":
		return nil, bus.Errorf(bus.CodeInvalid, "stage %s has several outputs (%v), and its handler did not say which; set To", s.Spec.Name, s.Spec.Out)
	}
	return nil, bus.Errorf(bus.CodeInvalid, "stage %s has no output %q; it has %v", s.Spec.Name, name, s.Spec.Out)
}

// admit gives ordered work its turn: it reports false when another item of its key is before it.
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

// leave ends the turn of ordered work; the next of its key becomes runnable.
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

// choose finds a worker for the work. For work whose key sticks to a busy one there is none, and it waits for that one:
// taken is then true.
func (s *StageState) chooseWorker(w *Work) (h *WorkerSlots, taken bool) {
	if !s.Spec.Sticky || w.key == "" {
		return s.Workers.LeastLoaded(), false
	}
	h = s.Workers.Pinned(w.key)
	if h == nil {
		if h = s.Workers.LeastLoaded(); h != nil {
			s.Workers.Pin(w.key, h)
		}
		return h, false
	}
	if h.Free() > 0 {
		return h, false
	}
	h.queue.push(w)
	s.parked++
	return nil, true
}

// fromQueues is work that waited for its worker, which has room now.
func (s *StageState) nextPinned() (*Work, *WorkerSlots) {
	if s.parked == 0 || !s.Spec.Sticky {
		return nil, nil
	}
	for _, h := range s.Workers.All {
		if h.Free() > 0 && h.queue.len() > 0 {
			w, _ := h.queue.pop()
			s.parked--
			return w, h
		}
	}
	return nil, nil
}

// giveBack makes work runnable again that waited for, or was with, a worker that is gone.
func (s *StageState) requeue(works []*Work) {
	for _, w := range slices.Backward(works) {
		s.runnable.pushFront(w)
	}
}

// delay puts failed work aside.
func (s *StageState) delay(w *Work, until time.Time) {
	w.retryAt = until
	i, _ := slices.BinarySearchFunc(s.delayed, w, func(a, b *Work) int {
		if a.retryAt.After(b.retryAt) {
			return 1
		}
		return -1 // behind its equals
	})
	s.delayed = slices.Insert(s.delayed, i, w)
}

// wake makes delayed work runnable whose time has come, and groups that are due.
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

// next is when wake will have something to do; zero: not for now.
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

// waits is how many items the stage has taken out of its streams and not handed out.
func (s *StageState) waiting() int {
	n := s.parked + len(s.delayed) + s.runnable.len()
	for _, h := range s.Workers.All {
		if h.isolated != nil && !h.isolatedStarted {
			n++
		}
	}
	if s.groups != nil {
		n += s.groups.size
	}
	return n
}
