package calls

import (
	"cmp"
	"slices"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

// control returns the subject for a control frame to some ranks, and the part that the server's "no responders" to it
// concerns.
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

// everyPart is the part number for all parts in a reply subject.
func (g *Gather) everyPart() int { return len(g.call.Parts) }

// ask requests the status of the ranks that have not answered, at growing intervals, and at once when all is set.
func (g *Gather) ask(now time.Time, all bool) {
	g.mu.Lock()
	if g.over || !g.sent || !all && now.Before(g.nextAsk) {
		g.mu.Unlock()
		return
	}
	switch {
	case all:
	case g.askDelay < firstAsk:
		g.askDelay = max(g.askDelay, now.Sub(g.sentAt))
	default:
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
		h := wire.Header{Session: g.ep.Session(), Seq: g.seq, Age: time.Since(g.sentAt)}
		f := wire.Frame{Kind: wire.KindAsk, Header: h}
		subject, part := g.control(ranks, &f)
		_ = g.ep.session.SendWithReply(subject, appendReplyCall(g.ep.callPrefix, g.seq, part), &f) // repeated after askDelay
	}
}

// status handles a worker's answer to ask. A call that the worker has not seen is sent again, with its id.
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
	resend := f.Header.State == wire.StateNever && time.Since(rare.resentAt) > bus.SweepEvery
	if resend {
		rare.resentAt = time.Now()
	}
	g.mu.Unlock()
	switch {
	case f.Header.State == wire.StateUnknown:
		g.settle(i, nil, bus.Errorf(bus.CodeOutcomeUnknown, "the worker no longer has the answer; the call may have run and will not be run again"))
	case resend:
		g.sender.resend(g, f.Header.Rank)
	}
}

// noResponders handles the server's message that a part has no subscriber. That may be temporary, so the next status
// request follows soon; after GoneAfter the ranks count as lost.
func (g *Gather) noResponders(part int) {
	now := time.Now()
	limit := cmp.Or(g.call.GoneAfter, bus.GoneAfter)
	pause := min(firstAsk/2, limit/4)
	var gone []int
	g.mu.Lock()
	for i := range g.slots {
		s := &g.slots[i]
		if s.answered || int(s.part) != part && part != g.everyPart() || s.fetching().Owner != "" {
			continue
		}
		rare := s.more()
		if now.Sub(rare.noneLast) > max(limit/2, 2*bus.SweepEvery+pause) { // a request in between reached a subscriber
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
		g.settle(i, nil, bus.Errorf(bus.CodeWorkerLost, "nothing has subscribed to %s for %s: the role has ended or its workers are gone", g.call.To.Prefix(), limit))
	}
}

func (g *Gather) lost(rank int, gen uint32, why error) {
	g.mu.Lock()
	s, i := g.slotOf(rank)
	mine := s != nil && g.genOf(rank) <= gen && !g.deferred // a deferred call goes to the next worker of the rank
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

// cancelFrame is a cancel message to the workers of a call that is over.
type cancelFrame struct {
	subject string
	frame   wire.Frame
}

// tellCancelled tells the workers that the call is over. After a reconnect it is sent again, because it may have been
// lost; the next call also implies it. why is CodeTimedOut after the deadline: the frame may arrive before the deadline
// passes at the workers, whose clocks began when the call arrived.
func (g *Gather) tellCancelled(ranks wire.RankSet, why bus.Code) {
	f := wire.Frame{Kind: wire.KindCancel, Header: wire.Header{Session: g.ep.Session(), Seq: g.seq, Code: why}}
	subject, _ := g.control(ranks, &f)
	_ = g.ep.Send(subject, &f)
	g.ep.mu.Lock()
	defer g.ep.mu.Unlock()
	if len(g.ep.cancels) == maxCancels {
		g.ep.cancels = slices.Delete(g.ep.cancels, 0, maxCancels/2)
	}
	g.ep.cancels = append(g.ep.cancels, cancelFrame{subject, f})
}

// cancelAgain are the times after a reconnect at which cancels are sent again. There are several, because the workers
// may reconnect later.
var cancelAgain = []time.Duration{0, 2 * time.Second, 10 * time.Second}

// repeatCancels sends the last cancels again after a reconnect. Only the sweep calls it.
func (e *Endpoint) repeatCancels(now time.Time, connected, anew bool) {
	e.mu.Lock()
	if anew && len(e.cancels) > 0 {
		e.cancelsAt = e.cancelsAt[:0]
		for _, after := range cancelAgain {
			e.cancelsAt = append(e.cancelsAt, now.Add(after))
		}
	}
	if !connected || len(e.cancelsAt) == 0 || now.Before(e.cancelsAt[0]) {
		e.mu.Unlock()
		return
	}
	cancels := slices.Clone(e.cancels)
	if e.cancelsAt = e.cancelsAt[1:]; len(e.cancelsAt) == 0 {
		e.cancels = nil
	}
	e.mu.Unlock()
	for i := range cancels {
		_ = e.Send(cancels[i].subject, &cancels[i].frame) // repeated, and implied by the next call
	}
}
