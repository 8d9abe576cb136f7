package pipeline

import (
	"context"
	"time"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/pipeline/flow"
	"troupe/pipeline/spec"
)

const (
	maxPutItems       = 500       // in one message
	maxPutBytes       = 512 << 10 // bytes in one message, unless one item is larger
	putAttemptTimeout = 2 * time.Second
)

type putEvent struct {
	flow.Put
	name string
	end  func(error) // receives the result; must not block
}

func (e *putEvent) apply(p *Pipeline) {
	e.Stream = p.flow.StreamNamed(e.name)
	if e.Stream == nil {
		e.reply(p.noStream(e.name))
		return
	}
	e.Token = e
	p.flow.Put(&e.Put)
}

func (e *putEvent) reply(err error) { e.end(err) }

func (p *Pipeline) noStream(name string) error {
	return bus.Errorf(bus.CodeNotFound, "pipeline %s has no stream %q; it has %v", p.at.Name, name, p.streamNames())
}

func (p *Pipeline) streamNames() []string {
	var out []string
	for _, s := range p.spec.Streams {
		out = append(out, s.Name)
	}
	return out
}

// Put stores items in a stream. It returns when they are committed, or an error: bus.ErrBusy if the stream is full and
// its policy is Refuse. With Block it waits for room. Up to 900 items of 4 MiB are stored atomically; more are stored
// in several parts, in order.
func (p *Pipeline) Put(ctx context.Context, stream string, items ...spec.Item) error {
	return inBatches(items, spec.MaxGroup, flow.MaxCommitBytes, func(piece []spec.Item) error { return p.putBatch(ctx, stream, piece) })
}

func (p *Pipeline) putBatch(ctx context.Context, stream string, items []spec.Item) error {
	if full := p.storeFull.Load(); full != nil {
		return full
	}
	doneCh := make(chan error, 1)
	e := &putEvent{Put: flow.Put{Items: items}, name: stream, end: func(err error) { doneCh <- err }}
	p.inbox.push(e)
	select {
	case err := <-doneCh:
		return err
	case <-p.doneCh:
		select {
		case err := <-doneCh:
			return err
		default:
			return p.ended()
		}
	case <-ctx.Done():
	}
	p.inbox.push(eventFunc(func(p *Pipeline) { p.flow.WithdrawPut(e) }))
	return bus.Errorf(bus.CodeOf(ctx.Err()), "put into stream %s: outcome unknown: %w", stream, ctx.Err())
}

// inBatches splits items into batches that are stored atomically.
func inBatches(items []spec.Item, countLimit int, byteLimit int64, do func([]spec.Item) error) error {
	for len(items) > 0 {
		n, bytes := 0, int64(0)
		for n < len(items) && n < countLimit {
			more := flow.Weight(&items[n]) + int64(len(items[n].ID))
			if n > 0 && bytes+more > byteLimit {
				break
			}
			bytes += more
			n++
		}
		if err := do(items[:n:n]); err != nil {
			return err
		}
		items = items[n:]
	}
	return nil
}

// Producer puts items into a pipeline that runs in any process. Puts are numbered, so a put that is repeated because
// its answer or the engine was lost is stored once. It is safe for concurrent use; puts are sequential.
type Producer struct {
	b        *bus.Bus
	exchange *values.Exchange
	at       Address
	name     string

	lockCh chan struct{} // capacity one: a lock that guards seq
	seq    uint64
}

// putRequest is a put on the wire.
type putRequest struct {
	Source string     `msgpack:"source"`
	Seq    uint64     `msgpack:"seq"`
	Stream string     `msgpack:"stream"`
	Items  []wireItem `msgpack:"items"`
	// Body names the body of the only item, if the engine has to pull it.
	Body wire.BodyRef `msgpack:"body"`
}

// wireItem is an item on the wire, as methods with the style "item" receive and return it.
type wireItem struct {
	To       string   `msgpack:"to,omitempty"`
	ID       string   `msgpack:"id,omitempty"`
	Key      string   `msgpack:"key,omitempty"`
	Group    string   `msgpack:"group,omitempty"`
	Of       int      `msgpack:"of,omitempty"`
	Priority int      `msgpack:"priority,omitempty"`
	Version  *float64 `msgpack:"version,omitempty"`
	Attempt  int      `msgpack:"attempt,omitempty"`
	Stale    bool     `msgpack:"stale,omitempty"`
	Stream   string   `msgpack:"stream,omitempty"`
	Body     wire.Raw `msgpack:"body"`
}

func toWire(it *spec.Item) wireItem {
	w := wireItem{
		ID: it.ID, Key: it.Key, Group: it.Group, Of: it.Of, Priority: it.Priority, Attempt: it.Attempt, Stale: it.Stale, Stream: it.Stream, Body: it.Body,
	}
	if it.Stamped {
		v := it.Version.Float()
		w.Version = &v
	}
	return w
}

func (w wireItem) item() spec.Item {
	it := spec.Item{ID: w.ID, Key: w.Key, Group: w.Group, Of: w.Of, Priority: w.Priority, Body: w.Body}
	if w.Version != nil {
		it.Version, it.Stamped = spec.VersionOf(*w.Version), true
	}
	return it
}

// Put stores items in a stream, as Pipeline.Put does. It retries over restarts of the server and of the pipeline until
// ctx ends.
func (r *Producer) Put(ctx context.Context, stream string, items ...spec.Item) error {
	select {
	case r.lockCh <- struct{}{}:
		defer func() { <-r.lockCh }()
	case <-ctx.Done():
		return bus.Errorf(bus.CodeOf(ctx.Err()), "put into stream %s: %w", stream, ctx.Err())
	}
	return inBatches(items, maxPutItems, r.batchBytes(), func(piece []spec.Item) error { return r.putBatch(ctx, stream, piece) })
}

func (r *Producer) batchBytes() int64 { return int64(min(maxPutBytes, r.b.MaxPayload()/2)) }

func (r *Producer) putBatch(ctx context.Context, stream string, items []spec.Item) error {
	r.seq++
	req := putRequest{Source: r.name, Seq: r.seq, Stream: stream, Items: make([]wireItem, len(items))}
	for i := range items {
		req.Items[i] = toWire(&items[i])
		if len(req.Items[i].Body) == 0 {
			req.Items[i].Body = wire.Raw{0xc0}
		}
	}
	if large := items[0].Body; len(items) == 1 && int64(len(large)) > r.batchBytes()/2 {
		store, err := r.exchange.Store()
		if err != nil {
			return bus.Errorf(bus.CodeOf(err), "put into stream %s: %w", stream, err)
		}
		req.Body, req.Items[0].Body = store.OfferKept(large, nil), wire.Raw{0xc0}
		defer store.Withdraw(req.Body)
	}
	body, err := wire.Marshal(req)
	if err != nil {
		return bus.Errorf(bus.CodeInvalid, "put into stream %s: the bodies must be msgpack (wire.Marshal): %w", stream, err)
	}
	for waits := backoff.Start(); ; {
		err := sendRequest(ctx, r.b, r.at, "put", body, nil, putAttemptTimeout)
		if err == nil || !isRetryable(err) {
			return err
		}
		if waits.Wait(ctx) != nil {
			return bus.Errorf(bus.CodeOf(ctx.Err()), "put into stream %s: outcome unknown: %w (%w)", stream, err, ctx.Err())
		}
	}
}
