package placement

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/placement/planner"
)

// reign is all that a leader knows in one term. The loop owns it; what is committed changes it, in apply, and nothing
// else does, but for what only a term knows: the queue, the clients, the nodes' signs of life.
type leaderTerm struct {
	cfg       Config
	ledger    *ledger
	startedAt time.Time
	inputs    *inputQueue

	planner  *planner.Planner
	records  map[string]*ledgerEntry
	queue    map[string]*waiter
	nodes    *nodeTable
	sessions map[string]*clientSession
	rules    Rules
	identity ledgerIdentity

	reported       map[string]bool // nodes that have said all that runs on them, while the ledger is in doubt
	anyUnconfirmed bool            // a record may be unconfirmed

	needsSchedule bool // there may be something to grant
	nodesPending  bool // nodes may still come back
	anyLost       bool // a record may be lost
	lastTick      time.Time
	reconnects    uint64
	round         *round // the one being decided, or the next
}

// entry is a record with what the leader does about it.
type ledgerEntry struct {
	storedRecord
	encoded wire.Raw  // the record as it was written; nil: to be written anew for an answer
	evictAt time.Time // when the grace of one that is leaving is over

	lastConfirmed time.Time // when an agent last ran it, or this term began; of one that is unconfirmed
	ending        bool      // its deletion is in this round, and then
	onEnd         []func(error)
}

// call is one message of a client.
type call struct {
	message
	reply     string
	namespace string // empty: an operator
	request   Request
	digest    uint64
	err       error // what is wrong with the message itself
}

// waiter is a request in the queue.
type waiter struct {
	call     *call // the latest message of it
	since    time.Time
	renewed  time.Time
	admitted bool
	notified bool // its client knows that it waits
	wait     planner.Wait
}

// newReign begins a term with what is in the ledger.
func newLeaderTerm(cfg Config, l *ledger, c ledgerContents, w *watermark, now time.Time) (*leaderTerm, error) {
	t := &leaderTerm{
		cfg: cfg, ledger: l, startedAt: now, inputs: newInputQueue(), rules: cfg.Rules, round: newRound(),
		records: map[string]*ledgerEntry{}, queue: map[string]*waiter{}, sessions: map[string]*clientSession{}, reported: map[string]bool{},
		nodes: newNodeTable(cfg.NodeLease, cfg.NodeSilence, now),
	}
	if cfg.Bus != nil {
		t.reconnects = cfg.Bus.Conn().Stats().Reconnects
	}
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
		return nil, fmt.Errorf("the ledger contradicts itself: %w", err)
	}
	t.planner = book
	t.checkLedger(&c, w, now)
	return t, nil
}

// termTime is the time of this term in microseconds, which clients stamp their messages with.
func (t *leaderTerm) termTime(now time.Time) int64 { return now.Sub(t.startedAt).Microseconds() }

// decide takes in what has come and returns what is to be written.
func (t *leaderTerm) decide(items []input, now time.Time) *round {
	t.round.now = now
	t.planner.Now = now
	for _, it := range items {
		switch {
		case it.lease != nil:
			t.handleLease(it.lease, now)
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
		t.resolveDoubt()
		t.dropUnconfirmed(now)
	}
	if t.needsSchedule {
		t.needsSchedule = false
		t.schedule(now)
	}
	decided := t.round
	t.round = newRound() // what is decided while this one is written comes into the next
	return decided
}

// apply enters what was committed. What failed for certain is answered with its error. What is unknown is returned: then
// this leader must go, after everybody else in the round has got an answer.
func (t *leaderTerm) apply(c *change, now time.Time) error {
	switch {
	case c.err == nil:
		c.done(c.revision, now)
	case !isDefinite(c.err):
		return c.err
	case c.failed != nil:
		c.failed(c.err)
	default:
		t.cfg.Logger.Error("placement: the ledger does not take a write", "key", c.key, "error", c.err)
	}
	return nil
}

// rewrite writes a record over its old self and tells its holder.
func (t *leaderTerm) updateRecord(e *ledgerEntry, next storedRecord, news Event) {
	t.anyLost = t.anyLost || next.State == StateLost
	e.storedRecord = next // before it is written, so that nothing is decided twice; if it fails, this term ends or nobody minds
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
	t.publish(bus.PlacementEvents(e.Namespace), data)
}

// end deletes a record. then, if any, is called when it is gone, or could not be deleted. Several may end one in one
// round: it is gone once, and each is told.
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
		if t.records[e.ID] == e { // else an agent was found to run a later grant of it meanwhile
			delete(t.records, e.ID)
			t.planner.Release(e.ID)
			t.reconcileNodesOf(e, now)
		}
		t.needsSchedule = t.needsSchedule || len(t.queue) > 0
		if news.Kind != "" {
			t.notifyHolder(e, news)
		}
		tell(nil)
	}, tell)
}
