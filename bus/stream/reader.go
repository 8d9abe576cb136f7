package stream

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
)

const (
	fetchSize      = 256
	readerIdleTime = time.Minute // after which the server removes a reader that was not closed
)

// fetchBackoff is the wait for messages that the server has and has not delivered: it takes microseconds to count one, and
// a new replica may take seconds.
var fetchBackoff = bus.Backoff{First: time.Millisecond, Most: 20 * time.Millisecond}

// Message is a stored message.
type Message struct {
	Subject string
	Header  bus.Header
	Data    []byte
	Seq     uint64
	Time    time.Time
}

// ReadOptions say what to read. The zero value reads everything.
type ReadOptions struct {
	Subject     string    // may have wildcards
	From        uint64    // first sequence
	Since       time.Time // first time of storage; not with From
	HeadersOnly bool      // leave out the bodies
}

func (o ReadOptions) start() (jetstream.DeliverPolicy, uint64, *time.Time) {
	switch {
	case o.From > 0:
		return jetstream.DeliverByStartSequencePolicy, o.From, nil
	case !o.Since.IsZero():
		return jetstream.DeliverByStartTimePolicy, 0, &o.Since
	}
	return jetstream.DeliverAllPolicy, 0, nil
}

// Reader reads messages in order. It reads a message again that is lost on its way, so a missing message was deleted. One
// goroutine owns it; after an error it must not be used again.
type Reader struct {
	s        *Stream
	o        ReadOptions
	consumer jetstream.Consumer
	count    uint64 // messages received from the consumer
	highest  uint64 // sequence of the last one
}

// Reader starts reading. Close frees its resources on the server.
func (s *Stream) Reader(ctx context.Context, o ReadOptions) (*Reader, error) {
	r := &Reader{s: s, o: o}
	if s.door != nil {
		return r, nil
	}
	if err := r.begin(ctx); err != nil {
		return nil, coded(s.b, "read stream "+s.name, err)
	}
	return r, nil
}

// begin reads on after the last message that was received.
func (r *Reader) begin(ctx context.Context) error {
	o := r.o
	if r.highest > 0 {
		o.From = r.highest + 1
	}
	cfg := jetstream.ConsumerConfig{
		FilterSubject: o.Subject, AckPolicy: jetstream.AckNonePolicy, HeadersOnly: o.HeadersOnly,
		InactiveThreshold: readerIdleTime, MemoryStorage: true, Replicas: 1,
	}
	cfg.DeliverPolicy, cfg.OptStartSeq, cfg.OptStartTime = o.start()
	js, err := r.s.handle(ctx)
	if err != nil {
		return err
	}
	r.count = 0
	r.consumer, err = bus.Repeat(ctx, func(ctx context.Context) (jetstream.Consumer, error) { return js.CreateConsumer(ctx, cfg) })
	return err
}

// Next returns up to n more messages; none: all that were stored before the call have been read. An empty fetch alone is
// not proof of that, because the server may be slow, so Next asks for the number of unread messages. Nor is that: the server
// counts a message a little after it has acknowledged it, and a replica that reads may lag behind.
func (r *Reader) Next(ctx context.Context, n int) ([]Message, error) {
	if r.s.door != nil {
		return r.nextAtDoor(ctx, n)
	}
	waits := fetchBackoff.Start()
	for {
		out, received, lost, err := r.fetch(ctx, n)
		if lost {
			r.Close(ctx)
			err = r.begin(ctx)
		}
		if err != nil || len(out) > 0 {
			return out, coded(r.s.b, "read stream "+r.s.name, err)
		}
		if received > 0 {
			continue // only markers
		}
		info, err := r.consumer.Info(ctx)
		switch {
		case err != nil:
			return nil, coded(r.s.b, "read stream "+r.s.name, err)
		case info.Delivered.Consumer > r.count: // they were sent for a request that this process had given up
			r.Close(ctx)
			if err := r.begin(ctx); err != nil {
				return nil, coded(r.s.b, "read stream "+r.s.name, err)
			}
		case info.NumPending == 0:
			if behind, err := r.behind(ctx); err != nil || !behind {
				return nil, err
			}
		}
		if err := waits.Wait(ctx); err != nil {
			return nil, coded(r.s.b, "read stream "+r.s.name, err)
		}
	}
}

// behind reports whether the leader of the stream has a message for this reader that it has not received. Of a lossy stream
// any replica would answer.
func (r *Reader) behind(ctx context.Context) (bool, error) {
	if r.s.direct {
		return false, nil
	}
	js, err := r.s.handle(ctx)
	if err != nil {
		return false, coded(r.s.b, "read stream "+r.s.name, err)
	}
	last, err := js.GetLastMsgForSubject(ctx, cmp.Or(r.o.Subject, ">"))
	switch {
	case errors.Is(err, jetstream.ErrMsgNotFound):
		return false, nil
	case err != nil:
		return false, coded(r.s.b, "read stream "+r.s.name, err)
	}
	return last.Sequence > r.highest && last.Sequence >= r.o.From && !last.Time.Before(r.o.Since), nil
}

// fetch reads what is there, up to a message before which another was lost. It leaves out the markers that the server writes for expired
// messages.
func (r *Reader) fetch(ctx context.Context, n int) (out []Message, received int, lost bool, err error) {
	batch, err := r.consumer.FetchNoWait(n)
	if err != nil {
		return nil, 0, false, err
	}
	for {
		select {
		case <-ctx.Done():
			return nil, received, false, ctx.Err()
		case m, ok := <-batch.Messages():
			if !ok {
				return out, received, false, batch.Error()
			}
			meta, err := m.Metadata()
			if err != nil {
				return nil, received, false, err
			}
			if meta.Sequence.Consumer != r.count+1 {
				return out, received, true, nil
			}
			received++
			r.count++
			r.highest = meta.Sequence.Stream
			if m.Headers().Get(jetstream.MarkerReasonHeader) == "" {
				out = append(out, messageOf(m, meta))
			}
		}
	}
}

// Close ends the reader.
func (r *Reader) Close(ctx context.Context) {
	if r.s.door != nil {
		return
	}
	if js, err := r.s.handle(ctx); err == nil {
		_ = js.DeleteConsumer(context.WithoutCancel(ctx), r.consumer.CachedInfo().Name) // otherwise it expires
	}
}

// Each calls do with each message, in order, up to the end of the stream.
func (s *Stream) Each(ctx context.Context, o ReadOptions, do func(Message) error) error {
	r, err := s.Reader(ctx, o)
	if err != nil {
		return err
	}
	defer r.Close(ctx)
	for {
		msgs, err := r.Next(ctx, fetchSize)
		if err != nil || len(msgs) == 0 {
			return err
		}
		for _, m := range msgs {
			if err := do(m); err != nil {
				return err
			}
		}
	}
}

// Follow calls do with each message, in order, also with those that are stored later, until do returns an error or ctx
// ends. It survives restarts of the server, and a connection that NATS closes unasked.
func (s *Stream) Follow(ctx context.Context, o ReadOptions, do func(Message) error) error {
	if s.door != nil {
		return s.followAtDoor(ctx, o, do)
	}
	waits := bus.Backoff{}.Start()
	for {
		var failed error // of do
		err := s.follow(ctx, o, func(m Message) error {
			waits.Reset()
			failed = do(m)
			o.From, o.Since = m.Seq+1, time.Time{}
			return failed
		})
		switch {
		case failed != nil:
			return failed
		case !closed(err) || s.b.Closed() || ctx.Err() != nil, waits.Wait(ctx) != nil:
			return coded(s.b, "read stream "+s.name, cmp.Or(ctx.Err(), err))
		}
	}
}

// follow is Follow on one connection.
func (s *Stream) follow(ctx context.Context, o ReadOptions, do func(Message) error) error {
	cfg := jetstream.OrderedConsumerConfig{HeadersOnly: o.HeadersOnly}
	if o.Subject != "" {
		cfg.FilterSubjects = []string{o.Subject}
	}
	cfg.DeliverPolicy, cfg.OptStartSeq, cfg.OptStartTime = o.start()
	js, err := s.handle(ctx)
	if err != nil {
		return err
	}
	c, err := js.OrderedConsumer(ctx, cfg)
	if err != nil {
		return err
	}
	messages, err := c.Messages()
	if err != nil {
		return err
	}
	defer messages.Stop()
	defer context.AfterFunc(ctx, bus.Guard(messages.Stop))()
	for {
		m, err := messages.Next()
		if err != nil {
			return err
		}
		meta, err := m.Metadata()
		if err != nil {
			return err
		}
		if m.Headers().Get(jetstream.MarkerReasonHeader) != "" {
			continue
		}
		if err := do(messageOf(m, meta)); err != nil {
			return err
		}
	}
}

func messageOf(m jetstream.Msg, meta *jetstream.MsgMetadata) Message {
	return Message{Subject: m.Subject(), Header: m.Headers(), Data: m.Data(), Seq: meta.Sequence.Stream, Time: meta.Timestamp}
}
