package pipeline

import (
	"context"
	"strconv"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/pipeline/flow"
)

const (
	largeBodyMin     = 16 << 10 // larger bodies go to a body stream
	maxBatchMessages = 500      // sent before the server has acknowledged one
	maxBatchBytes    = 4 << 20
	maxChunk         = 1 << 20  // bytes of a body in one message
	minPayload       = 64 << 10 // payload that a server must accept
)

// bodyWriter stores the large bodies of one body stream before the commits that refer to them, in order, in batches.
// The flow bounds what waits: it starts no tasks while many bytes do.
type bodyWriter struct {
	p      *Pipeline
	stream *flow.BodyStream
	wakeCh chan struct{} // capacity one
	inbox  string
	ackCh  chan *bus.Msg
	number uint64 // of the last message sent
	ways   ways

	mu      sync.Mutex // guards the following fields
	waiting []*flow.PendingBody
}

// storeBodies passes bodies to the writers of their streams. It is called in the loop.
func (p *Pipeline) storeBodies(bodies []*flow.PendingBody) {
	for _, b := range bodies {
		w := p.bodyWriters[b.Stream]
		if w == nil {
			w = &bodyWriter{p: p, stream: b.Stream, wakeCh: make(chan struct{}, 1), ackCh: make(chan *bus.Msg, maxBatchMessages+1)}
			p.bodyWriters[b.Stream] = w
			p.group.Go(bus.Guard(w.run))
		}
		w.push(b)
	}
}

func (w *bodyWriter) push(b *flow.PendingBody) {
	w.mu.Lock()
	w.waiting = append(w.waiting, b)
	w.mu.Unlock()
	select {
	case w.wakeCh <- struct{}{}:
	default:
	}
}

// take returns the next bodies to store, in order: several small ones or a large one.
func (w *bodyWriter) take() []*flow.PendingBody {
	w.mu.Lock()
	defer w.mu.Unlock()
	n, bytes := 0, 0
	for n < len(w.waiting) && n < maxBatchMessages && (n == 0 || bytes+len(w.waiting[n].Data) <= maxBatchBytes) {
		bytes += len(w.waiting[n].Data)
		n++
	}
	out := w.waiting[:n:n]
	if w.waiting = w.waiting[n:]; len(w.waiting) == 0 {
		w.waiting = nil
	}
	return out
}

func (w *bodyWriter) run() {
	w.inbox = w.p.cfg.Bus.NewInbox()
	sub, err := w.p.cfg.Bus.SubscribeChan(w.inbox+".*", w.ackCh)
	if err != nil {
		w.p.cancel(bus.Errorf(bus.CodeUnavailable, "pipeline %s: %w", w.p.at.Name, err))
		return
	}
	defer func() { _ = sub.Unsubscribe() }() // fails only on a closed connection
	for {
		bodies := w.take()
		for len(bodies) == 0 {
			select {
			case <-w.p.ctx.Done():
				return
			case <-w.wakeCh:
			}
			bodies = w.take()
		}
		if !w.storeAll(bodies) {
			return
		}
		w.p.inbox.push(eventFunc(func(p *Pipeline) { p.flow.BodiesStored(bodies) }))
	}
}

// chunk is one message of a body.
type chunk struct {
	of   *flow.PendingBody
	data []byte
}

// storeAll stores bodies in chunks. It reports false when the pipeline ends first.
func (w *bodyWriter) storeAll(bodies []*flow.PendingBody) bool {
	size := min(maxChunk, w.p.cfg.Bus.MaxPayload()-headerRoom)
	var some []chunk
	bytes := 0
	for _, b := range bodies {
		for rest := b.Data; len(rest) > 0; {
			data := rest[:min(size, len(rest))]
			rest = rest[len(data):]
			if bytes+len(data) > maxBatchBytes || len(some) == maxBatchMessages {
				if !w.store(some) {
					return false
				}
				some, bytes = some[:0], 0
			}
			some, bytes = append(some, chunk{b, data}), bytes+len(data)
		}
	}
	return w.store(some)
}

// store retries until the chunks are stored; it reports false when the pipeline ends first. A chunk that is stored
// twice, because an acknowledgement was lost, is purged with its neighbours.
func (w *bodyWriter) store(parts []chunk) bool {
	waits := backoff.Start()
	for attempt := 1; ; attempt++ {
		seqs, err := w.try(parts)
		for len(parts) > 0 && len(seqs) > 0 && seqs[0] > 0 { // up to the first that is not stored
			parts[0].of.Seqs = parts[0].of.Seqs.Append(seqs[0])
			parts, seqs = parts[1:], seqs[1:]
		}
		if len(parts) == 0 {
			return true
		}
		if waits.Wait(w.p.ctx) != nil {
			return false
		}
		if attempt == 5 {
			w.p.cfg.Logger.Warn("pipeline: large bodies cannot be stored; retrying", "pipeline", w.p.at.Name, "stream", w.stream.Name, "error", err)
		}
	}
}

// try sends the chunks and waits until all are stored.
func (w *bodyWriter) try(parts []chunk) ([]uint64, error) {
	ctx, cancel := context.WithTimeout(w.p.ctx, 5*attemptTimeout)
	defer cancel()
	if _, err := w.p.journal.bodyStream(ctx, w.stream, true); err != nil {
		return nil, err
	}
	batch := len(parts) > 1 && w.ways.batch()
	start := time.Now()
	seqs, err := w.send(ctx, parts, batch)
	if err == nil && len(parts) > 1 {
		w.ways.took(batch, time.Since(start), len(parts))
	}
	return seqs, err
}

// send publishes the chunks, as a batch with one acknowledgement or each with its own, and returns their sequences.
func (w *bodyWriter) send(ctx context.Context, parts []chunk, batch bool) ([]uint64, error) {
	subject := w.p.at.Bodies(w.stream.Name, w.stream.Priority)
	w.number += uint64(len(parts)) // acknowledgements of earlier attempts have lower numbers
	first := w.number - uint64(len(parts)) + 1
	msgs := make([]*bus.Msg, len(parts))
	for i, part := range parts {
		msgs[i] = &bus.Msg{Subject: subject, Data: part.data}
	}
	reply := func(i int) string { return w.inbox + "." + strconv.FormatUint(first+uint64(i), 36) }
	if batch {
		id := w.p.journal.engine + "." + strconv.FormatUint(first, 36)
		if err := stream.AppendAsync(w.p.cfg.Bus, msgs, id, reply(len(msgs)-1)); err != nil {
			return nil, err
		}
	}
	for i := range msgs {
		if batch {
			break
		}
		if err := stream.AppendAsync(w.p.cfg.Bus, msgs[i:i+1], "", reply(i)); err != nil {
			return nil, err
		}
	}
	return w.gather(ctx, first, len(parts), batch)
}

// gather reads the acknowledgements: the sequence of each chunk; 0: unknown.
func (w *bodyWriter) gather(ctx context.Context, first uint64, n int, batch bool) ([]uint64, error) {
	seqs := make([]uint64, n)
	var failed error
	for left := n; left > 0; {
		var m *bus.Msg
		select {
		case m = <-w.ackCh:
		case <-ctx.Done():
			return seqs, ctx.Err()
		}
		number, err := strconv.ParseUint(lastToken(m.Subject), 36, 64)
		if err != nil || number < first || seqs[number-first] > 0 {
			continue // of an earlier attempt
		}
		ack, err := stream.ParseAck(m)
		seq := ack.Seq
		if err != nil {
			failed = err
		}
		if !batch {
			seqs[number-first] = seq
			left--
			continue
		}
		if err != nil {
			return seqs, err
		}
		if seq < uint64(n) {
			return nil, bus.Errorf(bus.CodeInternal, "%d bodies were stored up to sequence %d", n, seq)
		}
		for i := range seqs {
			seqs[i] = seq - uint64(n-1-i)
		}
		return seqs, nil
	}
	return seqs, failed
}

// ways are the two of storing several messages: as a batch, which the server writes twice and syncs once, or one by one,
// each synced if the server syncs at all. Which is faster depends on its disk and its settings, so both are measured.
type ways struct {
	cost  [2]float64 // seconds a message, smoothed; 0: not known
	turns int
}

const otherWayEvery = 64

func (w *ways) batch() bool {
	w.turns++
	faster := w.cost[1] == 0 || w.cost[0] > 0 && w.cost[1] <= w.cost[0]
	if w.turns == 2 || w.turns%otherWayEvery == 0 {
		return !faster
	}
	return faster
}

func (w *ways) took(batch bool, d time.Duration, n int) {
	way := 0
	if batch {
		way = 1
	}
	if c := d.Seconds() / float64(n); w.cost[way] == 0 {
		w.cost[way] = c
	} else {
		w.cost[way] += (c - w.cost[way]) / 4
	}
}
