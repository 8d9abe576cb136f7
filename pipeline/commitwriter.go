package pipeline

import (
	"context"
	"errors"
	"time"

	"troupe/bus"
	"troupe/bus/stream"
)

// commitWriter writes commits to the log, in order. Several may be in flight; each has to follow the one before it, so
// a failed one fails all later ones, and they are sent again together. One goroutine owns it.
type commitWriter struct {
	p        *Pipeline
	inflight []*inflightCommit
	inbox    string
	ackCh    chan *bus.Msg
	waits    *bus.Waits // between attempts
}

func (p *Pipeline) writeLoop() {
	w := &commitWriter{p: p, inbox: p.cfg.Bus.NewInbox(), ackCh: make(chan *bus.Msg, 64), waits: backoff.Start()}
	sub, err := p.cfg.Bus.SubscribeChan(w.inbox+".*", w.ackCh)
	if err != nil {
		p.cancel(bus.Errorf(bus.CodeUnavailable, "pipeline %s: %w", p.at.Name, err))
		return
	}
	defer func() { _ = sub.Unsubscribe() }() // fails only on a closed connection
	if err := w.run(); err != nil {
		p.cancel(err) // the state in memory can no longer be stored
	}
}

func (w *commitWriter) run() error {
	timer := time.NewTimer(attemptTimeout)
	defer timer.Stop()
	for {
		in := w.p.commitCh
		if len(w.inflight) >= maxCommitsInFlight {
			in = nil
		}
		select {
		case <-w.p.ctx.Done():
			return nil
		case c := <-in:
			fl, err := w.p.journal.encodeCommit(c)
			if err != nil {
				return err
			}
			w.inflight = append(w.inflight, fl)
			w.send(fl)
		case m := <-w.ackCh:
			if err := w.handleAck(m); err != nil {
				return err
			}
		case <-timer.C:
			if len(w.inflight) > 0 && time.Since(w.inflight[0].sent) >= attemptTimeout {
				if err := w.resend(); err != nil {
					return err
				}
			}
			timer.Reset(attemptTimeout / 4)
		}
	}
}

// send sends a commit that follows the previous one. A failure shows as a missing acknowledgement.
func (w *commitWriter) send(fl *inflightCommit) {
	fl.expectAfter(w.p.lastWritten)
	fl.sent = time.Now()
	w.p.lastWritten = fl.lastSeq()
	_ = stream.AppendAsync(w.p.cfg.Bus, fl.msgs, w.p.journal.batchID(fl), w.inbox+"."+fl.ackToken())
}

// handleAck takes an acknowledgement. Those of earlier attempts are ignored.
func (w *commitWriter) handleAck(m *bus.Msg) error {
	for i, fl := range w.inflight {
		if lastToken(m.Subject) != fl.ackToken() {
			continue
		}
		ack, err := stream.ParseAck(m)
		if err == nil {
			err = fl.check(ack)
		}
		if err != nil {
			w.noteStoreFull(err)
			return w.resend()
		}
		w.reportCommitted(i + 1) // earlier commits are stored as well
		w.waits.Reset()
		w.p.storeFull.Store(nil)
		return nil
	}
	return nil
}

// noteStoreFull rejects puts while the store is full, until the waiting commit is stored.
func (w *commitWriter) noteStoreFull(err error) {
	if e := bus.Errorf(bus.CodeUnavailable, "pipeline %s: %w", w.p.at.Name, err); e.Code == bus.CodeNoSpace {
		w.p.storeFull.Store(e)
	}
}

// reportCommitted tells the loop that the first n commits are stored.
func (w *commitWriter) reportCommitted(n int) {
	for _, fl := range w.inflight[:n] {
		w.p.inbox.push(&commitDone{fl.commit, fl.firstSeq()})
	}
	w.inflight = append(w.inflight[:0], w.inflight[n:]...)
}

// resend finds out which commits are in the log and sends the others again.
func (w *commitWriter) resend() error {
	for {
		if w.waits.Wait(w.p.ctx) != nil {
			return nil
		}
		ctx, cancel := context.WithTimeout(w.p.ctx, 5*attemptTimeout)
		rec, last, err := w.p.journal.readCheckpoint(ctx)
		cancel()
		if errors.Is(err, bus.ErrMalformed) {
			return err
		}
		if err != nil {
			w.noteStoreFull(err)
			continue // the server is not available
		}
		if rec == nil || rec.Engine != w.p.journal.engine {
			return w.p.journal.fenced(rec)
		}
		n := 0
		for n < len(w.inflight) && w.inflight[n].commit.Number <= rec.Commit {
			n++
		}
		w.reportCommitted(n)
		w.p.lastWritten = last
		for _, fl := range w.inflight {
			if err := w.p.journal.reencode(fl); err != nil {
				return err
			}
			w.send(fl)
		}
		return nil
	}
}
