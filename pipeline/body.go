package pipeline

import (
	"context"
	"strconv"
	"sync"

	"github.com/nats-io/nats.go"

	"troupe/bus"
)

const (
	bodyApart    = 16 << 10 // from here on a body is stored apart
	bodiesAtOnce = 500      // of one batch
)

// bodyWriter stores the large bodies of one lane ahead of the commits that name them, in order, as many at once as have
// come while the ones before were being stored. The flow bounds what waits: it hands nothing out while much does.
type bodyWriter struct {
	p      *Pipeline
	lane   *lane
	wakeCh chan struct{} // holds one

	mu      sync.Mutex // guards what follows
	entries []*entry
}

// storeBodies gives bodies to the writers of their lanes, in the loop.
func (p *Pipeline) storeBodies(entries []*entry) {
	for _, e := range entries {
		w := p.bodies[e.lane]
		if w == nil {
			w = &bodyWriter{p: p, lane: e.lane, wakeCh: make(chan struct{}, 1)}
			p.bodies[e.lane] = w
			p.group.Go(bus.Guard(w.run))
		}
		w.push(e)
	}
}

func (w *bodyWriter) push(e *entry) {
	w.mu.Lock()
	w.entries = append(w.entries, e)
	w.mu.Unlock()
	select {
	case w.wakeCh <- struct{}{}:
	default:
	}
}

// take returns the next to store, in order.
func (w *bodyWriter) take() []*entry {
	w.mu.Lock()
	defer w.mu.Unlock()
	n, bytes := 0, 0
	for n < len(w.entries) && n < bodiesAtOnce && (n == 0 || bytes+len(w.entries[n].Body) <= maxCommitBytes) {
		bytes += len(w.entries[n].Body)
		n++
	}
	out := w.entries[:n:n]
	if w.entries = w.entries[n:]; len(w.entries) == 0 {
		w.entries = nil
	}
	return out
}

func (w *bodyWriter) run() {
	for number := 0; ; number++ {
		entries := w.take()
		for len(entries) == 0 {
			select {
			case <-w.p.ctx.Done():
				return
			case <-w.wakeCh:
			}
			entries = w.take()
		}
		seqs, ok := w.store(entries, number)
		if !ok {
			return
		}
		w.p.inbox.push(eventFunc(func(p *Pipeline) { p.flow.bodiesStored(entries, seqs) }))
	}
}

// store tries until the bodies are stored; it reports false when the pipeline ends first. One that is stored twice, because
// an answer was lost, is in nobody's way and is let go of with its neighbours.
func (w *bodyWriter) store(entries []*entry, number int) ([]uint64, bool) {
	pause := firstPause
	for attempt := 1; ; attempt++ {
		last, err := w.try(entries, number, attempt)
		if err == nil {
			seqs := make([]uint64, len(entries))
			for i := range seqs {
				seqs[i] = last - uint64(len(entries)-1-i)
			}
			return seqs, true
		}
		if wait(w.p.ctx, pause) != nil {
			return nil, false
		}
		if pause = min(2*pause, longestPause); attempt == 5 {
			w.p.cfg.Logger.Warn("pipeline: bodies cannot be stored; trying again", "pipeline", w.p.at.Name, "stream", w.lane.stream.spec.Name, "error", err)
		}
	}
}

func (w *bodyWriter) try(entries []*entry, number, attempt int) (last uint64, err error) {
	ctx, cancel := context.WithTimeout(w.p.ctx, 5*attemptLimit)
	defer cancel()
	if _, err := w.p.journal.bodies(ctx, w.lane, true); err != nil {
		return 0, err
	}
	nc := w.p.cfg.Bus.Conn()
	id := []string{w.p.journal.engine + "." + strconv.FormatInt(int64(number), 36) + "." + strconv.Itoa(attempt)}
	subject := w.p.at.Bodies(w.lane.stream.spec.Name, w.lane.priority)
	for i, e := range entries {
		m := &nats.Msg{Subject: subject, Data: e.Body}
		if len(entries) > 1 {
			m.Header = nats.Header{headerBatchID: id, headerBatchSeq: batchNumbers[i]}
		}
		if i < len(entries)-1 {
			if err := nc.PublishMsg(m); err != nil {
				return 0, err
			}
			continue
		}
		if len(entries) > 1 {
			m.Header[headerBatchCommit] = []string{"1"}
		}
		reply, err := nc.RequestMsgWithContext(ctx, m)
		if err != nil {
			return 0, err
		}
		if last, err = seqOf(reply); err != nil {
			return 0, err
		}
	}
	if last < uint64(len(entries)) {
		return 0, bus.Errorf(bus.CodeInternal, "%d bodies were stored up to %d", len(entries), last)
	}
	return last, nil
}
