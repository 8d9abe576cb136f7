package actors

import (
	"slices"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

const (
	maxKept       = 4096     // answers a worker keeps for callers that have not acknowledged them
	maxKeptBytes  = 16 << 20 // and their bytes, without large bodies, which are held until they are fetched
	maxRemembered = 1 << 16  // calls of one session that are remembered to have run
	missingEvery  = 300 * time.Millisecond
	sessionTTL    = 10 * time.Minute
	maxSessions   = 4096
)

// session is what a worker remembers of one caller, so that no call runs twice. The worker's mutex guards it.
type session struct {
	id         string
	inbox      string           // where answers go
	stream     *stream          // the order of its calls, but for those that a sequencer orders; nil until the first
	calls      map[uint64]*call // not yet acknowledged; gone stands for those whose answer is no longer kept
	gone       int              // how many of those there are
	acked      uint64           // the caller has every answer up to here
	floor      uint64           // calls up to here are over; one that is not in calls will not be run
	blankUntil time.Time        // nobody knows what the caller sent before; zero: it is all known
	lastSeen   time.Time        // when it last said something, or was answered
	// absentSince is since when the server has said, each time, that nobody listens to its inbox; absentLast, when it did
	// so last.
	absentSince time.Time
	absentLast  time.Time
}

// gone is the entry of a call that ran, or must not, and of which no more is remembered. It is never changed.
var gone = &call{phase: forgotten}

// find reports what is known of a call: its entry, or whether it is known to be over, or may be.
func (s *session) find(h *wire.Header, now time.Time) (c *call, over bool) {
	c = s.calls[h.Seq]
	return c, c == nil && (h.Seq <= s.floor || h.Age > 0 && now.Add(-h.Age).Before(s.blankUntil))
}

// acknowledge forgets what the caller has, and gives up what it no longer waits for: if such a call has not ended, the
// word that it was cancelled has been lost. One that runs stays until it ends.
func (s *session) acknowledge(upTo uint64, forget, giveUp func(*call)) {
	if upTo <= s.acked {
		return
	}
	from := s.acked + 1
	s.acked, s.floor = upTo, max(s.floor, upTo)
	settle := func(seq uint64, c *call) {
		giveUp(c)
		forget(c)
		if c.phase == forgotten {
			s.remove(seq)
		}
	}
	if upTo-from >= uint64(len(s.calls)) {
		for seq, c := range s.calls {
			if seq <= upTo {
				settle(seq, c)
			}
		}
		return
	}
	for seq := from; seq <= upTo; seq++ {
		if c := s.calls[seq]; c != nil {
			settle(seq, c)
		}
	}
}

// pass notes that a call that has not arrived in time will not be run: it was cancelled, or whoever orders the calls has
// said that nobody waits for it.
func (s *session) pass(seq uint64) {
	if s.calls[seq] == nil && seq > s.floor {
		s.bury(seq)
	}
}

// leave lets go of a call that has ended and whose answer is not kept: all that is remembered is that it is over, and
// not even that if the caller will not ask about it.
func (s *session) leave(c *call) {
	switch seq := c.header.Seq; {
	case c.phase != forgotten || s.calls[seq] != c:
	case seq <= s.acked:
		s.remove(seq)
	default:
		s.bury(seq)
	}
}

func (s *session) remove(seq uint64) {
	if s.calls[seq] == gone {
		s.gone--
	}
	delete(s.calls, seq)
}

// bury leaves of a call that it is over. When there are too many of those the older half is let go and the floor raised
// in their place: what lies under it is known to be over too, which is safe, because the floor only ever refuses.
func (s *session) bury(seq uint64) {
	s.calls[seq] = gone
	s.gone++
	if s.gone <= maxRemembered {
		return
	}
	seqs := make([]uint64, 0, s.gone)
	for seq, c := range s.calls {
		if c == gone {
			seqs = append(seqs, seq)
		}
	}
	slices.Sort(seqs)
	for _, seq := range seqs[:len(seqs)/2] {
		s.remove(seq)
		s.floor = max(s.floor, seq)
	}
}

// busy reports whether a call of the session waits or runs.
func (s *session) busy() bool {
	for _, c := range s.calls {
		if c.phase <= running {
			return true
		}
	}
	return false
}

// stream is the order of the calls from one source, a caller or a sequencer, to one rank.
type stream struct {
	bus.ReorderBuffer[*arrival]
	askedAt  time.Time
	lastSeen time.Time
}

// streamID names a stream. A process that both calls and sequences has two: their calls come by different ways.
type streamID struct {
	session   string
	sequencer bool
}

func streamOf(h *wire.Header) streamID {
	return streamID{session: h.OrderedBy(), sequencer: h.Stream != ""}
}

// arrival is a call that came before its turn.
type arrival struct {
	header *wire.Header
	body   []byte
	at     time.Time
}
