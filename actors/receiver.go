package actors

import (
	"bytes"
	"errors"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

// maxSharedBody: a larger body does not share its message with the header, which lives longer.
const maxSharedBody = 1 << 10

// receiver passes the messages of one channel to workers, in order of arrival. It does not block. One goroutine owns it.
type receiver struct {
	host   *Host
	ch     chan *bus.Msg
	reader wire.FrameReader
	next   *delivery // filled by the next message

	// The workers of the last message's subject; the next message mostly has the same one.
	sub           *bus.Subscription
	routesVersion uint64
	workers       []*Worker
}

// delivery is a parsed message and the memory for the first of its calls.
type delivery struct {
	frame wire.Frame
	first call
}

func newReceiver(h *Host, ch chan *bus.Msg) *receiver {
	return &receiver{host: h, ch: ch, next: new(delivery)}
}

// loop returns when the host closes.
func (r *receiver) loop() {
	for {
		m := <-r.ch
		if m == nil || r.host.receiversDone.Load() {
			return
		}
		r.handle(m)
	}
}

// closeReceivers ends both receivers: with a nil message, or, where the channel is full, at the next message.
func (h *Host) closeReceivers() {
	close(h.closedCh)
	h.receiversDone.Store(true)
	for _, ch := range []chan *bus.Msg{h.workCh, h.controlCh} {
		select {
		case ch <- nil:
		default:
		}
	}
}

// handle processes one message.
func (r *receiver) handle(m *bus.Msg) {
	h, f := r.host, &r.next.frame
	if err := r.reader.ParseInto(f, m.Data); err != nil {
		h.cfg.Logger.Warn("actors: malformed message", "subject", m.Subject, "error", err)
		if errors.Is(err, bus.ErrVersion) {
			h.ep.AnswerVersion(m.Reply)
		}
		return
	}
	now := time.Now()
	switch f.Kind {
	case wire.KindCall:
		r.call(m, now)
		return
	case wire.KindChunk:
		h.ep.Chunk(f)
	case wire.KindAsk:
		r.each(m, f, func(w *Worker) { w.statusAsked(&f.Header, now) })
	case wire.KindCancel:
		r.each(m, f, func(w *Worker) { w.cancelRequested(&f.Header, now) })
	case wire.KindTaken:
		r.each(m, f, func(w *Worker) { w.referencesTaken(&f.Header) })
	case wire.KindSkip:
		r.each(m, f, func(w *Worker) { h.fetch(w.skip(&f.Header)) })
	default:
		h.cfg.Logger.Warn("actors: unknown frame kind", "subject", m.Subject, "kind", f.Kind.String())
	}
	f.Body = nil
}

// workersOn returns the workers that listen on the message's subject.
func (r *receiver) workersOn(m *bus.Msg) []*Worker {
	if version := r.host.routesVersion.Load(); r.sub == nil || r.sub != m.Sub || r.routesVersion != version {
		r.sub, r.routesVersion, r.workers = m.Sub, version, r.host.workersOn(m.Subject)
	}
	return r.workers
}

func (r *receiver) each(m *bus.Msg, f *wire.Frame, do func(*Worker)) {
	for _, w := range r.workersOn(m) {
		if f.Header.For(w.spec.Rank) {
			do(w)
		}
	}
}

// call passes a call to the workers that it addresses; the delivery belongs to them afterwards.
func (r *receiver) call(m *bus.Msg, now time.Time) {
	d := r.next
	r.next = new(delivery)
	h, body := &d.frame.Header, d.frame.Body
	d.frame.Body = nil // the calls hold the body until they have run
	r.host.ep.CountReceived(bus.PathInline, int64(len(body)))
	if len(body) > maxSharedBody {
		detach(h)
	}
	var fetch []*call
	for _, w := range r.workersOn(m) {
		if !h.For(w.spec.Rank) || h.Gens[w.spec.Rank] != w.spec.Gen {
			continue
		}
		more, begin := w.accept(d, body, now)
		fetch = append(fetch, more...)
		if begin.call != nil {
			w.continueLane(begin.queue, begin.call)
		}
	}
	r.host.fetch(fetch)
}

// detach copies what the header shares with its message: the header is kept longer than a body should be.
func detach(h *wire.Header) {
	h.Meta, h.Ranks, h.Collect = bytes.Clone(h.Meta), h.Ranks.Clone(), h.Collect.Clone()
}
