package values

import (
	"bytes"
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/direct"
	"troupe/bus/recorder"
	"troupe/bus/wire"
)

// Receivers pull large bodies. The frame that needs one carries a Ref; the receiver reserves bytes of its connection's
// budget and then requests the body from the owner. The owner sends chunks, at most a window ahead of the slowest
// receiver's confirmations. A receiver without progress repeats its request from its current offset; this covers lost
// chunks, reconnects and restarted servers alike.
//
//	attaching ── the body is shared on this host ──► done
//	   │ it is not
//	   ▼
//	joining ── another process of the host has pulled it ──► done
//	   │ this process pulls it
//	   ▼        room in the budget              last byte
//	waiting ─────────────────────────► active ─────────────► done (Done sent, budget released)
//	   │                               │   ▲ │
//	   │                   no progress │   │ │ owner sends Gone, or is silent for giveUpAfter
//	   └────────── abandoned           └───┘ └──────────────► failed
const (
	window        = 4 << 20                // bytes in flight to one receiver of one body
	progressEvery = window / 4             // bytes between two confirmations
	stallAfter    = 700 * time.Millisecond // time without progress before the first repeated request
	stallMost     = 3 * time.Second        // the same after several requests without effect
	giveUpAfter   = 30 * time.Second       // silence of the owner before the download fails
	maxGaps       = 2                      // requests after chunks beyond the offset: one for the gap, one for a note that nothing is in flight
)

// downloads are the bodies that this endpoint receives.
type downloads struct {
	store *Store
	mu    sync.Mutex
	in    map[wire.BodyRef]*download
}

// download is one partly received body. mu guards its fields; done is called without it.
type download struct {
	ref wire.BodyRef
	Receiver
	began     time.Time
	done      []func([]byte, error)
	admission *bus.Admission

	mu        sync.Mutex
	admitted  bool
	buf       []byte // nil until the first byte arrives, so that waiting receivers use no memory
	got       int
	confirmed int
	heard     time.Time // of the owner's last message
	moved     time.Time // of the last progress, or of the last note to wait
	asked     time.Time
	patience  time.Duration     // time without progress before the request is repeated
	gaps      int               // chunks beyond the offset since the last one in order
	fetch     HostFetch         // this process pulls the body for its host, and buf is its room; nil: it does not, or has its own view
	whole     bool              // all bytes are there; this process obtains its own view of the room of fetch
	sub       *bus.Subscription // to the body's subject, with fetch
	way       way
	arrived   *direct.Arrived    // what is there of a body that comes past the bus, or is passed on; nil: got says it
	tries     int                // requests
	stop      context.CancelFunc // ends the direct pull
	after     []func()           // to be done when the direct pull has ended
	// absentSince is when the server first reported that the owner's inbox has no subscriber; zero: it has one.
	absentSince time.Time
	finished    bool
}

func newDownloads(store *Store) *downloads {
	return &downloads{store: store, in: map[wire.BodyRef]*download{}}
}

// Receiver is what a download is for.
type Receiver struct {
	Ranks  wire.RankSet // the ranks of this process that need the body; empty for a caller
	Memory Memory       // allocates the body; nil: Go's heap
	Alone  bool         // no other process needs the body
}

// Fetch requests a body and calls done with the whole body or an error. A memory that is Sharing attaches the body at its
// location, if it has one; otherwise one process of the host pulls it for all; without a Sharing memory each process pulls it for itself.
// The body belongs to done. Callers of Fetch with the same ref must not write to it: without a memory, or shared memory of the host, they share it.
// done must not block.
func (s *Store) Fetch(ref wire.BodyRef, at wire.Location, to Receiver, done func([]byte, error)) {
	if ref.Len > s.session.Bus().MaxBody() {
		s.Release(ref, to.Ranks)
		done(nil, bus.Errorf(bus.CodeRefused, "a body of %d bytes is larger than the limit of %d (bus.Config.MaxBody)", ref.Len, s.session.Bus().MaxBody()))
		return
	}
	if to.Memory == nil && !to.Alone && s.host != nil {
		to.Memory = s.host
	}
	rs := s.downloads
	rs.mu.Lock()
	if r, ok := rs.in[ref]; ok {
		r.done = append(r.done, done)
		rs.mu.Unlock()
		return
	}
	r := &download{ref: ref, Receiver: to, done: []func([]byte, error){done}, began: time.Now(), patience: stallAfter}
	r.heard = r.began
	rs.in[ref] = r
	rs.mu.Unlock()
	s.session.WakeSweep()
	if s, ok := to.Memory.(Sharing); ok && !at.IsZero() && ref.Len > MaxInline {
		s.Attach(at, ref.Len, func(body []byte) { rs.attached(r, body) })
		return
	}
	rs.join(r)
}

// Pull is Fetch into Go's heap, and waits for the body. The end of ctx ends the download.
func (s *Store) Pull(ctx context.Context, ref wire.BodyRef) ([]byte, error) {
	type result struct {
		body []byte
		err  error
	}
	doneCh := make(chan result, 1)
	s.Fetch(ref, wire.Location{}, Receiver{Alone: true}, func(body []byte, err error) { doneCh <- result{body, err} })
	select {
	case r := <-doneCh:
		return r.body, r.err
	case <-ctx.Done():
		err := bus.Errorf(bus.CodeOf(ctx.Err()), "pull a body of %d bytes: %w", ref.Len, ctx.Err())
		s.downloads.abandon(ref, err)
		return nil, err
	}
}

// attached ends a download whose body is shared; nil: it is not.
func (rs *downloads) attached(r *download, body []byte) {
	if body == nil {
		rs.join(r)
		return
	}
	r.mu.Lock()
	late := r.finished
	if !late {
		r.buf = body
	}
	r.mu.Unlock()
	if late {
		FreeBody(r.Memory, body)
		return
	}
	rs.store.CountReceived(PathShared, r.ref.Len)
	rs.finish(r, nil)
}

// pull reserves bytes of the budget for a download, and requests it then.
func (rs *downloads) pull(r *download) {
	budget := rs.store.session.Bus().Budget()
	a := budget.Acquire(min(r.ref.Len, window), func() { rs.admit(r) })
	r.mu.Lock()
	r.admission = a
	late := r.finished // finish has not seen the admission, so it is released here
	r.mu.Unlock()
	if late && !budget.Cancel(a) {
		budget.Release(a)
	}
}

func (rs *downloads) len() int {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	return len(rs.in)
}

// admit sends the request after the budget has been reserved.
func (rs *downloads) admit(r *download) {
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
	rs.listen(r)
	rs.want(r)
	if r.ref.Len == 0 {
		rs.finish(r, nil)
	}
}

func (rs *downloads) want(r *download) {
	r.mu.Lock()
	r.asked = time.Now()
	h := rs.header(r)
	h.Offset = uint64(r.got)
	if r.sub != nil {
		h.ForHost = wire.ForAll
	}
	var ask []byte
	if r.tries++; r.way == wayUnknown && r.tries <= mostAsks {
		ask = rs.store.direct.ask(r.ref.Len)
	}
	r.mu.Unlock()
	_ = rs.store.session.Send(rs.store.session.Inbox(r.ref.Owner), &wire.Frame{Kind: wire.KindWant, Header: h, Body: ask}) // repeated without progress
}

// Chunk receives a piece of a body. An empty one says how much was sent before it. A chunk before the current offset
// belongs to another receiver and is ignored; a chunk beyond it means that one was lost, and the request is repeated.
func (s *Store) Chunk(f *wire.Frame) {
	s.CountReceived(PathChunks, int64(len(f.Body)))
	rs := s.downloads
	rs.mu.Lock()
	r := rs.in[f.Header.Ref]
	rs.mu.Unlock()
	if r == nil {
		if len(f.Body) == 0 && f.Header.Offset == uint64(f.Header.Ref.Len) {
			s.Release(f.Header.Ref, wire.RankSet{}) // the first Done was lost
		}
		return
	}
	r.mu.Lock()
	if !r.admitted || r.finished || r.whole || r.way == wayDirect {
		r.mu.Unlock()
		return
	}
	r.heard, r.absentSince = time.Now(), time.Time{}
	if r.buf == nil {
		if r.buf = makeBody(r.Memory, int(r.ref.Len)); r.buf == nil {
			r.mu.Unlock()
			rs.finish(r, bus.Errorf(bus.CodeRefused, "no memory for a body of %d bytes", r.ref.Len))
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
		r.way = wayBus
		r.got += copy(r.buf[r.got:], f.Body)
		r.patience, r.gaps = stallAfter, 0
		if r.arrived != nil {
			r.arrived.Fill(r.got)
		}
	}
	r.moved = r.heard
	whole := r.got == len(r.buf)
	r.whole = whole && r.fetch != nil
	confirm := !whole && r.got-r.confirmed >= progressEvery
	if confirm {
		r.confirmed = r.got
	}
	fetch := r.fetch
	got := uint64(r.got)
	r.mu.Unlock()
	switch {
	case whole && fetch != nil:
		fetch.Whole(func(body []byte) { rs.viewed(r, body) })
	case whole:
		rs.finish(r, nil)
	case confirm:
		if fetch != nil {
			fetch.Moved()
		}
		h := wire.Header{Session: s.name, Ref: f.Header.Ref, Offset: got}
		_ = s.session.Send(s.session.Inbox(r.ref.Owner), &wire.Frame{Kind: wire.KindProgress, Header: h}) // the next one includes this one
	}
}

// finish ends a download once: it sends Done, releases the budget, and passes the body or err to the waiting callers.
func (rs *downloads) finish(r *download, err error) {
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
	a, body, fetch, sub := r.admission, r.buf, r.fetch, r.sub
	whole := r.whole
	buf := body
	if r.arrived != nil && err != nil {
		r.arrived.End()
	}
	end := func() {
		if fetch != nil && !whole { // a whole body stays for others
			fetch.End()
		}
		if err != nil && fetch == nil {
			FreeBody(r.Memory, buf)
		}
	}
	if r.way == wayDirect {
		r.stop()
		r.after, end = append(r.after, end), func() {}
	}
	r.mu.Unlock()
	if sub != nil {
		_ = sub.Unsubscribe() // fails only on a closed connection
	}
	rs.store.recordTransfer(recorder.Download, r.began, r.ref.Len, err != nil)
	rs.store.Release(r.ref, r.Ranks)
	if a != nil && !rs.store.session.Bus().Budget().Cancel(a) {
		rs.store.session.Bus().Budget().Release(a)
	}
	end()
	if err != nil {
		body = nil
	}
	bodies := make([][]byte, len(waiters))
	for i := range bodies {
		if bodies[i] = body; i > 0 && r.Memory != nil { // bodies of a memory have one owner
			bodies[i] = bytes.Clone(body)
		}
	}
	for i, done := range waiters {
		done(bodies[i], err)
	}
}

// Release tells the owner that this endpoint needs no more of the body.
func (s *Store) Release(ref wire.BodyRef, ranks wire.RankSet) {
	h := wire.Header{Session: s.name, Ref: ref, Some: ranks.Len() > 0, Ranks: ranks}
	_ = s.session.Send(s.session.Inbox(ref.Owner), &wire.Frame{Kind: wire.KindDone, Header: h}) // the end of the call has the same effect
}

// Abandon ends a download that is not needed any more.
func (s *Store) Abandon(ref wire.BodyRef, why error) { s.downloads.abandon(ref, why) }

// abandon ends a download that is not needed any more.
func (rs *downloads) abandon(ref wire.BodyRef, why error) {
	rs.mu.Lock()
	r := rs.in[ref]
	rs.mu.Unlock()
	if r != nil {
		rs.finish(r, why)
	}
}

// gone fails a download whose owner does not have the body.
func (rs *downloads) gone(ref wire.BodyRef) {
	rs.abandon(ref, bus.Errorf(bus.CodeOutcomeUnknown, "the body of %d bytes is no longer offered by its owner", ref.Len))
}

// all returns the current downloads.
func (rs *downloads) all() []*download {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	return slices.Collect(maps.Values(rs.in))
}

// sweep repeats requests without progress, and all requests after a reconnect, and fails downloads whose owner is
// silent. The time of an outage of the local connection does not count.
func (rs *downloads) sweep(now time.Time, connected, anew bool) {
	for _, r := range rs.all() {
		r.mu.Lock()
		waiting := !r.admitted || r.whole || r.way == wayDirect
		fetch := r.fetch
		if waiting || !connected {
			r.heard, r.moved = now, now
		}
		silent, stalled := now.Sub(r.heard), now.Sub(r.asked) > r.patience && now.Sub(r.moved) > r.patience
		if stalled {
			r.patience = min(2*r.patience, stallMost)
		}
		stalled = stalled || anew && connected && !waiting
		r.mu.Unlock()
		if fetch != nil && waiting && connected {
			fetch.Moved()
		}
		switch {
		case silent > giveUpAfter:
			rs.finish(r, bus.Errorf(bus.CodeWorkerLost, "the owner of a body of %d bytes has not answered for %s", r.ref.Len, giveUpAfter))
		case stalled:
			rs.want(r)
			rs.store.session.Probe(r.ref.Owner)
		}
	}
}

// absent handles the server's report that the inbox of an owner has no subscriber. When this lasts, its downloads fail.
func (rs *downloads) absent(session string, now time.Time) {
	for _, r := range rs.all() {
		if r.ref.Owner != session {
			continue
		}
		r.mu.Lock()
		if r.way == wayDirect { // the data port of its node may live
			r.mu.Unlock()
			continue
		}
		if r.absentSince.IsZero() {
			r.absentSince = now
		}
		gone := now.Sub(r.absentSince) >= bus.GoneAfter
		r.mu.Unlock()
		if gone {
			rs.finish(r, bus.Errorf(bus.CodeWorkerLost, "the owner of a body of %d bytes has ended: nothing has subscribed to its inbox for %s", r.ref.Len, bus.GoneAfter))
		}
	}
}

func (rs *downloads) failAll(err error) {
	for _, r := range rs.all() {
		rs.finish(r, err)
	}
}
