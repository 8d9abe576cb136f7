package bus

// Stream is the order of the calls from one source as one receiver keeps it: a rank for each caller and for the role's
// sequencer, a sequencer for each caller. Each call names its place and the place of the call before it for the same
// receiver; one that comes too early is held until that one has come, or is known to be coming no more. The zero Stream
// has seen nothing. It is not safe for concurrent use.
//
//	          before it has come                 it has come, or was skipped
//	arrives ─────────────────────► taken ◄──────────────────────────────────── held
//	   │                                                                        ▲
//	   ├────── before it is missing ───────────────────────────────────────────┘
//	   └────── its own place has been passed ────► past: a repeat, or nobody waits for it
type Stream[T any] struct {
	last uint64 // the place of the last call that was taken
	held map[uint64]early[T]
}

// early is a call that came before its turn.
type early[T any] struct {
	prev uint64
	call T
}

// Turn is what to do with a call that arrives.
type Turn uint8

const (
	TakeIt Turn = iota // its turn has come
	HoldIt             // an earlier call has not arrived
	PastIt             // its place has been passed
)

// maxHeldCalls is how many calls of one stream may wait for an earlier one.
const maxHeldCalls = 1024

// Take decides about a call with this place, and remembers that it was taken. The zero order has no place and is always
// taken.
func (s *Stream[T]) Take(order, prev uint64) Turn {
	switch {
	case order == 0:
		return TakeIt
	case order <= s.last:
		return PastIt
	case prev > s.last:
		return HoldIt
	}
	s.last = order
	return TakeIt
}

// Hold keeps a call until its turn; false: there is no room, and whoever waits for it will ask.
func (s *Stream[T]) Hold(order, prev uint64, call T) bool {
	if len(s.held) >= maxHeldCalls {
		return false
	}
	if s.held == nil {
		s.held = map[uint64]early[T]{}
	}
	s.held[order] = early[T]{prev: prev, call: call}
	return true
}

// Release takes the held call whose turn has come, if there is one.
func (s *Stream[T]) Release() (call T, ok bool) {
	var first uint64
	for order, e := range s.held {
		switch {
		case order <= s.last:
			delete(s.held, order) // it came again, in its turn
		case e.prev <= s.last && (!ok || order < first):
			first, call, ok = order, e.call, true
		}
	}
	if ok {
		delete(s.held, first)
		s.last = first
	}
	return call, ok
}

// Gap is the range of places in which something is missing: after the last call that was taken, up to what the first of
// those held waits for.
func (s *Stream[T]) Gap() (after, upTo uint64, open bool) {
	for _, e := range s.held {
		if !open || e.prev < upTo {
			upTo, open = e.prev, true
		}
	}
	return s.last, upTo, open
}

// Skip is the source's word that nothing comes up to upTo but what it has just sent again, the last of it at prev. If
// some of that has been lost the word counts for nothing, and the gap must be reported once more.
func (s *Stream[T]) Skip(upTo, prev uint64) {
	if prev <= s.last {
		s.last = max(s.last, upTo)
	}
}

// Drop lets go of what is held: whoever waits for it will ask.
func (s *Stream[T]) Drop() { clear(s.held) }

// Held are the calls that wait, in no order.
func (s *Stream[T]) Held(yield func(T) bool) {
	for _, e := range s.held {
		if !yield(e.call) {
			return
		}
	}
}
