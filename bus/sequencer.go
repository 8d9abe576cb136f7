package bus

import (
	"slices"
	"sync"

	"github.com/nats-io/nats.go"
)

const (
	sequencedCalls = 4096     // how many calls a sequencer can repeat
	sequencedBytes = 32 << 20 // and how many bytes of them
)

// Calls of several drivers on one role have no common order: each rank sees its own. A role whose workers must agree,
// because they meet in collectives, is ordered: its callers send each call, all its frames in one message, to the
// role's sequencer, which gives it a place and publishes it. Bodies of any size are pulled from their owner as always
// and never pass the sequencer.

// sequencers are the sequencers that run at one endpoint, by the prefix of their role.
type sequencers struct {
	ep *Endpoint
	mu sync.Mutex
	of map[string]*sequencer
}

// sequencer orders the calls of one role. Its state belongs to its subscription's goroutine and to missing; mu guards it.
type sequencer struct {
	ep    *Endpoint
	to    Address
	world int
	sub   *nats.Subscription

	mu    sync.Mutex
	chain chain
	calls []*sequenced // the last calls, oldest first
	byID  map[callID]*sequenced
	bytes int
}

type callID struct {
	session string
	seq     uint64
}

// sequenced is one call that has its place.
type sequenced struct {
	id     callID
	place  place
	frames []sequencedFrame
	bytes  int
}

type sequencedFrame struct {
	subject string
	frame   Frame
	ranks   []int
}

func newSequencers(ep *Endpoint) *sequencers {
	return &sequencers{ep: ep, of: map[string]*sequencer{}}
}

// Sequence makes this endpoint the sequencer of an ordered role until stop is called or the endpoint is closed.
func (e *Endpoint) Sequence(to Address, world int) (stop func(), err error) {
	s := &sequencer{ep: e, to: to, world: world, byID: map[callID]*sequenced{}}
	sub, err := e.bus.nc.Subscribe(to.Sequencer(), s.receive)
	if err != nil {
		return nil, natsError("subscribe as sequencer", err)
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

// toSequencer sends all frames of a call in one message. t.mu is held.
func (t *target) toSequencer(g *Gather, parts []Part) error {
	var body []byte
	for i := range parts {
		f := g.frame(i)
		if !parts[i].Scope.All { // the sequencer knows no meshes
			f.Header.Some, f.Header.Ranks = true, Ranks(parts[i].Ranks...)
		}
		body = packBin(packStr(body, parts[i].Scope.subject(t.to, false)), f.Append(nil))
	}
	f := Frame{Kind: KindSequence, Header: Header{Session: t.ep.session, Seq: g.seq}, Body: body}
	if len(body) > int(t.ep.bus.nc.MaxPayload())-maxEnvelope {
		return Errorf(CodeInvalid, "a call of %d parts is too large for the sequencer of %s; address fewer ranks or send fewer small arguments", len(parts), t.to.Role)
	}
	return t.ep.sendFrom(t.to.Sequencer(), replyCall(t.ep.namespace, t.ep.session, g.seq, 0), &f)
}

// receive gives a call its place and publishes it; one that has its place already is published again as it was, which
// the ranks recognise.
func (s *sequencer) receive(m *nats.Msg) {
	outer, err := ParseFrame(m.Data)
	if err != nil || outer.Kind != KindSequence {
		s.ep.AnswerVersion(m.Reply)
		return
	}
	id := callID{session: outer.Header.Session, seq: outer.Header.Seq}
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.byID[id]
	if c == nil {
		if c = s.parse(id, outer.Body); c == nil {
			s.ep.bus.cfg.Logger.Warn("bus: a call for the sequencer cannot be read", "role", s.to.Role)
			return
		}
		s.place(c)
	}
	for i := range c.frames {
		_ = s.ep.send(c.frames[i].subject, &c.frames[i].frame) // its ranks notice the gap if it is lost
	}
}

func (s *sequencer) parse(id callID, body []byte) *sequenced {
	c := &sequenced{id: id, bytes: len(body)}
	u := unpacker{b: body}
	for len(u.b) > 0 && !u.bad {
		subject := u.str()
		f, err := ParseFrame(u.bin())
		if err != nil || u.bad || f.Kind != KindCall {
			return nil
		}
		c.frames = append(c.frames, sequencedFrame{subject: subject, frame: f, ranks: s.heardBy(subject, &f)})
	}
	return c
}

// heardBy lists the ranks a frame is for.
func (s *sequencer) heardBy(subject string, f *Frame) []int {
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

// place stamps the call and remembers it.
func (s *sequencer) place(c *sequenced) {
	var ranks []int
	for _, f := range c.frames {
		ranks = append(ranks, f.ranks...)
	}
	c.place = s.chain.next(ranks, s.world)
	for i := range c.frames {
		h := &c.frames[i].frame.Header
		h.Stream, h.Order, h.Prev, h.Prevs = s.ep.session, c.place.order, c.place.prev, c.place.prevs
	}
	s.calls, s.byID[c.id], s.bytes = append(s.calls, c), c, s.bytes+c.bytes
	for len(s.calls) > sequencedCalls || s.bytes > sequencedBytes && len(s.calls) > 1 {
		s.bytes -= s.calls[0].bytes
		delete(s.byID, s.calls[0].id)
		s.calls = s.calls[1:]
	}
}

// missing repeats to one rank what it has not received, and reports false if no sequencer of that role is here.
func (ss *sequencers) missing(f *Frame) bool {
	ss.mu.Lock()
	s := ss.of[f.Header.Object]
	ss.mu.Unlock()
	if s == nil || f.Header.Stream != ss.ep.session {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	subject := s.to.Rank(f.Header.Rank)
	for _, c := range s.calls {
		if c.place.order <= f.Header.Prev || c.place.order > f.Header.Order {
			continue
		}
		for i := range c.frames {
			if slices.Contains(c.frames[i].ranks, f.Header.Rank) {
				_ = ss.ep.send(subject, &c.frames[i].frame) // the rank asks again if it is lost
			}
		}
	}
	skip := Frame{Kind: KindSkip, Header: Header{Session: ss.ep.session, Stream: ss.ep.session, Order: f.Header.Order}}
	_ = ss.ep.send(subject, &skip)
	return true
}
