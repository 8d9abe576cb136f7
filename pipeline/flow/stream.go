package flow

import (
	"time"

	"troupe/bus"
	"troupe/pipeline/spec"
)

// StreamState is one declared stream: its lanes, and what counts against its bounds.
type StreamState struct {
	spec            spec.StreamSpec
	lanes           []*Lane // by priority
	items           int     // accepted and not completed
	bytes           int64
	storedBytes     int64 // bytes of committed items that are not completed
	reservedOutputs int   // outputs that running tasks may still produce
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

// fits reports whether the bounds leave room for so many items and bytes.
func (s *StreamState) fits(items int, bytes int64) bool {
	return s.items+items <= s.spec.Items && s.bytes+bytes <= s.spec.Bytes
}

// hasOutputRoom reports whether a task that writes to this stream may start.
func (s *StreamState) hasOutputRoom() bool {
	return s.items+s.reservedOutputs < s.spec.Items && s.bytes < s.spec.Bytes
}

// count adds an accepted item to the counters.
func (s *StreamState) count(it *spec.Item) {
	s.items++
	s.in++
	s.bytes += Weight(it)
}

// uncount removes a completed item from them.
func (s *StreamState) uncount(it *spec.Item) {
	s.items--
	s.out++
	s.bytes -= Weight(it)
}

// popNext takes the oldest item of the highest priority.
func (s *StreamState) popNext() (*Entry, bool) {
	for p := len(s.lanes) - 1; p >= 0; p-- {
		if e, ok := s.lanes[p].pop(); ok {
			return e, true
		}
	}
	return nil, false
}

// popOldest takes the oldest item of the lowest priority, which is dropped first.
func (s *StreamState) popOldest() (*Entry, bool) {
	for _, l := range s.lanes {
		if e, ok := l.pop(); ok {
			return e, true
		}
	}
	return nil, false
}

// isExpired reports whether the item exceeds the age bound.
func (s *StreamState) isExpired(it *spec.Item, now time.Time) bool {
	return s.spec.Age > 0 && now.Sub(it.Stored) > s.spec.Age
}

// check rejects items that could never be stored.
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

const maxNameBytes = 512 // of an id, key or group

func (s *StreamState) checkItem(it *spec.Item, maxBody int) error {
	return s.checkSize(it, len(it.Body), maxBody)
}

// checkSize checks an item with a body of size bytes.
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
