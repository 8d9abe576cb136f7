package placement

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"troupe/bus/wire"
	"troupe/placement/planner"
)

// leaderTerm is the state of a leader during one term. The lock of the desk guards it. Committed changes are applied in apply; only
// state that is not stored (the queue, clients, liveness of nodes) changes elsewhere.
type leaderTerm struct {
	cfg       Config
	ledger    *ledger
	startedAt time.Time
	inputs    *inputQueue
	desk      *Desk

	planner  *planner.Planner
	records  map[string]*ledgerEntry
	queue    map[string]*waiter
	nodes    *nodeTable
	sessions map[string]*clientSession
	rules    Rules
	identity ledgerIdentity

	reported       map[string]bool // nodes that have reported everything that runs on them while the ledger is untrusted
	anyUnconfirmed bool            // records may contain unconfirmed ones

	needsSchedule bool // the queue or the free resources have changed
	nodesPending  bool // nodes may still return after the start of the term
	anyLost       bool // records may contain lost ones
	lastTick      time.Time
	round         *round // that is being decided
	outbox        outbox
}

// ledgerEntry is a record with the state that only the leader has.
type ledgerEntry struct {
	storedRecord
	encoded wire.Raw  // as stored; nil: encoded when needed
	evictAt time.Time // end of the grace period of a leaving reservation

	lastConfirmed time.Time // of an unconfirmed one: when an agent last ran it, or the start of the term
	ending        bool      // its deletion is in the current round
	onEnd         []func(error)
	onGrant       []*call // of the desk, for a reservation that is being written
}

// call is one message of a client.
type call struct {
	message
	reply     string
	namespace string // empty: an operator
	request   Request
	digest    uint64
	err       error        // of decoding the message
	local     *deskRequest // of the desk; nil: of a client
}

// waiter is a request in the queue.
type waiter struct {
	call     *call // its latest message
	since    time.Time
	renewed  time.Time
	admitted bool
	notified bool // the client has been told that it waits
	wait     planner.Wait
}

// newLeaderTerm starts a term with the contents of the ledger.
func newLeaderTerm(cfg Config, l *ledger, c ledgerContents, w *watermark, now time.Time) (*leaderTerm, error) {
	t := &leaderTerm{
		cfg: cfg, ledger: l, startedAt: now, inputs: newInputQueue(), rules: cfg.Rules, round: newRound(),
		records: map[string]*ledgerEntry{}, queue: map[string]*waiter{}, sessions: map[string]*clientSession{}, reported: map[string]bool{},
		nodes: newNodeTable(cfg.NodeLease, cfg.NodeSilence, now), desk: newDesk(),
	}
	t.desk.term = t
	if c.rules != nil {
		t.rules = *c.rules
	}
	snapshot := planner.Snapshot{Now: now}
	for _, s := range c.records {
		e := &ledgerEntry{storedRecord: *s, lastConfirmed: now}
		t.anyUnconfirmed = t.anyUnconfirmed || s.Unconfirmed != ""
		if s.State == StateLeaving {
			e.evictAt = now.Add(t.rules.grace())
		}
		t.anyLost = t.anyLost || s.State == StateLost
		t.records[s.ID] = e
		snapshot.Reservations = append(snapshot.Reservations, s.Reservation)
	}
	t.nodes.cordons = c.cordons
	for _, name := range slices.Sorted(maps.Keys(c.ranks)) {
		t.nodes.restore(name, c.ranks[name])
	}
	book, err := planner.New(snapshot)
	if err != nil {
		return nil, fmt.Errorf("the ledger is inconsistent: %w", err)
	}
	t.planner = book
	t.checkLedger(&c, w, now)
	return t, nil
}

// termTime returns the time since the start of the term in microseconds. Clients stamp their messages with it.
func (t *leaderTerm) termTime(now time.Time) int64 { return now.Sub(t.startedAt).Microseconds() }

// decide processes the inputs and returns the round to write.
func (t *leaderTerm) decide(items []input, now time.Time) *round {
	t.round.now = now
	t.planner.Now = now
	for _, it := range items {
		switch {
		case it.lease != nil:
			t.handleLease(it.lease, now)
		case it.reconnected:
			t.nodes.postponeJudgement(now)
		case it.heartbeat != nil:
			t.handleHeartbeat(it.heartbeat, now)
		default:
			t.handleCall(it.call, now)
		}
	}
	if now.Sub(t.lastTick) >= tickEvery {
		t.lastTick = now
		t.checkNodes(now)
		t.expireClients(now)
		t.resolveDoubt(now)
		t.dropUnconfirmed(now)
		if now.Sub(t.startedAt) > settleGrace {
			t.dropStandby(func(*ledgerEntry) bool { return true })
		}
	}
	if t.needsSchedule {
		t.needsSchedule = false
		t.schedule(now)
	}
	decided := t.round
	t.round = newRound() // decisions made while the round is written go into the next
	return decided
}

// apply applies one committed change. A definite failure is answered with its error. An unknown outcome is returned:
// the leader must step down after the rest of the round is answered.
func (t *leaderTerm) apply(c *change, now time.Time) error {
	switch {
	case c.err == nil:
		c.done(c.revision, now)
	case !isDefinite(c.err):
		return c.err
	case c.failed != nil:
		c.failed(c.err)
	default:
		t.cfg.Logger.Error("placement: a write to the ledger failed", "key", c.key, "error", c.err)
	}
	return nil
}

// updateRecord replaces a record and notifies its holder.
func (t *leaderTerm) updateRecord(e *ledgerEntry, next storedRecord, news Event) {
	t.anyLost = t.anyLost || next.State == StateLost
	e.storedRecord = next // before the write, so that nothing is decided twice; an unknown outcome ends the term
	value, err := e.encode()
	if err != nil {
		t.cfg.Logger.Error("placement: a record cannot be written", "id", e.ID, "error", err)
		return
	}
	e.encoded = value
	t.round.put(reservationKey(e.ID), value, func(uint64, time.Time) {
		if news.Kind != "" {
			t.notifyHolder(e, news)
		}
	}, nil)
}

func (t *leaderTerm) notifyHolder(e *ledgerEntry, news Event) {
	news.ID, news.Namespace, news.Token = e.ID, e.Namespace, e.Token
	data, err := wire.Marshal(news)
	if err != nil || e.Namespace == "" {
		return
	}
	t.publish(eventSubject(e.Namespace), data)
}

// endReservation deletes a record. then, if not nil, is called after the deletion or its failure. Several calls in one
// round delete once, and each then is called.
func (t *leaderTerm) endReservation(e *ledgerEntry, news Event, then func(error)) {
	if then != nil {
		e.onEnd = append(e.onEnd, then)
	}
	if e.ending {
		return
	}
	e.ending = true
	tell := func(err error) {
		for _, then := range e.onEnd {
			then(err)
		}
		e.ending, e.onEnd = false, nil
	}
	t.round.put(reservationKey(e.ID), nil, func(_ uint64, now time.Time) {
		if t.records[e.ID] == e { // otherwise an agent was found to run a later grant of the same id
			delete(t.records, e.ID)
			t.planner.Release(e.ID)
			t.reconcileNodesOf(e, now)
			t.endChildren(e.ID)
			t.desk.recordEnded(e.ID, news.Why)
		}
		t.needsSchedule = t.needsSchedule || len(t.queue) > 0
		if news.Kind != "" {
			t.notifyHolder(e, news)
		}
		tell(nil)
	}, tell)
}
