package bus

import (
	"sync"
	"time"

	"troupe/bus/wire"
)

const (
	chunkSize  = 512 << 10
	minChunk   = 4 << 10
	gatherWait = 25 * time.Millisecond  // those who want a body wait so long for the next one, to be served together,
	gatherRate = 1 << 30                // or as long as it takes to send the body again, at so many bytes a second,
	gatherMost = 500 * time.Millisecond // and no longer than this
	remindIn   = 5 * time.Second        // a caller that has been sent all of a body, and has said nothing since, is told so
	slowAfter  = 3 * time.Second        // a receiver that confirms nothing for so long no longer holds up the others
)

// store is the bodies that this endpoint holds for others: the large arguments of its calls and the large answers of
// its workers.
type store struct {
	ep   *Endpoint
	mu   sync.Mutex
	next uint64
	held map[uint64]*held
}

// held is one body that receivers pull. Its bytes are never written to while it is held.
type held struct {
	st      *store
	ref     wire.Ref
	body    []byte
	subject string // where all its receivers listen, for one stream to all; empty: to each its own inbox
	onDone  func() // called once, when nobody reads the body any more

	mu      sync.Mutex
	needed  wire.RankSet // ranks that have not said Done; empty for a caller's inbox, which is done at once
	wanting wire.RankSet // of those, the ranks that want it in the next stream
	wants   []want
	first   time.Time            // of the oldest entry of wants
	latest  time.Time            // of the newest
	serving map[string]*receiver // by session, of the stream that runs
	tried   map[string]bool      // those who were served together with others, and do not hear that if they ask again
	asker   string               // a caller that has asked for it, when there is one alone
	active  time.Time            // when that was, or when it was reminded
	to      string               // the subject of that stream
	sent    int                  // how far it has come
	pumping bool
	dropped bool
	wakeCh  chan struct{} // holds one; a want or a confirmation came in
}

// want is one receiver's request.
type want struct {
	session string
	offset  int
	ranks   wire.RankSet
}

// receiver is one of those a stream runs to.
type receiver struct {
	ranks wire.RankSet // of its process; empty for a caller
	acked int          // it has this much
	told  int          // it has asked from there, and was told how much was sent; -1: it has not asked
	moved time.Time    // when it last said something, or when its stream began
}

func newStore(ep *Endpoint) *store { return &store{ep: ep, held: map[uint64]*held{}} }

// Hold keeps body until everyone in ranks is done with it (a single unnamed receiver if ranks is empty), or until it
// is dropped; onDone, if set, is called when nobody reads it any more. subject is where all those ranks listen, or empty.
func (e *Endpoint) Hold(body []byte, ranks wire.RankSet, subject string, onDone func()) wire.Ref {
	st := e.store
	h := &held{st: st, body: body, subject: subject, needed: ranks, onDone: onDone, serving: map[string]*receiver{}, tried: map[string]bool{}, wakeCh: make(chan struct{}, 1)}
	st.mu.Lock()
	st.next++
	h.ref = wire.Ref{Owner: e.session, ID: st.next, Len: int64(len(body))}
	st.held[h.ref.ID] = h
	st.mu.Unlock()
	return h.ref
}

// Drop forgets a held body. It may be called for one that is gone.
func (e *Endpoint) Drop(ref wire.Ref) {
	if h := e.store.get(ref.ID); h != nil {
		e.store.forget(h)
	}
}

// Holding counts the bodies this endpoint holds for others; zero when nothing is under way.
func (e *Endpoint) Holding() int {
	e.store.mu.Lock()
	defer e.store.mu.Unlock()
	return len(e.store.held)
}

func (st *store) get(id uint64) *held {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.held[id]
}

func (st *store) forget(h *held) {
	st.mu.Lock()
	delete(st.held, h.ref.ID)
	st.mu.Unlock()
	h.mu.Lock()
	h.dropped = true
	tell := h.unreadLocked()
	h.mu.Unlock()
	h.wake()
	tell()
}

// unreadLocked is what to do, without the lock, if nobody reads the body any more: it is dropped, and no pump runs.
func (h *held) unreadLocked() (tell func()) {
	if h.onDone == nil || !h.dropped || h.pumping {
		return func() {}
	}
	tell, h.onDone = h.onDone, nil
	return tell
}

// rest notes that no pump runs.
func (h *held) rest() {
	h.mu.Lock()
	h.pumping = false
	tell := h.unreadLocked()
	h.mu.Unlock()
	tell()
}

func (st *store) dropAll() {
	st.mu.Lock()
	all := make([]*held, 0, len(st.held))
	for _, h := range st.held {
		all = append(all, h)
	}
	st.mu.Unlock()
	for _, h := range all {
		st.forget(h)
	}
}

// wanted notes a receiver's request and sees to it that somebody serves it.
func (st *store) wanted(f *wire.Frame) {
	inbox := replyIn(st.ep.namespace, f.Header.Session)
	h := st.get(f.Header.Ref.ID)
	if h == nil || f.Header.Offset > uint64(len(h.body)) {
		_ = st.ep.send(inbox, &wire.Frame{Kind: wire.KindGone, Header: wire.Header{Ref: f.Header.Ref}}) // the receiver asks again if it is lost
		return
	}
	w := want{session: f.Header.Session, offset: int(f.Header.Offset), ranks: f.Header.Ranks.Clone()}
	start, sign := h.ask(w, time.Now())
	if start {
		if !st.ep.spawn(h.pump) {
			h.rest()
		}
		st.ep.wakeSweep()
	}
	if sign.subject == "" {
		sign.subject = inbox
	}
	if sign.say {
		_ = st.ep.send(sign.subject, &wire.Frame{Kind: wire.KindChunk, Header: wire.Header{Ref: h.ref, Offset: uint64(sign.offset)}})
	}
}

// sign is an empty chunk: up to this offset everything was sent, this way. It tells a receiver that has all that, or must
// wait for others, that the owner lives; and one that has less, that the rest was lost.
type sign struct {
	say     bool
	subject string // empty: the receiver's inbox
	offset  int
}

// ask takes in a request, unless its receiver is served and may miss nothing. It reports whether a pump must be started,
// and what to say in the meantime.
func (h *held) ask(w want, now time.Time) (start bool, s sign) {
	h.mu.Lock()
	defer h.mu.Unlock()
	defer h.wake()
	if h.dropped { // a moment ago: it is not read any more
		return false, sign{}
	}
	if served, s := h.served(w, now); served {
		return false, s
	}
	h.latest, h.active = now, now
	if h.needed.Len() == 0 {
		h.asker = w.session
	}
	if len(h.wants) == 0 {
		h.first = now
	}
	h.wants = append(withoutWant(h.wants, w.session), w)
	for _, r := range w.ranks.List() {
		h.wanting.Add(r)
	}
	start = !h.pumping
	h.pumping = true
	return start, sign{say: len(h.serving) > 0, offset: w.offset}
}

// served reports whether the stream that runs goes on serving this receiver. It may have all that was sent, and wait with
// us for a slower one. If it has less, that may be on its way: it is told how much was sent, behind all of that. If it
// then asks once more from the same place it has missed something, and leaves the stream, which no longer waits for it.
func (h *held) served(w want, now time.Time) (bool, sign) {
	r := h.serving[w.session]
	switch {
	case r == nil:
		return false, sign{}
	case w.offset < h.sent && r.told == w.offset:
		delete(h.serving, w.session)
		return false, sign{}
	}
	r.acked, r.moved, r.told = max(r.acked, w.offset), now, w.offset
	return true, sign{say: true, subject: h.to, offset: h.sent}
}

// inUse reports whether somebody has asked for a body that is held.
func (st *store) inUse() bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, h := range st.held {
		if h.hasAsker() {
			return true
		}
	}
	return false
}

func (h *held) hasAsker() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.asker != ""
}

// remind tells callers who have been sent all of a body, and have not said that they need no more of it, that there is
// no more to come: that word may have been lost.
func (st *store) remind(now time.Time) {
	st.mu.Lock()
	var all []*held
	for _, h := range st.held {
		all = append(all, h)
	}
	st.mu.Unlock()
	for _, h := range all {
		h.mu.Lock()
		due := h.asker != "" && !h.pumping && now.Sub(h.active) > remindIn
		if due {
			h.active = now
		}
		f := wire.Frame{Kind: wire.KindChunk, Header: wire.Header{Ref: h.ref, Offset: uint64(len(h.body))}}
		inbox := replyIn(st.ep.namespace, h.asker)
		h.mu.Unlock()
		if due {
			_ = st.ep.send(inbox, &f) // and once more if it is lost
		}
	}
}

func withoutWant(ws []want, session string) []want {
	out := ws[:0]
	for _, w := range ws {
		if w.session != session {
			out = append(out, w)
		}
	}
	return out
}

func (st *store) progressed(f *wire.Frame) {
	if h := st.get(f.Header.Ref.ID); h != nil {
		h.mu.Lock()
		if r := h.serving[f.Header.Session]; r != nil {
			r.acked, r.moved = max(r.acked, int(min(f.Header.Offset, uint64(len(h.body))))), time.Now()
		}
		h.mu.Unlock()
		h.wake()
	}
}

// done notes that a receiver needs nothing more; with the last one the body is forgotten.
func (st *store) done(f *wire.Frame) {
	h := st.get(f.Header.Ref.ID)
	if h == nil {
		return
	}
	h.mu.Lock()
	h.leave(f.Header.Session)
	for _, r := range f.Header.Ranks.List() {
		h.needed.Remove(r)
		h.wanting.Remove(r)
	}
	last := h.needed.Len() == 0
	h.mu.Unlock()
	h.wake()
	if last {
		st.forget(h)
	}
}

// leave takes a receiver out of those who are served and those who wait. h.mu is held.
func (h *held) leave(session string) {
	delete(h.serving, session)
	h.wants = withoutWant(h.wants, session)
}

// unneeded notes that a rank will not come for the body: it is dead, or has answered. With its last rank a receiver
// leaves the set that gives credit.
func (e *Endpoint) unneeded(ref wire.Ref, rank int) {
	h := e.store.get(ref.ID)
	if h == nil {
		return
	}
	h.mu.Lock()
	for session, r := range h.serving {
		if r.ranks.Has(rank) {
			if r.ranks.Remove(rank); r.ranks.Len() == 0 {
				h.leave(session)
			}
		}
	}
	h.mu.Unlock()
	h.st.done(&wire.Frame{Header: wire.Header{Ref: ref, Some: true, Ranks: wire.Ranks(rank)}})
}

func (h *held) wake() {
	select {
	case h.wakeCh <- struct{}{}:
	default:
	}
}

// pump serves those who want the body until nobody does. One pump runs at a time.
func (h *held) pump() {
	for {
		together, alone, more := h.nextRound()
		if !more {
			return
		}
		if len(together) > 0 {
			h.stream(h.subject, together, 0)
		}
		for _, w := range alone {
			h.stream(replyIn(h.st.ep.namespace, w.session), []want{w}, w.offset)
		}
	}
}

// nextRound waits a moment for the receivers that have not spoken yet, so that one stream serves all, and then takes
// those who want the body: together those who need it from the start and listen to one subject, alone the others.
func (h *held) nextRound() (together, alone []want, more bool) {
	for {
		h.mu.Lock()
		if h.dropped || len(h.wants) == 0 {
			h.pumping = false
			tell := h.unreadLocked()
			h.mu.Unlock()
			tell()
			return nil, nil, false
		}
		missing := h.needed.Len() - h.wanting.Len()
		again := time.Duration(len(h.body)/(gatherRate/1000)) * time.Millisecond
		left := min(max(gatherWait, again)-time.Since(h.latest), gatherMost-time.Since(h.first))
		if h.subject != "" && missing > 0 && left > 0 {
			h.mu.Unlock()
			h.waitWake(left)
			continue
		}
		for _, w := range h.wants {
			if h.subject != "" && w.offset == 0 && len(h.wants) > 1 && !h.tried[w.session] {
				h.tried[w.session] = true
				together = append(together, w)
			} else {
				alone = append(alone, w)
			}
		}
		h.wants, h.wanting = nil, wire.RankSet{}
		h.mu.Unlock()
		return together, alone, true
	}
}

// stream sends the body from offset to subject, never more than a window ahead of the slowest of its receivers. One
// that is silent for too long leaves the set, and will ask again by itself.
func (h *held) stream(subject string, to []want, offset int) {
	now := time.Now()
	h.mu.Lock()
	clear(h.serving)
	for _, w := range to {
		h.serving[w.session] = &receiver{ranks: w.ranks, acked: offset, told: -1, moved: now}
	}
	h.to, h.sent = subject, offset
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		clear(h.serving)
		h.mu.Unlock()
	}()
	size := max(min(chunkSize, int(h.st.ep.bus.nc.MaxPayload())-maxEnvelope), minChunk)
	for off := offset; off < len(h.body); {
		if !h.await(off - window + 1) {
			return
		}
		end := min(off+size, len(h.body))
		f := wire.Frame{Kind: wire.KindChunk, Header: wire.Header{Ref: h.ref, Offset: uint64(off)}, Body: h.body[off:end]}
		if h.st.ep.send(subject, &f) != nil {
			return // disconnected: the receivers ask again
		}
		off = end
		h.mu.Lock()
		h.sent = off
		h.mu.Unlock()
	}
	h.await(len(h.body)) // so that streams one after the other are not all in flight at once
}

// await waits until everyone who is still served has so many bytes; one that has them all is no longer served. Those who
// are silent for too long are served no more. It reports false when nobody is.
func (h *held) await(least int) bool {
	for {
		h.mu.Lock()
		now, patience := time.Now(), time.Duration(0)
		for session, r := range h.serving {
			switch left := slowAfter - now.Sub(r.moved); {
			case r.acked >= least:
			case left <= 0:
				delete(h.serving, session)
			default:
				patience = max(patience, left)
			}
		}
		over := h.dropped || len(h.serving) == 0
		h.mu.Unlock()
		if over || patience == 0 {
			return !over
		}
		h.waitWake(patience)
	}
}

func (h *held) waitWake(d time.Duration) {
	t := time.NewTimer(max(d, time.Millisecond))
	defer t.Stop()
	select {
	case <-h.wakeCh:
	case <-t.C:
	case <-h.st.ep.closedCh:
	}
}
