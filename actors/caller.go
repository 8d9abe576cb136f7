package actors

import (
	"context"
	"slices"
	"time"

	"troupe/bus/recorder"
	"troupe/bus/wire"
)

const (
	maxUnacked      = 4096     // answers that a worker keeps until they are acknowledged
	maxUnackedBytes = 16 << 20 // bytes of those, without large bodies, which are held until they are fetched
	maxTombstones   = 1 << 16  // tombstones of one caller
	gapReportEvery  = 300 * time.Millisecond
	callerTTL       = 10 * time.Minute
	maxCallers      = 4096
)

// callerState is what a worker remembers of one caller, so that no call runs twice. The worker's mutex guards it.
type callerState struct {
	id            string
	text          recorder.Text    // its id in the flight recorder
	inbox         string           // subject of its answers
	order         *callOrder       // order of its calls, except sequenced ones; nil until the first
	calls         map[uint64]*call // not acknowledged; tombstone: the answer is no longer kept
	tombstones    int              // number of tombstones in calls
	acked         uint64           // the caller has every answer up to this sequence
	floor         uint64           // calls up to this sequence are over; those not in calls must not run
	unknownBefore time.Time        // calls sent before this time have an unknown outcome; zero: all are known
	lastSeen      time.Time        // of its last frame or answer
	// unreachableSince is when the server first reported that the caller's inbox has no subscriber, without a break
	// since; unreachableLast is the latest such report.
	unreachableSince time.Time
	unreachableLast  time.Time
}

// tombstone is the entry of a call that is over or must not run, and whose answer is not kept. It is never changed.
var tombstone = &call{phase: forgotten}

// find returns the entry of a call, or whether the call is, or may be, over.
func (s *callerState) find(h *wire.Header, now time.Time) (c *call, over bool) {
	c = s.calls[h.Seq]
	return c, c == nil && (h.Seq <= s.floor || h.Age > 0 && now.Add(-h.Age).Before(s.unknownBefore))
}

// acknowledge forgets the answers that the caller has, and cancels calls that it no longer waits for: their
// cancellation was lost. A running call stays until it ends.
func (s *callerState) acknowledge(upTo uint64, forget, giveUp func(*call)) {
	if upTo <= s.acked {
		return
	}
	from := s.acked + 1
	s.acked, s.floor = upTo, max(s.floor, upTo)
	settle := func(seq uint64, c *call) {
		giveUp(c)
		forget(c)
		if c.phase == forgotten {
			s.remove(seq)
			c.reuse()
		}
	}
	if upTo-from >= uint64(len(s.calls)) {
		for seq, c := range s.calls {
			if seq <= upTo {
				settle(seq, c)
			}
		}
		return
	}
	for seq := from; seq <= upTo; seq++ {
		if c := s.calls[seq]; c != nil {
			settle(seq, c)
		}
	}
}

// markOver records that a call that has not arrived must not run: it was cancelled, or its sequencer has skipped it.
func (s *callerState) markOver(seq uint64) {
	if s.calls[seq] == nil && seq > s.floor {
		s.addTombstone(seq)
	}
}

// retire replaces an ended call whose answer is not kept by a tombstone, or removes it if it is acknowledged.
func (s *callerState) retire(c *call) {
	switch seq := c.header.Seq; {
	case c.phase != forgotten || s.calls[seq] != c:
	case seq <= s.acked:
		s.remove(seq)
	default:
		s.addTombstone(seq)
	}
}

func (s *callerState) remove(seq uint64) {
	if s.calls[seq] == tombstone {
		s.tombstones--
	}
	delete(s.calls, seq)
}

// addTombstone records that a call is over. When there are too many tombstones the older half is removed and the floor
// raised above them: the floor only ever refuses calls, so that is safe.
func (s *callerState) addTombstone(seq uint64) {
	s.calls[seq] = tombstone
	s.tombstones++
	if s.tombstones <= maxTombstones {
		return
	}
	seqs := make([]uint64, 0, s.tombstones)
	for seq, c := range s.calls {
		if c == tombstone {
			seqs = append(seqs, seq)
		}
	}
	slices.Sort(seqs)
	for _, seq := range seqs[:len(seqs)/2] {
		s.remove(seq)
		s.floor = max(s.floor, seq)
	}
}

// busy reports whether a call of the caller is queued or running.
func (s *callerState) busy() bool {
	for _, c := range s.calls {
		if c.phase <= running {
			return true
		}
	}
	return false
}

// callerOf returns the state of the caller, which is new if the caller is unknown or was purged: then the outcome of
// its earlier calls is unknown.
func (w *Worker) callerOf(h *wire.Header, now time.Time) *callerState {
	if s := w.lastCaller; s != nil && s.id == h.Session {
		s.lastSeen = now
		return s
	}
	s := w.callers[h.Session]
	if s == nil {
		if len(w.callers) >= maxCallers {
			w.purgeLocked(now)
		}
		s = &callerState{id: h.Session, text: recorder.TextOf(h.Session), inbox: w.host.ep.Inbox(h.Session), calls: map[uint64]*call{}, unknownBefore: w.lastPurge}
		w.callers[h.Session] = s
	}
	s.lastSeen, w.lastCaller = now, s
	return s
}

// cancelRequested handles the caller's cancellation of a call: a queued call is removed, a running one gets its context
// cancelled, and one that has not arrived will not run.
func (w *Worker) cancelRequested(h *wire.Header, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.callerOf(h, now)
	why := context.Canceled
	if h.Code == wire.CodeTimedOut {
		why = context.DeadlineExceeded
	}
	if c := s.calls[h.Seq]; c != nil {
		w.endCall(c, why)
	} else {
		s.markOver(h.Seq)
	}
}

func (w *Worker) cancelCall(c *call) { w.endCall(c, context.Canceled) }

// endCall ends a call that its caller no longer waits for; why is the error of the method's context.
func (w *Worker) endCall(c *call, why error) {
	switch c.phase {
	case queued:
		w.dropArguments(c)
		c.free(c.body)
		c.dropped, c.phase, c.body = true, forgotten, nil
		c.caller.retire(c)
		q := c.binding.queue
		q.waiting.remove(func(other *call) bool { return other == c })
		w.startReady(q, instantOf(time.Now()))
	case running:
		c.dropped = true
		c.ctx.cancel(why)
	case answered: // the answer will not be fetched
		w.forget(c)
		c.caller.retire(c)
	}
}

// purge forgets callers that have been silent for callerTTL and have no call queued or running.
func (w *Worker) purge(now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.purgeLocked(now)
}

// purgeLocked also makes room when there are too many callers: the longest silent ones are forgotten.
func (w *Worker) purgeLocked(now time.Time) {
	var silent []string
	for id, s := range w.callers {
		if !s.busy() {
			silent = append(silent, id)
		}
	}
	slices.SortFunc(silent, func(a, b string) int { return w.callers[a].lastSeen.Compare(w.callers[b].lastSeen) })
	tooMany := 0
	if len(w.callers) >= maxCallers {
		tooMany = len(w.callers) - maxCallers*3/4
	}
	for i, id := range silent {
		if s := w.callers[id]; i < tooMany || now.Sub(s.lastSeen) >= callerTTL {
			w.forgetAll(s)
			delete(w.callers, id)
			delete(w.orders, orderID{session: id})
			w.lastPurge, w.lastCaller = now, nil
		}
	}
	for _, st := range w.orders {
		if now.Sub(st.lastSeen) >= callerTTL { // the sequencer has ended: its missing calls will not come
			st.Clear()
		}
	}
}

func (w *Worker) forgetAll(s *callerState) {
	for _, c := range s.calls {
		if c.phase == answered {
			w.forget(c)
			s.retire(c)
		}
	}
}

// A dead caller never fetches its large answers, and enough of those stop a worker from starting calls. A caller that
// is silent while a large answer is held for it is therefore probed; if the server reports, for goneHeartbeats, that
// its inbox has no subscriber, its answers are dropped.
const (
	silentHeartbeats = 5 // a caller is probed after this many heartbeats of silence,
	goneHeartbeats   = 5 // and counts as dead when it was unreachable for this many
)

// probeSilentCallers probes the silent callers of unfetched large answers.
func (w *Worker) probeSilentCallers(now time.Time) {
	w.mu.Lock()
	silent := map[string]bool{}
	if w.unfetched > 0 {
		for c := w.unacked.oldest; c != nil; c = c.newer {
			if c.reply.Uploaded() && now.Sub(c.caller.lastSeen) >= silentHeartbeats*w.host.cfg.HeartbeatEvery {
				silent[c.caller.id] = true
			}
		}
	}
	w.mu.Unlock()
	for session := range silent {
		w.host.ep.Probe(session)
	}
}

// callerUnreachable handles the server's report that a caller's inbox has no subscriber. When this lasts, the answers
// held for it are dropped; if the caller comes back, their outcome is unknown.
func (w *Worker) callerUnreachable(session string, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.callers[session]
	if s == nil {
		return
	}
	beat := w.host.cfg.HeartbeatEvery
	if s.unreachableLast.Before(s.lastSeen) || now.Sub(s.unreachableLast) > goneHeartbeats*beat/2 { // the caller was reachable in between
		s.unreachableSince = now
	}
	s.unreachableLast = now
	if now.Sub(s.unreachableSince) < goneHeartbeats*beat {
		return
	}
	for _, c := range s.calls {
		if c.phase == answered && c.reply.Uploaded() {
			w.cancelCall(c)
		}
	}
}

func (h *Host) callerUnreachable(session string) {
	for _, w := range h.Workers() {
		w.callerUnreachable(session, time.Now())
	}
}
