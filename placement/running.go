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

// compare holds what a node says it runs against the ledger. Workers of a reservation that has ended make their devices
// unfit until a report shows them gone, and with fresh, which says that the report has just come, their agent is told to
// end them. What the ledger has forgotten is adopted.
func (r *reign) compare(m *member, fresh bool, now time.Time) {
	stale := map[string]string{}
	var ended []protocol.KillOrder
	for i := range m.report.Running {
		run := &m.report.Running[i]
		e := r.held[run.Reservation]
		switch {
		case e != nil && e.Token == run.Token:
			r.support(e, m, run, now)
		case r.forgotten(run, e):
			r.adopt(m, run, now)
		default:
			why := fmt.Sprintf("reservation %s with token %d has ended", run.Reservation, run.Token)
			ended = append(ended, protocol.KillOrder{Reservation: run.Reservation, Token: run.Token, Why: why})
			for _, d := range run.Devices {
				stale[d.UUID] = "in use by workers of a reservation that has ended: " + run.Reservation
			}
		}
	}
	m.setStale(stale, now)
	if fresh {
		r.orderEnd(m, ended)
	}
	if m.proven && m.report.RunningComplete {
		r.account(m.name)
	}
}

// orderEnd makes an agent end workers, at once and then every second until its report does not show them any more.
func (r *reign) orderEnd(m *member, ended []protocol.KillOrder) {
	more := false
	for _, one := range ended {
		if slices.Contains(m.ended, one) {
			continue
		}
		more = true
		r.cfg.Logger.Warn("placement: a node runs workers of a reservation that has ended; its agent is told to kill them", "node", m.name, "reservation", one.Reservation, "token", one.Token)
		r.emit(protocol.Event{Kind: protocol.EventStaleWorkers, Node: m.name, Text: one.Why + "; its workers are killed", Details: map[string]string{"reservation": one.Reservation}})
	}
	if m.ended = ended; more {
		m.asked = time.Time{}
	}
}

// forgotten reports whether a grant that an agent knows, and the ledger does not have as e, is one that the ledger has
// lost rather than ended. See identity.
func (r *reign) forgotten(run *protocol.RunningGrant, e *entry) bool {
	switch {
	case e != nil && (e.Token == 0 || e.Token > run.Token):
		return false // it was granted again since
	case bus.CheckName("reservation", run.Reservation) != nil || bus.CheckName("namespace", run.Namespace) != nil:
		return false // no ledger has granted that
	}
	return run.Token < r.identity.Born || run.Token > r.newest()
}

// support is an agent that runs workers of a reservation. That confirms it; but for one that was adopted from such a
// report, and may have nobody else: its holder has to be heard as well before it stays without workers.
func (r *reign) support(e *entry, m *member, run *protocol.RunningGrant, now time.Time) {
	if e.Unconfirmed == "" || e.ending {
		return
	}
	e.supported = now
	if !e.Adopted {
		r.confirm(e)
		return
	}
	if !e.covers(m, run) {
		r.adopt(m, run, now)
	}
}

// covers reports whether a record has all that a grant uses on a node.
func (e *entry) covers(m *member, run *protocol.RunningGrant) bool {
	if !slices.Contains(e.Nodes(), m.name) {
		return false
	}
	has := map[string]bool{}
	for i := range e.Workers {
		for _, slot := range e.Workers[i].Slots {
			has[slot.UUID] = true
		}
	}
	return !slices.ContainsFunc(workerOf(m, run, 0).Slots, func(s Slot) bool { return !has[s.UUID] })
}

// adopt writes a record for what an agent runs and the ledger does not have: so nothing is granted over it, and its holder
// can release it with the token it knows. What a gang has on several nodes is put together from their reports.
func (r *reign) adopt(m *member, run *protocol.RunningGrant, now time.Time) {
	if run.Token > r.newest() {
		why := fmt.Sprintf("the ledger is older than what node %s runs: reservation %s has token %d, and the newest it has granted is %d", m.name, run.Reservation, run.Token, r.newest())
		r.identity.Offset += run.Token - r.newest()
		r.doubt(why, slices.Collect(maps.Keys(r.roster.members)), now)
		r.cfg.Logger.Error("placement: nothing is granted", "error", r.ledgerError())
	}
	why := fmt.Sprintf("adopted from the report of node %s: the ledger did not have it", m.name)
	next := stored{
		Record: Record{
			Reservation: planner.Reservation{ID: run.Reservation, Namespace: run.Namespace, Over: run.SharesWith, Since: now.UTC()},
			Token:       run.Token, State: StateGranted, Why: why, Unconfirmed: "its holder has not been heard since",
		},
		Adopted: true,
	}
	old := r.held[run.Reservation]
	if old != nil && old.Token == run.Token {
		next = old.stored
		next.Workers = slices.DeleteFunc(slices.Clone(next.Workers), func(w Worker) bool { return w.Node == m.name })
	}
	next.Workers = append(next.Workers, workerOf(m, run, len(next.Workers)))
	if old != nil {
		r.book.Release(old.ID)
	}
	if err := r.enterAdopted(&next, m); err != nil {
		r.cfg.Logger.Error("placement: what a node runs cannot be adopted; its devices stay as the ledger has them", "node", m.name, "reservation", run.Reservation, "error", err)
		if old != nil {
			_ = r.book.Restore(old.Reservation) // as it was
		}
		return
	}
	e := &entry{stored: next, supported: now}
	value, err := e.encode()
	if err != nil {
		r.cfg.Logger.Error("placement: a record cannot be written", "id", e.ID, "error", err)
		return
	}
	e.raw = value
	r.held[e.ID] = e
	r.anyUnconfirmed = true
	r.round.put(reservationKey(e.ID), value, func(uint64, time.Time) {
		r.cfg.Logger.Warn("placement: a reservation is adopted", "id", e.ID, "token", e.Token, "why", why)
		r.announce(e, Event{Kind: EventAdopted, Why: why})
		n := reservationEvent(e, protocol.EventReservationAdopted, "reservation "+e.ID+" is "+why)
		n.Node = m.name
		r.emit(n)
	}, nil)
}

// enterAdopted puts an adopted reservation into the book. Reservations in its way that nobody has confirmed give way to
// the workers that run.
func (r *reign) enterAdopted(next *stored, m *member) error {
	err := r.book.Restore(next.Reservation)
	if err == nil {
		return nil
	}
	for _, id := range slices.Sorted(maps.Keys(r.held)) {
		e := r.held[id]
		if e.Unconfirmed != "" && !e.Adopted && !e.ending && e.ID != next.ID && overlaps(&e.Reservation, &next.Reservation) {
			r.drop(e, "node "+m.name+" runs "+next.ID+" on its devices")
			r.book.Release(e.ID) // before its end is in the ledger: both are in one round, and this is no grant
		}
	}
	return r.book.Restore(next.Reservation)
}

// overlaps reports whether two reservations have a device in common.
func overlaps(a, b *planner.Reservation) bool {
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

// workerOf is what a grant has on a node, as one worker: how many there are only its holder knows.
func workerOf(m *member, run *protocol.RunningGrant, rank int) Worker {
	w := Worker{Rank: rank, NodeRank: m.rank, Node: m.name, Devices: []int{}}
	for _, d := range m.report.Devices {
		at := slices.IndexFunc(run.Devices, func(s protocol.DeviceShare) bool { return s.UUID == d.UUID })
		if at < 0 {
			continue
		}
		w.Devices = append(w.Devices, d.Index)
		share := min(max(Share(run.Devices[at].Milli), 1), Whole)
		w.Slots = append(w.Slots, Slot{Node: m.name, NodeRank: m.rank, Index: d.Index, UUID: d.UUID, Share: share})
	}
	return w
}

// endedOn compares the nodes of a reservation that has just ended with the ledger again: workers of it that the newest
// reports still show keep their devices from being granted until a later report does not.
func (r *reign) endedOn(e *entry, now time.Time) {
	for _, name := range e.Nodes() {
		m := r.roster.members[name]
		if m == nil || m.report == nil || !slices.ContainsFunc(m.report.Running, func(run protocol.RunningGrant) bool { return run.Reservation == e.ID }) {
			continue
		}
		r.compare(m, false, now)
		r.tellBook(m)
	}
}
