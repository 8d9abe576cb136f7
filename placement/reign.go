package placement

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"troupe/bus"
)

// reign is all that a leader knows in one term. The loop owns it; what is committed changes it, in apply, and nothing
// else does, but for what only a term knows: the queue, the clients, the nodes' signs of life.
type reign struct {
	cfg    Config
	ledger *ledger
	began  time.Time
	in     *inbox

	book     *Book
	held     map[string]*entry
	queue    map[string]*waiter
	roster   *roster
	sessions map[string]*session
	rules    Rules

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
	raw     bus.Raw   // the record as it was written; nil: to be written anew for an answer
	evictAt time.Time // when the grace of one that is leaving is over
	ending  bool      // its deletion is in this round, and then
	onEnd   []func(error)
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
	wait     Wait
}

// round is what is committed together. Each change knows what to do when it is done, or when it was not.
type round struct {
	now     time.Time
	changes []*change
	byKey   map[string]*change
}

type change struct {
	key    string
	value  []byte // nil: it is deleted
	done   func(revision uint64, now time.Time)
	failed func(err error) // nil: the loop tries again by itself

	revision uint64
	err      error
}

func (c *change) keyedChange() keyedChange { return keyedChange{c.key, c.value} }

func newRound() *round { return &round{byKey: map[string]*change{}} }

// put writes a key in this round, or with no value deletes it. A later change of the same key takes the place of the
// earlier, and does for both.
func (r *round) put(key string, value []byte, done func(uint64, time.Time), failed func(error)) {
	c := r.byKey[key]
	if c == nil {
		c = &change{key: key, value: value, done: done, failed: failed}
		r.byKey[key] = c
		r.changes = append(r.changes, c)
		return
	}
	earlier := c.done
	c.value, c.failed = value, failed
	c.done = func(revision uint64, now time.Time) {
		earlier(revision, now)
		done(revision, now)
	}
}

// newReign begins a term with what is in the ledger.
func newReign(cfg Config, l *ledger, c contents, now time.Time) (*reign, error) {
	r := &reign{
		cfg: cfg, ledger: l, began: now, in: newInbox(), rules: cfg.Rules, round: newRound(),
		held: map[string]*entry{}, queue: map[string]*waiter{}, sessions: map[string]*session{},
		roster: newRoster(cfg.NodeLease, cfg.NodeSilence, now),
	}
	if cfg.Bus != nil {
		r.reconnects = cfg.Bus.Conn().Stats().Reconnects
	}
	if c.rules != nil {
		r.rules = *c.rules
	}
	snapshot := Snapshot{Now: now}
	for _, s := range c.records {
		e := &entry{stored: *s}
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
	book, err := NewBook(snapshot)
	if err != nil {
		return nil, fmt.Errorf("the ledger contradicts itself: %w", err)
	}
	r.book = book
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
			r.tellBook(r.roster.beat(it.beat, now))
		default:
			r.take(it.call, now)
		}
	}
	if now.Sub(r.ticked) >= tickEvery {
		r.ticked = now
		r.watchNodes(now)
		r.expire(now)
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

func (r *reign) hearLease(news *leaseNews, now time.Time) {
	switch {
	case news.report != nil:
		r.tellBook(r.roster.leaseTaken(news.report, now))
	case news.gone != "":
		r.roster.leaseGone(news.gone)
	default:
		r.roster.seen = true
	}
}

// watchNodes judges the nodes and tells the book, and the holders of what is lost.
func (r *reign) watchNodes(now time.Time) {
	if n := r.reconnectCount(); n != r.reconnects {
		r.reconnects = n
		r.roster.calm(now)
	}
	lost, gone := r.roster.judge(now)
	for _, m := range lost {
		r.cfg.Logger.Warn("placement: a node is lost", "node", m.name, "why", m.why)
		r.loseOn(m.name, m.why)
	}
	for _, m := range gone {
		r.cfg.Logger.Warn("placement: a node is gone", "node", m.name)
		r.endOn(m.name)
		m.leave()
	}
	for _, name := range slices.Sorted(maps.Keys(r.roster.members)) {
		r.tellBook(r.roster.members[name])
		r.ask(r.roster.members[name])
	}
	if settling := r.roster.settling(now); settling != r.settling {
		r.settling, r.dirty = settling, true
	}
}

func (r *reign) reconnectCount() uint64 {
	if r.cfg.Bus == nil {
		return 0
	}
	return r.cfg.Bus.Conn().Stats().Reconnects
}

// tellBook brings the book up to date with one node, if it is one. A newcomer is seated first.
func (r *reign) tellBook(m *member) {
	switch {
	case m == nil:
		return
	case m.over && m.report == nil && !r.needed(m.name):
		r.unseat(m)
	case !m.seated && m.report != nil:
		r.seat(m)
	case !m.changed:
		return
	case m.present():
		if err := r.book.SetNode(m.node()); err != nil {
			r.cfg.Logger.Error("placement: a node's report makes no sense", "node", m.name, "error", err)
		}
		if m.state == NodeReady {
			r.restoreOn(m.name)
		}
		r.dirty = r.dirty || len(r.queue) > 0
	default:
		r.book.RemoveNode(m.name)
		r.dirty = r.dirty || len(r.queue) > 0
	}
	m.changed = false
}

// ask asks a node that has a lease for the report that is missing. A question that is lost is asked again.
func (r *reign) ask(m *member) {
	if m.proven || !m.leased || r.book.Now.Sub(m.asked) < askEvery {
		return
	}
	m.asked = r.book.Now
	r.publish(bus.NodeAsk(m.name), nil)
}

// needed reports whether a reservation has something on a node.
func (r *reign) needed(name string) bool {
	for _, e := range r.held {
		if slices.Contains(e.nodes(), name) {
			return true
		}
	}
	return false
}

// seat writes a newcomer's rank. If that fails it is tried again at the next tick.
func (r *reign) seat(m *member) {
	value, err := bus.Marshal(seat{m.rank})
	if err != nil {
		return
	}
	r.round.put(seatKey(m.name), value, func(uint64, time.Time) {
		m.seated, m.changed = true, true
		r.tellBook(m)
		r.ask(m)
	}, nil)
}

func (r *reign) unseat(m *member) {
	if m.changed {
		r.book.RemoveNode(m.name)
	}
	r.round.put(seatKey(m.name), nil, func(uint64, time.Time) {
		if m.report == nil {
			delete(r.roster.members, m.name)
		} else {
			m.seated = false // it came back meanwhile
		}
	}, nil)
}

// loseOn marks what is held on a node as lost.
func (r *reign) loseOn(node, why string) {
	for _, e := range r.heldOn(node) {
		if e.State != StateGranted || e.ending {
			continue
		}
		lost := e.stored
		lost.State, lost.Why = StateLost, "node "+node+" is lost: "+why
		r.rewrite(e, lost, Event{Kind: EventLost, Why: lost.Why})
	}
}

// restoreOn takes back the loss of what is held on a node that has come back in time.
func (r *reign) restoreOn(node string) {
	if !r.anyLost {
		return
	}
	for _, e := range r.heldOn(node) {
		if e.State != StateLost || e.ending || len(e.Ended) > 0 || !r.whole(e) {
			continue
		}
		back := e.stored
		back.State, back.Why = StateGranted, ""
		r.rewrite(e, back, Event{Kind: EventRestored})
	}
}

// whole reports whether all nodes of a reservation are there and alive.
func (r *reign) whole(e *entry) bool {
	return !slices.ContainsFunc(e.nodes(), func(name string) bool {
		m := r.roster.members[name]
		return m == nil || !m.present() || m.state == NodeLost
	})
}

// endOn ends what was granted on a node whose lease is over: the whole reservation, if it has nothing on any other.
// What it has elsewhere may still be in use, and is its holder's to release.
func (r *reign) endOn(node string) {
	for _, e := range r.heldOn(node) {
		if e.ending || slices.Contains(e.Ended, node) {
			continue
		}
		ended := e.stored
		ended.Ended = append(slices.Clone(e.Ended), node)
		ended.State, ended.Why = StateLost, "the lease of node "+node+" is over"
		if len(ended.Ended) == len(e.nodes()) {
			r.end(e, Event{Kind: EventEnded, Why: ended.Why}, nil)
			continue
		}
		r.rewrite(e, ended, Event{Kind: EventLost, Why: ended.Why})
	}
}

func (r *reign) heldOn(node string) []*entry {
	var found []*entry
	for _, e := range r.held {
		if slices.Contains(e.nodes(), node) {
			found = append(found, e)
		}
	}
	slices.SortFunc(found, func(a, b *entry) int { return cmp.Compare(a.ID, b.ID) })
	return found
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
	r.round.put(reservationKey(e.ID), value, func(uint64, time.Time) { r.announce(e, news) }, nil)
}

func (r *reign) announce(e *entry, news Event) {
	news.ID, news.Namespace, news.Token = e.ID, e.Namespace, e.Token
	data, err := bus.Marshal(news)
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
	r.round.put(reservationKey(e.ID), nil, func(uint64, time.Time) {
		delete(r.held, e.ID)
		r.book.Release(e.ID)
		r.dirty = r.dirty || len(r.queue) > 0
		if news.Kind != "" {
			r.announce(e, news)
		}
		tell(nil)
	}, tell)
}

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
	r.end(e, Event{Kind: EventPreempted, Why: "its grace is over"}, func(err error) {
		if err != nil {
			return
		}
		for i := range e.Workers {
			r.roster.suspect(e.Workers[i].Slots, "not shown clean since "+e.ID+" was preempted")
		}
		for _, name := range e.nodes() {
			if m := r.roster.members[name]; m != nil {
				r.tellBook(m)
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
	queue := make([]Queued, 0, len(r.queue))
	for _, w := range r.queue {
		q := Queued{Request: w.call.request, Since: w.since, Admitted: w.admitted}
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

// grant writes a reservation into the ledger. It enters the book and is told when it is there.
func (r *reign) grant(g *Grant) {
	w := r.queue[g.Reservation.ID]
	delete(r.queue, g.Reservation.ID)
	e := &entry{stored: stored{
		Record:  Record{Reservation: g.Reservation, State: StateGranted, Unmet: g.Unmet},
		Session: w.call.Session, Seq: w.call.Seq, Digest: w.call.digest,
	}}
	value, err := e.encode()
	if err == nil && int64(len(value)) > r.maxRecord() {
		err = &RequestError{ErrTooManyBundles, fmt.Sprintf("a reservation of %d workers takes %d bytes", len(e.Workers), len(value)), fmt.Sprintf("the server takes %d", r.maxRecord())}
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
		e.Token = revision
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
	r.finish(c, &answer{Kind: answerDone, Record: e.raw, Token: e.Token})
}

// fail ends a waiting request with an error.
func (r *reign) fail(w *waiter, err error) {
	delete(r.queue, w.call.request.ID)
	r.finish(w.call, &answer{Kind: answerFailed, Error: toWire(err)})
}

// wait leaves a request in the queue and says so, the first time; one that would not wait is refused.
func (r *reign) wait(wait *Wait, position int, settling bool) {
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
func told(w *Wait) *Wait {
	short := *w
	short.WaitsFor = limited(w.WaitsFor)
	return &short
}

// whyNot is the refusal of a request that could wait but does not want to.
func (r *reign) whyNot(w *waiter, wait *Wait) error {
	if over := r.rules.overQuota(&w.call.request, r.book.usage[w.call.request.Namespace]); over != nil {
		return over
	}
	if plan, err := r.book.Plan(w.call.request); err == nil && !plan.Granted && !plan.Never {
		return plan.Err()
	}
	return &NoCapacityError{Reasons: []Reason{{Code: ReasonGang, Text: wait.Text}}, WaitsFor: wait.WaitsFor}
}

// preempt tells reservations to go.
func (r *reign) preempt(p Preemption) {
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
	}
}

// position is where the request of that id would stand in the queue if it were there, from 1.
func position(d Decision, id string) int {
	at := slices.IndexFunc(d.Waits, func(w Wait) bool { return w.ID == id })
	return at + 1
}

// explain says what would become of a request now.
func (r *reign) explain(c *call, now time.Time) (*Explanation, error) {
	request := c.request
	x := &Explanation{}
	if e := r.held[request.ID]; e != nil && request.ID != "" {
		held := e.Record
		x.Held = &held
	}
	for trial := 0; x.Held != nil || request.ID == "" || r.book.groups[request.ID] > 0; trial++ {
		request.ID = fmt.Sprintf("(this request %d)", trial) // no name that a reservation may have
		if r.book.groups[request.ID] == 0 && r.book.byName[request.ID] == nil {
			break
		}
	}
	request.AwaitNodes = request.AwaitNodes || r.roster.settling(now)
	plan, err := r.book.Plan(request)
	if err != nil {
		return nil, err
	}
	x.Plan = plan
	x.Reasons, x.WaitsFor = limited(plan.Reasons), limited(plan.WaitsFor)
	if request.PerInstance > 0 {
		return x, nil
	}
	queue := []Queued{{Request: request, Since: now}}
	for id, w := range r.queue {
		if id == request.ID {
			queue[0].Since = w.since
			continue
		}
		queue = append(queue, Queued{Request: w.call.request, Since: w.since, Admitted: w.admitted})
	}
	d := r.book.Schedule(queue, r.rules.Policy)
	x.Position = position(d, request.ID)
	if x.Position > 0 {
		x.Wait = told(&d.Waits[x.Position-1])
	}
	for _, p := range d.Preemptions {
		if p.For == request.ID {
			x.Preempts = p.Victims
		}
	}
	for _, refusal := range d.Refusals {
		if refusal.ID == request.ID && x.Granted {
			return nil, refusal.Err
		}
	}
	if x.Granted && x.Position > 0 { // there is room, but not for it
		x.Granted, x.Workers = false, []Worker{}
		x.Reasons = []Reason{{Code: ReasonGang, Text: x.Wait.Text}}
	}
	return x, nil
}

// page is a part of a sorted list that fits into a message: what comes behind after, and the last of it if there is
// more.
func page[T any](items []T, name func(*T) string, after string) (part []T, next string) {
	slices.SortFunc(items, func(a, b T) int { return cmp.Compare(name(&a), name(&b)) })
	size := 0
	for i := range items {
		if name(&items[i]) <= after && after != "" {
			continue
		}
		one, err := bus.Marshal(items[i])
		if err != nil {
			continue
		}
		if size += len(one); size > pageBytes && len(part) > 0 {
			return part, name(&part[len(part)-1])
		}
		part = append(part, items[i])
	}
	return part, ""
}

func (r *reign) records(namespace, after string) (records []Record, next string) {
	for _, e := range r.held {
		if (namespace == "" || e.Namespace == namespace) && e.Token != 0 {
			records = append(records, e.Record)
		}
	}
	return page(records, func(x *Record) string { return x.ID }, after)
}

func (r *reign) waiting(namespace string, now time.Time) []Waiting {
	list := []Waiting{}
	for id, w := range r.queue {
		q := &w.call.request
		if namespace != "" && q.Namespace != namespace {
			continue
		}
		list = append(list, Waiting{
			ID: id, Namespace: q.Namespace, Holder: q.Holder, Priority: q.Priority, Devices: q.Devices(),
			Waited: now.Sub(w.since).Milliseconds(), Wait: *told(&w.wait),
		})
	}
	slices.SortFunc(list, func(a, b Waiting) int {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(b.Waited, a.Waited), cmp.Compare(a.ID, b.ID))
	})
	return limited(list)
}

func (r *reign) nodes(after string) (nodes []NodeStatus, next string) {
	for _, m := range r.roster.members {
		nodes = append(nodes, m.status())
	}
	for name, all := range r.roster.cordons {
		if r.roster.members[name] == nil {
			away := NodeStatus{Rank: -1, State: NodeUnproven, Why: "it is away", Cordons: all.list()}
			away.Report.Node = name
			nodes = append(nodes, away)
		}
	}
	return page(nodes, func(x *NodeStatus) string { return x.Report.Node }, after)
}
