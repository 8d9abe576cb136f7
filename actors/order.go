package actors

import (
	"time"

	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// callOrder is the order of the calls from one source, a caller or a sequencer, to one rank.
type callOrder struct {
	calls.ReorderBuffer[*earlyCall]
	askedAt  time.Time
	lastSeen time.Time
}

// orderID names a source of calls. A process that both calls and sequences has two orders, because the calls take
// different routes.
type orderID struct {
	session   string
	sequencer bool
}

func orderOf(h *wire.Header) orderID {
	return orderID{session: h.OrderedBy(), sequencer: h.Stream != ""}
}

// earlyCall is a call that arrived before its turn.
type earlyCall struct {
	header *wire.Header
	body   []byte
	at     time.Time
}

// orderOf returns the order of a call.
func (w *Worker) orderOf(s *callerState, h *wire.Header, now time.Time) *callOrder {
	if h.Stream != "" {
		return w.orderNamed(orderOf(h), now)
	}
	if s.order == nil {
		s.order = w.orderNamed(orderOf(h), now)
	}
	s.order.lastSeen = now
	return s.order
}

func (w *Worker) orderNamed(id orderID, now time.Time) *callOrder {
	st := w.orders[id]
	if st == nil {
		if id.sequencer {
			w.dropHeld()
		}
		st = &callOrder{}
		w.orders[id] = st
	}
	st.lastSeen = now
	return st
}

// dropHeld drops the early calls of sequencers that were replaced: their callers ask about them and send them to the
// new one.
func (w *Worker) dropHeld() {
	for id, st := range w.orders {
		if id.sequencer {
			st.Clear()
		}
	}
}

// admitReleased admits the calls whose turn has come because an earlier one was admitted or skipped.
func (w *Worker) admitReleased(st *callOrder) (fetch []*call) {
	for a, ok := st.Release(); ok; a, ok = st.Release() {
		if c := w.admit(w.callerOf(a.header, a.at), a.header, a.body, a.at); c != nil && c.phase == queued && !c.ready() {
			fetch = append(fetch, c)
		}
	}
	return fetch
}

// skip handles the statement of a call's source that nothing before a position follows except what it has just sent
// again. If some of that was lost, the gap is reported again.
func (w *Worker) skip(h *wire.Header) (fetch []*call) {
	w.mu.Lock()
	defer w.mu.Unlock()
	st := w.orders[orderOf(h)]
	if st == nil {
		return nil
	}
	st.Skip(h.Order, h.Prev)
	return w.admitReleased(st)
}

// reportGap asks the source of the calls for the missing ones, and again until they have come.
func (w *Worker) reportGap(id orderID, st *callOrder) {
	after, upTo, open := st.Gap()
	if !open || time.Since(st.askedAt) < gapReportEvery/2 {
		return
	}
	st.askedAt = time.Now()
	h := wire.Header{Stream: id.session, Object: w.spec.Address.Prefix(), Rank: w.spec.Rank, Gen: w.spec.Gen, Prev: after, Order: upTo}
	w.sendTo(id.session, &wire.Frame{Kind: wire.KindMissing, Header: h})
	time.AfterFunc(gapReportEvery, bus.Guard(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if !w.state.Over() && w.orders[id] == st {
			w.reportGap(id, st)
		}
	}))
}

// heldCall finds an early call.
func (w *Worker) heldCall(h *wire.Header) *earlyCall {
	for _, st := range w.orders {
		for a := range st.Buffered {
			if a.header.Session == h.Session && a.header.Seq == h.Seq {
				return a
			}
		}
	}
	return nil
}

func (w *Worker) sendTo(session string, f *wire.Frame) {
	_ = w.host.ep.Tell(session, f) // a caller asks again if it is lost
}
