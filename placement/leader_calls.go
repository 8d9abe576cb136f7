package placement

import (
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/nodes/protocol"
	"troupe/placement/internal/text"
	"troupe/placement/planner"
)

// clientSession is one client in this term. The answer of a call is kept until the client acknowledges it with the
// floor, so a repeated message gets the same answer and nothing is done twice.
type clientSession struct {
	lastMessage time.Time
	floor       uint64                 // the client has received the answers of all calls up to this one
	answers     map[uint64]savedAnswer // of calls above the floor
	open        map[uint64]bool        // calls above the floor without an answer
}

// savedAnswer is the answer of a call that has ended.
type savedAnswer struct {
	data  []byte       // nil: the call was withdrawn
	grant *ledgerEntry // that the answer contains
}

// ended reports whether the granted reservation has ended since.
func (k savedAnswer) ended(t *leaderTerm) bool {
	return k.grant != nil && t.records[k.grant.ID] != k.grant
}

func (s *clientSession) raiseFloor(floor uint64) {
	if floor <= s.floor {
		return
	}
	s.floor = floor
	for seq := range s.answers {
		if seq <= floor {
			delete(s.answers, seq)
		}
	}
	for seq := range s.open {
		if seq <= floor {
			delete(s.open, seq)
		}
	}
}

// handleCall starts a call, unless it is a repetition.
func (t *leaderTerm) handleCall(c *call, now time.Time) {
	if c.Session == "" {
		return // an answer could not be matched
	}
	if c.Epoch != t.ledger.term.Epoch() || t.termTime(now) > c.Until {
		t.send(c, &answer{Kind: answerResync})
		return
	}
	s := t.sessions[c.Session]
	if s == nil {
		s = &clientSession{answers: map[uint64]savedAnswer{}, open: map[uint64]bool{}}
		t.sessions[c.Session] = s
	}
	s.lastMessage = now
	s.raiseFloor(c.Floor)
	answered, over := s.answers[c.Seq]
	switch {
	case c.Seq <= s.floor:
	case over && answered.data == nil: // withdrawn
	case over && answered.ended(t):
		t.send(c, &answer{Kind: answerFailed, Error: encodeError(bus.Errorf(bus.CodeFenced, "reservation %q was granted and has ended before the answer was received: %w", c.request.ID, ErrEnded))})
	case over && answered.grant != nil:
		t.answerGrant(c, answered.grant) // with its current state
	case over:
		t.publish(c.reply, answered.data)
	case s.open[c.Seq]:
		t.renewWait(c, now)
	default:
		if c.Verb.changes() {
			s.open[c.Seq] = true
		}
		t.startCall(c, now)
	}
}

// answerCall answers a call and keeps the answer.
func (t *leaderTerm) answerCall(c *call, a *answer) { t.answerWithGrant(c, a, nil) }

// answerWithGrant is answerCall for an answer with a grant.
func (t *leaderTerm) answerWithGrant(c *call, a *answer, grant *ledgerEntry) {
	data := t.send(c, a)
	if s := t.sessions[c.Session]; s != nil && c.Verb.changes() && c.Seq > s.floor {
		s.answers[c.Seq] = savedAnswer{data, grant}
		delete(s.open, c.Seq)
	}
}

func (t *leaderTerm) answerErr(c *call, err error) {
	if err == nil {
		t.answerCall(c, &answer{Kind: answerDone})
		return
	}
	t.answerCall(c, &answer{Kind: answerFailed, Error: encodeError(err)})
}

func (t *leaderTerm) startCall(c *call, now time.Time) {
	if c.err != nil {
		t.answerErr(c, c.err)
		return
	}
	switch c.Verb {
	case verbReserve:
		t.handleReserve(c, now)
	case verbRelease:
		t.handleRelease(c)
	case verbWithdraw:
		t.handleWithdraw(c)
	case verbExplain:
		t.handleExplain(c, now)
	case verbList:
		a := &answer{Kind: answerDone}
		a.Records, a.Next = t.listRecords(c.namespace, c.ID)
		if c.ID == "" {
			a.Waiting = t.listWaiting(c.namespace, now)
		}
		t.answerCall(c, a)
	case verbNodes:
		a := &answer{Kind: answerDone}
		a.Nodes, a.Next = t.listNodes(c.ID, c.Working)
		t.answerCall(c, a)
	case verbRules:
		rules := t.rules
		t.answerCall(c, &answer{Kind: answerDone, Rules: &rules})
	case verbSetRules:
		t.handleSetRules(c)
	case verbConfirm:
		t.handleConfirm(c)
	case verbLedger:
		t.answerCall(c, &answer{Kind: answerDone, Ledger: t.ledgerStatus()})
	case verbAccept:
		t.handleAcceptLedger(c)
	case verbCordon, verbUncordon:
		t.handleCordon(c, c.Verb == verbCordon, now)
	default:
		t.answerErr(c, bus.Errorf(bus.CodeVersion, "the placement service does not support operation %q", c.Verb))
	}
}

// renewWait handles a repeated message of a waiting request.
func (t *leaderTerm) renewWait(c *call, now time.Time) {
	w := t.queue[c.request.ID]
	if w == nil || w.call.Session != c.Session || w.call.Seq != c.Seq {
		return // it is being written; the answer follows
	}
	w.call, w.renewed = c, now
	if w.notified {
		t.send(c, &answer{Kind: answerWaits, Wait: clipWait(&w.wait)})
	}
}

// handleReserve queues a request, unless its reservation exists: then the client has lost the answer or was restarted.
func (t *leaderTerm) handleReserve(c *call, now time.Time) {
	q := &c.request
	if err := t.checkReserve(c); err != nil {
		t.answerErr(c, err)
		return
	}
	if host := t.records[q.Colocate]; host != nil && host.Namespace == q.Namespace {
		t.confirm(host)
	}
	if e := t.records[q.ID]; e != nil {
		if e.Adopted && e.Namespace == q.Namespace {
			t.answerErr(c, bus.Errorf(bus.CodeExists, "reservation %q exists, %s; use it under token %d, or release it: %w", q.ID, e.Why, e.Token, ErrDuplicate))
			return
		}
		if e.Namespace != q.Namespace || e.Digest != c.digest {
			t.answerErr(c, bus.Errorf(bus.CodeExists, "reservation %q exists with a different request: %w", q.ID, ErrDuplicate))
			return
		}
		t.confirm(e)
		t.answerGrant(c, e)
		return
	}
	if w := t.queue[q.ID]; w != nil {
		if w.call.namespace != c.namespace || w.call.digest != c.digest {
			t.answerErr(c, bus.Errorf(bus.CodeExists, "reservation %q is already requested with a different request: %w", q.ID, ErrDuplicate))
			return
		}
		// The client was restarted.
		t.answerErr(w.call, bus.Errorf(bus.CodeCancelled, "another call has taken over the request for reservation %q", q.ID))
		w.call, w.renewed, w.notified = c, now, false
		t.needsSchedule = true
		return
	}
	if err := t.rules.checkPriority(q); err != nil {
		t.answerErr(c, err)
		return
	}
	waited := time.Duration(max(c.Waited, 0)) * time.Microsecond
	t.queue[q.ID] = &waiter{call: c, since: now.Add(-waited), renewed: now}
	t.needsSchedule = true
}

func (t *leaderTerm) checkReserve(c *call) error {
	q := &c.request
	if err := bus.CheckName("reservation", q.ID); err != nil {
		return err
	}
	if q.Namespace != c.namespace && c.namespace != "" || q.Namespace == "" {
		return bus.Errorf(bus.CodeInvalid, "a client of namespace %q asks for a reservation in namespace %q", c.namespace, text.Clip(q.Namespace))
	}
	if q.Volatile && c.local == nil {
		return bus.Errorf(bus.CodeInvalid, "a volatile lease is given to control services of the head alone; ask for a reservation")
	}
	if q.PerInstance != 0 {
		return &RequestError{Problem: planner.ErrBadInstances, Detail: "a reservation of instances", Hint: "each instance is reserved by itself: Request.Instances"}
	}
	return bus.CheckName("namespace", q.Namespace)
}

// handleRelease ends a reservation. An unknown one has been released already.
func (t *leaderTerm) handleRelease(c *call) {
	e := t.records[c.ID]
	switch {
	case e == nil || c.namespace != "" && e.Namespace != c.namespace:
		t.answerErr(c, nil)
	case e.Token != c.Token:
		t.answerErr(c, &StaleTokenError{ID: c.ID, Token: c.Token, Now: e.Token})
	default:
		t.endReservation(e, Event{}, func(err error) {
			if err == nil {
				t.audit(c, reservationEvent(e, protocol.ActionReleased, "reservation "+e.ID+" of "+e.Holder))
			}
			t.answerErr(c, err)
		})
	}
}

// handleWithdraw ends a reserve call whose client has given up, and releases what it was granted by this leader or an
// earlier one.
func (t *leaderTerm) handleWithdraw(c *call) {
	s := t.sessions[c.Session]
	delete(s.open, c.Call)
	if _, over := s.answers[c.Call]; !over && c.Call > s.floor {
		s.answers[c.Call] = savedAnswer{} // a delayed copy of the call does nothing
	}
	if w := t.queue[c.ID]; w != nil && w.call.Session == c.Session && w.call.Seq == c.Call {
		delete(t.queue, c.ID)
		t.needsSchedule = true
		t.endChildren(c.ID)
	}
	if e := t.records[c.ID]; e != nil && e.Session == c.Session && e.Seq == c.Call {
		t.endReservation(e, Event{}, func(err error) { t.answerErr(c, err) })
		return
	}
	t.answerErr(c, nil)
}

func (t *leaderTerm) handleExplain(c *call, now time.Time) {
	if c.request.Namespace == "" {
		c.request.Namespace = c.namespace
	}
	x, err := t.explain(c, now)
	if err != nil {
		t.answerErr(c, err)
		return
	}
	t.answerCall(c, &answer{Kind: answerDone, Explanation: x})
}

// handleSetRules stores new rules, which apply from the next round on. Only operators may.
func (t *leaderTerm) handleSetRules(c *call) {
	if c.namespace != "" || c.Rules == nil {
		t.answerErr(c, bus.Errorf(bus.CodeRefused, "only operators may set rules, not clients of namespace %q", c.namespace))
		return
	}
	if err := c.Rules.check(); err != nil {
		t.answerErr(c, bus.Errorf(bus.CodeInvalid, "%w", err))
		return
	}
	value, err := wire.Marshal(*c.Rules)
	if err != nil {
		t.answerErr(c, err)
		return
	}
	t.round.put(rulesKey, value, func(uint64, time.Time) {
		t.rules, t.needsSchedule = *c.Rules, true
		t.audit(c, protocol.Event{Kind: protocol.ActionRules, Text: "quotas, priorities and preemption", Details: c.Rules.details()})
		t.answerErr(c, nil)
	}, func(err error) { t.answerErr(c, err) })
}
