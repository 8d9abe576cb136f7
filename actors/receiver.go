package actors

import (
	"bytes"
	"errors"
	"sync/atomic"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/internal/ab"
)

var (
	inlineCalls = ab.On(ab.InlineCalls)
	reuseCalls  = ab.On(ab.ReuseCalls)
)

const (
	maxSharedBody    = 1 << 10                // a larger body does not share its message with the header, which lives longer
	shortCallLimit   = 100 * time.Microsecond // a call that ends within this counts as short
	shortCallsNeeded = 4                      // a method runs inline after this many short calls in a row
	inlineStuckAfter = 5 * time.Millisecond   // an inline call that takes longer gets its receiver replaced at the next heartbeat
)

// receiver passes the messages of one channel to workers, in order of arrival. It does not block, except in a call that it
// runs inline. One goroutine owns it.
type receiver struct {
	host   *Host
	ch     chan *bus.Msg
	isWork bool // it receives work and may run calls inline
	reader wire.FrameReader
	next   *delivery // filled by the next message
	inline inlineRun

	// The workers of the last message's subject; the next message mostly has the same one.
	sub           *bus.Subscription
	routesVersion uint64
	workers       []*Worker
}

// delivery is a parsed message and the memory for the first of its calls. On a host with one worker the worker owns all of
// it and reuses it for a later call.
type delivery struct {
	frame wire.Frame
	first call
}

func newReceiver(h *Host, ch chan *bus.Msg) *receiver {
	r := &receiver{host: h, ch: ch, isWork: ch == h.workCh, next: new(delivery)}
	if r.isWork {
		h.inline.Store(&r.inline)
	}
	return r
}

// loop returns when the host closes or when another receiver has replaced this one.
func (r *receiver) loop() {
	for {
		m := <-r.ch
		if m == nil || r.host.receiversDone.Load() {
			return
		}
		if j := r.handle(m); j.call != nil && !r.inline.run(j) {
			return
		}
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

// handle processes one message. A returned job is a call that the receiver runs inline.
func (r *receiver) handle(m *bus.Msg) job {
	h, f := r.host, &r.next.frame
	if err := r.reader.ParseInto(f, m.Data); err != nil {
		h.cfg.Logger.Warn("actors: malformed message", "subject", m.Subject, "error", err)
		if errors.Is(err, bus.ErrVersion) {
			h.ep.AnswerVersion(m.Reply)
		}
		return job{}
	}
	now := time.Now()
	switch f.Kind {
	case wire.KindCall:
		return r.call(m, now)
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
	return job{}
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
func (r *receiver) call(m *bus.Msg, now time.Time) (inline job) {
	d, workers := r.next, r.workersOn(m)
	exclusive := len(workers) == 1 && reuseCalls
	if exclusive {
		r.next = workers[0].nextDelivery()
	} else {
		r.next = new(delivery)
	}
	h, body := &d.frame.Header, d.frame.Body
	d.frame.Body = nil // the calls hold the body until they have run
	if len(body) > maxSharedBody {
		detach(h)
	}
	var fetch []*call
	inlineAllowed := r.isWork && r.host.singleWorker.Load() && inlineCalls
	for _, w := range workers {
		if !h.For(w.spec.Rank) || h.Gens[w.spec.Rank] != w.spec.Gen {
			continue
		}
		more, j := w.accept(d, body, now, inlineAllowed && inline.call == nil, exclusive)
		fetch = append(fetch, more...)
		if j.call != nil {
			inline = j
		}
	}
	r.host.fetch(fetch)
	return inline
}

// detach copies what the header shares with its message: the header is kept longer than a body should be.
func detach(h *wire.Header) {
	h.Meta, h.Ranks, h.Collect = bytes.Clone(h.Meta), h.Ranks.Clone(), h.Collect.Clone()
}

// inlineRun is the state of a receiver that runs a call itself, which saves a short call the hand-over to another
// goroutine. Only methods whose last calls were short run inline. A call that takes long after all blocks its worker's
// receiver until the next heartbeat at most: then another goroutine becomes the receiver, and the method counts as slow
// until it has been short for a while. A timer for each call would react sooner and cost more than the hand-over.
type inlineRun struct {
	since atomic.Int64 // the instant at which the call began; 0: no call runs inline; replaced: another receiver took over
}

const replaced = -1

// run runs the job; it reports false if another receiver has taken over meanwhile.
func (i *inlineRun) run(j job) bool {
	began := int64(j.call.started)
	i.since.Store(began)
	j.worker.run(j.queue, j.call)
	return i.since.CompareAndSwap(began, 0)
}

// claimIfStuck reports, to one caller only, that the receiver has to be replaced.
func (i *inlineRun) claimIfStuck() bool {
	since := i.since.Load()
	return since > 0 && int64(instantOf(time.Now()))-since > int64(inlineStuckAfter) && i.since.CompareAndSwap(since, replaced)
}

// replaceStuckReceiver starts another receiver of work if an inline call blocks the current one.
func (h *Host) replaceStuckReceiver() {
	if i := h.inline.Load(); i != nil && i.claimIfStuck() {
		h.runners.group.Go(bus.Guard(func() { newReceiver(h, h.workCh).loop() }))
	}
}
