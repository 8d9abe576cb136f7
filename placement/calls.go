package placement

import (
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/placement/internal/text"
	"troupe/placement/planner"
)

// session is one client as the leader of this term knows it. A call that is over keeps its answer until the client says
// that it has it; so a message that comes again gets the same answer, and nothing is done twice.
type session struct {
	heard   time.Time
	floor   uint64          // every call up to this one is over for the client
	answers map[uint64]kept // of calls above the floor
	open    map[uint64]bool // calls above the floor that are under way
}

// kept is the answer of a call that is over.
type kept struct {
	data  []byte // nil: the call was withdrawn
	grant *entry // that it tells of
}

// ended reports whether the answer tells of a reservation that is not there any more.
func (k kept) ended(r *reign) bool { return k.grant != nil && r.held[k.grant.ID] != k.grant }

func (s *session) raise(floor uint64) {
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

// take begins a call, unless it is a repetition.
func (r *reign) take(c *call, now time.Time) {
	if c.Session == "" {
		return // not even an answer could be told apart
	}
	if c.Epoch != r.ledger.term.Epoch() || r.termTime(now) > c.Until {
		r.send(c, &answer{Kind: answerHello})
		return
	}
	s := r.sessions[c.Session]
	if s == nil {
		s = &session{answers: map[uint64]kept{}, open: map[uint64]bool{}}
		r.sessions[c.Session] = s
	}
	s.heard = now
	s.raise(c.Floor)
	answered, over := s.answers[c.Seq]
	switch {
	case c.Seq <= s.floor:
	case over && answered.data == nil: // it was withdrawn
	case over && answered.ended(r):
		r.send(c, &answer{Kind: answerFailed, Error: toWire(bus.Errorf(bus.CodeFenced, "reservation %q was granted, but you did not hear of it in time: %w", c.request.ID, ErrEnded))})
	case over && answered.grant != nil:
		r.grantTo(c, answered.grant) // as it is now: it may be lost
	case over:
		r.publish(c.reply, answered.data)
	case s.open[c.Seq]:
		r.renew(c, now)
	default:
		if c.Verb.changes() {
			s.open[c.Seq] = true
		}
		r.begin(c, now)
	}
}

// finish answers a call and keeps the answer.
func (r *reign) finish(c *call, a *answer) { r.finishWith(c, a, nil) }

// finishWith is finish for an answer that tells of a grant.
func (r *reign) finishWith(c *call, a *answer, grant *entry) {
	data := r.send(c, a)
	if s := r.sessions[c.Session]; s != nil && c.Verb.changes() && c.Seq > s.floor {
		s.answers[c.Seq] = kept{data, grant}
		delete(s.open, c.Seq)
	}
}

func (r *reign) finishErr(c *call, err error) {
	if err == nil {
		r.finish(c, &answer{Kind: answerDone})
		return
	}
	r.finish(c, &answer{Kind: answerFailed, Error: toWire(err)})
}

func (r *reign) begin(c *call, now time.Time) {
	if c.err != nil {
		r.finishErr(c, c.err)
		return
	}
	switch c.Verb {
	case verbReserve:
		r.reserve(c, now)
	case verbRelease:
		r.release(c)
	case verbWithdraw:
		r.withdraw(c)
	case verbExplain:
		r.answerExplain(c, now)
	case verbList:
		a := &answer{Kind: answerDone}
		a.Records, a.Next = r.records(c.namespace, c.ID)
		if c.ID == "" {
			a.Waiting = r.waiting(c.namespace, now)
		}
		r.finish(c, a)
	case verbNodes:
		a := &answer{Kind: answerDone}
		a.Nodes, a.Next = r.nodes(c.ID)
		r.finish(c, a)
	case verbRules:
		rules := r.rules
		r.finish(c, &answer{Kind: answerDone, Rules: &rules})
	case verbSetRules:
		r.setRules(c)
	case verbConfirm:
		r.confirmCall(c)
	case verbLedger:
		r.finish(c, &answer{Kind: answerDone, Ledger: r.ledgerStatus()})
	case verbAccept:
		r.acceptLedger(c)
	case verbCordon, verbUncordon:
		r.setCordon(c, c.Verb == verbCordon, now)
	default:
		r.finishErr(c, bus.Errorf(bus.CodeVersion, "the placement service does not know %q", c.Verb))
	}
}

// renew is a message of a call that is under way: its client still waits.
func (r *reign) renew(c *call, now time.Time) {
	w := r.queue[c.request.ID]
	if w == nil || w.call.Session != c.Session || w.call.Seq != c.Seq {
		return // it is being written; the answer comes
	}
	w.call, w.renewed = c, now
	if w.told {
		r.send(c, &answer{Kind: answerWaits, Wait: told(&w.wait)})
	}
}

// reserve puts a request into the queue, unless its reservation is there: then this is a client that has lost the
// answer, or has forgotten that it asked.
func (r *reign) reserve(c *call, now time.Time) {
	q := &c.request
	if err := r.checkReserve(c); err != nil {
		r.finishErr(c, err)
		return
	}
	if host := r.held[q.Colocate]; host != nil && host.Namespace == q.Namespace {
		r.confirm(host)
	}
	if e := r.held[q.ID]; e != nil {
		if e.Adopted && e.Namespace == q.Namespace {
			r.finishErr(c, bus.Errorf(bus.CodeExists, "reservation %q is there, %s; use it under the token %d that its workers have, or release it: %w", q.ID, e.Why, e.Token, ErrDuplicate))
			return
		}
		if e.Namespace != q.Namespace || e.Digest != c.digest {
			r.finishErr(c, bus.Errorf(bus.CodeExists, "reservation %q is there, and is another: %w", q.ID, ErrDuplicate))
			return
		}
		r.confirm(e)
		r.grantTo(c, e)
		return
	}
	if w := r.queue[q.ID]; w != nil {
		if w.call.namespace != c.namespace || w.call.digest != c.digest {
			r.finishErr(c, bus.Errorf(bus.CodeExists, "reservation %q is asked for already, and is another: %w", q.ID, ErrDuplicate))
			return
		}
		// Its client was started anew, and has forgotten the other call.
		r.finishErr(w.call, bus.Errorf(bus.CodeCancelled, "reservation %q is asked for by another call now", q.ID))
		w.call, w.renewed, w.told = c, now, false
		r.dirty = true
		return
	}
	waited := time.Duration(max(c.Waited, 0)) * time.Microsecond
	r.queue[q.ID] = &waiter{call: c, since: now.Add(-waited), renewed: now}
	r.dirty = true
}

func (r *reign) checkReserve(c *call) error {
	q := &c.request
	if err := bus.CheckName("reservation", q.ID); err != nil {
		return err
	}
	if q.Namespace != c.namespace && c.namespace != "" || q.Namespace == "" {
		return bus.Errorf(bus.CodeInvalid, "a reservation for namespace %q is asked for in namespace %q", text.Clip(q.Namespace), c.namespace)
	}
	if q.PerInstance != 0 {
		return &RequestError{Problem: planner.ErrBadInstances, Wrong: "a reservation of instances", Exists: "each instance is reserved by itself: Request.Instances"}
	}
	return bus.CheckName("namespace", q.Namespace)
}

// release ends a reservation. One that is not there has been released already.
func (r *reign) release(c *call) {
	e := r.held[c.ID]
	switch {
	case e == nil || c.namespace != "" && e.Namespace != c.namespace:
		r.finishErr(c, nil)
	case e.Token != c.Token:
		r.finishErr(c, &StaleTokenError{ID: c.ID, Token: c.Token, Now: e.Token})
	default:
		r.end(e, Event{}, func(err error) { r.finishErr(c, err) })
	}
}

// withdraw ends a reserve whose client has given up: from now on it is over, and what it got, from this leader or one
// before, is released.
func (r *reign) withdraw(c *call) {
	s := r.sessions[c.Session]
	delete(s.open, c.Call)
	if _, over := s.answers[c.Call]; !over && c.Call > s.floor {
		s.answers[c.Call] = kept{} // a copy of it that is still on its way does nothing
	}
	if w := r.queue[c.ID]; w != nil && w.call.Session == c.Session && w.call.Seq == c.Call {
		delete(r.queue, c.ID)
		r.dirty = true
	}
	if e := r.held[c.ID]; e != nil && e.Session == c.Session && e.Seq == c.Call {
		r.end(e, Event{}, func(err error) { r.finishErr(c, err) })
		return
	}
	r.finishErr(c, nil)
}

func (r *reign) answerExplain(c *call, now time.Time) {
	if c.request.Namespace == "" {
		c.request.Namespace = c.namespace
	}
	x, err := r.explain(c, now)
	if err != nil {
		r.finishErr(c, err)
		return
	}
	r.finish(c, &answer{Kind: answerDone, Explanation: x})
}

// setRules writes new rules, which hold from the next round on. Only operators may.
func (r *reign) setRules(c *call) {
	if c.namespace != "" || c.Rules == nil {
		r.finishErr(c, bus.Errorf(bus.CodeRefused, "rules are set by an operator, not from within namespace %q", c.namespace))
		return
	}
	if err := c.Rules.check(); err != nil {
		r.finishErr(c, bus.Errorf(bus.CodeInvalid, "%w", err))
		return
	}
	value, err := wire.Marshal(*c.Rules)
	if err != nil {
		r.finishErr(c, err)
		return
	}
	r.round.put(rulesKey, value, func(uint64, time.Time) {
		r.rules, r.dirty = *c.Rules, true
		r.finishErr(c, nil)
	}, func(err error) { r.finishErr(c, err) })
}
