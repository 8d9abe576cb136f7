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

func (t *leaderTerm) handleLease(change *leaseChange, now time.Time) {
	switch {
	case change.report != nil:
		old := t.nodes.byName[change.report.Node]
		switch {
		case old == nil || old.report == nil:
			t.emitNode(protocol.EventNodeJoined, change.report.Node, "its agent has registered")
		case old.session != change.report.Session:
			t.emitNode(protocol.EventNodeJoined, change.report.Node, "its agent was started again")
		}
		n := t.nodes.leaseTaken(change.report, now)
		t.syncPlanner(n)
		t.requestReport(n)
	case change.gone != "":
		t.nodes.leaseGone(change.gone)
	default:
		t.nodes.leasesSeen = true
	}
}

// handleHeartbeat records a heartbeat and compares its report with the ledger.
func (t *leaderTerm) handleHeartbeat(hb *protocol.Heartbeat, now time.Time) {
	if hb.Bye {
		t.markReported(hb.Node) // no worker of it is left
	}
	lost := t.nodes.isLost(hb.Node)
	n := t.nodes.heartbeat(hb, now)
	if left := t.nodes.byName[hb.Node]; hb.Bye && left != nil && left.departed {
		t.emitNode(protocol.EventNodeLeft, hb.Node, "its agent has ended in order")
	}
	if n == nil {
		return
	}
	if lost && n.state != NodeLost {
		t.emitNode(protocol.EventNodeJoined, hb.Node, "its heartbeats have resumed")
	}
	if hb.Report != nil && n.report == hb.Report {
		t.reconcile(n, true, now)
	}
	t.syncPlanner(n)
	t.requestReport(n)
}

func (t *leaderTerm) heardUntil(moment time.Time) bool {
	return t.cfg.Bus == nil || t.cfg.Bus.AnsweredSince(moment)
}

// checkNodes finds lost nodes, updates the planner, and notifies the holders of lost reservations.
func (t *leaderTerm) checkNodes(now time.Time) {
	lost, gone := t.nodes.findLost(now, t.heardUntil)
	for _, n := range lost {
		t.cfg.Logger.Warn("placement: a node is lost", "node", n.name, "why", n.why)
		t.emitNode(protocol.EventNodeLost, n.name, n.why)
		t.markLostOn(n.name, n.why)
	}
	for _, n := range gone {
		t.cfg.Logger.Warn("placement: a node is gone", "node", n.name)
		if n.state != NodeLost && !n.departed {
			t.emitNode(protocol.EventNodeLost, n.name, "its lease has expired")
		}
		t.endOn(n.name)
		n.markGone()
	}
	for _, name := range slices.Sorted(maps.Keys(t.nodes.byName)) {
		t.nodes.byName[name].expireUnverified(now)
		t.syncPlanner(t.nodes.byName[name])
		t.requestReport(t.nodes.byName[name])
	}
	if settling := t.nodes.nodesPending(now); settling != t.nodesPending {
		t.nodesPending, t.needsSchedule = settling, true
	}
}

// syncPlanner brings the planner up to date with one node. The rank of a new node is stored first.
func (t *leaderTerm) syncPlanner(n *nodeEntry) {
	switch {
	case n == nil:
		return
	case n.gone && n.report == nil && !t.nodeInUse(n.name):
		t.deleteRank(n)
	case !n.rankStored && n.report != nil:
		t.storeRank(n)
	case !n.changed:
		return
	case n.isUsable():
		if err := t.planner.SetNode(n.plannerNode()); err != nil {
			t.cfg.Logger.Error("placement: a node's report is invalid", "node", n.name, "error", err)
		}
		if n.state == NodeReady {
			t.restoreOn(n.name)
		}
		t.needsSchedule = t.needsSchedule || len(t.queue) > 0
	default:
		t.planner.RemoveNode(n.name)
		t.needsSchedule = t.needsSchedule || len(t.queue) > 0
	}
	n.changed = false
	t.desk.nodesChanged()
}

// requestReport asks a node with a lease for a missing report, or orders it to kill workers. It repeats until the
// report arrives.
func (t *leaderTerm) requestReport(n *nodeEntry) {
	awaited := !n.verified || len(n.unverified) > 0 && !n.answersNewest() || len(n.killOrders) > 0
	if !awaited || !n.leased || !n.rankStored || t.planner.Now.Sub(n.requestedAt) < reportRequestEvery {
		return
	}
	n.requestedAt = t.planner.Now
	data, err := wire.Marshal(protocol.ReportRequest{Stamp: n.stamp, Ended: n.killOrders})
	if err != nil {
		t.cfg.Logger.Error("placement: a report request cannot be encoded", "node", n.name, "error", err)
		return
	}
	t.publish(bus.NodeAsk(n.name), data)
}

// nodeInUse reports whether a reservation uses a node.
func (t *leaderTerm) nodeInUse(name string) bool {
	for _, e := range t.records {
		if slices.Contains(e.Nodes(), name) {
			return true
		}
	}
	return false
}

// storeRank stores the rank of a new node. The next tick repeats a failed write.
func (t *leaderTerm) storeRank(n *nodeEntry) {
	value, err := wire.Marshal(storedRank{n.rank})
	if err != nil {
		return
	}
	t.round.put(rankKey(n.name), value, func(uint64, time.Time) {
		n.rankStored, n.changed = true, true
		t.syncPlanner(n)
		t.requestReport(n)
	}, nil)
}

func (t *leaderTerm) deleteRank(n *nodeEntry) {
	if n.changed {
		t.planner.RemoveNode(n.name)
	}
	t.round.put(rankKey(n.name), nil, func(uint64, time.Time) {
		if n.report == nil {
			delete(t.nodes.byName, n.name)
		} else {
			n.rankStored = false // it has returned in the meantime
		}
	}, nil)
}

// markLostOn marks the reservations on a node as lost.
func (t *leaderTerm) markLostOn(node, why string) {
	for _, e := range t.entriesOn(node) {
		if e.State != StateGranted || e.ending {
			continue
		}
		lost := e.storedRecord
		lost.State, lost.Why = StateLost, "node "+node+" is lost: "+why
		t.updateRecord(e, lost, Event{Kind: EventLost, Why: lost.Why})
	}
}

// restoreOn restores the lost reservations on a node that has returned before its lease expired.
func (t *leaderTerm) restoreOn(node string) {
	if !t.anyLost {
		return
	}
	for _, e := range t.entriesOn(node) {
		if e.State != StateLost || e.ending || len(e.Ended) > 0 || !t.allNodesAlive(e) {
			continue
		}
		back := e.storedRecord
		back.State, back.Why = StateGranted, ""
		t.updateRecord(e, back, Event{Kind: EventRestored})
	}
}

// allNodesAlive reports whether all nodes of a reservation are present and not lost.
func (t *leaderTerm) allNodesAlive(e *ledgerEntry) bool {
	return !slices.ContainsFunc(e.Nodes(), func(name string) bool {
		n := t.nodes.byName[name]
		return n == nil || !n.isUsable() || n.state == NodeLost
	})
}

// endOn ends the grants on a node whose lease has expired: the whole reservation if it uses no other node. Otherwise
// its workers on other nodes may be running, and the holder must release it.
func (t *leaderTerm) endOn(node string) {
	for _, e := range t.entriesOn(node) {
		if e.ending || slices.Contains(e.Ended, node) {
			continue
		}
		ended := e.storedRecord
		ended.Ended = append(slices.Clone(e.Ended), node)
		ended.State, ended.Why = StateLost, "the lease of node "+node+" has expired"
		if len(ended.Ended) == len(e.Nodes()) {
			t.endReservation(e, Event{Kind: EventEnded, Why: ended.Why}, nil)
			continue
		}
		t.updateRecord(e, ended, Event{Kind: EventLost, Why: ended.Why})
	}
}

func (t *leaderTerm) entriesOn(node string) []*ledgerEntry {
	var found []*ledgerEntry
	for _, e := range t.records {
		if slices.Contains(e.Nodes(), node) {
			found = append(found, e)
		}
	}
	slices.SortFunc(found, func(a, b *ledgerEntry) int { return cmp.Compare(a.ID, b.ID) })
	return found
}
