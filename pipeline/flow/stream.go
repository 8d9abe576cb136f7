package flow

import (
	"time"

	"troupe/bus"
	"troupe/pipeline/spec"
)

// stream is one declared stream: its lanes, and what counts against its bounds.
type StreamState struct {
	spec            spec.StreamSpec
	lanes           []*Lane // by priority
	items           int     // accepted and not done
	bytes           int64
	storedBytes     int64 // bytes in the log that are not done
	reservedOutputs int   // outputs that items in hand may still give
	waiting         fifo[*Put]

	in, out, dropped, expired, late, stale uint64
	inRate, outRate                        rate
}

func newStream(spec spec.StreamSpec) *StreamState {
	s := &StreamState{spec: spec}
	for p := range spec.Priorities {
		s.lanes = append(s.lanes, &Lane{stream: s, Priority: p, retries: map[uint64]*RetryState{}, Bodies: &BodyStream{Name: spec.Name, Priority: p, MaxBytes: 2*spec.Bytes + 64<<20}})
	}
	return s
}

// put is items that somebody outside wants stored.
type Put struct {
	Stream *StreamState
	Items  []spec.Item
	bytes  int64
	Source string // whose; with seq, a repetition is known again
	Seq    uint64
	Token  any // of who waits for the answer
}

// fits says whether so much more is within the bounds.
func (s *StreamState) fits(items int, bytes int64) bool {
	return s.items+items <= s.spec.Items && s.bytes+bytes <= s.spec.Bytes
}

// takes says whether an item may be handed out whose output comes here.
func (s *StreamState) hasOutputRoom() bool {
	return s.items+s.reservedOutputs < s.spec.Items && s.bytes < s.spec.Bytes
}

// count notes an item that was accepted.
func (s *StreamState) count(it *spec.Item) {
	s.items++
	s.in++
	s.bytes += Weight(it)
}

// uncount notes an item that is done.
func (s *StreamState) uncount(it *spec.Item) {
	s.items--
	s.out++
	s.bytes -= Weight(it)
}

// next is the item to hand out: of the highest priority, the oldest.
func (s *StreamState) popNext() (*Entry, bool) {
	for p := len(s.lanes) - 1; p >= 0; p-- {
		if e, ok := s.lanes[p].pop(); ok {
			return e, true
		}
	}
	return nil, false
}

// oldestReady takes the item that goes first where the oldest are dropped: of the lowest priority.
func (s *StreamState) popOldest() (*Entry, bool) {
	for _, l := range s.lanes {
		if e, ok := l.pop(); ok {
			return e, true
		}
	}
	return nil, false
}

// tooOld says whether the item has outlived the stream's bound.
func (s *StreamState) isExpired(it *spec.Item, now time.Time) bool {
	return s.spec.Age > 0 && now.Sub(it.Stored) > s.spec.Age
}

// check refuses items that could never be stored.
func (s *StreamState) check(items []spec.Item, maxBody int) error {
	if len(items) > s.spec.Items {
		return bus.Errorf(bus.CodeInvalid, "stream %s: a put of %d items never fits into a bound of %d; put fewer at once, or raise items", s.spec.Name, len(items), s.spec.Items)
	}
	var bytes int64
	for i := range items {
		if err := s.checkItem(&items[i], maxBody); err != nil {
			return err
		}
		bytes += Weight(&items[i])
	}
	if bytes > s.spec.Bytes {
		return bus.Errorf(bus.CodeInvalid, "stream %s: a put of %d bytes never fits into a bound of %d; put fewer at once, or raise bytes", s.spec.Name, bytes, s.spec.Bytes)
	}
	return nil
}

const maxNameBytes = 512 // of an id, a key, a group

func (s *StreamState) checkItem(it *spec.Item, maxBody int) error {
	return s.checkSize(it, len(it.Body), maxBody)
}

// checkSize checks an item whose body has so many bytes.
func (s *StreamState) checkSize(it *spec.Item, size, maxBody int) error {
	switch {
	case it.Priority < 0 || it.Priority >= s.spec.Priorities:
		return bus.Errorf(bus.CodeInvalid, "stream %s: priority %d; it has 0 to %d (priorities)", s.spec.Name, it.Priority, s.spec.Priorities-1)
	case size > maxBody:
		return bus.Errorf(bus.CodeInvalid, "stream %s: a body of %d bytes; an item may have %d (cut it into several, or store it elsewhere and send its name)", s.spec.Name, size, maxBody)
	case weightWith(it, size) > s.spec.Bytes:
		return bus.Errorf(bus.CodeInvalid, "stream %s: a body of %d bytes never fits into a bound of %d; raise bytes", s.spec.Name, size, s.spec.Bytes)
	case len(it.ID) > maxNameBytes || len(it.Key) > maxNameBytes || len(it.Group) > maxNameBytes:
		return bus.Errorf(bus.CodeInvalid, "stream %s: an id, key or group of more than %d bytes", s.spec.Name, maxNameBytes)
	}
	return nil
}
