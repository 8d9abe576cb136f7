package pipeline

import (
	"slices"
	"time"

	"troupe/bus"
)

// maxHeld is how many items a stage may take out of its streams to look for one it can hand out.
const maxHeld = 2048

// work is what one call of a handler gets: an item, or a group of them.
type work struct {
	entries  []*entry
	key      string
	group    string
	grouped  bool
	failures []Failure
	losses   int       // workers that died with nothing else in hand, or engines with it
	shared   int       // workers that died with this and other work in hand
	notYet   time.Time // before then it is not tried again
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
type task struct {
	*work
	id      uint64
	stage   *stage
	hand    *hand
	started time.Time
	version Version // the pipeline's, when it was handed out
	aborted bool
}

// stage is one declared stage: what waits in it, and who works for it.
type stage struct {
	spec   StageSpec
	in     []*stream
	out    []*stream
	blocks []*stream // outputs that hold the stage up while they are full; those of a cycle do not

	hands    hands
	runnable fifo[*work]             // next, in this order
	keys     map[string]*fifo[*work] // of ordered stages: those behind one that is under way; nil queue: none behind
	held     int                     // in keys and in the workers' queues
	delayed  []*work                 // failed, by when they are tried again
	groups   *grouper                // nil: one item at a time
	running  map[uint64]*task
	paused   bool

	handled, failed, lost, aborted, dead uint64
	times                                histogram
}

func newStage(spec StageSpec) *stage {
	s := &stage{spec: spec, keys: map[string]*fifo[*work]{}, running: map[uint64]*task{}}
	if spec.Group != nil {
		s.groups = newGrouper(*spec.Group)
	}
	return s
}

// clear says whether the outputs have room for what the next item may give.
func (s *stage) clear() bool {
	for _, out := range s.blocks {
		if !out.takes() {
			return false
		}
	}
	return true
}

// outOf finds an output by name; the only one for no name.
func (s *stage) outOf(name string) (*stream, error) {
	if name == "" && len(s.out) == 1 {
		return s.out[0], nil
	}
	i := slices.IndexFunc(s.out, func(o *stream) bool { return o.spec.Name == name })
	switch {
	case i >= 0:
		return s.out[i], nil
	case len(s.out) == 0:
		return nil, bus.Errorf(bus.CodeInvalid, "stage %s has no outputs, and its handler gave one; declare a stream in out", s.spec.Name)
	case name == "":
		return nil, bus.Errorf(bus.CodeInvalid, "stage %s has several outputs (%v), and its handler did not say which; set To", s.spec.Name, s.spec.Out)
	}
	return nil, bus.Errorf(bus.CodeInvalid, "stage %s has no output %q; it has %v", s.spec.Name, name, s.spec.Out)
}

// admit gives ordered work its turn: it reports false when another item of its key is before it.
func (s *stage) admit(w *work) bool {
	if !s.spec.Ordered || w.key == "" {
		return true
	}
	behind, busy := s.keys[w.key]
	if !busy {
		s.keys[w.key] = nil
		return true
	}
	if behind == nil {
		behind = &fifo[*work]{}
		s.keys[w.key] = behind
	}
	behind.push(w)
	s.held++
	return false
}

// leave ends the turn of ordered work; the next of its key becomes runnable.
func (s *stage) leave(w *work) {
	if !s.spec.Ordered || w.key == "" {
		return
	}
	behind := s.keys[w.key]
	if behind == nil || behind.len() == 0 {
		delete(s.keys, w.key)
		return
	}
	next, _ := behind.pop()
	s.held--
	s.runnable.push(next)
}

// choose finds a worker for the work. For work whose key sticks to a busy one there is none, and it waits for that one:
// taken is then true.
func (s *stage) choose(w *work) (h *hand, taken bool) {
	if !s.spec.Sticky || w.key == "" {
		return s.hands.least(), false
	}
	h = s.hands.stuck(w.key)
	if h == nil {
		if h = s.hands.least(); h != nil {
			s.hands.stick(w.key, h)
		}
		return h, false
	}
	if h.free() > 0 {
		return h, false
	}
	h.queue.push(w)
	s.held++
	return nil, true
}

// fromQueues is work that waited for its worker, which has room now.
func (s *stage) fromQueues() (*work, *hand) {
	if s.held == 0 || !s.spec.Sticky {
		return nil, nil
	}
	for _, h := range s.hands.all {
		if h.free() > 0 && h.queue.len() > 0 {
			w, _ := h.queue.pop()
			s.held--
			return w, h
		}
	}
	return nil, nil
}

// giveBack makes work runnable again that waited for, or was with, a worker that is gone.
func (s *stage) giveBack(works []*work) {
	for _, w := range slices.Backward(works) {
		s.runnable.pushFront(w)
	}
}

// delay puts failed work aside.
func (s *stage) delay(w *work, until time.Time) {
	w.notYet = until
	i, _ := slices.BinarySearchFunc(s.delayed, w, func(a, b *work) int {
		if a.notYet.After(b.notYet) {
			return 1
		}
		return -1 // behind its equals
	})
	s.delayed = slices.Insert(s.delayed, i, w)
}

// wake makes delayed work runnable whose time has come, and groups that are due.
func (s *stage) wake(now time.Time) {
	for len(s.delayed) > 0 && !now.Before(s.delayed[0].notYet) {
		s.runnable.push(s.delayed[0])
		s.delayed = slices.Delete(s.delayed, 0, 1)
	}
	if s.groups != nil {
		for _, g := range s.groups.due(now) {
			s.runnable.push(workOf(g))
		}
	}
}

func workOf(g *group) *work {
	w := &work{entries: g.entries, group: g.key, grouped: true}
	w.resume()
	return w
}

// next is when wake will have something to do; zero: not for now.
func (s *stage) next() time.Time {
	var t time.Time
	if len(s.delayed) > 0 {
		t = s.delayed[0].notYet
	}
	if s.groups != nil {
		if g := s.groups.next(); t.IsZero() || !g.IsZero() && g.Before(t) {
			t = g
		}
	}
	return t
}

// waits is how many items the stage has taken out of its streams and not handed out.
func (s *stage) waits() int {
	n := s.held + len(s.delayed) + s.runnable.len()
	for _, h := range s.hands.all {
		if h.solo != nil && !h.soloOut {
			n++
		}
	}
	if s.groups != nil {
		n += s.groups.held
	}
	return n
}

// backoff is the wait after the n-th failure.
func (s StageSpec) backoff(n int) time.Duration {
	return s.Backoff * time.Duration(min(1<<min(n-1, 20), backoffGrowth))
}
