package values

import (
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

const (
	requestAfter = 500 * time.Millisecond // time without an answer of the owner before a request is repeated
	requestEvery = 2 * time.Second        // the same while the value is pending
	fetchTries   = 3                      // pulls of a body before its error counts: the owner may have it by then
)

// waiter waits for a value in this process.
type waiter struct {
	ready  bool // only whether the value is there
	memory Memory
	tries  int

	mu   sync.Mutex
	done func(Value, error) // nil: it was called, or cancelled
}

// valueRequest is a request for another process's value.
type valueRequest struct {
	number   uint64
	ref      wire.Reference
	waiter   *waiter
	sent     time.Time
	pending  bool // the owner has answered that the value is pending
	fetching bool
	placed   bool // the body is fetched from a BodySource, and the owner was not asked
}

// BodySource is where the body of a value lies. The owner may send it along with a reference: the receiver then fetches the body without asking
// first. One that is out of date costs the receiver time: the value moves when the process that has it ends, so it is not kept.
type BodySource struct {
	Ref      wire.BodyRef
	Location wire.Location
}

// Source is where the body of a value of this process lies. It is zero for a value of another process, and for one that is pending, small, or
// has references inside: their receivers ask the owner.
func (r *References) Source(ref wire.Reference) BodySource {
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.owned[ref.ID]
	known := v != nil && ref.Owner == r.store.name && v.lost == nil && len(v.contains) == 0 && (v.state == valueHere || v.state == valueElsewhere)
	if !known {
		return BodySource{}
	}
	return BodySource{Ref: v.ref, Location: v.location}
}

// finish calls done once. A value that came after cancel is dropped.
func (w *waiter) finish(r *References, v Value, err error) {
	w.mu.Lock()
	done := w.done
	w.done = nil
	w.mu.Unlock()
	if done != nil {
		done(v, err)
		return
	}
	if err == nil {
		FreeBody(w.memory, v.Body)
		r.Release(v.References...)
	}
}

func (w *waiter) cancelled() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.done == nil
}

// Get obtains the value of a reference, and calls done once with it or with its error: at once, or later from another goroutine.
// It waits while the value is pending. The body is allocated from memory, which may be nil; a body up to MaxInline is shared and
// must not be changed. cancel ends the wait without a call of done. done must not block.
func (r *References) Get(ref wire.Reference, memory Memory, done func(Value, error)) (cancel func()) {
	return r.wait(ref, &waiter{memory: memory, done: done})
}

// GetFrom is Get of a value whose body is believed to lie at a source. If it does not, the owner is asked.
func (r *References) GetFrom(ref wire.Reference, at BodySource, memory Memory, done func(Value, error)) (cancel func()) {
	if ref.Owner == r.store.name || at.Ref.Owner == "" || at.Ref.Owner == r.store.name || at.Ref.Len <= 0 {
		return r.Get(ref, memory, done)
	}
	w := &waiter{memory: memory, done: done}
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		w.finish(r, Value{}, errReferencesClosed)
		return func() {}
	}
	q := r.addRequestLocked(ref, w)
	q.fetching, q.placed = true, true
	r.mu.Unlock()
	r.store.Fetch(at.Ref, at.Location, Receiver{Memory: memory}, func(body []byte, err error) { r.fetched(q, body, nil, err) })
	return func() { r.cancelWait(ref, w) }
}

// GetHere is Get of a result that another process of this host keeps for this one. It moves no bytes: a result that does not lie in memory
// which the processes share is an error. It does not block, and calls done once, at once or later from another goroutine.
func (r *References) GetHere(ref wire.Reference, memory Memory, done func(Value, error)) {
	r.mu.Lock()
	v := r.owned[ref.ID]
	sharing, _ := memory.(Sharing)
	if v == nil || ref.Owner != r.store.name || v.state != valueElsewhere || v.location.IsZero() || sharing == nil {
		r.mu.Unlock()
		done(Value{}, errNotHere)
		return
	}
	at, n, contains := v.location, v.ref.Len, v.contains
	v.uses++
	r.retainLocked(contains)
	r.mu.Unlock()
	sharing.Attach(at, n, func(body []byte) {
		r.Release(ref)
		if body == nil {
			r.Release(contains...)
			done(Value{}, errNotHere)
			return
		}
		r.store.CountReceived(PathShared, n)
		done(Value{Body: body, References: contains}, nil)
	})
}

var errNotHere = bus.Errorf(bus.CodeNotFound, "the value is not in the shared memory of this host")

// Ready calls done once when the value of a reference is there, with its error if it has one.
func (r *References) Ready(ref wire.Reference, done func(error)) (cancel func()) {
	return r.wait(ref, &waiter{ready: true, done: func(_ Value, err error) { done(err) }})
}

func (r *References) wait(ref wire.Reference, w *waiter) (cancel func()) {
	if ref.Owner != r.store.name {
		return r.request(ref, w)
	}
	r.mu.Lock()
	v := r.owned[ref.ID]
	if v != nil && !r.closed && !w.ready {
		r.wantLocked(v)
	}
	switch {
	case r.closed:
		r.mu.Unlock()
		w.finish(r, Value{}, errReferencesClosed)
	case v == nil:
		r.mu.Unlock()
		w.finish(r, Value{}, errFreed(ref))
	case v.state == valuePending:
		v.waiters = append(v.waiters, w)
		r.mu.Unlock()
	default:
		v.uses++
		r.mu.Unlock()
		r.serve(v, w)
	}
	return func() { r.cancelWait(ref, w) }
}

func errFreed(ref wire.Reference) *bus.Error {
	return bus.Errorf(bus.CodeNotFound, "the value %s/%d was freed: nothing referred to it", ref.Owner, ref.ID)
}

func (r *References) cancelWait(ref wire.Reference, w *waiter) {
	w.mu.Lock()
	w.done = nil
	w.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	if v := r.owned[ref.ID]; v != nil && ref.Owner == r.store.name {
		kept := v.waiters[:0]
		for _, other := range v.waiters {
			if other != w {
				kept = append(kept, other)
			}
		}
		v.waiters = kept
		return
	}
	for number, q := range r.requests {
		if q.waiter == w && !q.fetching {
			delete(r.requests, number)
		}
	}
}

// serve gives a waiter a value of this endpoint that is not pending. The value has a use for it, which ends here. A body in shared memory is
// attached, as another process would do it: the receiver has it to itself without a copy.
func (r *References) serve(v *ownedValue, w *waiter) {
	name := r.nameOf(v)
	r.mu.Lock()
	state, body, ref, location, err := v.state, v.body, v.ref, v.location, v.err
	contains, alone := v.contains, !v.shared
	switch {
	case w.ready || state == valueFailed:
		r.mu.Unlock()
		r.Release(name)
		if state == valueFailed {
			w.finish(r, Value{}, copyError(err))
		} else {
			w.finish(r, Value{}, nil)
		}
	case state == valueElsewhere:
		r.mu.Unlock()
		r.store.Fetch(ref, location, Receiver{Memory: w.memory, Alone: alone}, func(body []byte, err error) { r.served(v, w, body, err) })
	default:
		r.retainLocked(contains)
		r.mu.Unlock()
		if s, ok := w.memory.(Sharing); ok && !location.IsZero() {
			s.Attach(location, int64(len(body)), func(attached []byte) {
				if attached == nil {
					r.give(v, w, body, contains)
					return
				}
				r.Release(name)
				w.finish(r, Value{Body: attached, References: contains}, nil)
			})
			return
		}
		r.give(v, w, body, contains)
	}
}

// give gives a waiter a copy of a body of this endpoint, unless the body is small. The value has a use for it, which ends here.
func (r *References) give(v *ownedValue, w *waiter, body []byte, contains []wire.Reference) {
	give := func() {
		own := body
		if len(body) > MaxInline {
			if own = makeBody(w.memory, len(body)); own != nil {
				copy(own, body)
			}
		}
		r.Release(r.nameOf(v))
		if own == nil && len(body) > 0 {
			r.Release(contains...)
			w.finish(r, Value{}, bus.Errorf(bus.CodeRefused, "no memory for a value of %d bytes", len(body)))
			return
		}
		w.finish(r, Value{Body: own, References: contains}, nil)
	}
	if len(body) <= MaxInline || !r.store.session.Spawn(give) {
		give()
	}
}

// copyError is an error that its receiver may change.
func copyError(e *bus.Error) error {
	own := *e
	return &own
}

// served ends the pull of a body that another process keeps for this one. After a failure the value may have moved, or failed
// with the cause.
func (r *References) served(v *ownedValue, w *waiter, body []byte, err error) {
	name := r.nameOf(v)
	if err == nil {
		r.mu.Lock()
		contains := v.contains
		r.retainLocked(contains)
		r.mu.Unlock()
		r.Release(name)
		w.finish(r, Value{Body: body, References: contains}, nil)
		return
	}
	w.tries++
	if w.tries >= fetchTries || w.cancelled() || !r.again(func() { r.serve(v, w) }) {
		r.mu.Lock()
		if v.state == valueFailed {
			err = copyError(v.err)
		}
		r.mu.Unlock()
		r.Release(name)
		w.finish(r, Value{}, err)
	}
}

// again runs do after a pause; false: the endpoint is closed.
func (r *References) again(do func()) bool {
	return r.store.session.Spawn(func() {
		select {
		case <-time.After(requestAfter):
		case <-r.store.session.Done():
		}
		do()
	})
}

// request asks the owner for a value.
func (r *References) request(ref wire.Reference, w *waiter) (cancel func()) {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		w.finish(r, Value{}, errReferencesClosed)
		return func() {}
	}
	r.sendRequestLocked(r.addRequestLocked(ref, w))
	r.mu.Unlock()
	r.store.session.WakeSweep()
	return func() { r.cancelWait(ref, w) }
}

func (r *References) addRequestLocked(ref wire.Reference, w *waiter) *valueRequest {
	r.lastRequest++
	q := &valueRequest{number: r.lastRequest, ref: ref, waiter: w}
	r.requests[q.number] = q
	return q
}

func (r *References) sendRequestLocked(q *valueRequest) {
	q.sent = time.Now()
	h := wire.Header{Session: r.store.name, Seq: q.number, NoData: q.waiter.ready, References: []wire.Reference{q.ref}}
	_ = r.store.session.TellProbing(q.ref.Owner, &wire.Frame{Kind: wire.KindResolve, Header: h}) // repeated
}

// repeatRequests sends requests without an answer again. Owners that are absent are reported by the server each time.
func (r *References) repeatRequests(now time.Time, connected bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, q := range r.requests {
		every := requestAfter
		if q.pending {
			every = requestEvery
		}
		if connected && !q.fetching && now.Sub(q.sent) >= every {
			r.sendRequestLocked(q)
		}
	}
}

// failRequestsLocked fails the requests to an owner that is gone; the result must be called without the lock.
func (r *References) failRequestsLocked(owner string) func() {
	var failed []*valueRequest
	for number, q := range r.requests {
		if q.ref.Owner == owner && !q.fetching {
			delete(r.requests, number)
			failed = append(failed, q)
		}
	}
	return func() {
		for _, q := range failed {
			q.waiter.finish(r, Value{}, bus.Errorf(bus.CodeWorkerLost, "the process that owned the value has ended, and the value with it: nothing has subscribed to the inbox of session %s for %s", owner, bus.GoneAfter))
		}
	}
}

// asked answers another process's request for a value. A repeat is answered again.
func (r *References) asked(f *wire.Frame) {
	if len(f.Header.References) != 1 {
		return
	}
	ref, a := f.Header.References[0], asker{session: f.Header.Session, number: f.Header.Seq, ready: f.Header.NoData}
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.owned[ref.ID]
	if v != nil && !r.closed && !a.ready {
		r.wantLocked(v)
	}
	switch {
	case v == nil || r.closed:
		r.replyLocked(&ownedValue{state: valueFailed, err: errFreed(ref)}, a)
	case v.state != valuePending:
		r.replyLocked(v, a)
	case len(v.askers) >= maxAskers:
		r.replyLocked(&ownedValue{state: valueFailed, err: bus.Errorf(bus.CodeBusy, "%d processes wait for this value already", len(v.askers))}, a)
	default:
		if v.askers == nil {
			v.askers = map[asker]time.Time{}
		}
		v.askers[a] = time.Now()
		r.sendResolved(a, &wire.Frame{Header: wire.Header{State: wire.StateQueued}})
	}
}

// replyLocked sends a value that is not pending to a process that asked for it.
func (r *References) replyLocked(v *ownedValue, a asker) {
	f := wire.Frame{Header: wire.Header{References: v.contains}}
	switch {
	case v.state == valueFailed:
		f.Header.Code = v.err.Code
		f.Header.References = nil
		f.Body, _ = wire.Marshal(v.err) // an error consists of texts
	case a.ready:
		f.Header.References = nil
	case v.ref.Owner != "":
		f.Header.Ref, f.Header.Location = v.ref, v.location
	default:
		f.Body = v.body
	}
	r.sendResolved(a, &f)
}

func (r *References) sendResolved(a asker, f *wire.Frame) {
	f.Kind, f.Header.Seq = wire.KindResolved, a.number
	if r.store.session.Tell(a.session, f) == nil { // the request is repeated
		r.store.CountSent(PathInline, int64(len(f.Body)))
	}
}

// resolved handles the owner's answer to a request.
func (r *References) resolved(f *wire.Frame) {
	h := &f.Header
	r.mu.Lock()
	q := r.requests[h.Seq]
	if q == nil || q.fetching {
		r.mu.Unlock()
		return
	}
	if p := r.peers[q.ref.Owner]; p != nil {
		p.absentSince, p.absentLast = time.Time{}, time.Time{}
	}
	if h.State == wire.StateQueued {
		q.pending = true
		r.mu.Unlock()
		return
	}
	if h.Ref.Owner != "" && !q.waiter.cancelled() {
		q.fetching = true
		r.mu.Unlock()
		refs := h.References
		r.store.Fetch(h.Ref, h.Location, Receiver{Memory: q.waiter.memory}, func(body []byte, err error) { r.fetched(q, body, refs, err) })
		return
	}
	delete(r.requests, q.number)
	if h.Code == "" {
		r.retainLocked(h.References)
	}
	r.mu.Unlock()
	if h.Code != "" {
		e := &bus.Error{}
		if err := wire.UnmarshalRecord(f.Body, e); err != nil {
			e.Message = "the error of the value cannot be decoded: " + err.Error()
		}
		e.Code = h.Code
		q.waiter.finish(r, Value{}, e)
		return
	}
	q.waiter.finish(r, Value{Body: f.Body, References: h.References}, nil)
}

// fetched ends the pull of another process's value. After a failure the owner is asked again: the body may have moved, or the
// owner knows the cause.
func (r *References) fetched(q *valueRequest, body []byte, refs []wire.Reference, err error) {
	retry := err != nil && q.waiter.tries+1 < fetchTries && !q.waiter.cancelled()
	r.mu.Lock()
	if q.placed && retry && !r.closed {
		q.placed, q.fetching = false, false
		r.sendRequestLocked(q)
		r.mu.Unlock()
		r.store.session.WakeSweep()
		return
	}
	if retry && !r.closed {
		q.waiter.tries++
		q.fetching, q.sent = false, time.Now()
		r.mu.Unlock()
		return
	}
	delete(r.requests, q.number)
	if err == nil {
		r.retainLocked(refs)
	}
	r.mu.Unlock()
	q.waiter.finish(r, Value{Body: body, References: refs}, err)
}
