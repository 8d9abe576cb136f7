package pipeline

import (
	"context"
	"strconv"
	"sync"

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
	body *flow.PendingBody
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
func (w *bodyWriter) store(chunks []chunk) bool {
	waits := backoff.Start()
	for attempt := 1; ; attempt++ {
		seqs, err := w.try(chunks)
		for len(chunks) > 0 && len(seqs) > 0 && seqs[0] > 0 { // up to the first that is not stored
			chunks[0].body.Seqs = chunks[0].body.Seqs.Append(seqs[0])
			chunks, seqs = chunks[1:], seqs[1:]
		}
		if len(chunks) == 0 {
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
func (w *bodyWriter) try(chunks []chunk) ([]uint64, error) {
	ctx, cancel := context.WithTimeout(w.p.ctx, 5*attemptTimeout)
	defer cancel()
	if _, err := w.p.journal.bodyStream(ctx, w.stream, true); err != nil {
		return nil, err
	}
	return w.send(ctx, chunks)
}

// send publishes the chunks and returns their sequences; 0: not stored, or unknown.
func (w *bodyWriter) send(ctx context.Context, chunks []chunk) ([]uint64, error) {
	subject := w.p.at.Bodies(w.stream.Name, w.stream.Priority)
	w.number += uint64(len(chunks)) // acknowledgements of earlier attempts have lower numbers
	first := w.number - uint64(len(chunks)) + 1
	for i, c := range chunks {
		m := &bus.Msg{Subject: subject, Data: c.data}
		if err := stream.AppendAsync(w.p.cfg.Bus, []*bus.Msg{m}, "", w.inbox+"."+strconv.FormatUint(first+uint64(i), 36)); err != nil {
			return nil, err
		}
	}
	seqs := make([]uint64, len(chunks))
	var failed error
	for range chunks {
		number, ack, err := w.nextAck(ctx, first)
		if number == 0 {
			return seqs, err
		}
		if err != nil {
			failed = err
		}
		seqs[number-first] = ack.Seq
	}
	return seqs, failed
}

// nextAck waits for an acknowledgement of a message with this number or a later one.
func (w *bodyWriter) nextAck(ctx context.Context, first uint64) (number uint64, ack stream.Ack, err error) {
	for {
		select {
		case m := <-w.ackCh:
			number, err = strconv.ParseUint(lastToken(m.Subject), 36, 64)
			if err == nil && number >= first { // otherwise of an earlier attempt
				ack, err = stream.ParseAck(m)
				return number, ack, err
			}
		case <-ctx.Done():
			return 0, stream.Ack{}, ctx.Err()
		}
	}
}
