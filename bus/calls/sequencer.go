package calls

import (
	"errors"
	"slices"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/wire"

	"github.com/nats-io/nats.go"
)

const (
	sequencedCalls = 4096     // calls that a sequencer can repeat
	sequencedBytes = 32 << 20 // and their bytes
	maxCallers     = 4096     // callers with a reorder buffer
	callerTTL      = 10 * time.Minute
	missingEvery   = 300 * time.Millisecond // interval of the reports of a gap
)

// Calls of several drivers on one role have no common order: each rank sees its own. A role whose workers must agree,
// because they run collectives, is ordered: its callers send each call, all its frames in one message, to the role's
// sequencer, which assigns a position and publishes it. Calls from a caller to the sequencer carry positions like calls
// from a caller to a rank, so a lost call is not overtaken by the next. Large bodies are pulled from their owner and do
// not pass the sequencer.

// sequencers are the sequencers of one endpoint, by the prefix of their role.
type sequencers struct {
	ep *Endpoint
	mu sync.Mutex
	of map[string]*sequencer
}

// sequencer orders the calls of one role. mu guards its state, which the subscription's goroutine and missing use.
type sequencer struct {
	ep    *Endpoint
	to    bus.Address
	world int
	sub   *bus.Subscription

	mu      sync.Mutex
	chain   orderChain
	calls   []*sequenced // the last calls, oldest first
	byID    map[callID]*sequenced
	bytes   int
	callers map[string]*caller // by session
	closed  bool
}

// caller is the reorder buffer of one caller's calls.
type caller struct {
	ReorderBuffer[*sequenced]
	lastSeen time.Time
	askedAt  time.Time
}

type callID struct {
	session string
	seq     uint64
}

// sequenced is one call with its position.
type sequenced struct {
	id     callID
	at     time.Time // when the position was assigned
	place  callOrder
	frames []sequencedFrame
	bytes  int
}

type sequencedFrame struct {
	subject string
	frame   wire.Frame
	ranks   []int
}

func newSequencers(ep *Endpoint) *sequencers {
	return &sequencers{ep: ep, of: map[string]*sequencer{}}
}

// Sequence makes this endpoint the sequencer of an ordered role until stop is called or the endpoint is closed.
func (e *Endpoint) Sequence(to bus.Address, world int) (stop func(), err error) {
	s := &sequencer{ep: e, to: to, world: world, byID: map[callID]*sequenced{}, callers: map[string]*caller{}}
	sub, err := e.Bus().Subscribe(to.Sequencer(), s.receive)
	if err != nil {
		return nil, err
	}
	s.sub = sub
	e.sequencers.mu.Lock()
	e.sequencers.of[to.Prefix()] = s
	e.sequencers.mu.Unlock()
	return func() { e.sequencers.close(to.Prefix()) }, nil
}

func (ss *sequencers) close(prefix string) {
	ss.mu.Lock()
	s := ss.of[prefix]
	delete(ss.of, prefix)
	ss.mu.Unlock()
	if s != nil {
		_ = s.sub.Unsubscribe() // fails only on a closed connection
		s.mu.Lock()
		s.closed = true
		s.mu.Unlock()
	}
}

func (ss *sequencers) closeAll() {
	ss.mu.Lock()
	var prefixes []string
	for p := range ss.of {
		prefixes = append(prefixes, p)
	}
	ss.mu.Unlock()
	for _, p := range prefixes {
		ss.close(p)
	}
}

// toSequencer sends all frames of a call in one message, after the call at position prev. For a repeat, ranks are the
// ranks that miss it; for a first sending it is empty.
func (t *roleSender) toSequencer(g *Gather, prev uint64, ranks wire.RankSet) error {
	parts := g.call.Parts
	var body []byte
	for i := range parts {
		f := g.frame(i)
		f.Header.Order, f.Header.Prev, f.Header.Prevs = 0, 0, nil // the sequencer assigns them
		if !parts[i].Scope.All {                                  // the sequencer does not know meshes
			f.Header.Some, f.Header.Ranks = true, wire.Ranks(parts[i].Ranks...)
		}
		body = wire.AppendRouted(body, parts[i].Scope.subject(t.to, false), &f)
	}
	if len(body) > t.ep.Bus().MaxPayload()-bus.MaxEnvelope {
		return bus.Errorf(bus.CodeInvalid, "a call of %d parts is too large for the sequencer of %s; address fewer ranks or send fewer small arguments", len(parts), t.to.Role)
	}
	f := wire.Frame{Kind: wire.KindSequence, Header: wire.Header{Session: t.ep.Session(), Seq: g.seq, Order: g.place.order, Prev: prev}, Body: body}
	if ranks.Len() > 0 {
		f.Header.Some, f.Header.Ranks = true, ranks
	}
	return t.ep.sendCall(t.to.Sequencer(), appendReplyCall(t.ep.callPrefix, g.seq, g.everyPart()), &f)
}

// receive handles a message for the sequencer. It does not block.
func (s *sequencer) receive(m *nats.Msg) {
	f, err := wire.ParseFrame(m.Data)
	if err != nil {
		s.ep.Bus().Malformed("a message to the sequencer of "+s.to.Role, err)
		if errors.Is(err, bus.ErrVersion) {
			s.ep.AnswerVersion(m.Reply)
		}
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	switch f.Kind {
	case wire.KindSequence:
		s.arrive(&f, now)
	case wire.KindSkip:
		from := s.callerOf(f.Header.Session, now)
		from.Skip(f.Header.Order, f.Header.Prev)
		s.release(from, now)
	default:
		s.ep.Bus().Malformed("a message to the sequencer of "+s.to.Role, bus.Errorf(bus.CodeMalformed, "unknown %s", f.Kind))
	}
}

// arrive assigns a position to a call and publishes it, if it is next. A call that has its position is sent again to
// the ranks that miss it, which recognise it.
func (s *sequencer) arrive(f *wire.Frame, now time.Time) {
	h := &f.Header
	if c := s.byID[callID{h.Session, h.Seq}]; c != nil {
		s.repeat(c, h.Ranks, now)
		return
	}
	c := s.parse(f, now)
	if c == nil {
		s.ep.Bus().Malformed("a call to the sequencer of "+s.to.Role, bus.Errorf(bus.CodeMalformed, "its frames are no calls on subjects of the role"))
		return
	}
	from := s.callerOf(h.Session, now)
	switch from.Take(h.Order, h.Prev) {
	case InOrder:
		s.publish(c, now)
		s.release(from, now)
	case TooEarly:
		if from.Buffer(h.Order, h.Prev, c) {
			s.reportGap(h.Session, from, now)
		}
	case Passed: // its position is forgotten: it cannot run in order any more
		s.sayUnknown(c, h.Ranks)
	}
}

// release publishes the buffered calls that are next.
func (s *sequencer) release(from *caller, now time.Time) {
	for c, ok := from.Release(); ok; c, ok = from.Release() {
		s.publish(c, now)
	}
}

func (s *sequencer) publish(c *sequenced, now time.Time) {
	s.place(c)
	for i := range c.frames {
		f := c.frameAt(i, now)
		_ = s.ep.Send(c.frames[i].subject, &f) // its ranks report the gap if it is lost
	}
}

// repeat sends a call again to some of its ranks, on their own subjects.
func (s *sequencer) repeat(c *sequenced, ranks wire.RankSet, now time.Time) {
	for i := range c.frames {
		f := c.frameAt(i, now)
		for _, rank := range c.frames[i].ranks {
			if ranks.Has(rank) {
				_ = s.ep.Send(s.to.Rank(rank), &f) // the ranks report the gap again if it is lost
			}
		}
	}
}

// sayUnknown sends the caller the status "outcome unknown" on behalf of some ranks.
func (s *sequencer) sayUnknown(c *sequenced, ranks wire.RankSet) {
	for i := range c.frames {
		h := &c.frames[i].frame.Header
		for _, rank := range c.frames[i].ranks {
			if ranks.Has(rank) {
				say := wire.Header{Seq: c.id.seq, Rank: rank, Gen: h.Gens[rank], State: wire.StateUnknown}
				_ = s.ep.Tell(c.id.session, &wire.Frame{Kind: wire.KindStatus, Header: say}) // the caller's next status request repeats it
			}
		}
	}
}

// reportGap asks a caller for the calls that are missing before the buffered ones, and repeats that until they arrive.
func (s *sequencer) reportGap(session string, from *caller, now time.Time) {
	after, upTo, open := from.Gap()
	if !open || now.Sub(from.askedAt) < missingEvery/2 {
		return
	}
	from.askedAt = now
	h := wire.Header{Stream: session, Object: s.to.Sequencer(), Prev: after, Order: upTo}
	_ = s.ep.Tell(session, &wire.Frame{Kind: wire.KindMissing, Header: h})
	time.AfterFunc(missingEvery, bus.Guard(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if !s.closed && s.callers[session] == from {
			s.reportGap(session, from, time.Now())
		}
	}))
}

// callerOf returns the reorder buffer of a caller, and removes those of callers that have long been silent: if one
// returns, it is asked for missing calls and answers that there are none.
func (s *sequencer) callerOf(session string, now time.Time) *caller {
	c := s.callers[session]
	if c == nil {
		if len(s.callers) >= maxCallers {
			for id, c := range s.callers {
				if now.Sub(c.lastSeen) > callerTTL {
					delete(s.callers, id)
				}
			}
		}
		c = &caller{}
		s.callers[session] = c
	}
	c.lastSeen = now
	return c
}

// frameAt is a frame of the call with its current age and remaining time.
func (c *sequenced) frameAt(i int, now time.Time) wire.Frame {
	f := c.frames[i].frame
	f.Header.Age = now.Sub(c.at)
	if f.Header.Timeout > 0 {
		f.Header.Timeout = max(f.Header.Timeout-f.Header.Age, time.Microsecond)
	}
	return f
}

// parse accepts frames on subjects of the role alone, so that a sequencer does not publish anywhere else.
func (s *sequencer) parse(outer *wire.Frame, now time.Time) *sequenced {
	c := &sequenced{id: callID{outer.Header.Session, outer.Header.Seq}, at: now, bytes: len(outer.Body)}
	for rest := outer.Body; len(rest) > 0; {
		subject, f, after, err := wire.ReadRouted(rest)
		if err != nil || f.Kind != wire.KindCall || !s.to.Has(subject) {
			return nil
		}
		rest = after
		c.frames = append(c.frames, sequencedFrame{subject: subject, frame: f, ranks: s.heardBy(subject, &f)})
	}
	return c
}

// heardBy lists the ranks of a frame.
func (s *sequencer) heardBy(subject string, f *wire.Frame) []int {
	switch {
	case f.Header.Some:
		return f.Header.Ranks.List()
	case subject == s.to.All():
		all := make([]int, s.world)
		for i := range all {
			all[i] = i
		}
		return all
	}
	return nil
}

// place assigns the call's position and keeps the call for repeats.
func (s *sequencer) place(c *sequenced) {
	var ranks []int
	for _, f := range c.frames {
		ranks = append(ranks, f.ranks...)
	}
	c.place = s.chain.next(s.ep.orders.Add(1), ranks, s.world)
	for i := range c.frames {
		h := &c.frames[i].frame.Header
		h.Stream, h.Order, h.Prev, h.Prevs = s.ep.Session(), c.place.order, c.place.prev, c.place.prevs
	}
	s.calls, s.byID[c.id], s.bytes = append(s.calls, c), c, s.bytes+c.bytes
	for len(s.calls) > sequencedCalls || s.bytes > sequencedBytes && len(s.calls) > 1 {
		s.bytes -= s.calls[0].bytes
		delete(s.byID, s.calls[0].id)
		s.calls[0] = nil // the array of the queue would keep the call
		s.calls = s.calls[1:]
	}
}

// missing repeats to one rank the calls that it has not received, and reports false if this endpoint is not the
// sequencer of that role.
func (ss *sequencers) missing(f *wire.Frame) bool {
	ss.mu.Lock()
	s := ss.of[f.Header.Object]
	ss.mu.Unlock()
	if s == nil || f.Header.Stream != ss.ep.Session() {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	subject, after, now := s.to.Rank(f.Header.Rank), f.Header.Prev, time.Now()
	for _, c := range s.calls {
		if c.place.order <= f.Header.Prev || c.place.order > f.Header.Order {
			continue
		}
		for i := range c.frames {
			if slices.Contains(c.frames[i].ranks, f.Header.Rank) {
				again := c.frameAt(i, now)
				_ = ss.ep.Send(subject, &again) // the rank reports the gap again if it is lost
				after = c.place.order
			}
		}
	}
	skip := wire.Frame{Kind: wire.KindSkip, Header: wire.Header{Session: ss.ep.Session(), Stream: ss.ep.Session(), Order: f.Header.Order, Prev: after}}
	_ = ss.ep.Send(subject, &skip)
	return true
}
