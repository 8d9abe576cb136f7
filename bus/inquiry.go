package bus

import (
	"cmp"
	"time"

	"troupe/bus/wire"
)

// control is the one subject for a control frame to some ranks, and the part that nobody has heard if nobody is there.
func (g *Gather) control(ranks wire.RankSet, f *wire.Frame) (subject string, part int) {
	list := ranks.List()
	if len(list) == 1 {
		s, _ := g.slotOf(list[0])
		return g.call.To.ControlRank(list[0]), int(s.part)
	}
	if len(list) < g.call.World {
		f.Header.Some, f.Header.Ranks = true, ranks
	}
	return g.call.To.Control(), g.everyPart()
}

// everyPart stands for all parts in a reply subject.
func (g *Gather) everyPart() int { return len(g.call.Parts) }

// ask inquires about the ranks that have not answered, now and then, and at once when all is set.
func (g *Gather) ask(now time.Time, all bool) {
	g.mu.Lock()
	if g.over || !g.sent || !all && now.Before(g.nextAsk) {
		g.mu.Unlock()
		return
	}
	if !all {
		g.askDelay = min(2*g.askDelay, maxAsk)
	}
	g.nextAsk = now.Add(g.askDelay)
	var ranks wire.RankSet
	for i := range g.slots {
		if s := &g.slots[i]; !s.answered && s.fetching().Owner == "" {
			ranks.Add(s.answer.Rank)
		}
	}
	g.mu.Unlock()
	if ranks.Len() > 0 {
		h := wire.Header{Session: g.ep.session, Seq: g.seq, Age: time.Since(g.sentAt)}
		f := wire.Frame{Kind: wire.KindAsk, Header: h}
		subject, part := g.control(ranks, &f)
		_ = g.ep.sendFrom(subject, appendReplyCall(g.ep.callPrefix, g.seq, part), &f) // the next one follows
	}
}

// status takes in what a worker says when asked. A call it never saw is sent again, under its id.
func (g *Gather) status(f *wire.Frame) {
	g.mu.Lock()
	s, i := g.slotOf(f.Header.Rank)
	if g.over || s == nil || s.answered || f.Header.Gen != g.genOf(f.Header.Rank) {
		g.mu.Unlock()
		return
	}
	rare := s.more()
	rare.noneLast = time.Time{}
	s.state, rare.stateFor = f.Header.State, max(f.Header.Queued, f.Header.Ran)
	resend := f.Header.State == wire.StateNever && time.Since(rare.resentAt) > sweepEvery
	if resend {
		rare.resentAt = time.Now()
	}
	g.mu.Unlock()
	switch {
	case f.Header.State == wire.StateUnknown:
		g.settle(i, nil, Errorf(CodeOutcomeUnknown, "the worker no longer has the answer; the call may have run and will not be run again"))
	case resend:
		g.target.resend(g, f.Header.Rank)
	}
}

// nobodyListens is the server's word that a part reached nobody. That may pass, so the ranks are asked again soon;
// when it lasts, they are gone.
func (g *Gather) nobodyListens(part int) {
	now := time.Now()
	limit := cmp.Or(g.call.GoneAfter, goneAfter)
	pause := min(firstAsk/2, limit/4)
	var gone []int
	g.mu.Lock()
	for i := range g.slots {
		s := &g.slots[i]
		if s.answered || int(s.part) != part && part != g.everyPart() || s.fetching().Owner != "" {
			continue
		}
		rare := s.more()
		if now.Sub(rare.noneLast) > max(limit/2, 2*sweepEvery+pause) { // asked in between, and somebody was there
			rare.noneSince = now
		}
		rare.noneLast = now
		if now.Sub(rare.noneSince) > limit {
			gone = append(gone, i)
		}
	}
	g.askDelay, g.nextAsk = 2*pause, now.Add(pause)
	g.mu.Unlock()
	for _, i := range gone {
		g.settle(i, nil, Errorf(CodeWorkerLost, "nobody has listened at %s for %s: the role has ended or its workers are gone", g.call.To.Prefix(), limit))
	}
}

func (g *Gather) lost(rank int, gen uint32, why error) {
	g.mu.Lock()
	s, i := g.slotOf(rank)
	mine := s != nil && g.genOf(rank) <= gen && !g.held // a held call goes to the worker that comes after
	g.mu.Unlock()
	if mine {
		g.settle(i, nil, why)
	}
}

// expects reports whether the rank has not answered yet.
func (g *Gather) expects(rank int) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	s, _ := g.slotOf(rank)
	return s != nil && !s.answered && !g.over
}
