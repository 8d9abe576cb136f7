package bus

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"troupe/bus/wire"
)

// target is what an endpoint remembers of one running role: in which order it has called the role's ranks. One call is
// published whole before the next, so all ranks see one order; and each call says which call came before it for the
// same rank, so that a rank knows when one was lost on the way and does not run the next one early.
type target struct {
	ep     *Endpoint
	to     Address
	inline atomic.Int64 // bytes of arguments on their way inside frames

	mu sync.Mutex // held while one call is published
	chain
}

// place is a call's place in the order of one stream of calls.
type place struct {
	order uint64
	prev  uint64         // the call before it, for a rank that is not in prevs
	prevs map[int]uint64 // ranks called on their own since
}

func (p place) prevFor(rank int) uint64 {
	if v, ok := p.prevs[rank]; ok {
		return v
	}
	return p.prev
}

// chain gives places. The zero chain is a stream that has not begun.
type chain struct {
	lastAll uint64         // place of the last call that addressed every rank
	since   map[int]uint64 // later calls, by rank
}

// next gives a call over some ranks of the world its place; order must be higher than any before. The map in the
// returned place is not changed afterwards.
func (c *chain) next(order uint64, ranks []int, world int) place {
	p := place{order: order, prev: c.lastAll}
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

// forget starts the chain of one rank anew: another worker has taken its place.
func (c *chain) forget(rank int) {
	if c.since == nil {
		c.since = map[int]uint64{}
	}
	c.since[rank] = 0
}

func (e *Endpoint) target(to Address) *target {
	e.mu.Lock()
	defer e.mu.Unlock()
	t := e.targets[to]
	if t == nil {
		t = &target{ep: e, to: to}
		e.targets[to] = t
	}
	return t
}

// Replaced tells the endpoint that a rank has a new worker, which has seen none of the earlier calls.
func (e *Endpoint) Replaced(to Address, rank int) {
	t := e.target(to)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.forget(rank)
}

// inlineRoom takes room for an argument that would travel in its frame; false: it must be pulled.
func (t *target) inlineRoom(n, limit int) bool {
	if n > limit {
		return false
	}
	if t.inline.Add(int64(n)) > maxInlineRole {
		t.inline.Add(-int64(n))
		return false
	}
	return true
}

func (t *target) inlineDone(n int) { t.inline.Add(-int64(n)) }

// publish sends every part of g before any other call on the role.
func (t *target) publish(g *Gather) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := &g.call
	if !c.Control {
		ranks, world := g.ranks(), c.World
		if c.Ordered { // all of them go to one receiver
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
	var first error
	for i := range c.Parts {
		f := g.frame(i)
		subject := c.Parts[i].Scope.subject(t.to, c.Control)
		err := t.ep.sendFrom(subject, appendReplyCall(t.ep.callPrefix, g.seq, i), &f)
		if err != nil && first == nil {
			first = err
		}
	}
	return first
}

// ranks lists who must answer.
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

// resend sends a rank its part again, under the same id.
func (t *target) resend(g *Gather, rank int) { t.resendAfter(g, rank, g.place.prevFor(rank)) }

func (t *target) resendAfter(g *Gather, rank int, prev uint64) {
	s, _ := g.slotOf(rank)
	part := int(s.part)
	if g.call.Ordered && !g.call.Control {
		_ = t.toSequencer(g, prev, wire.Ranks(rank)) // it knows the call by its id, and repeats what the rank missed
		return
	}
	f := g.frame(part)
	f.Header.Some, f.Header.Ranks = false, wire.RankSet{}
	f.Header.Prev, f.Header.Prevs = prev, nil
	f.Header.Age = max(time.Since(g.sentAt), time.Microsecond)
	subject := OneRank(rank).subject(t.to, g.call.Control)
	_ = t.ep.sendFrom(subject, appendReplyCall(t.ep.callPrefix, g.seq, part), &f) // asked about again if lost
}

// missing answers a rank, or a sequencer, that received a call out of turn: everything it may not have seen up to that
// call is sent again, in order, and then it is told to go on, if it has received what was sent. Calls that are over need
// not be run.
func (e *Endpoint) missing(f *wire.Frame) {
	if e.sequencers.missing(f) {
		return
	}
	rank, after, upTo := f.Header.Rank, f.Header.Prev, f.Header.Order
	role, sequencer := strings.CutSuffix(f.Header.Object, sequencerWord)
	for _, g := range e.between(role, after, upTo) {
		switch {
		case g.call.Ordered != sequencer:
			continue
		case sequencer:
			_ = g.target.toSequencer(g, after, wire.RankSet{}) // it asks again if it is lost
		case g.expects(rank):
			g.target.resendAfter(g, rank, after)
		default:
			continue
		}
		after = g.place.order
	}
	subject := f.Header.Object
	if !sequencer {
		subject += ".rank." + strconv.Itoa(rank)
	}
	skip := wire.Frame{Kind: wire.KindSkip, Header: wire.Header{Session: e.session, Order: upTo, Prev: after}}
	_ = e.send(subject, &skip) // whoever misses something asks again if it is lost
}

// between are the calls on a role that are not over and whose place is after one and not after the other, in order.
func (e *Endpoint) between(role string, after, upTo uint64) []*Gather {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []*Gather
	for _, g := range e.pending {
		if g.place.order > after && g.place.order <= upTo && g.call.To.Prefix() == role {
			out = append(out, g)
		}
	}
	slices.SortFunc(out, func(a, b *Gather) int { return cmp.Compare(a.place.order, b.place.order) })
	return out
}
