package values

import (
	"slices"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

// A reference names a value of the process that put it, or that made the call whose result it is: the owner. The owner knows
// where the value lies: here, or, a large result, with the worker that made it. Other processes request the value from the
// owner and pull its body from where it lies.
//
//	             result, or error            last reference dropped
//	pending ──────────────────────► here ──────────────────────────► freed
//	   │                             ▲ handed over                     ▲
//	   └── large result ──► elsewhere┴─────────────────────────────────┤
//	                            └── the process that keeps it is lost ─┴► failed
//
// A lent value (Lend) is on a device of its owner. It is pending while a request for its bytes is served.
//
// Counting. Each process counts its own uses of a reference, and tells the owner when the first one begins (hold) and the last
// one ends (drop). The owner has a set of holders, not a number, so that a message that arrives twice changes nothing. The
// sender of a reference keeps it until the receiver has sent its hold: the arguments of a call until the call is over, the
// references of an answer until the caller has taken them. A report of everything that a process holds, sent regularly, corrects
// what was lost; a process whose inbox has had no subscriber for absentAfter is gone, with all that it held.
const (
	reportEvery = 2 * time.Second        // time between two reports of what a process holds and keeps
	absentAfter = 5 * time.Second        // time without a subscriber after which a process is gone
	probeAgain  = 500 * time.Millisecond // time between two probes of a holder that was absent
	freeGrace   = 300 * time.Millisecond // time from the end of the last holder to the end of a value: messages of two servers may overtake each other
	askerTTL    = 15 * time.Second       // a process that waits for a pending value repeats its request more often than this
	maxAskers   = 1 << 16                // processes that wait for one value
	MaxReport   = 100_000                // references in one message
	// emptyReports is the number of empty reports, reportEvery apart, to an owner after the last reference to its values was dropped: that
	// drop may have been lost, and the first reports too.
	emptyReports = 10
)

// References are the values of one endpoint to which any process of the namespace may refer, and the references that this
// process has to values of others. It is safe for concurrent use.
type References struct {
	store *Store
	bound *valueBound

	mu        sync.Mutex // guards what follows, and the values
	closed    bool
	last      uint64 // the last number of a value
	owned     map[uint64]*ownedValue
	elsewhere map[bodyKey]*ownedValue // values whose body another process keeps
	unheld    map[uint64]*ownedValue  // values that are freed after freeGrace
	held      map[wire.Reference]int  // uses in this process of other processes' values
	owners    map[string]int          // processes of those values: reports to send when none is held any more
	peers     map[string]*peer
	kept      map[uint64]*keptBody // by the number of the upload
	keptBytes int64
	version   uint64 // of the last message about what this process holds
	reported  time.Time

	lastRequest uint64
	requests    map[uint64]*valueRequest
}

// bodyKey names a body that another process keeps.
type bodyKey struct {
	session string
	id      uint64
}

// peer is another process, by session.
type peer struct {
	holds   map[uint64]struct{} // values of this endpoint to which it refers
	version uint64              // of its last message about them
	// absentSince is when the server first reported that its inbox has no subscriber, without a break since; absentLast is the
	// latest such report.
	absentSince time.Time
	absentLast  time.Time
}

// valueState is the state of an owned value.
type valueState uint8

const (
	valuePending   valueState = iota // the call is not over
	valueHere                        // body has it
	valueElsewhere                   // another process keeps the body
	valueFailed                      // err says why there is none
	valueLent                        // not in memory; its bytes are made when they are requested
)

// ownedValue is a value of this endpoint. The mutex of References guards it.
type ownedValue struct {
	id       uint64
	state    valueState
	uses     int  // in this process
	others   int  // processes that hold it
	shared   bool // another process has held it
	unwanted bool // no process will hold it again
	since    time.Time

	body     []byte
	memory   Memory
	ref      wire.BodyRef // of the body, if it is pulled
	location wire.Location
	err      *bus.Error
	contains []wire.Reference // references inside the body
	retained bool             // they are retained for the body

	producer producer
	lost     error // why the producer is believed to be lost
	taking   bool  // the body is being handed over

	lending Lending // of a value that is lent, or was until its bytes were requested

	waiters []*waiter
	askers  map[asker]time.Time
}

// producer is the rank whose result a value is.
type producer struct {
	to   bus.Address
	rank int
	gen  uint32
}

// asker is a request of another process.
type asker struct {
	session string
	number  uint64
	ready   bool
}

// Value is the value of a reference: the encoded body, which belongs to the receiver, and the references inside it, each
// retained once for the receiver.
type Value struct {
	Body       []byte
	References []wire.Reference
}

func newReferences(store *Store) *References {
	return &References{
		store: store, bound: newValueBound(store.session.Bus().ValuesConfig(), store.session.Bus().Logger()), owned: map[uint64]*ownedValue{}, elsewhere: map[bodyKey]*ownedValue{}, unheld: map[uint64]*ownedValue{},
		held: map[wire.Reference]int{}, owners: map[string]int{}, peers: map[string]*peer{}, kept: map[uint64]*keptBody{}, requests: map[uint64]*valueRequest{},
	}
}

var errReferencesClosed = bus.Errorf(bus.CodeClosed, "the session is closed, and its references with it")

// Put makes a value of an encoded body, which belongs to it from now on, with one use. contains are the references inside the
// body; they are retained as long as the value is. Past the bound of Config.Values it writes the value to disk, which may take long, or
// refuses it. After an error the body still belongs to the caller.
func (r *References) Put(body []byte, memory Memory, contains []wire.Reference) (wire.Reference, error) {
	v := &ownedValue{state: valueHere, uses: 1}
	place, in, err := r.charge(body, memory)
	if err != nil {
		return wire.Reference{}, err
	}
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		r.discharge(place, in)
		return wire.Reference{}, errReferencesClosed
	}
	r.addLocked(v)
	r.placeLocked(v, place, in, contains)
	r.mu.Unlock()
	if isSpilled(in) {
		FreeBody(memory, body)
	}
	return r.nameOf(v), nil
}

// Body is the body of a value of this process, in place; nil: it is not here. The caller has a use of the value as long as it reads it.
func (r *References) Body(ref wire.Reference) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	if v := r.owned[ref.ID]; v != nil && ref.Owner == r.store.name && v.state == valueHere {
		return v.body
	}
	return nil
}

// Promise makes a value that is pending, with one use. Fulfil or Fail follows.
func (r *References) Promise() (wire.Reference, error) {
	v := &ownedValue{uses: 1}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return wire.Reference{}, errReferencesClosed
	}
	r.addLocked(v)
	return r.nameOf(v), nil
}

func (r *References) addLocked(v *ownedValue) {
	r.last++
	v.id = r.last
	r.owned[v.id] = v
}

func (r *References) nameOf(v *ownedValue) wire.Reference {
	return wire.Reference{Owner: r.store.name, ID: v.id}
}

// placeLocked gives a value its body, which counts towards the bound. A large one is offered until the value is freed.
func (r *References) placeLocked(v *ownedValue, body []byte, memory Memory, contains []wire.Reference) {
	v.state, v.body, v.memory, v.contains = valueHere, body, memory, contains
	v.ref, v.location = wire.BodyRef{}, wire.Location{}
	if len(body) > MaxInline {
		v.location = Locate(memory, body)
		v.ref = r.store.OfferKept(body, func() {
			FreeBody(memory, body)
			r.discharge(body, memory)
		})
		r.store.Place(v.ref, v.location)
	}
	if !v.retained {
		v.retained = true
		r.retainLocked(contains)
	}
}

// Result is what a call has made: a body, a value of this endpoint that has it (Kept), or an error. References are those inside the body.
type Result struct {
	Body       []byte
	Kept       wire.Reference
	References []wire.Reference
	Err        error
}

// Fulfil gives a promised value the result of a call. A kept value moves to the promise, with its use. The body is shared with the value, and
// must not change.
func (r *References) Fulfil(promise wire.Reference, a Result) {
	if a.Err != nil {
		r.Fail(promise, a.Err)
		return
	}
	r.mu.Lock()
	v := r.owned[promise.ID]
	if v == nil || v.state != valuePending {
		r.mu.Unlock()
		return
	}
	if from := r.owned[a.Kept.ID]; !a.Kept.IsZero() && from != nil {
		delete(r.owned, from.id)
		delete(r.unheld, from.id)
		v.state, v.ref, v.location, v.contains, v.producer, v.memory = from.state, from.ref, from.location, from.contains, from.producer, from.memory
		v.err, v.lost, v.body, v.retained = from.err, from.lost, from.body, from.retained
		v.uses += from.uses
		if v.state == valueElsewhere {
			r.elsewhere[bodyKey{v.ref.Owner, v.ref.ID}] = v
		}
	} else {
		body := a.Body
		if len(body) > MaxInline { // the receiver of the answer owns its memory
			body = append([]byte(nil), body...)
		}
		r.bound.add(len(body))
		r.placeLocked(v, body, nil, a.References)
	}
	settle := r.settleLocked(v)
	r.mu.Unlock()
	settle()
}

// Fail ends a promised value with an error.
func (r *References) Fail(promise wire.Reference, err error) {
	r.mu.Lock()
	v := r.owned[promise.ID]
	if v == nil || v.state != valuePending {
		r.mu.Unlock()
		return
	}
	settle := r.failLocked(v, err)
	r.mu.Unlock()
	settle()
}

func (r *References) failLocked(v *ownedValue, err error) (settle func()) {
	if v.state == valueElsewhere {
		delete(r.elsewhere, bodyKey{v.ref.Owner, v.ref.ID})
	}
	v.state, v.err, v.ref, v.location = valueFailed, bus.AsError(err), wire.BodyRef{}, wire.Location{}
	return r.settleLocked(v)
}

// settleLocked tells all that wait for the value that it is there, and frees it if nothing refers to it. The result must be
// called without the lock.
func (r *References) settleLocked(v *ownedValue) func() {
	for a := range v.askers {
		r.replyLocked(v, a)
	}
	waiters := v.waiters
	v.waiters, v.askers = nil, nil
	for range waiters {
		v.uses++ // until it has been served
	}
	free := r.unusedLocked(v)
	return func() {
		free()
		for _, w := range waiters {
			r.serve(v, w)
		}
	}
}

// Adopt makes a value of a large answer that its worker keeps, with one use.
func (r *References) Adopt(h *wire.Header, to bus.Address, memory Memory) wire.Reference {
	v := &ownedValue{
		state: valueElsewhere, uses: 1, ref: h.Ref, location: h.Location, contains: h.References, memory: memory,
		producer: producer{to: to, rank: h.Rank, gen: h.Gen},
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return wire.Reference{}
	}
	r.addLocked(v)
	r.elsewhere[bodyKey{h.Ref.Owner, h.Ref.ID}] = v
	r.store.session.WakeSweep()
	return r.nameOf(v)
}

// Discard frees the body of a kept answer that was not adopted. A repeat of an answer that was adopted is left alone.
func (r *References) Discard(ref wire.BodyRef) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.elsewhere[bodyKey{ref.Owner, ref.ID}] == nil {
		r.sendFreeLocked(ref.Owner, ref.ID)
	}
}

func (r *References) sendFreeLocked(session string, ids ...uint64) {
	r.tellLocked(wire.KindFree, session, false, bodyNames(session, ids))
}

// bodyNames are the names of bodies that a process keeps.
func bodyNames(session string, ids []uint64) []wire.Reference {
	refs := make([]wire.Reference, len(ids))
	for i, id := range ids {
		refs[i] = wire.Reference{Owner: session, ID: id}
	}
	return refs
}

// tellLocked sends a list of references to another process. With probe the server reports when the process is absent.
func (r *References) tellLocked(kind wire.Kind, session string, probe bool, refs []wire.Reference) {
	r.version++
	f := wire.Frame{Kind: kind, Header: wire.Header{Session: r.store.name, Seq: r.version}, Body: wire.AppendReferences(nil, refs)}
	tell := r.store.session.Tell
	if probe {
		tell = r.store.session.TellProbing
	}
	_ = tell(session, &f) // the next report has the same effect
}

// Retain adds a use of each reference. The first use of another process's value is reported to its owner.
func (r *References) Retain(refs ...wire.Reference) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.retainLocked(refs)
}

func (r *References) retainLocked(refs []wire.Reference) {
	var first []wire.Reference
	for _, ref := range refs {
		if ref.Owner == r.store.name {
			if v := r.owned[ref.ID]; v != nil {
				v.uses++
				delete(r.unheld, v.id)
			}
			continue
		}
		if r.held[ref]++; r.held[ref] == 1 {
			first = append(first, ref)
			r.owners[ref.Owner] = emptyReports
		}
	}
	r.tellOwnersLocked(wire.KindHold, first)
	if len(first) > 0 {
		r.store.session.WakeSweep()
	}
}

// Release ends a use of each reference. The last use of another process's value is reported to its owner; a value of this
// process that nothing refers to is freed.
func (r *References) Release(refs ...wire.Reference) {
	var free []func()
	r.mu.Lock()
	var last []wire.Reference
	for _, ref := range refs {
		if ref.Owner == r.store.name {
			if v := r.owned[ref.ID]; v != nil {
				v.uses--
				free = append(free, r.unusedLocked(v))
			}
			continue
		}
		switch n := r.held[ref]; {
		case n > 1:
			r.held[ref] = n - 1
		case n == 1:
			delete(r.held, ref)
			last = append(last, ref)
		}
	}
	r.tellOwnersLocked(wire.KindDrop, last)
	r.mu.Unlock()
	for _, do := range free {
		do()
	}
}

// ReleaseForAll is Release of values of this process that no process will hold again: they end with their last holder, at once.
func (r *References) ReleaseForAll(refs ...wire.Reference) {
	r.mu.Lock()
	for _, ref := range refs {
		if v := r.owned[ref.ID]; v != nil && ref.Owner == r.store.name {
			v.unwanted = true
		}
	}
	r.mu.Unlock()
	r.Release(refs...)
}

// ReleaseSent is Release of references that were sent to another process. Values of this process among them are kept for a moment,
// in which the hold of that process arrives, if it is not here yet.
func (r *References) ReleaseSent(refs ...wire.Reference) {
	r.mu.Lock()
	for _, ref := range refs {
		if v := r.owned[ref.ID]; v != nil && ref.Owner == r.store.name {
			v.shared = true
		}
	}
	r.mu.Unlock()
	r.Release(refs...)
}

// RetainedReferences is a list of references inside a message. By has retained each of them once, until the receiver holds them.
type RetainedReferences struct {
	By   *References
	List []wire.Reference
}

// ReleaseSent ends these uses. The caller calls it once, when the message was received or is not needed any more.
func (r RetainedReferences) ReleaseSent() {
	if len(r.List) > 0 {
		r.By.ReleaseSent(r.List...)
	}
}

// tellOwnersLocked sends each owner the references to its values.
func (r *References) tellOwnersLocked(kind wire.Kind, refs []wire.Reference) {
	if len(refs) == 0 || r.closed {
		return
	}
	byOwner := map[string][]wire.Reference{}
	for _, ref := range refs {
		byOwner[ref.Owner] = append(byOwner[ref.Owner], ref)
	}
	for owner, own := range byOwner {
		for part := range slices.Chunk(own, MaxReport) {
			r.tellLocked(kind, owner, false, part)
		}
	}
}

// unusedLocked frees a value that nothing refers to; the result must be called without the lock. A value that another process
// has held is freed after freeGrace, unless it is held again or unwanted.
func (r *References) unusedLocked(v *ownedValue) (free func()) {
	if v.uses > 0 || v.others > 0 || r.owned[v.id] != v {
		return func() {}
	}
	if v.shared && !v.unwanted && !r.closed {
		if r.unheld[v.id] == nil {
			r.unheld[v.id], v.since = v, time.Now()
			r.store.session.WakeSweep()
		}
		return func() {}
	}
	return r.freeLocked(v)
}

// freeLocked ends a value; the result must be called without the lock.
func (r *References) freeLocked(v *ownedValue) (free func()) {
	delete(r.owned, v.id)
	delete(r.unheld, v.id)
	v.err = bus.Errorf(bus.CodeNotFound, "the value was freed: its last reference was dropped")
	for a := range v.askers {
		v.state = valueFailed
		r.replyLocked(v, a)
	}
	v.askers = nil
	ref, body, memory, contains, retained := v.ref, v.body, v.memory, v.contains, v.retained
	here := v.state == valueHere
	if v.lending.FreedFunc != nil {
		v.lending.FreedFunc(v.id)
	}
	if key := (bodyKey{ref.Owner, ref.ID}); r.elsewhere[key] == v {
		delete(r.elsewhere, key)
		r.sendFreeLocked(ref.Owner, ref.ID)
	}
	v.body, v.contains, v.retained = nil, nil, false
	return func() {
		switch {
		case !here:
		case ref.Owner != "":
			r.store.Withdraw(ref) // the body is freed when it is not read any more
		default:
			FreeBody(memory, body)
		}
		if retained {
			r.Release(contains...)
		}
	}
}

// Owned counts the values of this endpoint, Held the references of this process to others' values, and Kept the bytes of results
// that this process keeps for their callers.
func (r *References) Owned() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.owned)
}

func (r *References) Held() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.held)
}

func (r *References) Kept() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.keptBytes
}

// Close drops every reference and frees every value. What other processes hold of this one is lost to them.
func (r *References) Close() {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return
	}
	byOwner := map[string]bool{}
	for ref := range r.held {
		byOwner[ref.Owner] = true
	}
	for owner := range byOwner {
		r.tellLocked(wire.KindReport, owner, false, nil)
	}
	clear(r.held)
	r.closed = true
	var after []func()
	for _, v := range r.owned {
		if v.state == valuePending {
			after = append(after, r.failLocked(v, errReferencesClosed))
		}
		v.uses, v.others = 0, 0
	}
	for _, v := range r.owned {
		after = append(after, r.freeLocked(v))
	}
	for _, k := range r.kept {
		after = append(after, r.dropKeptLocked(k))
	}
	requests := r.requests
	r.requests = map[uint64]*valueRequest{}
	r.mu.Unlock()
	for _, do := range after {
		do()
	}
	for _, q := range requests {
		q.waiter.finish(r, Value{}, errReferencesClosed)
	}
}
