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
type reign struct {
	cfg    Config
	ledger *ledger
	began  time.Time
	in     *inbox

	book     *planner.Book
	held     map[string]*entry
	queue    map[string]*waiter
	roster   *roster
	sessions map[string]*session
	rules    Rules
	identity identity

	accounted      map[string]bool // nodes that have said all that runs on them, while the ledger is in doubt
	anyUnconfirmed bool            // a record may be unconfirmed

	dirty      bool // there may be something to grant
	settling   bool // nodes may still come back
	anyLost    bool // a record may be lost
	ticked     time.Time
	reconnects uint64
	round      *round // the one being decided, or the next
}

// entry is a record with what the leader does about it.
type entry struct {
	stored
	raw     wire.Raw  // the record as it was written; nil: to be written anew for an answer
	evictAt time.Time // when the grace of one that is leaving is over

	supported time.Time // when an agent last ran it, or this term began; of one that is unconfirmed
	ending    bool      // its deletion is in this round, and then
	onEnd     []func(error)
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
	told     bool // its client knows that it waits
	wait     planner.Wait
}

// newReign begins a term with what is in the ledger.
func newReign(cfg Config, l *ledger, c contents, m *mark, now time.Time) (*reign, error) {
	r := &reign{
		cfg: cfg, ledger: l, began: now, in: newInbox(), rules: cfg.Rules, round: newRound(),
		held: map[string]*entry{}, queue: map[string]*waiter{}, sessions: map[string]*session{}, accounted: map[string]bool{},
		roster: newRoster(cfg.NodeLease, cfg.NodeSilence, now),
	}
	if cfg.Bus != nil {
		r.reconnects = cfg.Bus.Conn().Stats().Reconnects
	}
	if c.rules != nil {
		r.rules = *c.rules
	}
	snapshot := planner.Snapshot{Now: now}
	for _, s := range c.records {
		e := &entry{stored: *s, supported: now}
		r.anyUnconfirmed = r.anyUnconfirmed || s.Unconfirmed != ""
		if s.State == StateLeaving {
			e.evictAt = now.Add(r.rules.grace())
		}
		r.anyLost = r.anyLost || s.State == StateLost
		r.held[s.ID] = e
		snapshot.Reservations = append(snapshot.Reservations, s.Reservation)
	}
	r.roster.cordons = c.cordons
	for _, name := range slices.Sorted(maps.Keys(c.seats)) {
		r.roster.sit(name, c.seats[name])
	}
	book, err := planner.NewBook(snapshot)
	if err != nil {
		return nil, fmt.Errorf("the ledger contradicts itself: %w", err)
	}
	r.book = book
	r.beginLedger(&c, m, now)
	return r, nil
}

// termTime is the time of this term in microseconds, which clients stamp their messages with.
func (r *reign) termTime(now time.Time) int64 { return now.Sub(r.began).Microseconds() }

// decide takes in what has come and returns what is to be written.
func (r *reign) decide(items []item, now time.Time) *round {
	r.round.now = now
	r.book.Now = now
	for _, it := range items {
		switch {
		case it.lease != nil:
			r.hearLease(it.lease, now)
		case it.beat != nil:
			r.hearBeat(it.beat, now)
		default:
			r.take(it.call, now)
		}
	}
	if now.Sub(r.ticked) >= tickEvery {
		r.ticked = now
		r.watchNodes(now)
		r.expire(now)
		r.settleDoubt()
		r.reviewUnconfirmed(now)
	}
	if r.dirty {
		r.dirty = false
		r.schedule(now)
	}
	decided := r.round
	r.round = newRound() // what is decided while this one is written comes into the next
	return decided
}

// apply enters what was committed. What failed for certain is answered with its error. What is unknown is returned: then
// this leader must go, after everybody else in the round has got an answer.
func (r *reign) apply(c *change, now time.Time) error {
	switch {
	case c.err == nil:
		c.done(c.revision, now)
	case !resolved(c.err):
		return c.err
	case c.failed != nil:
		c.failed(c.err)
	default:
		r.cfg.Logger.Error("placement: the ledger does not take a write", "key", c.key, "error", c.err)
	}
	return nil
}

// rewrite writes a record over its old self and tells its holder.
func (r *reign) rewrite(e *entry, next stored, news Event) {
	r.anyLost = r.anyLost || next.State == StateLost
	e.stored = next // before it is written, so that nothing is decided twice; if it fails, this term ends or nobody minds
	value, err := e.encode()
	if err != nil {
		r.cfg.Logger.Error("placement: a record cannot be written", "id", e.ID, "error", err)
		return
	}
	e.raw = value
	r.round.put(reservationKey(e.ID), value, func(uint64, time.Time) {
		if news.Kind != "" {
			r.announce(e, news)
		}
	}, nil)
}

func (r *reign) announce(e *entry, news Event) {
	news.ID, news.Namespace, news.Token = e.ID, e.Namespace, e.Token
	data, err := wire.Marshal(news)
	if err != nil || e.Namespace == "" {
		return
	}
	r.publish(bus.PlacementEvents(e.Namespace), data)
}

// end deletes a record. then, if any, is called when it is gone, or could not be deleted. Several may end one in one
// round: it is gone once, and each is told.
func (r *reign) end(e *entry, news Event, then func(error)) {
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
	r.round.put(reservationKey(e.ID), nil, func(_ uint64, now time.Time) {
		if r.held[e.ID] == e { // else an agent was found to run a later grant of it meanwhile
			delete(r.held, e.ID)
			r.book.Release(e.ID)
			r.endedOn(e, now)
		}
		r.dirty = r.dirty || len(r.queue) > 0
		if news.Kind != "" {
			r.announce(e, news)
		}
		tell(nil)
	}, tell)
}
