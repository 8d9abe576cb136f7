package actors

import (
	"context"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

// cancelCall is the caller's word that it gave up. A call that waits is taken out, one that runs is told through its
// context, one that has not arrived will not be run.
func (w *Worker) cancelCall(h *wire.Header, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.sessionOf(h, now)
	if c := s.calls[h.Seq]; c != nil {
		w.giveUp(c)
	} else {
		s.pass(h.Seq)
	}
}

// giveUp ends a call that nobody waits for, if it has not ended.
func (w *Worker) giveUp(c *call) {
	switch c.phase {
	case queued:
		c.free(c.body)
		c.dropped, c.phase, c.body = true, forgotten, nil
		c.session.leave(c)
		q := c.binding.queue
		q.waiting.remove(func(other *call) bool { return other == c })
		w.kick(q, instantOf(time.Now()))
	case running:
		c.dropped = true
		c.ctx.cancel(context.Canceled)
	case answered: // nobody will fetch it
		w.forget(c)
		c.session.leave(c)
	}
}

// skip is the word of whoever orders the calls that up to that place nothing more comes than what was just sent again.
// If some of that was lost, the word counts for nothing: the gap is reported once more.
func (w *Worker) skip(h *wire.Header) (fetch []*call) {
	w.mu.Lock()
	defer w.mu.Unlock()
	st := w.streams[streamOf(h)]
	if st == nil {
		return nil
	}
	st.Skip(h.Order, h.Prev)
	return w.admitReleased(st)
}

// reportGap asks whoever orders the calls for what is missing, and again until it has come.
func (w *Worker) reportGap(id streamID, st *stream) {
	after, upTo, open := st.Gap()
	if !open || time.Since(st.askedAt) < missingEvery/2 {
		return
	}
	st.askedAt = time.Now()
	h := wire.Header{Stream: id.session, Object: w.spec.Address.Prefix(), Rank: w.spec.Rank, Gen: w.spec.Gen, Prev: after, Order: upTo}
	w.tell(id.session, &wire.Frame{Kind: wire.KindMissing, Header: h})
	time.AfterFunc(missingEvery, bus.Guard(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if !w.state.Over() && w.streams[id] == st {
			w.reportGap(id, st)
		}
	}))
}
