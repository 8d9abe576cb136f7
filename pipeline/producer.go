package pipeline

import (
	"context"
	"time"

	"github.com/nats-io/nats.go"

	"troupe/bus"
	"troupe/bus/wire"
)

const (
	wireItems = 500       // of one put on the wire
	wireBytes = 512 << 10 // and their bytes, unless one item alone is more
	putAgain  = 2 * time.Second
)

// putEvent is a put on its way to the loop.
type putEvent struct {
	put
	name string
	end  func(error) // told what came of it; it must not block
}

func (e *putEvent) apply(p *Pipeline) {
	e.stream = p.flow.streamOf(e.name)
	if e.stream == nil {
		e.reply(p.noStream(e.name))
		return
	}
	e.token = e
	p.flow.put(&e.put)
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

// Put stores items in a stream. It returns when they are stored, or says why they are not: bus.ErrBusy when the stream
// is full and declared to refuse. While a stream that blocks is full, it waits. Up to 900 items of 4 MiB are stored all
// or nothing; more, in pieces, in order.
func (p *Pipeline) Put(ctx context.Context, stream string, items ...Item) error {
	return inPieces(items, maxGroup, maxCommitBytes, func(piece []Item) error { return p.putPiece(ctx, stream, piece) })
}

func (p *Pipeline) putPiece(ctx context.Context, stream string, items []Item) error {
	if full := p.full.Load(); full != nil {
		return full
	}
	doneCh := make(chan error, 1)
	e := &putEvent{put: put{items: items}, name: stream, end: func(err error) { doneCh <- err }}
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
	p.inbox.push(eventFunc(func(p *Pipeline) { p.flow.withdraw(e) }))
	return bus.Errorf(bus.CodeOf(ctx.Err()), "put into stream %s: it may or may not have been stored: %w", stream, ctx.Err())
}

// inPieces cuts items into what is stored at once.
func inPieces(items []Item, most int, mostBytes int64, do func([]Item) error) error {
	for len(items) > 0 {
		n, bytes := 0, int64(0)
		for n < len(items) && n < most {
			more := weight(&items[n]) + int64(len(items[n].ID))
			if n > 0 && bytes+more > mostBytes {
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

// Producer puts items into a pipeline that runs in any process. Each put has a number: one that has to be repeated,
// because its answer or the process that runs the pipeline was lost, is stored once. It is safe for concurrent use; puts
// go one after the other.
type Producer struct {
	b    *bus.Bus
	at   bus.Pipeline
	name string

	turnCh chan struct{} // holds one: whose turn it is, who owns what follows
	seq    uint64
}

// putRequest is a put on the wire.
type putRequest struct {
	Source string     `msgpack:"source"`
	Seq    uint64     `msgpack:"seq"`
	Stream string     `msgpack:"stream"`
	Items  []wireItem `msgpack:"items"`
	Size   int64      `msgpack:"size,omitempty"` // of the body of its only item, which is to be fetched
	From   string     `msgpack:"from,omitempty"` // here
}

// wireItem is an item on the wire, and what a method with the style "item" sees and gives.
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

func toWire(it *Item) wireItem {
	w := wireItem{
		ID: it.ID, Key: it.Key, Group: it.Group, Of: it.Of, Priority: it.Priority, Attempt: it.Attempt, Stale: it.Stale, Stream: it.Stream, Body: it.Body,
	}
	if it.Stamped {
		v := it.Version.Float()
		w.Version = &v
	}
	return w
}

func (w wireItem) item() Item {
	it := Item{ID: w.ID, Key: w.Key, Group: w.Group, Of: w.Of, Priority: w.Priority, Body: w.Body}
	if w.Version != nil {
		it.Version, it.Stamped = VersionOf(*w.Version), true
	}
	return it
}

// Put stores items in a stream, as Pipeline.Put does, and goes on through restarts of the server and of the pipeline
// until ctx ends.
func (r *Producer) Put(ctx context.Context, stream string, items ...Item) error {
	select {
	case r.turnCh <- struct{}{}:
		defer func() { <-r.turnCh }()
	case <-ctx.Done():
		return bus.Errorf(bus.CodeOf(ctx.Err()), "put into stream %s: %w", stream, ctx.Err())
	}
	return inPieces(items, wireItems, r.pieceBytes(), func(piece []Item) error { return r.putPiece(ctx, stream, piece) })
}

// pieceBytes is how much of a put goes into one message.
func (r *Producer) pieceBytes() int64 { return min(wireBytes, r.b.Conn().MaxPayload()/2) }

func (r *Producer) putPiece(ctx context.Context, stream string, items []Item) error {
	r.seq++
	req := putRequest{Source: r.name, Seq: r.seq, Stream: stream, Items: make([]wireItem, len(items))}
	for i := range items {
		req.Items[i] = toWire(&items[i])
		if len(req.Items[i].Body) == 0 {
			req.Items[i].Body = wire.Raw{0xc0}
		}
	}
	if large := items[0].Body; len(items) == 1 && int64(len(large)) > r.pieceBytes()/2 {
		stop, err := r.offer(&req, large)
		if err != nil {
			return err
		}
		defer stop()
	}
	body, err := wire.Marshal(req)
	if err != nil {
		return bus.Errorf(bus.CodeInvalid, "put into stream %s: the bodies must be msgpack (bus.Marshal): %w", stream, err)
	}
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		err := ask(ctx, r.b, r.at, "put", body, nil, putAgain)
		if err == nil || !again(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return bus.Errorf(bus.CodeOf(ctx.Err()), "put into stream %s: it may or may not have been stored: %w (%w)", stream, err, ctx.Err())
		case <-time.After(pause):
		}
	}
}

// offer leaves a large body out of a put: the pipeline fetches it from here, until stop is called.
func (r *Producer) offer(req *putRequest, body wire.Raw) (stop func(), err error) {
	inbox := r.b.Conn().NewInbox()
	sub, err := r.b.Conn().Subscribe(inbox, bus.GuardMsg(func(m *nats.Msg) {
		servePart(m, func(of uint64, _ int) []byte {
			if of != req.Seq {
				return nil
			}
			return body
		})
	}))
	if err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "put into stream %s: %w", req.Stream, err)
	}
	req.Size, req.From, req.Items[0].Body = int64(len(body)), inbox, wire.Raw{0xc0}
	return func() { _ = sub.Unsubscribe() }, nil // fails only on a closed connection
}
