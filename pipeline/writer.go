package pipeline

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"troupe/bus"
)

// writer brings commits into the log, in order. Several may be on their way: each is aimed behind the one before it, so
// that one that fails takes those behind it along, and they are sent again together. It belongs to one goroutine.
type writer struct {
	p       *Pipeline
	flights []*flight
	inbox   string
	ackCh   chan *nats.Msg
	pause   time.Duration
}

func (p *Pipeline) writeLoop() {
	w := &writer{p: p, inbox: p.cfg.Bus.Conn().NewInbox(), ackCh: make(chan *nats.Msg, 64)}
	sub, err := p.cfg.Bus.Conn().ChanSubscribe(w.inbox+".*", w.ackCh)
	if err != nil {
		p.cancel(bus.Errorf(bus.CodeUnavailable, "pipeline %s: %w", p.at.Name, err))
		return
	}
	defer func() { _ = sub.Unsubscribe() }() // fails only on a closed connection
	if err := w.run(); err != nil {
		p.cancel(err) // nothing of what is in memory can be stored any more
	}
}

func (w *writer) run() error {
	timer := time.NewTimer(attemptLimit)
	defer timer.Stop()
	for {
		in := w.p.commitCh
		if len(w.flights) >= maxFlights {
			in = nil
		}
		select {
		case <-w.p.ctx.Done():
			return nil
		case c := <-in:
			fl, err := w.p.journal.newFlight(c)
			if err != nil {
				return err
			}
			w.flights = append(w.flights, fl)
			w.send(fl)
		case m := <-w.ackCh:
			if err := w.acked(m); err != nil {
				return err
			}
		case <-timer.C:
			if len(w.flights) > 0 && time.Since(w.flights[0].sent) >= attemptLimit {
				if err := w.resolve(); err != nil {
					return err
				}
			}
			timer.Reset(attemptLimit / 4)
		}
	}
}

// send aims a commit behind the one before it. What cannot be sent is noticed by its missing answer.
func (w *writer) send(fl *flight) {
	fl.aim(w.p.written)
	fl.sent = time.Now()
	w.p.written = fl.end()
	_ = w.p.journal.publish(fl, w.inbox+"."+strconv.FormatUint(fl.commit.number, 36)+"-"+strconv.Itoa(fl.attempt))
}

// acked takes the server's answer. Answers to earlier attempts are passed over.
func (w *writer) acked(m *nats.Msg) error {
	for i, fl := range w.flights {
		if lastWord(m.Subject) != strconv.FormatUint(fl.commit.number, 36)+"-"+strconv.Itoa(fl.attempt) {
			continue
		}
		if err := ackOf(m, fl); err != nil {
			w.noteFull(err)
			return w.resolve()
		}
		w.land(i + 1) // those before it are there too
		w.pause = 0
		w.p.full.Store(nil)
		return nil
	}
	return nil
}

// noteFull has puts refused while the store is full, until the commit that waits for it has landed: they would wait for that
// as well.
func (w *writer) noteFull(err error) {
	if e := bus.Errorf(bus.CodeUnavailable, "pipeline %s: %w", w.p.at.Name, err); e.Code == bus.CodeNoSpace {
		w.p.full.Store(e)
	}
}

// land tells the loop of the first n commits.
func (w *writer) land(n int) {
	for _, fl := range w.flights[:n] {
		w.p.inbox.push(&landing{fl.commit, fl.first()})
	}
	w.flights = append(w.flights[:0], w.flights[n:]...)
}

// resolve finds out which commits are in the log, and sends the others again.
func (w *writer) resolve() error {
	for {
		w.pause = min(max(2*w.pause, firstPause), longestPause)
		if wait(w.p.ctx, w.pause) != nil {
			return nil
		}
		ctx, cancel := context.WithTimeout(w.p.ctx, 5*attemptLimit)
		rec, last, err := w.p.journal.readRecord(ctx)
		cancel()
		if errors.Is(err, bus.ErrMalformed) {
			return err
		}
		if err != nil {
			w.noteFull(err)
			continue // the server is away
		}
		if rec == nil || rec.Engine != w.p.journal.engine {
			return w.p.journal.fenced(rec)
		}
		n := 0
		for n < len(w.flights) && w.flights[n].commit.number <= rec.Commit {
			n++
		}
		w.land(n)
		w.p.written = last
		for _, fl := range w.flights {
			if err := w.p.journal.renew(fl); err != nil {
				return err
			}
			w.send(fl)
		}
		return nil
	}
}
