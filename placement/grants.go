package placement

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"troupe/nodes/protocol"
	"troupe/placement/planner"
)

// expire forgets who is not heard any more, and ends what had to go by now.
func (r *reign) expire(now time.Time) {
	for id, w := range r.queue {
		if now.Sub(w.renewed) > queueTTL {
			if s := r.sessions[w.call.Session]; s != nil {
				delete(s.open, w.call.Seq) // should it be heard again, it begins anew
			}
			delete(r.queue, id)
			r.dirty = true // the next may be the head now
		}
	}
	for name, s := range r.sessions {
		if now.Sub(s.heard) > sessionTTL {
			delete(r.sessions, name)
		}
	}
	for _, e := range r.held {
		if e.State == StateLeaving && !e.ending && now.After(e.evictAt) {
			r.evict(e)
		}
	}
}

// evict ends a reservation that was told to go. Nobody has seen its end, so its devices have to be shown clean.
func (r *reign) evict(e *entry) {
	why := "its grace is over; it was " + e.Why
	r.end(e, Event{Kind: EventPreempted, Why: why}, func(err error) {
		if err != nil {
			return
		}
		r.emit(reservationEvent(e, protocol.EventReservationEvicted, "reservation "+e.ID+" is ended: "+why))
		for i := range e.Workers {
			r.roster.suspect(e.Workers[i].Slots, "not shown clean since "+e.ID+" was preempted", r.book.Now)
		}
		for _, name := range e.Nodes() {
			if m := r.roster.members[name]; m != nil {
				r.tellBook(m)
				r.ask(m)
			}
		}
	})
}

// schedule goes through the queue and enters what comes of it into the round. What is granted does not count on
// anything that is only being released: a grant must not reach the ledger before the release that it lives on.
func (r *reign) schedule(now time.Time) {
	if len(r.queue) == 0 {
		return
	}
	settling := r.roster.settling(now)
	r.settling = settling
	if err := r.ledgerError(); err != nil {
		r.holdQueue(err)
		return
	}
	queue := make([]planner.Queued, 0, len(r.queue))
	for _, w := range r.queue {
		q := planner.Queued{Request: w.call.request, Since: w.since, Admitted: w.admitted}
		q.Request.AwaitNodes = q.Request.AwaitNodes || settling
		queue = append(queue, q)
	}
	d := r.book.Schedule(queue, r.rules.Policy)
	for i := range d.Grants {
		r.grant(&d.Grants[i])
	}
	for _, refusal := range d.Refusals {
		r.fail(r.queue[refusal.ID], refusal.Err)
	}
	for i := range d.Waits {
		r.wait(&d.Waits[i], i+1, settling)
	}
	for _, p := range d.Preemptions {
		r.preempt(p)
	}
}

// holdQueue leaves everything in the queue while the ledger is in doubt.
func (r *reign) holdQueue(err error) {
	for _, id := range slices.Sorted(maps.Keys(r.queue)) {
		w := r.queue[id]
		if w.call.Try {
			r.fail(w, err)
			continue
		}
		w.wait = planner.Wait{ID: id, Code: planner.WaitLedger, Text: err.Error()}
		if !w.told {
			w.told = true
			r.send(w.call, &answer{Kind: answerWaits, Wait: &w.wait})
		}
	}
}

// grant writes a reservation into the ledger. It enters the book and is told when it is there.
func (r *reign) grant(g *planner.Grant) {
	w := r.queue[g.Reservation.ID]
	delete(r.queue, g.Reservation.ID)
	e := &entry{stored: stored{
		Record:  Record{Reservation: g.Reservation, State: StateGranted, Unmet: g.Unmet},
		Session: w.call.Session, Seq: w.call.Seq, Digest: w.call.digest, Offset: r.identity.Offset,
	}}
	value, err := e.encode()
	if err == nil && int64(len(value)) > r.maxRecord() {
		err = &RequestError{Problem: planner.ErrTooManyBundles, Wrong: fmt.Sprintf("a reservation of %d workers takes %d bytes", len(e.Workers), len(value)), Exists: fmt.Sprintf("the server takes %d", r.maxRecord())}
	}
	if err != nil {
		r.fail(w, err)
		return
	}
	e.raw = value
	if err := r.book.Grant(e.Reservation); err != nil {
		r.fail(w, err)
		return
	}
	r.held[e.ID] = e
	r.round.put(reservationKey(e.ID), value, func(revision uint64, _ time.Time) {
		e.Token = revision + e.Offset
		r.grantTo(w.call, e)
	}, func(err error) {
		delete(r.held, e.ID)
		r.book.Release(e.ID)
		r.fail(w, err)
	})
}

func (r *reign) maxRecord() int64 {
	if r.cfg.Bus == nil {
		return 1 << 20
	}
	return r.cfg.Bus.Conn().MaxPayload() - 4096
}

// grantTo answers a call with a reservation.
func (r *reign) grantTo(c *call, e *entry) {
	if e.raw == nil {
		e.raw, _ = e.encode() // it was decoded from such bytes
	}
	r.finishWith(c, &answer{Kind: answerDone, Record: e.raw, Token: e.Token}, e)
}

// fail ends a waiting request with an error.
func (r *reign) fail(w *waiter, err error) {
	delete(r.queue, w.call.request.ID)
	r.finish(w.call, &answer{Kind: answerFailed, Error: toWire(err)})
}

// wait leaves a request in the queue and says so, the first time; one that would not wait is refused.
func (r *reign) wait(wait *planner.Wait, position int, settling bool) {
	w := r.queue[wait.ID]
	if w.call.Try {
		r.fail(w, r.whyNot(w, wait))
		return
	}
	w.admitted = !settling
	w.wait = *wait
	if !w.told {
		w.told = true
		r.send(w.call, &answer{Kind: answerWaits, Wait: told(wait), Position: position})
	}
}

// told is a wait that fits into a message.
func told(w *planner.Wait) *planner.Wait {
	short := *w
	short.WaitsFor = limited(w.WaitsFor)
	return &short
}

// whyNot is the refusal of a request that could wait but does not want to.
func (r *reign) whyNot(w *waiter, wait *planner.Wait) error {
	if over := r.book.OverQuota(&w.call.request, r.rules.Policy); over != nil {
		return over
	}
	if plan, err := r.book.Plan(w.call.request); err == nil && !plan.Granted && !plan.Never {
		return plan.Err()
	}
	return &NoCapacityError{Reasons: []planner.Reason{{Code: planner.ReasonGang, Text: wait.Text}}, WaitsFor: wait.WaitsFor}
}

// preempt tells reservations to go.
func (r *reign) preempt(p planner.Preemption) {
	grace := r.rules.grace()
	for _, id := range p.Victims {
		e := r.held[id]
		if e == nil || e.ending || e.State == StateLeaving {
			continue
		}
		leaving := e.stored
		leaving.Leaving, leaving.State, leaving.Why = true, StateLeaving, "preempted for "+p.For
		e.evictAt = r.round.now.Add(grace)
		r.book.Release(id)
		if err := r.book.Grant(leaving.Reservation); err != nil {
			r.cfg.Logger.Error("placement: a reservation cannot be marked as leaving", "id", id, "error", err)
			continue
		}
		r.rewrite(e, leaving, Event{Kind: EventLeave, Why: leaving.Why, Grace: grace.Milliseconds()})
		n := reservationEvent(e, protocol.EventReservationPreempted, fmt.Sprintf("reservation %s is sent away to make room for %s; it has %v to go", id, r.requestName(p.For), grace))
		n.Details["for"] = p.For
		r.emit(n)
	}
}

// requestName is a waiting request in words.
func (r *reign) requestName(id string) string {
	w := r.queue[id]
	if w == nil {
		return id
	}
	return planner.ReservationName(id, w.call.request.Holder, w.call.request.Namespace)
}
