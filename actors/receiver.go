package actors

import (
	"bytes"
	"errors"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// maxSharedBody: a larger body does not share its message with the header, which lives longer.
const maxSharedBody = 1 << 10

// receiver passes the messages of one channel to workers, in order of arrival. One goroutine owns it. It does not block, except while it
// runs a call, when another receiver takes over as soon as a message arrives.
type receiver struct {
	host   *Host
	ch     chan *bus.Msg
	reader wire.FrameReader
	next   *delivery // filled by the next message
	here   job       // a call of the last message, for this goroutine to run

	// The workers of the last message's subject; the next message mostly has the same one.
	subject       string
	routesVersion uint64
	workers       []*Worker
}

// delivery is a parsed message and the memory for the first of its calls.
type delivery struct {
	frame  wire.Frame
	first  call
	alone  bool // one worker of this process listens on its subject
	mayRun bool // the receiver may run its call
}

var deliveries = sync.Pool{New: func() any { return new(delivery) }}

// reuse gives the memory of an answered and acknowledged call to a later message, if nothing else can refer to it: other ranks
// may use its header, and fetches and asynchronous handlers may hold it longer.
func (c *call) reuse() {
	if c.delivery == nil || c.binding == nil || c.binding.async != nil || c.args != nil || c.header.Ref.Owner != "" {
		return
	}
	d := c.delivery
	*d = delivery{}
	deliveries.Put(d)
}

func newReceiver(h *Host, ch chan *bus.Msg) *receiver {
	return &receiver{host: h, ch: ch, next: deliveries.Get().(*delivery)}
}

func (h *Host) startReceiver(ch chan *bus.Msg) {
	h.runners.group.Go(bus.Guard(func() { newReceiver(h, ch).loop() }))
}

// loop returns when the host closes, or after it was relieved.
func (r *receiver) loop() {
	for {
		m := <-r.ch
		if m == nil || r.host.receiversDone.Load() {
			return
		}
		r.handle(m)
		if j := r.here; j.call != nil {
			r.here = job{}
			if relieved := r.run(j); relieved {
				return
			}
		}
	}
}

// run executes a call on the receiver's goroutine, which saves the hand-over to another one. If a message arrives
// meanwhile, relieve starts another receiver, and this one ends after the call.
func (r *receiver) run(j job) (relieved bool) {
	h, returned := r.host, false
	h.receiverBusy.Store(true)
	h.relieve() // a message may have arrived just before
	defer func() {
		relieved = !h.receiverBusy.CompareAndSwap(true, false)
		if !returned && !relieved { // the method called runtime.Goexit
			h.startReceiver(r.ch)
		}
	}()
	j.worker.run(j.queue, j.call)
	returned = true
	return // what the deferred function finds
}

// mayRun reports whether the receiver may run a call itself: nothing else waits for it, and it is relieved when something does. A role
// of one worker is faster without it.
func (r *receiver) mayRun(w *Worker) bool {
	return w.spec.World > 1 && r.ch == r.host.workCh && len(r.ch) == 0 && r.host.relievable.Load()
}

// relieve starts another receiver if messages wait for one that runs a call. The connection's reader calls it.
func (h *Host) relieve() {
	if !h.relievable.Load() {
		h.relievable.Store(true)
	}
	if h.receiverBusy.Load() && len(h.workCh) > 0 && h.receiverBusy.CompareAndSwap(true, false) {
		h.startReceiver(h.workCh)
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
		h.ep.Bus().Malformed("a message on "+m.Subject, err)
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
		h.ep.Values().Chunk(f)
	case wire.KindAsk:
		r.each(m, f, func(w *Worker) { w.statusAsked(&f.Header, now) })
	case wire.KindCancel:
		r.each(m, f, func(w *Worker) { w.cancelRequested(&f.Header, now) })
	case wire.KindTaken:
		r.each(m, f, func(w *Worker) { w.referencesTaken(&f.Header) })
	case wire.KindSkip:
		r.each(m, f, func(w *Worker) { h.fetch(w.skip(&f.Header)) })
	default:
		h.ep.Bus().Malformed("a message on "+m.Subject, bus.Errorf(bus.CodeMalformed, "unknown %s", f.Kind))
	}
	f.Body = nil
}

// workersOn returns the workers that listen on the message's subject.
func (r *receiver) workersOn(m *bus.Msg) []*Worker {
	if version := r.host.routesVersion.Load(); r.workers == nil || r.subject != m.Subject || r.routesVersion != version {
		r.subject, r.routesVersion, r.workers = m.Subject, version, r.host.workersOn(m.Subject)
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
	r.next = deliveries.Get().(*delivery)
	h, body := &d.frame.Header, d.frame.Body
	d.frame.Body = nil // the calls hold the body until they have run
	r.host.ep.Values().CountReceived(values.PathInline, int64(len(body)))
	if len(body) > maxSharedBody {
		detach(h)
	}
	var fetch []*call
	workers := r.workersOn(m)
	d.alone = len(workers) == 1
	for _, w := range workers {
		if !h.For(w.spec.Rank) || h.Gens[w.spec.Rank] != w.spec.Gen {
			continue
		}
		d.mayRun = d.alone && r.mayRun(w)
		more, begin := w.accept(d, body, now)
		fetch = append(fetch, more...)
		switch {
		case begin.call == nil:
		case begin.call.binding.async != nil:
			w.continueLane(begin.queue, begin.call)
		default:
			r.here = begin
		}
	}
	r.host.fetch(fetch)
}

// detach copies what the header shares with its message: the header is kept longer than a body should be.
func detach(h *wire.Header) {
	h.Meta, h.Ranks, h.Collect = bytes.Clone(h.Meta), h.Ranks.Clone(), h.Collect.Clone()
}
