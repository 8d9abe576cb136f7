package bus

import (
	"sync"
	"time"
)

const (
	chunkSize  = 512 << 10
	gatherWait = 25 * time.Millisecond // how long the first who want a body wait for the others, to be served together
	slowAfter  = 3 * time.Second       // a receiver that confirms nothing for so long no longer holds up the others
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
	ref     Ref
	body    []byte
	subject string // where all its receivers listen, for one stream to all; empty: to each its own inbox
	onDone  func() // called once, when nobody needs the body any more

	mu      sync.Mutex
	needed  RankSet // ranks that have not said Done; empty for a caller's inbox, which is done at once
	wanting RankSet // of those, the ranks that want it in the next stream
	wants   []want
	first   time.Time      // of the oldest entry of wants
	acked   map[string]int // by session, of the stream that runs
	pumping bool
	dropped bool
	wakeCh  chan struct{} // holds one; a want or a confirmation came in
}

// want is one receiver's request.
type want struct {
	session string
	offset  int
}

func newStore(ep *Endpoint) *store { return &store{ep: ep, held: map[uint64]*held{}} }

// Hold keeps body until everyone in ranks is done with it (a single unnamed receiver if ranks is empty), or until it
// is dropped. subject is where all those ranks listen, or empty.
func (e *Endpoint) Hold(body []byte, ranks RankSet, subject string, onDone func()) Ref {
	st := e.store
	h := &held{st: st, body: body, subject: subject, needed: ranks, onDone: onDone, acked: map[string]int{}, wakeCh: make(chan struct{}, 1)}
	st.mu.Lock()
	st.next++
	h.ref = Ref{Owner: e.session, ID: st.next, Len: int64(len(body))}
	st.held[h.ref.ID] = h
	st.mu.Unlock()
	return h.ref
}

// Drop forgets a held body. It may be called for one that is gone.
func (e *Endpoint) Drop(ref Ref) {
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
	_, here := st.held[h.ref.ID]
	delete(st.held, h.ref.ID)
	st.mu.Unlock()
	h.mu.Lock()
	h.dropped = true
	h.mu.Unlock()
	h.wake()
	if here && h.onDone != nil {
		h.onDone()
	}
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

// wanted notes a receiver's request and sees to it that somebody serves it. A repeat restarts that receiver's stream
// where it is, which is harmless.
func (st *store) wanted(f *Frame) {
	h := st.get(f.Header.Ref.ID)
	if h == nil || f.Header.Offset > uint64(len(h.body)) {
		st.ep.send(replyIn(st.ep.namespace, f.Header.Session), &Frame{Kind: KindGone, Header: Header{Ref: f.Header.Ref}})
		return
	}
	h.mu.Lock()
	if len(h.wants) == 0 {
		h.first = time.Now()
	}
	h.wants = append(withoutWant(h.wants, f.Header.Session), want{session: f.Header.Session, offset: int(f.Header.Offset)})
	for _, r := range f.Header.Ranks.List() {
		h.wanting.Add(r)
	}
	start := !h.pumping
	h.pumping = true
	h.mu.Unlock()
	h.wake()
	if start {
		st.ep.spawn(h.pump)
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

func (st *store) progressed(f *Frame) {
	if h := st.get(f.Header.Ref.ID); h != nil {
		h.mu.Lock()
		if _, serving := h.acked[f.Header.Session]; serving {
			h.acked[f.Header.Session] = max(h.acked[f.Header.Session], int(min(f.Header.Offset, uint64(len(h.body)))))
		}
		h.mu.Unlock()
		h.wake()
	}
}

// done notes that a receiver needs nothing more; with the last one the body is forgotten.
func (st *store) done(f *Frame) {
	h := st.get(f.Header.Ref.ID)
	if h == nil {
		return
	}
	h.mu.Lock()
	delete(h.acked, f.Header.Session)
	h.wants = withoutWant(h.wants, f.Header.Session)
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

// unneeded notes that some ranks will not come for the body: they are dead, or have answered without it.
func (e *Endpoint) unneeded(ref Ref, rank int) {
	if h := e.store.get(ref.ID); h != nil {
		h.st.done(&Frame{Header: Header{Ref: ref, Some: true, Ranks: Ranks(rank)}})
	}
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
			h.mu.Unlock()
			return nil, nil, false
		}
		missing := h.needed.Len() - h.wanting.Len()
		left := gatherWait - time.Since(h.first)
		if h.subject != "" && missing > 0 && left > 0 {
			h.mu.Unlock()
			h.waitWake(left)
			continue
		}
		for _, w := range h.wants {
			if h.subject != "" && w.offset == 0 && len(h.wants) > 1 {
				together = append(together, w)
			} else {
				alone = append(alone, w)
			}
		}
		h.wants, h.wanting = nil, RankSet{}
		h.mu.Unlock()
		return together, alone, true
	}
}

// stream sends the body from offset to subject, never more than a window ahead of the slowest of its receivers. One
// that is silent for too long leaves the set, and will ask again by itself.
func (h *held) stream(subject string, to []want, offset int) {
	h.mu.Lock()
	clear(h.acked)
	for _, w := range to {
		h.acked[w.session] = offset
	}
	h.mu.Unlock()
	size := min(chunkSize, int(h.st.ep.bus.nc.MaxPayload())-maxEnvelope)
	for off := offset; off < len(h.body); {
		if !h.awaitWindow(off) {
			return
		}
		end := min(off+size, len(h.body))
		f := Frame{Kind: KindChunk, Header: Header{Ref: h.ref, Offset: uint64(off)}, Body: h.body[off:end]}
		if h.st.ep.send(subject, &f) != nil {
			return // disconnected: the receivers ask again
		}
		off = end
	}
}

// awaitWindow waits until off is within the window of everyone who is still served; it reports false when nobody is.
func (h *held) awaitWindow(off int) bool {
	deadline := time.Now().Add(slowAfter)
	for {
		h.mu.Lock()
		lowest, late := off, time.Now().After(deadline)
		for session, acked := range h.acked {
			if off-acked >= window && late {
				delete(h.acked, session)
				continue
			}
			lowest = min(lowest, acked)
		}
		over := h.dropped || len(h.acked) == 0
		h.mu.Unlock()
		if over {
			return false
		}
		if off-lowest < window {
			return true
		}
		h.waitWake(time.Until(deadline))
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
