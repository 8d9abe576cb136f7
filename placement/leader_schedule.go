package placement

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"troupe/nodes/protocol"
	"troupe/placement/internal/text"
	"troupe/placement/planner"
)

// expireClients removes requests and sessions of silent clients, and evicts reservations whose grace period is over.
func (t *leaderTerm) expireClients(now time.Time) {
	for id, w := range t.queue {
		if w.call.local == nil && now.Sub(w.renewed) > queueTTL {
			if s := t.sessions[w.call.Session]; s != nil {
				delete(s.open, w.call.Seq) // a later repetition starts anew
			}
			delete(t.queue, id)
			t.needsSchedule = true // the next request may become the head
		}
	}
	t.needsSchedule = t.needsSchedule || t.anyWaitsForParent()
	for name, s := range t.sessions {
		if now.Sub(s.lastMessage) > sessionTTL {
			delete(t.sessions, name)
		}
	}
	for _, e := range t.records {
		if e.State == StateLeaving && !e.ending && now.After(e.evictAt) {
			t.evict(e)
		}
	}
}

// evict ends a preempted reservation. Its workers may still run, so its devices need verification.
func (t *leaderTerm) evict(e *ledgerEntry) {
	t.endAndVerify(e, Event{Kind: EventPreempted, Why: "its grace period is over; it was " + e.Why})
}

// endAndVerify ends a reservation whose workers may still run: their agents kill them, and its devices are granted again
// when a report shows them empty.
func (t *leaderTerm) endAndVerify(e *ledgerEntry, news Event) {
	t.endReservation(e, news, func(err error) {
		if err != nil {
			return
		}
		t.emit(reservationEvent(e, protocol.EventReservationEvicted, "reservation "+e.ID+" is evicted: "+news.Why))
		for i := range e.Workers {
			t.nodes.requireVerification(e.Workers[i].Slots, "not verified to be empty since "+e.ID+" was evicted", t.planner.Now)
		}
		for _, name := range e.Nodes() {
			if n := t.nodes.byName[name]; n != nil {
				t.syncPlanner(n)
				t.requestReport(n)
			}
		}
	})
}

// anyWaitsForParent reports whether a request waits for a parent that is not granted; the wait is bounded.
func (t *leaderTerm) anyWaitsForParent() bool {
	for _, w := range t.queue {
		if parent := w.call.request.Parent; parent != "" && t.records[parent] == nil {
			return true
		}
	}
	return false
}

// endChildren ends the reservations inside a reservation that has ended, and refuses the requests that wait for it. The
// agents kill the workers, and the devices need verification.
func (t *leaderTerm) endChildren(parent string) {
	for _, id := range slices.Sorted(maps.Keys(t.records)) {
		if e := t.records[id]; e.Parent == parent && !e.ending {
			t.endAndVerify(e, Event{Kind: EventPreempted, Why: "reservation " + parent + ", which contains it, has ended"})
		}
	}
	for _, id := range slices.Sorted(maps.Keys(t.queue)) {
		if w := t.queue[id]; w.call.request.Parent == parent {
			t.refuseWaiter(w, &RequestError{Problem: planner.ErrUnknownReservation, Detail: fmt.Sprintf("reservation %q has ended", text.Clip(parent))})
		}
	}
}

// schedule decides on the queue and adds the grants to the round. Grants never use resources of releases that are not
// committed yet: the planner frees them only after the commit.
func (t *leaderTerm) schedule(now time.Time) {
	if len(t.queue) == 0 {
		return
	}
	settling := t.nodes.nodesPending(now)
	t.nodesPending = settling
	if err := t.ledgerError(); err != nil {
		t.suspendQueue(err)
		return
	}
	queue := make([]planner.Queued, 0, len(t.queue))
	for _, w := range t.queue {
		q := planner.Queued{Request: w.call.request, Since: w.since, Admitted: w.admitted, Try: w.call.Try}
		q.Request.AwaitNodes = q.Request.AwaitNodes || settling
		queue = append(queue, q)
	}
	d := t.planner.Schedule(queue, t.rules.Policy)
	for i := range d.Grants {
		t.grant(&d.Grants[i])
	}
	for _, refusal := range d.Refusals {
		t.refuseWaiter(t.queue[refusal.ID], refusal.Err)
	}
	for i := range d.Waits {
		t.keepWaiting(&d.Waits[i], i+1, settling)
	}
	for _, p := range d.Preemptions {
		t.preempt(p)
	}
}

// suspendQueue keeps all requests waiting while the ledger is untrusted.
func (t *leaderTerm) suspendQueue(err error) {
	for _, id := range slices.Sorted(maps.Keys(t.queue)) {
		w := t.queue[id]
		if w.call.Try {
			t.refuseWaiter(w, err)
			continue
		}
		w.wait = planner.Wait{ID: id, Code: planner.WaitLedger, Text: err.Error()}
		if !w.notified {
			w.notified = true
			t.send(w.call, &answer{Kind: answerWaits, Wait: &w.wait})
		}
	}
}

// grant adds a reservation to the planner and the round. It is answered after the commit.
func (t *leaderTerm) grant(g *planner.Grant) {
	w := t.queue[g.Reservation.ID]
	delete(t.queue, g.Reservation.ID)
	if g.Reservation.Volatile {
		if err := t.planner.Grant(g.Reservation); err != nil {
			t.refuseWaiter(w, err)
			return
		}
		t.desk.finish(w.call.local, Record{Reservation: g.Reservation, State: StateGranted}, nil)
		return
	}
	e := &ledgerEntry{storedRecord: storedRecord{
		Record:  Record{Reservation: g.Reservation, State: StateGranted, Unmet: g.Unmet},
		Session: w.call.Session, Seq: w.call.Seq, Digest: w.call.digest, Offset: t.identity.Offset,
	}}
	value, err := e.encode()
	if err == nil && int64(len(value)) > t.maxRecord() {
		err = &RequestError{Problem: planner.ErrTooManyBundles, Detail: fmt.Sprintf("a reservation of %d workers takes %d bytes", len(e.Workers), len(value)), Hint: fmt.Sprintf("the server takes %d", t.maxRecord())}
	}
	if err != nil {
		t.refuseWaiter(w, err)
		return
	}
	e.encoded = value
	if err := t.planner.Grant(e.Reservation); err != nil {
		t.refuseWaiter(w, err)
		return
	}
	t.records[e.ID] = e
	t.round.put(reservationKey(e.ID), value, func(revision uint64, _ time.Time) {
		e.Token = revision + e.Offset
		t.audit(w.call, reservationEvent(e, protocol.ActionReserved, fmt.Sprintf("reservation %s of %d workers for %s", e.ID, len(e.Workers), e.Holder)))
		t.answerGrant(w.call, e)
	}, func(err error) {
		delete(t.records, e.ID)
		t.planner.Release(e.ID)
		t.refuseWaiter(w, err)
	})
}

func (t *leaderTerm) maxRecord() int64 {
	if t.cfg.Bus == nil {
		return 1 << 20
	}
	return int64(t.cfg.Bus.MaxPayload()) - 4096
}

func (t *leaderTerm) answerGrant(c *call, e *ledgerEntry) {
	for _, other := range append(e.onGrant, c) {
		if other.local != nil {
			t.desk.finish(other.local, e.Record, nil)
		}
	}
	if e.onGrant = nil; c.local != nil {
		return
	}
	if e.encoded == nil {
		e.encoded, _ = e.encode() // cannot fail: it was decoded from such bytes
	}
	t.answerWithGrant(c, &answer{Kind: answerDone, Record: e.encoded, Token: e.Token}, e)
}

func (t *leaderTerm) refuseWaiter(w *waiter, err error) {
	delete(t.queue, w.call.request.ID)
	if w.call.local != nil {
		t.desk.finish(w.call.local, Record{}, err)
		return
	}
	t.answerCall(w.call, &answer{Kind: answerFailed, Error: encodeError(err)})
}

// keepWaiting leaves a request in the queue and notifies its client once; a request that must not wait is refused.
func (t *leaderTerm) keepWaiting(wait *planner.Wait, position int, settling bool) {
	w := t.queue[wait.ID]
	if w.call.Try {
		t.refuseWaiter(w, t.refusalReason(w, wait))
		return
	}
	w.admitted = !settling
	w.wait = *wait
	if !w.notified {
		w.notified = true
		t.send(w.call, &answer{Kind: answerWaits, Wait: clipWait(wait), Position: position})
	}
}

// clipWait limits a wait to the size of a message.
func clipWait(w *planner.Wait) *planner.Wait {
	short := *w
	short.WaitsFor = clipList(w.WaitsFor)
	return &short
}

// refusalReason returns the error for a request that must not wait.
func (t *leaderTerm) refusalReason(w *waiter, wait *planner.Wait) error {
	if over := t.planner.OverQuota(&w.call.request, t.rules.Policy); over != nil {
		return over
	}
	if plan, err := t.planner.Plan(w.call.request); err == nil && !plan.Granted && !plan.Never {
		return plan.Err()
	}
	return &NoCapacityError{Reasons: []planner.Reason{{Code: planner.ReasonGang, Text: wait.Text}}, WaitsFor: wait.WaitsFor}
}

// preempt starts the grace period of the victims.
func (t *leaderTerm) preempt(p planner.Preemption) {
	grace, above := t.rules.grace(), t.requestName(p.For)
	if w := t.queue[p.For]; w != nil {
		above += fmt.Sprintf(", whose priority %d is higher", w.call.request.Priority)
	}
	for _, id := range p.Victims {
		e := t.records[id]
		if e == nil {
			t.desk.preemptLease(id, "preempted for "+p.For)
			continue
		}
		if e.ending || e.State == StateLeaving {
			continue
		}
		leaving := e.storedRecord
		leaving.Leaving, leaving.State, leaving.Why = true, StateLeaving, "preempted for "+above+" (troupe rules: preemption is on)"
		e.evictAt = t.round.now.Add(grace)
		t.planner.Release(id)
		if err := t.planner.Grant(leaving.Reservation); err != nil {
			t.cfg.Logger.Error("placement: a reservation cannot be marked as leaving", "id", id, "error", err)
			continue
		}
		t.updateRecord(e, leaving, Event{Kind: EventLeave, Why: leaving.Why, Grace: grace.Milliseconds()})
		n := reservationEvent(e, protocol.EventReservationPreempted, fmt.Sprintf("reservation %s is preempted for %s; its grace period is %v", id, above, grace))
		n.Details["for"] = p.For
		t.emit(n)
	}
}

func (t *leaderTerm) requestName(id string) string {
	w := t.queue[id]
	if w == nil {
		return id
	}
	return planner.ReservationName(id, w.call.request.Holder, w.call.request.Namespace)
}
