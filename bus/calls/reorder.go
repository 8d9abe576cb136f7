package calls

// ReorderBuffer restores the order of the calls from one source at one receiver: a rank has one for each caller and for
// the role's sequencer, a sequencer has one for each caller. Each call carries its position and the position of the call
// before it for the same receiver. A call that arrives too early is buffered until the calls before it have arrived or
// were skipped. The zero ReorderBuffer is empty. It is not safe for concurrent use.
//
//	         predecessor was taken           predecessor was taken or skipped
//	arrives ───────────────────────► taken ◄────────────────────────────────── buffered
//	   │                                                                          ▲
//	   ├────── predecessor is missing ───────────────────────────────────────────┘
//	   └────── its own position was passed ────► passed: a repeat, or a call that was skipped
type ReorderBuffer[T any] struct {
	last    uint64 // position of the last call that was taken
	waiting map[uint64]waitingCall[T]
}

// waitingCall is a buffered call.
type waitingCall[T any] struct {
	prev uint64
	call T
}

// Arrival is the result of Take.
type Arrival uint8

const (
	InOrder  Arrival = iota // the call is next
	TooEarly                // an earlier call has not arrived
	Passed                  // the position of the call was passed
)

// maxBuffered bounds the calls of one buffer.
const maxBuffered = 1024

// Take decides about a call with this position, and records it if it is InOrder. A call with position 0 is unordered and
// always InOrder.
func (s *ReorderBuffer[T]) Take(order, prev uint64) Arrival {
	switch {
	case order == 0:
		return InOrder
	case order <= s.last:
		return Passed
	case prev > s.last:
		return TooEarly
	}
	s.last = order
	return InOrder
}

// Buffer keeps a call that is TooEarly. It reports false when the buffer is full; then the call is lost, and its source
// sends it again when it asks for the status.
func (s *ReorderBuffer[T]) Buffer(order, prev uint64, call T) bool {
	if len(s.waiting) >= maxBuffered {
		return false
	}
	if s.waiting == nil {
		s.waiting = map[uint64]waitingCall[T]{}
	}
	s.waiting[order] = waitingCall[T]{prev: prev, call: call}
	return true
}

// Release takes the buffered call that is next, if there is one.
func (s *ReorderBuffer[T]) Release() (call T, ok bool) {
	var first uint64
	for order, w := range s.waiting {
		switch {
		case order <= s.last:
			delete(s.waiting, order) // a repeat of it was taken
		case w.prev <= s.last && (!ok || order < first):
			first, call, ok = order, w.call, true
		}
	}
	if ok {
		delete(s.waiting, first)
		s.last = first
	}
	return call, ok
}

// Gap is the range of missing positions: after the last call that was taken, up to the predecessor of the first buffered
// call.
func (s *ReorderBuffer[T]) Gap() (after, upTo uint64, open bool) {
	for _, w := range s.waiting {
		if !open || w.prev < upTo {
			upTo, open = w.prev, true
		}
	}
	return s.last, upTo, open
}

// Skip handles the source's statement that it sent everything up to upTo again, the last of it at position prev. If some
// of that was lost, Skip changes nothing, and the gap must be reported again.
func (s *ReorderBuffer[T]) Skip(upTo, prev uint64) {
	if prev <= s.last {
		s.last = max(s.last, upTo)
	}
}

// Clear removes the buffered calls. Their source sends them again when it asks for the status.
func (s *ReorderBuffer[T]) Clear() { clear(s.waiting) }

// Buffered yields the buffered calls, in no order.
func (s *ReorderBuffer[T]) Buffered(yield func(T) bool) {
	for _, w := range s.waiting {
		if !yield(w.call) {
			return
		}
	}
}
