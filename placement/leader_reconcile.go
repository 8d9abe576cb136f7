package placement

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"troupe/bus"
	"troupe/nodes/protocol"
	"troupe/placement/planner"
)

// reconcile compares the running workers of a node with the ledger. Devices with workers of ended reservations are
// unfit until a report shows them gone; if fresh (the report has just arrived), the agent is ordered to kill these
// workers. Grants that the ledger has lost are adopted.
func (t *leaderTerm) reconcile(n *nodeEntry, fresh bool, now time.Time) {
	stale := map[string]string{}
	var ended []protocol.KillOrder
	for i := range n.report.Running {
		run := &n.report.Running[i]
		e := t.records[run.Reservation]
		switch {
		case e != nil && e.Token == run.Token:
			t.confirmByReport(e, n, run, now)
		case t.lostByLedger(run, e):
			t.adopt(n, run, now)
		default:
			why := fmt.Sprintf("reservation %s with token %d has ended", run.Reservation, run.Token)
			ended = append(ended, protocol.KillOrder{Reservation: run.Reservation, Token: run.Token, Why: why})
			for _, d := range run.Devices {
				stale[d.UUID] = "in use by workers of a reservation that has ended: " + run.Reservation
			}
		}
	}
	n.setStale(stale, now)
	if fresh {
		t.orderKills(n, ended)
	}
	if n.verified && n.report.RunningComplete {
		t.markReported(n.name)
	}
}

// orderKills makes requestReport send kill orders, at once and then repeatedly until the report no longer shows the
// workers.
func (t *leaderTerm) orderKills(n *nodeEntry, ended []protocol.KillOrder) {
	more := false
	for _, one := range ended {
		if slices.Contains(n.killOrders, one) {
			continue
		}
		more = true
		t.cfg.Logger.Warn("placement: a node runs workers of a reservation that has ended; its agent is ordered to kill them", "node", n.name, "reservation", one.Reservation, "token", one.Token)
		t.emit(protocol.Event{Kind: protocol.EventStaleWorkers, Node: n.name, Text: one.Why + "; its workers are killed", Details: map[string]string{"reservation": one.Reservation}})
	}
	if n.killOrders = ended; more {
		n.requestedAt = time.Time{}
	}
}

// lostByLedger reports whether a running grant that is not in the ledger as e was lost by the ledger rather than ended.
// See ledgerIdentity.
func (t *leaderTerm) lostByLedger(run *protocol.RunningGrant, e *ledgerEntry) bool {
	switch {
	case e != nil && (e.Token == 0 || e.Token > run.Token):
		return false // it has been granted again since
	case bus.CheckName("reservation", run.Reservation) != nil || bus.CheckName("namespace", run.Namespace) != nil:
		return false // no ledger grants invalid names
	}
	return run.Token < t.identity.Born || t.identity.lostLater(run.Token, t.newestToken())
}

// confirmByReport confirms a reservation that an agent runs. An adopted one is not confirmed by reports alone: its
// holder must confirm it too before it remains without workers.
func (t *leaderTerm) confirmByReport(e *ledgerEntry, n *nodeEntry, run *protocol.RunningGrant, now time.Time) {
	if e.Unconfirmed == "" || e.ending {
		return
	}
	e.lastConfirmed = now
	if !e.Adopted {
		t.confirm(e)
		return
	}
	if !e.coversGrant(n, run) {
		t.adopt(n, run, now)
	}
}

// coversGrant reports whether a record contains all that a grant uses on a node.
func (e *ledgerEntry) coversGrant(n *nodeEntry, run *protocol.RunningGrant) bool {
	if !slices.Contains(e.Nodes(), n.name) {
		return false
	}
	has := map[string]bool{}
	for i := range e.Workers {
		for _, slot := range e.Workers[i].Slots {
			has[slot.UUID] = true
		}
	}
	return !slices.ContainsFunc(workerFor(n, run, 0).Slots, func(s Slot) bool { return !has[s.UUID] })
}

// adopt stores a record for a grant that an agent runs and the ledger does not have, so that its devices are not
// granted again and its holder can release it with the token. The parts of a gang on several nodes are merged from
// their reports.
func (t *leaderTerm) adopt(n *nodeEntry, run *protocol.RunningGrant, now time.Time) {
	if newest := t.newestToken(); t.identity.lostLater(run.Token, newest) {
		why := fmt.Sprintf("the ledger is older than what node %s runs: it has never granted reservation %s with token %d", n.name, run.Reservation, run.Token)
		t.identity.Offset += max(run.Token, newest) - newest
		t.distrust(why, slices.Collect(maps.Keys(t.nodes.byName)), now)
		t.cfg.Logger.Error("placement: nothing is granted", "error", t.ledgerError())
	}
	why := fmt.Sprintf("adopted from the report of node %s: the ledger did not have it", n.name)
	next := storedRecord{
		Record: Record{
			Reservation: planner.Reservation{ID: run.Reservation, Namespace: run.Namespace, SharesWith: run.SharesWith, Since: now.UTC()},
			Token:       run.Token, State: StateGranted, Why: why, Unconfirmed: "its holder has not confirmed it",
		},
		Adopted: true,
	}
	old := t.records[run.Reservation]
	if old != nil && old.Token == run.Token {
		next = old.storedRecord
		next.Workers = slices.DeleteFunc(slices.Clone(next.Workers), func(w Worker) bool { return w.Node == n.name })
	}
	next.Workers = append(next.Workers, workerFor(n, run, len(next.Workers)))
	if old != nil {
		t.planner.Release(old.ID)
	}
	if err := t.enterAdopted(&next, n); err != nil {
		t.cfg.Logger.Error("placement: a running grant cannot be adopted; the ledger stays as it is", "node", n.name, "reservation", run.Reservation, "error", err)
		if old != nil {
			_ = t.planner.Restore(old.Reservation) // restores the previous state
		}
		return
	}
	e := &ledgerEntry{storedRecord: next, lastConfirmed: now}
	value, err := e.encode()
	if err != nil {
		t.cfg.Logger.Error("placement: a record cannot be written", "id", e.ID, "error", err)
		return
	}
	e.encoded = value
	t.records[e.ID] = e
	t.anyUnconfirmed = true
	t.round.put(reservationKey(e.ID), value, func(uint64, time.Time) {
		t.cfg.Logger.Warn("placement: a reservation is adopted", "id", e.ID, "token", e.Token, "why", why)
		t.notifyHolder(e, Event{Kind: EventAdopted, Why: why})
		ev := reservationEvent(e, protocol.EventReservationAdopted, "reservation "+e.ID+" is "+why)
		ev.Node = n.name
		t.emit(ev)
	}, nil)
}

// enterAdopted adds an adopted reservation to the planner. Unconfirmed reservations of the same devices are dropped.
func (t *leaderTerm) enterAdopted(next *storedRecord, n *nodeEntry) error {
	err := t.planner.Restore(next.Reservation)
	if err == nil {
		return nil
	}
	for _, id := range slices.Sorted(maps.Keys(t.records)) {
		e := t.records[id]
		if e.Unconfirmed != "" && !e.Adopted && !e.ending && e.ID != next.ID && shareDevice(&e.Reservation, &next.Reservation) {
			t.drop(e, "node "+n.name+" runs "+next.ID+" on its devices")
			t.planner.Release(e.ID) // before the deletion is stored: both are in one round, and this is not a grant
		}
	}
	return t.planner.Restore(next.Reservation)
}

// shareDevice reports whether two reservations have a device in common.
func shareDevice(a, b *planner.Reservation) bool {
	has := map[string]bool{}
	for i := range a.Workers {
		for _, slot := range a.Workers[i].Slots {
			has[slot.UUID] = true
		}
	}
	return slices.ContainsFunc(b.Workers, func(w Worker) bool {
		return slices.ContainsFunc(w.Slots, func(s Slot) bool { return has[s.UUID] })
	})
}

// workerFor returns all that a grant uses on a node as one worker: the report does not tell workers apart.
func workerFor(n *nodeEntry, run *protocol.RunningGrant, rank int) Worker {
	w := Worker{Rank: rank, NodeRank: n.rank, Node: n.name, Devices: []int{}}
	for _, d := range n.report.Devices {
		at := slices.IndexFunc(run.Devices, func(s protocol.DeviceShare) bool { return s.UUID == d.UUID })
		if at < 0 {
			continue
		}
		w.Devices = append(w.Devices, d.Index)
		share := min(max(Share(run.Devices[at].Milli), 1), Whole)
		w.Slots = append(w.Slots, Slot{Node: n.name, NodeRank: n.rank, Index: d.Index, UUID: d.UUID, Share: share})
	}
	return w
}

// reconcileNodesOf compares the nodes of a reservation that has just ended with the ledger again: devices on which the
// newest reports still show its workers are not granted until a later report shows them gone.
func (t *leaderTerm) reconcileNodesOf(e *ledgerEntry, now time.Time) {
	for _, name := range e.Nodes() {
		n := t.nodes.byName[name]
		if n == nil || n.report == nil || !slices.ContainsFunc(n.report.Running, func(run protocol.RunningGrant) bool { return run.Reservation == e.ID }) {
			continue
		}
		t.reconcile(n, false, now)
		t.syncPlanner(n)
	}
}
