package values

import (
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/recorder"
	"troupe/bus/wire"
)

const (
	chunkSize  = 512 << 10
	minChunk   = 4 << 10
	gatherWait = 25 * time.Millisecond  // wait for further receivers after each request, to serve them together,
	gatherRate = 1 << 30                // or the time to send the body again, at this many bytes a second,
	gatherMost = 500 * time.Millisecond // and at most this
	remindIn   = 5 * time.Second        // silence of a caller that was sent the whole body, before it is reminded
	slowAfter  = 3 * time.Second        // silence of a receiver before the transfer stops waiting for it
)

// uploads are the bodies that this endpoint offers to others: the large arguments of its calls and the large answers of
// its workers.
type uploads struct {
	store *Store
	mu    sync.Mutex
	next  uint64
	byID  map[uint64]*upload
}

// upload is one body that receivers pull. Its bytes do not change while it is offered.
type upload struct {
	st      *uploads
	ref     wire.BodyRef
	body    []byte
	kept    bool          // offered until withdraw, to any number of receivers, each on its own inbox
	subject string        // subscribed by all receivers, for one transfer to all; empty: each has its own inbox
	at      wire.Location // of the body in shared memory; zero: it is not there
	onDone  func()        // called once, when the body is not read any more

	mu        sync.Mutex
	needed    wire.RankSet // ranks that have not sent Done; empty for a caller, whose first Done ends the upload
	wanting   wire.RankSet // ranks of the next transfer
	byOthers  wire.RankSet // ranks for which another process of their host requests it
	wants     []want
	first     time.Time            // of the oldest entry of wants
	latest    time.Time            // of the newest
	serving   map[string]*receiver // by session, of the running transfer
	tried     map[string]bool      // sessions that were served on the common subject once, and are served alone next time
	pulled    map[string]bool      // sessions that have requested it, and so do not use it in place
	asker     string               // session of the only receiver, if it is a caller
	active    time.Time            // of the asker's request or of the last reminder
	to        string               // subject of the running transfer
	sent      int                  // bytes sent by it
	pumping   bool
	withdrawn bool
	reading   int             // direct transfers
	tickets   map[string]bool // sessions that were given one, and have not requested chunks since
	chain     chain           // of the hosts that pull it past the bus
	wakeCh    chan struct{}   // holds one; a want or a confirmation arrived
}

// want is one receiver's request.
type want struct {
	session string
	offset  int
	ranks   wire.RankSet
	forHost wire.ForHost
}

// receiver is one receiver of a running transfer.
type receiver struct {
	ranks wire.RankSet // of its process; empty for a caller
	acked int          // confirmed bytes
	told  int          // offset of its last request, which was answered with the bytes sent so far; -1: none
	moved time.Time    // of its last message, or the start of the transfer
}

func newUploads(store *Store) *uploads { return &uploads{store: store, byID: map[uint64]*upload{}} }

// Offer keeps body until every rank has sent Done (a single caller if ranks is empty), or until withdraw. onDone, if
// set, is called when the body is not read any more. subject is one that all these ranks subscribe to, or empty.
func (s *Store) Offer(body []byte, ranks wire.RankSet, subject string, onDone func()) wire.BodyRef {
	st := s.uploads
	h := &upload{st: st, body: body, subject: subject, needed: ranks, onDone: onDone, serving: map[string]*receiver{}, tried: map[string]bool{}, wakeCh: make(chan struct{}, 1)}
	h.ref = wire.BodyRef{Owner: s.name, ID: st.number(), Len: int64(len(body))}
	st.mu.Lock()
	st.byID[h.ref.ID] = h
	st.mu.Unlock()
	return h.ref
}

// OfferKept keeps body until withdraw, for any number of receivers. onDone, if set, is called when it is not read any more.
func (s *Store) OfferKept(body []byte, onDone func()) wire.BodyRef {
	ref := s.Offer(body, wire.RankSet{}, "", onDone)
	h := s.uploads.get(ref.ID)
	h.kept = true // no process knows the ref yet
	return ref
}

// Place says where the body of an upload lies in shared memory: the data port of the node can read it there.
func (s *Store) Place(ref wire.BodyRef, at wire.Location) {
	if h := s.uploads.get(ref.ID); h != nil {
		h.mu.Lock()
		h.at = at
		h.mu.Unlock()
	}
}

// Withdraw ends an upload. It may have ended before.
func (s *Store) Withdraw(ref wire.BodyRef) {
	if h := s.uploads.get(ref.ID); h != nil {
		s.uploads.forget(h)
	}
}

// withdrawIdle ends an upload that no receiver has used for so long, now or later.
func (s *Store) withdrawIdle(ref wire.BodyRef, after time.Duration) {
	h := s.uploads.get(ref.ID)
	if h == nil {
		return
	}
	h.mu.Lock()
	used, reading := h.active, h.reading > 0
	for _, r := range h.serving {
		used = latest(used, r.moved)
	}
	h.mu.Unlock()
	if reading {
		used = time.Now()
	}
	if left := after - time.Since(used); left > 0 {
		time.AfterFunc(left, bus.Guard(func() { s.withdrawIdle(ref, after) }))
		return
	}
	s.uploads.forget(h)
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// Uploads counts the bodies that this endpoint offers; zero when no call is pending.
func (s *Store) Uploads() int {
	s.uploads.mu.Lock()
	defer s.uploads.mu.Unlock()
	return len(s.uploads.byID)
}

// number is the next ID of a body that this process serves.
func (st *uploads) number() uint64 {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.next++
	return st.next
}

func (st *uploads) get(id uint64) *upload {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.byID[id]
}

func (st *uploads) forget(h *upload) {
	st.mu.Lock()
	delete(st.byID, h.ref.ID)
	st.mu.Unlock()
	h.mu.Lock()
	h.withdrawn = true
	tell := h.unreadLocked()
	h.mu.Unlock()
	h.wake()
	tell()
}

// unreadLocked returns the notification for the owner of the bytes, to be called without the lock, if the upload is
// withdrawn and nothing reads it.
func (h *upload) unreadLocked() (tell func()) {
	if h.onDone == nil || !h.withdrawn || h.pumping || h.reading > 0 {
		return func() {}
	}
	tell, h.onDone = h.onDone, nil
	return tell
}

// rest records that no pump runs.
func (h *upload) rest() {
	h.mu.Lock()
	h.pumping = false
	tell := h.unreadLocked()
	h.mu.Unlock()
	tell()
}

func (st *uploads) dropAll() {
	st.mu.Lock()
	all := make([]*upload, 0, len(st.byID))
	for _, h := range st.byID {
		all = append(all, h)
	}
	st.mu.Unlock()
	for _, h := range all {
		st.forget(h)
	}
}

// wanted records a receiver's request and starts a pump if none runs.
func (st *uploads) wanted(f *wire.Frame) {
	inbox := st.store.session.Inbox(f.Header.Session)
	h := st.get(f.Header.Ref.ID)
	if h == nil || f.Header.Offset > uint64(len(h.body)) {
		_ = st.store.session.Send(inbox, &wire.Frame{Kind: wire.KindGone, Header: wire.Header{Ref: f.Header.Ref}}) // the receiver repeats its request if this is lost
		return
	}
	if len(f.Body) > 0 && st.store.direct.answer(h, f) {
		return
	}
	st.pushed(h, f)
}

// pushed has the body sent over the bus.
func (st *uploads) pushed(h *upload, f *wire.Frame) {
	inbox := st.store.session.Inbox(f.Header.Session)
	w := want{session: f.Header.Session, offset: int(f.Header.Offset), ranks: f.Header.Ranks.Clone(), forHost: f.Header.ForHost}
	start, note := h.ask(w, time.Now())
	if start {
		if !st.store.session.Spawn(h.pump) {
			h.rest()
		}
		st.store.session.WakeSweep()
	}
	if note.subject == "" {
		note.subject = inbox
	}
	if note.send {
		_ = st.store.session.Send(note.subject, &wire.Frame{Kind: wire.KindChunk, Header: wire.Header{Ref: h.ref, Offset: uint64(note.offset)}})
	}
}

// sentNote is an empty chunk: everything up to this offset was sent on this subject. A receiver that has all of it, or
// waits for others, learns that the owner is alive; a receiver that has less learns that chunks were lost.
type sentNote struct {
	send    bool
	subject string // empty: the receiver's inbox
	offset  int
}

// ask records a request, unless the running transfer serves its receiver and nothing was lost. It reports whether a pump
// must be started, and the note to send.
func (h *upload) ask(w want, now time.Time) (start bool, s sentNote) {
	h.mu.Lock()
	defer h.mu.Unlock()
	defer h.wake()
	if h.withdrawn {
		return false, sentNote{}
	}
	if h.pulled == nil {
		h.pulled = map[string]bool{}
	}
	h.pulled[w.session] = true
	delete(h.tickets, w.session)
	h.chain.avoid(w.session)
	if w.forHost == wire.ByAnother {
		for _, r := range w.ranks.List() {
			h.byOthers.Add(r)
		}
		return false, sentNote{}
	}
	if served, s := h.served(w, now); served {
		return false, s
	}
	h.latest, h.active = now, now
	if h.needed.Len() == 0 && !h.kept {
		h.asker = w.session
	}
	if len(h.wants) == 0 {
		h.first = now
	}
	h.wants = append(withoutWant(h.wants, w.session), w)
	for _, r := range w.ranks.List() {
		h.wanting.Add(r)
		h.byOthers.Remove(r)
	}
	start = !h.pumping
	h.pumping = true
	return start, sentNote{send: len(h.serving) > 0, offset: w.offset}
}

// served reports whether the running transfer continues to serve this receiver. A receiver with all bytes sent so far
// waits for a slower one. With fewer bytes the rest may be in flight: it gets a note with the bytes sent so far, behind
// all of them. When it then repeats its request from the same offset, a chunk was lost, and it leaves the transfer.
func (h *upload) served(w want, now time.Time) (bool, sentNote) {
	r := h.serving[w.session]
	switch {
	case r == nil:
		return false, sentNote{}
	case w.offset < h.sent && r.told == w.offset:
		delete(h.serving, w.session)
		return false, sentNote{}
	}
	r.acked, r.moved, r.told = max(r.acked, w.offset), now, w.offset
	return true, sentNote{send: true, subject: h.to, offset: h.sent}
}

// inUse reports whether a caller has requested one of the uploads.
func (st *uploads) inUse() bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, h := range st.byID {
		if h.hasAsker() {
			return true
		}
	}
	return false
}

func (h *upload) hasAsker() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.asker != ""
}

// remind sends a note to callers that were sent a whole body and have not sent Done: the Done may have been lost.
func (st *uploads) remind(now time.Time) {
	st.mu.Lock()
	var all []*upload
	for _, h := range st.byID {
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
		inbox := st.store.session.Inbox(h.asker)
		h.mu.Unlock()
		if due {
			_ = st.store.session.Send(inbox, &f) // repeated at the next reminder
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

func (st *uploads) progressed(f *wire.Frame) {
	if h := st.get(f.Header.Ref.ID); h != nil {
		h.mu.Lock()
		if r := h.serving[f.Header.Session]; r != nil {
			r.acked, r.moved = max(r.acked, int(min(f.Header.Offset, uint64(len(h.body))))), time.Now()
		}
		h.mu.Unlock()
		h.wake()
	}
}

// done records that a receiver needs no more; the last one ends the upload.
func (st *uploads) done(f *wire.Frame) {
	h := st.get(f.Header.Ref.ID)
	if h == nil {
		return
	}
	h.mu.Lock()
	switch session := f.Header.Session; {
	case session == "":
	case !h.pulled[session]:
		st.store.CountSent(PathShared, h.ref.Len)
	case h.tickets[session]:
		delete(h.tickets, session)
		st.store.CountSent(PathDirect, h.ref.Len)
	}
	h.leave(f.Header.Session)
	h.chain.leave(f.Header.Session)
	for _, r := range f.Header.Ranks.List() {
		h.needed.Remove(r)
		h.wanting.Remove(r)
		h.byOthers.Remove(r)
	}
	last := h.needed.Len() == 0 && !h.kept
	h.mu.Unlock()
	h.wake()
	if last {
		st.forget(h)
	}
}

// leave removes a receiver from the transfer and the queue. h.mu is held.
func (h *upload) leave(session string) {
	delete(h.serving, session)
	h.wants = withoutWant(h.wants, session)
}

// Unneeded records that a rank will not fetch the body: it is dead, or has answered. A receiver without ranks leaves the
// transfer.
func (s *Store) Unneeded(ref wire.BodyRef, rank int) {
	h := s.uploads.get(ref.ID)
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

func (h *upload) wake() {
	select {
	case h.wakeCh <- struct{}{}:
	default:
	}
}

// pump serves requests until there are none. One pump runs at a time.
func (h *upload) pump() {
	for {
		round, more := h.nextRound()
		if !more {
			return
		}
		if len(round.hosts) > 0 {
			h.transfer(bodySubject(h.st.store.namespace, h.ref), round.hosts, 0)
		}
		if len(round.ranks) > 0 {
			h.transfer(h.subject, round.ranks, 0)
		}
		for _, w := range round.alone {
			h.transfer(h.st.store.session.Inbox(w.session), []want{w}, w.offset)
		}
	}
}

// round are the requests that a pump serves next.
type round struct {
	hosts []want // together on the body's subject, from offset 0
	ranks []want // together on the subject of the ranks, from offset 0
	alone []want
}

// nextRound waits for the receivers that have not sent a request yet, so that one transfer serves all, and then returns
// the requests.
func (h *upload) nextRound() (next round, more bool) {
	for {
		h.mu.Lock()
		if h.withdrawn || len(h.wants) == 0 {
			h.pumping = false
			tell := h.unreadLocked()
			h.mu.Unlock()
			tell()
			return round{}, false
		}
		missing := h.needed.Len() - h.wanting.Len() - h.byOthers.Len()
		again := time.Duration(len(h.body)/(gatherRate/1000)) * time.Millisecond
		left := min(max(gatherWait, again)-time.Since(h.latest), gatherMost-time.Since(h.first))
		if h.subject != "" && missing > 0 && left > 0 {
			h.mu.Unlock()
			h.waitWake(left)
			continue
		}
		next = h.divideLocked()
		h.wants, h.wanting = nil, wire.RankSet{}
		h.mu.Unlock()
		return next, true
	}
}

// divideLocked divides the requests into those that one transfer serves and the others. The subject of the ranks is not used when some of
// them get the body from their host: it would be sent to them too.
func (h *upload) divideLocked() (next round) {
	for _, w := range h.wants {
		first := w.offset == 0 && !h.tried[w.session]
		switch {
		case first && w.forHost == wire.ForAll:
			next.hosts = append(next.hosts, w)
		case first && h.subject != "" && h.byOthers.Len() == 0:
			next.ranks = append(next.ranks, w)
		default:
			next.alone = append(next.alone, w)
		}
	}
	for _, group := range []*[]want{&next.hosts, &next.ranks} {
		if len(*group) == 1 {
			next.alone, *group = append(next.alone, *group...), nil
		}
		for _, w := range *group {
			h.tried[w.session] = true
		}
	}
	return next
}

// transfer sends the body from offset to subject, at most a window ahead of the slowest receiver. A receiver that is
// silent for too long leaves the transfer, and requests the rest later.
func (h *upload) transfer(subject string, to []want, offset int) {
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
		sent := h.sent
		h.mu.Unlock()
		h.st.store.recordTransfer(recorder.Upload, now, int64(sent-offset), sent < len(h.body))
	}()
	size := max(min(chunkSize, h.st.store.session.Bus().MaxPayload()-bus.MaxEnvelope), minChunk)
	for off := offset; off < len(h.body); {
		if !h.await(off - window + 1) {
			return
		}
		end := min(off+size, len(h.body))
		f := wire.Frame{Kind: wire.KindChunk, Header: wire.Header{Ref: h.ref, Offset: uint64(off)}, Body: h.body[off:end]}
		if h.st.store.session.SendBody(subject, &f) != nil {
			return // disconnected: the receivers repeat their requests
		}
		h.st.store.CountSent(PathChunks, int64(len(f.Body)))
		off = end
		h.mu.Lock()
		h.sent = off
		h.mu.Unlock()
	}
	h.await(len(h.body)) // so that consecutive transfers are not in flight at once
}

// await waits until every receiver has confirmed at least so many bytes. Receivers that are silent for too long leave
// the transfer. It reports false when no receiver is left.
func (h *upload) await(least int) bool {
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
		over := h.withdrawn || len(h.serving) == 0
		h.mu.Unlock()
		if over || patience == 0 {
			return !over
		}
		h.waitWake(patience)
	}
}

func (h *upload) waitWake(d time.Duration) {
	t := time.NewTimer(max(d, time.Millisecond))
	defer t.Stop()
	select {
	case <-h.wakeCh:
	case <-t.C:
	case <-h.st.store.session.Done():
	}
}
