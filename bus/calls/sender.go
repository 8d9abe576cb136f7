package calls

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"troupe/bus"
	"troupe/bus/recorder"
	"troupe/bus/wire"
)

// roleSender publishes the calls of one endpoint on one role. It publishes a call whole before the next, so that all
// ranks see one order; and each call carries the position of the call before it for the same rank, so that a rank
// detects a lost call and does not run the next one early.
type roleSender struct {
	ep     *Endpoint
	to     bus.Address
	toText recorder.Text // of the role
	inline atomic.Int64  // bytes of arguments inside frames of pending calls

	mu sync.Mutex // held while one call is published
	orderChain
}

// callOrder is the position of a call among the calls of one source.
type callOrder struct {
	order uint64
	prev  uint64         // position of the call before it, for a rank that is not in prevs
	prevs map[int]uint64 // the same for ranks that were called on their own since
}

func (p callOrder) prevFor(rank int) uint64 {
	if v, ok := p.prevs[rank]; ok {
		return v
	}
	return p.prev
}

// orderChain assigns positions. The zero orderChain has assigned none.
type orderChain struct {
	lastAll uint64         // position of the last call that addressed every rank
	since   map[int]uint64 // later calls, by rank
}

// next assigns a position to a call on some ranks of the world; order must be higher than any before. The map in the
// result does not change afterwards.
func (c *orderChain) next(order uint64, ranks []int, world int) callOrder {
	p := callOrder{order: order, prev: c.lastAll}
	switch {
	case len(ranks) == world:
		p.prevs, c.since, c.lastAll = c.since, nil, order
		return p
	case len(ranks) == 1:
		if v, ok := c.since[ranks[0]]; ok {
			p.prev = v
		}
	default:
		p.prevs = map[int]uint64{}
		for _, r := range ranks {
			if v, ok := c.since[r]; ok {
				p.prevs[r] = v
			}
		}
	}
	if c.since == nil {
		c.since = map[int]uint64{}
	}
	for _, r := range ranks {
		c.since[r] = order
	}
	return p
}

func (e *Endpoint) senderOf(to bus.Address) *roleSender {
	e.mu.Lock()
	defer e.mu.Unlock()
	t := e.senders[to]
	if t == nil {
		t = &roleSender{ep: e, to: to, toText: recorder.TextOf(to.Role)}
		e.senders[to] = t
	}
	return t
}

// inlineRoom reserves bytes for an argument inside its frame; false: the ranks must pull it.
func (t *roleSender) inlineRoom(n, limit int) bool {
	if n > limit {
		return false
	}
	if t.inline.Add(int64(n)) > maxInlineRole {
		t.inline.Add(-int64(n))
		return false
	}
	return true
}

func (t *roleSender) inlineDone(n int) { t.inline.Add(-int64(n)) }

// maxSelfWritten is the number of ranks up to which the goroutine of a call writes it to the socket, if no other call is pending. That saves
// the wake-up of NATS's flushing goroutine, a twentieth of a call of four or eight ranks. Calls of one rank and of more than these
// are slower with it: the woken thread polls the network, and sees the next message sooner.
const maxSelfWritten = 8

// publish sends every part of g before any other call on the role.
func (t *roleSender) publish(g *Gather) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := &g.call
	if !c.Control {
		ranks, world := g.ranks(), c.World
		if c.Ordered { // all parts go to the sequencer
			ranks, world = []int{0}, 1
		}
		p := t.next(t.ep.orders.Add(1), ranks, world)
		t.ep.mu.Lock()
		g.place = p
		t.ep.mu.Unlock()
		if c.Ordered {
			return t.toSequencer(g, p.prev, wire.RankSet{})
		}
	}
	if n := len(g.slots); g.only && n > 1 && n <= maxSelfWritten {
		batch := t.ep.Bus().BatchWrites()
		defer batch.Flush(true)
	}
	var first error
	for i := range c.Parts {
		f := g.frame(i)
		subject := c.Parts[i].Scope.subject(t.to, c.Control)
		err := t.ep.sendCall(subject, appendReplyCall(t.ep.callPrefix, g.seq, i), &f)
		if err != nil && first == nil {
			first = err
		}
	}
	return first
}

// ranks lists the ranks that must answer.
func (g *Gather) ranks() []int {
	if len(g.call.Parts) == 1 {
		return g.call.Parts[0].Ranks
	}
	out := make([]int, len(g.slots))
	for i := range g.slots {
		out[i] = g.slots[i].answer.Rank
	}
	return out
}

// resend sends a rank its part again, with the same call id.
func (t *roleSender) resend(g *Gather, rank int) { t.resendAfter(g, rank, g.place.prevFor(rank)) }

func (t *roleSender) resendAfter(g *Gather, rank int, prev uint64) {
	s, _ := g.slotOf(rank)
	part := int(s.part)
	if g.call.Ordered && !g.call.Control {
		_ = t.toSequencer(g, prev, wire.Ranks(rank)) // which recognises the call id and repeats the call for this rank
		return
	}
	f := g.frame(part)
	f.Header.Some, f.Header.Ranks = false, wire.RankSet{}
	f.Header.Prev, f.Header.Prevs = prev, nil
	f.Header.Age = max(time.Since(g.sentAt), time.Microsecond)
	subject := OneRank(rank).subject(t.to, g.call.Control)
	_ = t.ep.sendCall(subject, appendReplyCall(t.ep.callPrefix, g.seq, part), &f) // the next status request repeats it
}

// missing answers a rank, or a sequencer, that received a call too early: every pending call up to that one is sent
// again, in order, and then a skip frame, which counts if all of them arrive. Calls that are over need not run.
func (e *Endpoint) missing(f *wire.Frame) {
	if e.sequencers.missing(f) {
		return
	}
	rank, after, upTo := f.Header.Rank, f.Header.Prev, f.Header.Order
	to, tail, ok := bus.ParseRole(f.Header.Object)
	sequencer := tail == "sequencer"
	if !ok || to.Namespace != e.Namespace() || tail != "" && !sequencer {
		e.Bus().Malformed("a report of missing calls", bus.Errorf(bus.CodeMalformed, "%q is no role of namespace %s", wire.Clip(f.Header.Object), e.Namespace()))
		return
	}
	for _, g := range e.between(to, after, upTo) {
		switch {
		case g.call.Ordered != sequencer:
			continue
		case sequencer:
			_ = g.sender.toSequencer(g, after, wire.RankSet{}) // the sequencer reports the gap again if this is lost
		case g.expects(rank) && g.genOf(rank) == f.Header.Gen: // a call to an earlier worker of this rank would be ignored
			g.sender.resendAfter(g, rank, after)
		default:
			continue
		}
		after = g.place.order
	}
	subject := to.Sequencer()
	if !sequencer {
		subject = to.Rank(rank)
	}
	skip := wire.Frame{Kind: wire.KindSkip, Header: wire.Header{Session: e.Session(), Order: upTo, Prev: after}}
	_ = e.Send(subject, &skip) // the receiver reports the gap again if this is lost
}

// between returns the pending calls on a role with positions above after, up to upTo, in order.
func (e *Endpoint) between(to bus.Address, after, upTo uint64) []*Gather {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []*Gather
	for _, g := range e.pending {
		if g.place.order > after && g.place.order <= upTo && g.call.To == to {
			out = append(out, g)
		}
	}
	slices.SortFunc(out, func(a, b *Gather) int { return cmp.Compare(a.place.order, b.place.order) })
	return out
}
