package actors

import (
	"bytes"
	"errors"
	"time"

	"github.com/nats-io/nats.go"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/internal/ab"
)

var (
	inlineCalls = ab.On(ab.InlineCalls)
	reuseCalls  = ab.On(ab.ReuseCalls)
)

const keepWhole = 1 << 10 // a body that may stay in memory with its envelope

// intake hands the messages of one channel to workers, in the order of arrival. Nothing in it blocks, but for a call it
// runs itself. It belongs to one goroutine.
type intake struct {
	host    *Host
	ch      chan *nats.Msg
	work    bool // it is the one that takes work, and may run a call itself
	reader  wire.FrameReader
	next    *delivery // to be filled by the next message
	lending lending

	// Whom the last message was for: the next one mostly has the same subject.
	sub     *nats.Subscription
	changes uint64
	workers []*Worker
}

// delivery is a message on its way to the workers it is for, and the memory for the first of their calls. Most hosts have
// one worker, which then has all of it to itself and uses it again for a later call.
type delivery struct {
	frame wire.Frame
	first call
}

func newIntake(h *Host, ch chan *nats.Msg) *intake {
	in := &intake{host: h, ch: ch, work: ch == h.workCh, next: new(delivery)}
	if in.work {
		h.lending.Store(&in.lending)
	}
	return in
}

// loop ends with the host, or when another intake has taken over.
func (in *intake) loop() {
	for {
		m := <-in.ch
		if m == nil || in.host.over.Load() {
			return
		}
		if j := in.handle(m); j.call != nil && !in.lending.run(j) {
			return
		}
	}
}

// closeIntakes ends both. A nil message does it; where there is no room for one, the next message will.
func (h *Host) closeIntakes() {
	close(h.closedCh)
	h.over.Store(true)
	for _, ch := range []chan *nats.Msg{h.workCh, h.controlCh} {
		select {
		case ch <- nil:
		default:
		}
	}
}

// handle takes one message. A call of the only worker here may be returned, to be run by the intake.
func (in *intake) handle(m *nats.Msg) (lent job) {
	h, f := in.host, &in.next.frame
	if err := in.reader.ParseInto(f, m.Data); err != nil {
		h.cfg.Logger.Warn("actors: a message cannot be read", "subject", m.Subject, "error", err)
		if errors.Is(err, bus.ErrVersion) {
			h.ep.AnswerVersion(m.Reply)
		}
		return job{}
	}
	now := time.Now()
	switch f.Kind {
	case wire.KindCall:
		return in.call(m, now)
	case wire.KindChunk:
		h.ep.Chunk(f)
	case wire.KindAsk:
		in.each(m, f, func(w *Worker) { w.asked(&f.Header, now) })
	case wire.KindCancel:
		in.each(m, f, func(w *Worker) { w.cancelCall(&f.Header, now) })
	case wire.KindSkip:
		in.each(m, f, func(w *Worker) { h.fetch(w.skip(&f.Header)) })
	default:
		h.cfg.Logger.Warn("actors: a frame of an unknown kind", "subject", m.Subject, "kind", f.Kind.String())
	}
	f.Body = nil
	return job{}
}

// behind are the workers that listen to the message's subject.
func (in *intake) behind(m *nats.Msg) []*Worker {
	if changes := in.host.changes.Load(); in.sub == nil || in.sub != m.Sub || in.changes != changes {
		in.sub, in.changes, in.workers = m.Sub, changes, in.host.behind(m.Subject)
	}
	return in.workers
}

func (in *intake) each(m *nats.Msg, f *wire.Frame, do func(*Worker)) {
	for _, w := range in.behind(m) {
		if f.Header.For(w.spec.Rank) {
			do(w)
		}
	}
}

// call gives a call to the workers it is for; the delivery is theirs from then on.
func (in *intake) call(m *nats.Msg, now time.Time) (lent job) {
	d, workers := in.next, in.behind(m)
	alone := len(workers) == 1 && reuseCalls
	if alone {
		in.next = workers[0].nextDelivery()
	} else {
		in.next = new(delivery)
	}
	h, body := &d.frame.Header, d.frame.Body
	d.frame.Body = nil // the calls have it, until they have run
	if len(body) > keepWhole {
		detach(h)
	}
	var fetch []*call
	lend := in.work && in.host.solo.Load() && inlineCalls
	for _, w := range workers {
		if !h.For(w.spec.Rank) || h.Gens[w.spec.Rank] != w.spec.Gen {
			continue
		}
		more, j := w.arrive(d, body, now, lend && lent.call == nil, alone)
		fetch = append(fetch, more...)
		if j.call != nil {
			lent = j
		}
	}
	in.host.fetch(fetch)
	return lent
}

// detach makes an envelope independent of its message: it is remembered longer than a body should be.
func detach(h *wire.Header) {
	h.Meta, h.Ranks, h.Collect = bytes.Clone(h.Meta), h.Ranks.Clone(), h.Collect.Clone()
}
