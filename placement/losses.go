package placement

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/nodes/protocol"
)

func (r *reign) hearLease(news *leaseNews, now time.Time) {
	switch {
	case news.report != nil:
		old := r.roster.members[news.report.Node]
		switch {
		case old == nil || old.report == nil:
			r.emitNode(protocol.EventNodeJoined, news.report.Node, "its agent has registered")
		case old.session != news.report.Session:
			r.emitNode(protocol.EventNodeJoined, news.report.Node, "its agent was started again")
		}
		m := r.roster.leaseTaken(news.report, now)
		r.tellBook(m)
		r.ask(m)
	case news.gone != "":
		r.roster.leaseGone(news.gone)
	default:
		r.roster.seen = true
	}
}

// hearBeat takes a sign of life, and holds a report against the ledger.
func (r *reign) hearBeat(b *protocol.Heartbeat, now time.Time) {
	if b.Bye {
		r.account(b.Node) // no worker of it is left
	}
	lost := r.roster.isLost(b.Node)
	m := r.roster.beat(b, now)
	if left := r.roster.members[b.Node]; b.Bye && left != nil && left.departed {
		r.emitNode(protocol.EventNodeLeft, b.Node, "its agent has ended in order")
	}
	if m == nil {
		return
	}
	if lost && m.state != NodeLost {
		r.emitNode(protocol.EventNodeJoined, b.Node, "its heartbeats have resumed")
	}
	if b.Report != nil && m.report == b.Report {
		r.compare(m, true, now)
	}
	r.tellBook(m)
	r.ask(m)
}

// watchNodes judges the nodes and tells the book, and the holders of what is lost.
func (r *reign) watchNodes(now time.Time) {
	if n := r.reconnectCount(); n != r.reconnects {
		r.reconnects = n
		r.roster.calm(now)
	}
	lost, gone := r.roster.judge(now)
	for _, m := range lost {
		r.cfg.Logger.Warn("placement: a node is lost", "node", m.name, "why", m.why)
		r.emitNode(protocol.EventNodeLost, m.name, m.why)
		r.loseOn(m.name, m.why)
	}
	for _, m := range gone {
		r.cfg.Logger.Warn("placement: a node is gone", "node", m.name)
		if m.state != NodeLost && !m.departed {
			r.emitNode(protocol.EventNodeLost, m.name, "its lease has expired")
		}
		r.endOn(m.name)
		m.leave()
	}
	for _, name := range slices.Sorted(maps.Keys(r.roster.members)) {
		r.roster.members[name].lapse(now)
		r.tellBook(r.roster.members[name])
		r.ask(r.roster.members[name])
	}
	if settling := r.roster.settling(now); settling != r.settling {
		r.settling, r.dirty = settling, true
	}
}

func (r *reign) reconnectCount() uint64 {
	if r.cfg.Bus == nil {
		return 0
	}
	return r.cfg.Bus.Conn().Stats().Reconnects
}

// tellBook brings the book up to date with one node, if it is one. A newcomer is seated first.
func (r *reign) tellBook(m *member) {
	switch {
	case m == nil:
		return
	case m.over && m.report == nil && !r.needed(m.name):
		r.unseat(m)
	case !m.seated && m.report != nil:
		r.seat(m)
	case !m.changed:
		return
	case m.present():
		if err := r.book.SetNode(m.node()); err != nil {
			r.cfg.Logger.Error("placement: a node's report makes no sense", "node", m.name, "error", err)
		}
		if m.state == NodeReady {
			r.restoreOn(m.name)
		}
		r.dirty = r.dirty || len(r.queue) > 0
	default:
		r.book.RemoveNode(m.name)
		r.dirty = r.dirty || len(r.queue) > 0
	}
	m.changed = false
}

// ask asks a node that has a lease for the report that is missing, or tells it what to end. What is lost is asked again.
func (r *reign) ask(m *member) {
	awaited := !m.proven || len(m.probation) > 0 && !m.answered() || len(m.ended) > 0
	if !awaited || !m.leased || !m.seated || r.book.Now.Sub(m.asked) < askEvery {
		return
	}
	m.asked = r.book.Now
	data, err := wire.Marshal(protocol.ReportRequest{Stamp: m.stamp, Ended: m.ended})
	if err != nil {
		r.cfg.Logger.Error("placement: a question cannot be written", "node", m.name, "error", err)
		return
	}
	r.publish(bus.NodeAsk(m.name), data)
}

// needed reports whether a reservation has something on a node.
func (r *reign) needed(name string) bool {
	for _, e := range r.held {
		if slices.Contains(e.Nodes(), name) {
			return true
		}
	}
	return false
}

// seat writes a newcomer's rank. If that fails it is tried again at the next tick.
func (r *reign) seat(m *member) {
	value, err := wire.Marshal(seat{m.rank})
	if err != nil {
		return
	}
	r.round.put(seatKey(m.name), value, func(uint64, time.Time) {
		m.seated, m.changed = true, true
		r.tellBook(m)
		r.ask(m)
	}, nil)
}

func (r *reign) unseat(m *member) {
	if m.changed {
		r.book.RemoveNode(m.name)
	}
	r.round.put(seatKey(m.name), nil, func(uint64, time.Time) {
		if m.report == nil {
			delete(r.roster.members, m.name)
		} else {
			m.seated = false // it came back meanwhile
		}
	}, nil)
}

// loseOn marks what is held on a node as lost.
func (r *reign) loseOn(node, why string) {
	for _, e := range r.heldOn(node) {
		if e.State != StateGranted || e.ending {
			continue
		}
		lost := e.stored
		lost.State, lost.Why = StateLost, "node "+node+" is lost: "+why
		r.rewrite(e, lost, Event{Kind: EventLost, Why: lost.Why})
	}
}

// restoreOn takes back the loss of what is held on a node that has come back in time.
func (r *reign) restoreOn(node string) {
	if !r.anyLost {
		return
	}
	for _, e := range r.heldOn(node) {
		if e.State != StateLost || e.ending || len(e.Ended) > 0 || !r.whole(e) {
			continue
		}
		back := e.stored
		back.State, back.Why = StateGranted, ""
		r.rewrite(e, back, Event{Kind: EventRestored})
	}
}

// whole reports whether all nodes of a reservation are there and alive.
func (r *reign) whole(e *entry) bool {
	return !slices.ContainsFunc(e.Nodes(), func(name string) bool {
		m := r.roster.members[name]
		return m == nil || !m.present() || m.state == NodeLost
	})
}

// endOn ends what was granted on a node whose lease is over: the whole reservation, if it has nothing on any other.
// What it has elsewhere may still be in use, and is its holder's to release.
func (r *reign) endOn(node string) {
	for _, e := range r.heldOn(node) {
		if e.ending || slices.Contains(e.Ended, node) {
			continue
		}
		ended := e.stored
		ended.Ended = append(slices.Clone(e.Ended), node)
		ended.State, ended.Why = StateLost, "the lease of node "+node+" is over"
		if len(ended.Ended) == len(e.Nodes()) {
			r.end(e, Event{Kind: EventEnded, Why: ended.Why}, nil)
			continue
		}
		r.rewrite(e, ended, Event{Kind: EventLost, Why: ended.Why})
	}
}

func (r *reign) heldOn(node string) []*entry {
	var found []*entry
	for _, e := range r.held {
		if slices.Contains(e.Nodes(), node) {
			found = append(found, e)
		}
	}
	slices.SortFunc(found, func(a, b *entry) int { return cmp.Compare(a.ID, b.ID) })
	return found
}
