package bus

import (
	"bytes"
	"maps"
	"slices"
	"sync"
	"time"

	"troupe/bus/wire"
)

// Large bodies are pulled. The frame that needs one carries a Ref; the receiver asks for room in its connection's
// budget, and when it has it tells the owner that it wants the body. The owner sends chunks, at most a window ahead of
// what the slowest receiver has confirmed. A receiver that sees no progress asks again from where it is, so that a
// lost chunk, a reconnect and a restarted server all mend the same way.
//
//	            room in the budget              last byte
//	waiting ─────────────────────────► coming ─────────────► done (Done sent, room given back)
//	   │                               │   ▲ │
//	   │                   no progress │   │ │ owner says Gone, or says nothing for giveUpAfter
//	   └────────── abandoned           └───┘ └──────────────► failed
const (
	window        = 4 << 20                // bytes in flight to one receiver of one body
	progressEvery = window / 4             // how often a receiver confirms
	stallAfter    = 700 * time.Millisecond // no progress: ask again, at first
	stallMost     = 3 * time.Second        // and later, when asking was of no use
	giveUpAfter   = 30 * time.Second       // no sign of the owner at all
	maxGaps       = 2                      // chunks that come too early make us ask so often: once, and once more when we are told that nothing is on its way
)

// receipts are the bodies on their way to one endpoint.
type receipts struct {
	ep *Endpoint
	mu sync.Mutex
	in map[wire.Ref]*receipt
}

// receipt is one body on its way in. Its fields are guarded by mu; done is called without it.
type receipt struct {
	ref       wire.Ref
	ranks     wire.RankSet // the ranks of this process that need it; empty for a caller
	memory    Memory
	done      []func([]byte, error)
	admission *admission

	mu        sync.Mutex
	admitted  bool
	buf       []byte // nil until its first byte comes: those who wait for each other's requests do not wait for memory too
	got       int
	confirmed int
	heard     time.Time // last sign of the owner
	moved     time.Time // last progress, or word that we must wait
	asked     time.Time
	patience  time.Duration // no progress for so long: ask again
	gaps      int           // chunks that came too early since the last one that did not
	finished  bool
}

func newReceipts(ep *Endpoint) *receipts {
	return &receipts{ep: ep, in: map[wire.Ref]*receipt{}}
}

// Fetch asks for a body and calls done with it, whole, or with the reason why it will not come. The body is of memory, which
// may be nil, and belongs to whoever is called. Several callers of Fetch for one ref must not write to it; without a
// memory they share it. done must not block.
func (e *Endpoint) Fetch(ref wire.Ref, ranks wire.RankSet, memory Memory, done func([]byte, error)) {
	if ref.Len > e.bus.cfg.MaxBody {
		e.release(ref, ranks)
		done(nil, Errorf(CodeRefused, "a body of %d bytes is larger than the limit of %d (bus.Config.MaxBody)", ref.Len, e.bus.cfg.MaxBody))
		return
	}
	rs := e.receipts
	rs.mu.Lock()
	if r, ok := rs.in[ref]; ok {
		r.done = append(r.done, done)
		rs.mu.Unlock()
		return
	}
	r := &receipt{ref: ref, ranks: ranks, memory: memory, done: []func([]byte, error){done}, heard: time.Now(), patience: stallAfter}
	rs.in[ref] = r
	rs.mu.Unlock()
	e.wakeSweep()
	a := e.bus.budget.acquire(min(ref.Len, window), func() { rs.admit(r) })
	r.mu.Lock()
	r.admission = a
	late := r.finished // it was over before we had the admission: nobody else can give it back
	r.mu.Unlock()
	if late && !e.bus.budget.cancel(a) {
		e.bus.budget.release(a)
	}
}

func (rs *receipts) len() int {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	return len(rs.in)
}

// admit tells the owner to send.
func (rs *receipts) admit(r *receipt) {
	r.mu.Lock()
	if r.finished {
		r.mu.Unlock()
		return
	}
	r.admitted, r.heard = true, time.Now()
	r.moved = r.heard
	if r.ref.Len == 0 {
		r.buf = []byte{}
	}
	r.mu.Unlock()
	rs.want(r)
	if r.ref.Len == 0 {
		rs.finish(r, nil)
	}
}

func (rs *receipts) want(r *receipt) {
	r.mu.Lock()
	r.asked = time.Now()
	h := wire.Header{Session: rs.ep.session, Ref: r.ref, Offset: uint64(r.got), Some: r.ranks.Len() > 0, Ranks: r.ranks}
	r.mu.Unlock()
	_ = rs.ep.send(replyIn(rs.ep.namespace, r.ref.Owner), &wire.Frame{Kind: wire.KindWant, Header: h}) // repeated if nothing comes
}

// Chunk takes in a piece of a body. An empty one says how much was sent before it. One that is not the next belongs to
// another receiver's stream and is ignored; or something before it was lost, and then it is asked for.
func (e *Endpoint) Chunk(f *wire.Frame) {
	rs := e.receipts
	rs.mu.Lock()
	r := rs.in[f.Header.Ref]
	rs.mu.Unlock()
	if r == nil {
		if len(f.Body) == 0 && f.Header.Offset == uint64(f.Header.Ref.Len) {
			e.release(f.Header.Ref, wire.RankSet{}) // we had said so, but its owner does not know
		}
		return
	}
	r.mu.Lock()
	if !r.admitted || r.finished {
		r.mu.Unlock()
		return
	}
	r.heard = time.Now()
	if r.buf == nil {
		if r.buf = makeBody(r.memory, int(r.ref.Len)); r.buf == nil {
			r.mu.Unlock()
			rs.finish(r, Errorf(CodeRefused, "there is no memory for a body of %d bytes", r.ref.Len))
			return
		}
	}
	if f.Header.Offset < uint64(r.got) || len(f.Body) > len(r.buf)-r.got {
		r.mu.Unlock()
		return
	}
	if f.Header.Offset > uint64(r.got) {
		r.gaps++
		ask := r.gaps <= maxGaps
		r.mu.Unlock()
		if ask {
			rs.want(r)
		}
		return
	}
	if len(f.Body) > 0 {
		r.got += copy(r.buf[r.got:], f.Body)
		r.patience, r.gaps = stallAfter, 0
	}
	r.moved = r.heard
	whole := r.got == len(r.buf)
	confirm := !whole && r.got-r.confirmed >= progressEvery
	if confirm {
		r.confirmed = r.got
	}
	got := uint64(r.got)
	r.mu.Unlock()
	switch {
	case whole:
		rs.finish(r, nil)
	case confirm:
		h := wire.Header{Session: e.session, Ref: f.Header.Ref, Offset: got}
		_ = e.send(replyIn(e.namespace, r.ref.Owner), &wire.Frame{Kind: wire.KindProgress, Header: h}) // the next one says as much
	}
}

// finish ends a receipt once: the owner is told, the room is given back, and those who wait get the body or err.
func (rs *receipts) finish(r *receipt, err error) {
	rs.mu.Lock()
	if rs.in[r.ref] == r {
		delete(rs.in, r.ref)
	}
	waiters := r.done
	rs.mu.Unlock()
	r.mu.Lock()
	if r.finished {
		r.mu.Unlock()
		return
	}
	r.finished = true
	a, body := r.admission, r.buf
	r.mu.Unlock()
	rs.ep.release(r.ref, r.ranks)
	if a != nil && !rs.ep.bus.budget.cancel(a) {
		rs.ep.bus.budget.release(a)
	}
	if err != nil {
		FreeBody(r.memory, body)
		body = nil
	}
	bodies := make([][]byte, len(waiters))
	for i := range bodies {
		if bodies[i] = body; i > 0 && r.memory != nil { // it has one owner
			bodies[i] = bytes.Clone(body)
		}
	}
	for i, done := range waiters {
		done(bodies[i], err)
	}
}

// release tells the owner that this endpoint needs nothing more of the body.
func (e *Endpoint) release(ref wire.Ref, ranks wire.RankSet) {
	h := wire.Header{Session: e.session, Ref: ref, Some: ranks.Len() > 0, Ranks: ranks}
	_ = e.send(replyIn(e.namespace, ref.Owner), &wire.Frame{Kind: wire.KindDone, Header: h}) // the call's end says as much
}

// abandon ends a receipt that nobody needs any more.
func (rs *receipts) abandon(ref wire.Ref, why error) {
	rs.mu.Lock()
	r := rs.in[ref]
	rs.mu.Unlock()
	if r != nil {
		rs.finish(r, why)
	}
}

// gone is the owner's word that it does not have the body.
func (rs *receipts) gone(ref wire.Ref) {
	rs.abandon(ref, Errorf(CodeOutcomeUnknown, "the body of %d bytes is no longer held by its owner", ref.Len))
}

// all are the receipts of this moment.
func (rs *receipts) all() []*receipt {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	return slices.Collect(maps.Values(rs.in))
}

// sweep asks again where nothing moves, and everywhere after a reconnect, and gives up where the owner is silent. An
// outage of our own connection is not held against the owner.
func (rs *receipts) sweep(now time.Time, connected, anew bool) {
	for _, r := range rs.all() {
		r.mu.Lock()
		waiting := !r.admitted
		if waiting || !connected {
			r.heard, r.moved = now, now
		}
		silent, stalled := now.Sub(r.heard), now.Sub(r.asked) > r.patience && now.Sub(r.moved) > r.patience
		if stalled {
			r.patience = min(2*r.patience, stallMost)
		}
		stalled = stalled || anew && connected && !waiting
		r.mu.Unlock()
		switch {
		case silent > giveUpAfter:
			rs.finish(r, Errorf(CodeWorkerLost, "the owner of a body of %d bytes has been silent for %s", r.ref.Len, giveUpAfter))
		case stalled:
			rs.want(r)
		}
	}
}

func (rs *receipts) failAll(err error) {
	for _, r := range rs.all() {
		rs.finish(r, err)
	}
}
