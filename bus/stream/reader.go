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

// Reader reads messages in order. A message that is lost on its way is an error, so a missing message was deleted. One
// goroutine owns it; after an error it must not be used again.
type Reader struct {
	s        *Stream
	o        ReadOptions
	consumer jetstream.Consumer
	count    uint64 // messages received
	highest  uint64 // sequence of the last one
}

// Reader starts reading. Close frees its resources on the server.
func (s *Stream) Reader(ctx context.Context, o ReadOptions) (*Reader, error) {
	cfg := jetstream.ConsumerConfig{
		FilterSubject: o.Subject, AckPolicy: jetstream.AckNonePolicy, HeadersOnly: o.HeadersOnly,
		InactiveThreshold: readerIdleTime, MemoryStorage: true, Replicas: 1,
	}
	cfg.DeliverPolicy, cfg.OptStartSeq, cfg.OptStartTime = o.start()
	js, err := s.handle(ctx)
	if err != nil {
		return nil, coded(s.b, "read stream "+s.name, err)
	}
	c, err := js.CreateConsumer(ctx, cfg)
	if err != nil {
		return nil, coded(s.b, "read stream "+s.name, err)
	}
	return &Reader{s: s, o: o, consumer: c}, nil
}

// Next returns up to n more messages; none: all that were stored before the call have been read. An empty fetch alone is
// not proof of that, because the server may be slow, so Next asks for the number of unread messages. Nor is that: the server
// counts a message a little after it has acknowledged it, and a replica that reads may lag behind.
func (r *Reader) Next(ctx context.Context, n int) ([]Message, error) {
	waits := fetchBackoff.Start()
	for {
		out, received, err := r.fetch(ctx, n)
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
		case info.Delivered.Consumer > r.count:
			return nil, bus.Errorf(bus.CodeUnavailable, "read stream %s: %d messages were lost in transit", r.s.name, info.Delivered.Consumer-r.count)
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

// fetch reads what is there. It leaves out the markers that the server writes for expired messages.
func (r *Reader) fetch(ctx context.Context, n int) (out []Message, received int, err error) {
	batch, err := r.consumer.FetchNoWait(n)
	if err != nil {
		return nil, 0, err
	}
	for {
		select {
		case <-ctx.Done():
			return nil, received, ctx.Err()
		case m, ok := <-batch.Messages():
			if !ok {
				return out, received, batch.Error()
			}
			meta, err := m.Metadata()
			if err != nil {
				return nil, received, err
			}
			received++
			r.highest = meta.Sequence.Stream
			if r.count++; meta.Sequence.Consumer != r.count {
				return nil, received, bus.Errorf(bus.CodeUnavailable, "message %d was lost in transit", meta.Sequence.Stream)
			}
			if m.Headers().Get(jetstream.MarkerReasonHeader) == "" {
				out = append(out, messageOf(m, meta))
			}
		}
	}
}

// Close ends the reader.
func (r *Reader) Close(ctx context.Context) {
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
