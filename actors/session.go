package actors

import (
	"time"

	"troupe/bus"
)

const (
	maxKept       = 4096     // answers a worker keeps for callers that have not acknowledged them
	maxKeptBytes  = 16 << 20 // and their bytes, without large bodies, which are held until they are fetched
	maxRemembered = 1 << 16  // calls of one session that are remembered to have run
	maxHeld       = 1024     // calls of one stream that wait for an earlier one
	missingEvery  = 300 * time.Millisecond
	sessionTTL    = 10 * time.Minute
	maxSessions   = 4096
)

// session is what a worker remembers of one caller, so that no call runs twice. The worker's mutex guards it.
type session struct {
	inbox    string // where answers go
	calls    map[uint64]*call
	floor    uint64 // calls up to here are over; one that is not in calls will not be run
	lastSeen time.Time
}

// find reports what is known of a call: its entry, or whether it is known to be over.
func (s *session) find(seq uint64) (c *call, over bool) {
	c = s.calls[seq]
	return c, c == nil && seq <= s.floor
}

// acknowledge forgets what the caller has. A call that still runs stays until it ends.
func (s *session) acknowledge(upTo uint64, forget func(*call)) {
	if upTo <= s.floor {
		return
	}
	if upTo-s.floor > uint64(len(s.calls)) {
		for seq, c := range s.calls {
			if seq <= upTo && c.phase >= answered {
				forget(c)
				delete(s.calls, seq)
			}
		}
	} else {
		for seq := s.floor + 1; seq <= upTo; seq++ {
			if c := s.calls[seq]; c != nil && c.phase >= answered {
				forget(c)
				delete(s.calls, seq)
			}
		}
	}
	s.floor = upTo
}

// bound raises the floor when a session has too many unacknowledged calls behind it: older ones are then known to be
// over, which is safe, because the floor only ever refuses.
func (s *session) bound() {
	if len(s.calls) <= maxRemembered {
		return
	}
	var highest uint64
	for seq, c := range s.calls {
		if c.phase == forgotten {
			highest = max(highest, seq)
			delete(s.calls, seq)
		}
	}
	s.floor = max(s.floor, highest)
}

// stream is the order of the calls from one source, a caller or a sequencer, to one rank.
type stream struct {
	last    uint64 // the place of the last call that was taken
	held    map[uint64]*arrival
	askedAt time.Time
}

// arrival is a call that came before its turn.
type arrival struct {
	header *bus.Header
	body   []byte
	prev   uint64
}

// turn is what to do with a call that arrives.
type turn uint8

const (
	takeIt turn = iota // its turn has come
	holdIt             // an earlier call has not arrived
	pastIt             // its place has been passed
)

// take decides about a call with this place. The zero order has no place and is always taken.
func (s *stream) take(order, prev uint64) turn {
	switch {
	case order == 0:
		return takeIt
	case order <= s.last:
		return pastIt
	case prev > s.last:
		return holdIt
	}
	s.last = order
	return takeIt
}

// hold keeps a call until its turn; false: there is no room, and the caller will ask about it.
func (s *stream) hold(a *arrival) bool {
	if len(s.held) >= maxHeld {
		return false
	}
	if s.held == nil {
		s.held = map[uint64]*arrival{}
	}
	s.held[a.header.Order] = a
	return true
}

// release returns the held call whose turn has come, if any.
func (s *stream) release() *arrival {
	if len(s.held) == 0 {
		return nil
	}
	var first *arrival
	for order, a := range s.held {
		if order <= s.last {
			delete(s.held, order)
		} else if a.prev <= s.last && (first == nil || order < first.header.Order) {
			first = a
		}
	}
	if first != nil {
		delete(s.held, first.header.Order)
	}
	return first
}

// gap returns the range that is missing: after the last call that was taken, up to the one before the first held.
func (s *stream) gap() (after, upTo uint64, open bool) {
	for _, a := range s.held {
		if !open || a.prev < upTo {
			upTo, open = a.prev, true
		}
	}
	return s.last, upTo, open
}
