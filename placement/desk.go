package placement

import (
	"context"
	"slices"
	"sync"
	"time"

	"troupe/bus"
	"troupe/placement/planner"
)

// Desk is where control services of the leader's own process ask for resources, without the bus: reservations, which are in the
// ledger, and volatile leases, which the leader keeps in memory. It outlives the terms of its leader: what waits waits on in the next
// term, and the leases are in the books before anything is granted.
//
// Its methods return at once, and may be called while the caller holds a lock: outcomes that are not known yet come by a callback, from
// another goroutine and in the order of the decisions.
type Desk struct {
	mu      sync.Mutex // guards what follows, and the term that leads
	term    *leaderTerm
	waiting map[string]*deskRequest        // by id
	lanes   map[string][]*deskRequest      // volatile requests of equal demand: the first of each is in the queue of the leader
	leases  map[string]planner.Reservation // volatile ones that are held
	ended   map[string]func(why string)
	returns map[string]uint64 // reservations to release, by id the token: no leader has taken them yet
	settled map[string]bool   // namespaces whose leases are known
	watch   map[int]func()    // of nodes
	watches int
	changed chan struct{} // closed when a term begins or ends

	calls  []func()
	wakeCh chan struct{}
}

// deskRequest is a request of a control service that is not granted.
type deskRequest struct {
	request Request
	since   time.Time
	done    func(Record, error)
	ended   func(why string)
	lane    string // of a volatile one
}

// settleGrace is how long the leases of an earlier leader are counted whose service does not say which are held.
const settleGrace = time.Minute

func newDesk() *Desk {
	return &Desk{waiting: map[string]*deskRequest{}, lanes: map[string][]*deskRequest{}, leases: map[string]planner.Reservation{}, ended: map[string]func(string){},
		returns: map[string]uint64{}, settled: map[string]bool{}, watch: map[int]func(){}, changed: make(chan struct{}), wakeCh: make(chan struct{}, 1)}
}

// Desk returns the desk of the service.
func (s *Service) Desk() *Desk { return s.desk }

// run makes the callbacks until ctx ends.
func (d *Desk) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-d.wakeCh:
		}
		d.mu.Lock()
		calls := d.calls
		d.calls = nil
		d.mu.Unlock()
		for _, call := range calls {
			call()
		}
	}
}

// later makes a callback. Its caller holds mu.
func (d *Desk) later(call func()) {
	d.calls = append(d.calls, call)
	select {
	case d.wakeCh <- struct{}{}:
	default:
	}
}

// Leads reports whether this process leads.
func (d *Desk) Leads() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.term != nil
}

// AwaitLead returns when this process leads.
func (d *Desk) AwaitLead(ctx context.Context) error {
	for {
		d.mu.Lock()
		leads, changed := d.term != nil, d.changed
		d.mu.Unlock()
		if leads {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// AwaitLoss returns when this process has not led for so long that another may.
func (d *Desk) AwaitLoss(ctx context.Context, patience time.Duration) {
	for ctx.Err() == nil {
		d.mu.Lock()
		leads, changed := d.term != nil, d.changed
		d.mu.Unlock()
		var over <-chan time.Time
		if !leads {
			over = time.After(patience)
		}
		select {
		case <-ctx.Done():
		case <-changed:
		case <-over:
			return
		}
	}
}

// Reserve asks for a reservation in the ledger; done is told the outcome, unless the request is withdrawn. One that exists under that id
// in the same namespace is the outcome. ended is called when a granted one ends without Release.
func (d *Desk) Reserve(q Request, done func(Record, error), ended func(why string)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := &deskRequest{request: q, since: time.Now(), done: done, ended: ended}
	d.waiting[q.ID] = r
	d.submit(r)
}

// Lease asks for a volatile lease. It returns it if it is free; otherwise done is told the outcome later, unless the request is withdrawn.
// ended is called when the lease is to end for a request of higher priority: Release ends it.
func (d *Desk) Lease(q Request, done func(Record, error), ended func(why string)) (Record, bool) {
	q.Volatile, q.Opportunistic, q.AwaitNodes = true, true, true
	d.mu.Lock()
	defer d.mu.Unlock()
	r := &deskRequest{request: q, since: time.Now(), done: done, ended: ended, lane: laneOf(&q)}
	if t := d.term; t != nil && len(d.lanes[r.lane]) == 0 && len(t.queue) == 0 && t.ledgerError() == nil && t.ledger.term.Valid() {
		t.planner.Now = r.since
		if granted, ok, err := t.planner.Try(&q); ok && err == nil {
			d.leases[q.ID], d.ended[q.ID] = granted, ended
			return Record{Reservation: granted, State: StateGranted}, true
		}
	}
	d.waiting[q.ID] = r
	if d.lanes[r.lane] = append(d.lanes[r.lane], r); len(d.lanes[r.lane]) == 1 {
		d.submit(r)
	}
	return Record{}, false
}

// laneOf is the same for volatile requests that fit where the other does.
func laneOf(q *Request) string {
	same := Request{Namespace: q.Namespace, Strategy: q.Strategy, Parent: q.Parent, ParentBundle: q.ParentBundle, Bundles: q.Bundles, Priority: q.Priority}
	text, err := encodeRequest(same)
	if err != nil {
		return q.ID
	}
	return string(text)
}

// submit puts a request into the queue of the leader. Its caller holds mu.
func (d *Desk) submit(r *deskRequest) {
	t := d.term
	if t == nil {
		return // the next term takes it
	}
	c := &call{namespace: r.request.Namespace, request: r.request, local: r}
	if err := t.checkReserve(c); err != nil {
		d.finish(r, Record{}, err)
		return
	}
	if e := t.records[r.request.ID]; e != nil {
		switch {
		case e.Namespace != r.request.Namespace:
			d.finish(r, Record{}, bus.Errorf(bus.CodeExists, "reservation %q exists in another namespace: %w", e.ID, ErrDuplicate))
		case e.Token != 0:
			t.confirm(e)
			d.finish(r, e.Record, nil)
		default: // it is being written for an earlier request
			e.onGrant = append(e.onGrant, c)
		}
		return
	}
	if err := t.rules.checkPriority(&r.request); err != nil {
		d.finish(r, Record{}, err)
		return
	}
	t.queue[r.request.ID] = &waiter{call: c, since: r.since, renewed: r.since}
	d.schedule()
}

// schedule decides on the queue now if it is short work, and otherwise with the next round. Its caller holds mu.
func (d *Desk) schedule() {
	t := d.term
	if t == nil || len(t.queue) == 0 {
		return
	}
	t.needsSchedule = true
	if !t.anyReserve() {
		now := time.Now()
		t.needsSchedule, t.round.now, t.planner.Now = false, now, now
		t.schedule(now)
	}
	t.inputs.wake()
}

// anyReserve reports whether a request waits for which resources are held back, which takes an analysis.
func (t *leaderTerm) anyReserve() bool {
	for _, w := range t.queue {
		if !w.call.request.Opportunistic {
			return true
		}
	}
	return false
}

// finish ends a request with its outcome. Its caller holds mu.
func (d *Desk) finish(r *deskRequest, granted Record, err error) {
	if d.waiting[r.request.ID] != r {
		if err == nil && !granted.Volatile && d.waiting[r.request.ID] == nil { // it was withdrawn while its grant was written
			d.returns[granted.ID] = granted.Token
			d.release(d.term)
		}
		return
	}
	delete(d.waiting, r.request.ID)
	if err == nil {
		if d.ended[granted.ID] = r.ended; granted.Volatile {
			d.leases[granted.ID] = granted.Reservation
		}
	}
	d.next(r)
	d.later(func() { r.done(granted, err) })
}

// next puts the next volatile request of a lane into the queue after one that leaves it. Its caller holds mu.
func (d *Desk) next(r *deskRequest) {
	if r.lane == "" {
		return
	}
	lane := d.lanes[r.lane]
	first := len(lane) > 0 && lane[0] == r
	if lane = slices.DeleteFunc(lane, func(other *deskRequest) bool { return other == r }); len(lane) == 0 {
		delete(d.lanes, r.lane)
		return
	}
	if d.lanes[r.lane] = lane; first && d.term != nil {
		q := lane[0]
		d.term.queue[q.request.ID] = &waiter{call: &call{namespace: q.request.Namespace, request: q.request, local: q}, since: q.since, renewed: q.since}
		d.term.needsSchedule = true
		d.term.inputs.wake()
	}
}

// Withdraw takes a request back that waits, and reports whether it did.
func (d *Desk) Withdraw(id string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.waiting[id]
	if r == nil {
		return false
	}
	delete(d.waiting, id)
	if t := d.term; t != nil && t.queue[id] != nil && t.queue[id].call.local == r {
		delete(t.queue, id)
		t.needsSchedule = true
		t.inputs.wake()
	}
	d.next(r)
	return true
}

// Release ends a reservation or a lease, or withdraws the request. An unknown one has ended already.
func (d *Desk) Release(id string, token uint64) {
	if d.Withdraw(id) {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.ended, id)
	if _, held := d.leases[id]; held {
		delete(d.leases, id)
		if d.term != nil {
			d.term.planner.Release(id)
			d.schedule()
		}
		return
	}
	if token == 0 {
		return
	}
	if d.returns[id] = token; d.term != nil {
		d.release(d.term)
	}
}

// release has the leader delete what is to be released. Its caller holds mu.
func (d *Desk) release(t *leaderTerm) {
	for id, token := range d.returns {
		delete(d.returns, id)
		if e := t.records[id]; e != nil && e.Token == token {
			t.endReservation(e, Event{}, nil)
			t.inputs.wake()
		}
	}
}

// SetCPUs changes the CPUs of a lease, or of a reservation of one worker until the term ends, see planner.SetCPUs.
func (d *Desk) SetCPUs(id string, cpus Share) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if lease, held := d.leases[id]; held {
		worker := lease.Workers[0]
		worker.CPUs = cpus
		lease.Workers = []Worker{worker}
		d.leases[id] = lease
	}
	if d.term != nil {
		d.term.planner.SetCPUs(id, cpus)
		d.schedule()
	}
}

// Restore takes over a lease that an earlier leader gave.
func (d *Desk) Restore(lease planner.Reservation) {
	d.mu.Lock()
	defer d.mu.Unlock()
	lease.Volatile = true
	if _, held := d.leases[lease.ID]; held {
		return
	}
	if d.leases[lease.ID] = lease; d.term != nil {
		_ = d.term.planner.Restore(lease) // fails only if it is there
	}
}

// OnEnd has ended called when a reservation ends without Release, as in Reserve.
func (d *Desk) OnEnd(id string, ended func(why string)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ended[id] = ended
}

// Settle says that all leases of a namespace are known: those of an earlier leader that nobody has restored have ended.
func (d *Desk) Settle(namespace string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.settled[namespace] = true
	if t := d.term; t != nil {
		t.dropStandby(func(e *ledgerEntry) bool { return e.Namespace == namespace })
		d.schedule()
	}
}

// Forget drops the requests and leases of a namespace whose service ends.
func (d *Desk) Forget(namespace string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.settled, namespace)
	for id, r := range d.waiting {
		if r.request.Namespace == namespace {
			delete(d.waiting, id)
			delete(d.lanes, r.lane)
			if t := d.term; t != nil && t.queue[id] != nil && t.queue[id].call.local == r {
				delete(t.queue, id)
			}
		}
	}
	for id, lease := range d.leases {
		if lease.Namespace == namespace {
			delete(d.leases, id)
			if d.term != nil {
				d.term.planner.Release(id)
			}
		}
	}
	d.schedule()
}

// Reservations lists the reservations of a namespace; false: this process does not lead.
func (d *Desk) Reservations(namespace string) ([]Record, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.term == nil {
		return nil, false
	}
	var out []Record
	for _, e := range d.term.records {
		if e.Namespace == namespace && e.Token != 0 {
			out = append(out, e.Record)
		}
	}
	return out, true
}

// Nodes lists the nodes that are not lost, by rank, with what is free of them; false: this process does not lead.
func (d *Desk) Nodes() ([]planner.NodeRoom, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.term == nil {
		return nil, false
	}
	return slices.DeleteFunc(d.term.planner.Room(), func(n planner.NodeRoom) bool { return n.Node.State == NodeLost }), true
}

// WatchNodes calls changed when nodes come, go or change, until stop.
func (d *Desk) WatchNodes(changed func()) (stop func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.watches++
	id := d.watches
	d.watch[id] = changed
	d.later(changed)
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.watch, id)
	}
}

func (d *Desk) nodesChanged() {
	for _, changed := range d.watch {
		d.later(changed)
	}
}

// begin gives a term what the desk holds, before the term grants anything.
func (d *Desk) begin(t *leaderTerm) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.term, t.desk = t, d
	for _, lease := range d.leases {
		_ = t.planner.Restore(lease) // fails only if it is there
	}
	for _, e := range t.records {
		if !d.settled[e.Namespace] {
			t.holdStandby(e)
		}
	}
	for _, r := range d.waiting {
		if r.lane == "" || d.lanes[r.lane][0] == r {
			d.submit(r)
		}
	}
	d.release(t)
	d.announce()
}

func (d *Desk) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.term = nil
	d.announce()
}

func (d *Desk) announce() {
	close(d.changed)
	d.changed = make(chan struct{})
	d.nodesChanged()
}

// recordEnded tells a control service that a reservation of it has ended, and ends the leases inside it.
func (d *Desk) recordEnded(id, why string) {
	for lease, r := range d.leases {
		if r.Parent == id {
			delete(d.leases, lease)
			delete(d.ended, lease)
			d.term.planner.Release(lease)
		}
	}
	d.term.planner.Release(standbyID(id))
	if ended := d.ended[id]; ended != nil {
		delete(d.ended, id)
		d.later(func() { ended(why) })
	}
}

// preemptLease asks the holder of a lease to end it, once.
func (d *Desk) preemptLease(id, why string) {
	if ended := d.ended[id]; ended != nil {
		d.ended[id] = nil
		d.later(func() { ended(why) })
	}
}

// standbyID is the id of what is counted for the unknown leases of an earlier leader; no request may have such an id.
func standbyID(id string) string { return "leases in " + id }

// holdStandby counts what volatile leases in the workers of a reservation may hold.
func (t *leaderTerm) holdStandby(e *ledgerEntry) {
	if e.Standby.IsZero() || len(e.Workers) == 0 {
		return
	}
	w := e.Workers[0]
	held := Worker{Node: w.Node, NodeRank: w.NodeRank, CPUs: e.Standby.CPUs, Memory: e.Standby.Memory, Resources: e.Standby.Resources}
	_ = t.planner.Restore(planner.Reservation{ID: standbyID(e.ID), Namespace: e.Namespace, Holder: "leases that an earlier head gave", Since: e.Since,
		Parent: e.Parent, ParentBundle: e.ParentBundle, SharesWith: e.SharesWith, Volatile: true, Workers: []Worker{held}}) // fails only if it is there
}

// dropStandby ends the count of unknown leases.
func (t *leaderTerm) dropStandby(which func(*ledgerEntry) bool) {
	for _, e := range t.records {
		if which(e) {
			t.planner.Release(standbyID(e.ID))
		}
	}
}
