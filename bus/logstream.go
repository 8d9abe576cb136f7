package bus

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// LogStreamConfig describes a bounded stream of messages: the oldest are dropped first. Writes are acknowledged before they
// are synced to disk when the stream has one replica.
type LogStreamConfig struct {
	Name     string
	Subject  string // filter of the subjects that are stored
	MaxBytes int64
	MaxAge   time.Duration
	Replicas int // see AllReplicas. Zero: as many as the cluster offers for a new stream, unchanged for an existing one
}

// LogStream is an open stream of a LogStreamConfig. It is safe for concurrent use.
type LogStream struct {
	b      *Bus
	name   string
	stream jetstream.Stream
}

// OpenLogStream opens a stream, or creates it. An existing stream keeps its limits.
func (b *Bus) OpenLogStream(ctx context.Context, cfg LogStreamConfig) (*LogStream, error) {
	persist := jetstream.AsyncPersistMode
	if b.Clustered() && cfg.Replicas != 1 { // the server allows asynchronous writes with a single replica only
		persist = jetstream.DefaultPersistMode
	}
	s, err := b.OpenStream(ctx, jetstream.StreamConfig{
		Name: cfg.Name, Subjects: []string{cfg.Subject}, MaxBytes: cfg.MaxBytes, MaxAge: cfg.MaxAge, Discard: jetstream.DiscardOld,
		Storage: jetstream.FileStorage, PersistMode: persist, AllowDirect: true, Replicas: cfg.Replicas,
	})
	if err != nil {
		return nil, err
	}
	return &LogStream{b: b, name: cfg.Name, stream: s}, nil
}

// Append stores a message and returns its sequence in the stream. A message whose acknowledgement is lost may be stored twice.
func (s *LogStream) Append(ctx context.Context, subject string, data []byte) (uint64, error) {
	ack, err := s.b.js.Publish(ctx, subject, data)
	if err != nil {
		return 0, Errorf(CodeUnavailable, "append to stream %s: %w", s.name, err)
	}
	return ack.Sequence, nil
}

// LogStreamQuery selects messages of a stream.
type LogStreamQuery struct {
	Subject string    // filter
	Since   time.Time // zero: from the first message
	Follow  bool      // wait for messages that are stored later
}

// StoredMsg is a message of a stream.
type StoredMsg struct {
	Subject string
	Data    []byte
	Seq     uint64 // in the stream; zero: unknown
}

// Read calls f with each selected message, in the order of the stream, from the calling goroutine. It returns nil after the
// last message, or with Follow when ctx ends. An error of f ends the reading and is returned.
func (s *LogStream) Read(ctx context.Context, q LogStreamQuery, f func(StoredMsg) error) error {
	order := jetstream.OrderedConsumerConfig{FilterSubjects: []string{q.Subject}, DeliverPolicy: jetstream.DeliverAllPolicy}
	if !q.Since.IsZero() {
		order.DeliverPolicy, order.OptStartTime = jetstream.DeliverByStartTimePolicy, &q.Since
	}
	consumer, err := s.stream.OrderedConsumer(ctx, order)
	if err != nil {
		return Errorf(CodeUnavailable, "read stream %s: %w", s.name, err)
	}
	info, err := consumer.Info(ctx)
	if err != nil {
		return Errorf(CodeUnavailable, "read stream %s: %w", s.name, err)
	}
	if !q.Follow && info.NumPending == 0 && info.Delivered.Consumer == 0 {
		return nil
	}
	messages, err := consumer.Messages()
	if err != nil {
		return Errorf(CodeUnavailable, "read stream %s: %w", s.name, err)
	}
	defer messages.Stop()
	defer context.AfterFunc(ctx, Guard(messages.Stop))()
	for {
		m, err := messages.Next()
		switch {
		case ctx.Err() != nil && q.Follow:
			return nil
		case ctx.Err() != nil:
			return Errorf(CodeOf(ctx.Err()), "read stream %s: %w", s.name, ctx.Err())
		case err != nil:
			return Errorf(CodeUnavailable, "read stream %s: %w", s.name, err)
		}
		stored, last := StoredMsg{Subject: m.Subject(), Data: m.Data()}, false
		if meta, err := m.Metadata(); err == nil {
			stored.Seq, last = meta.Sequence.Stream, meta.NumPending == 0
		}
		if err := f(stored); err != nil || last && !q.Follow {
			return err
		}
	}
}

// StreamNames lists the streams of the server.
func (b *Bus) StreamNames(ctx context.Context) ([]string, error) {
	var names []string
	list := b.js.StreamNames(ctx)
	for name := range list.Name() {
		names = append(names, name)
	}
	if err := list.Err(); err != nil && !errors.Is(err, jetstream.ErrEndOfData) {
		return nil, Errorf(CodeUnavailable, "list the streams: %w", err)
	}
	return names, nil
}

// DeleteStream deletes a stream with its messages. A stream that does not exist is no error.
func (b *Bus) DeleteStream(ctx context.Context, name string) error {
	if err := b.js.DeleteStream(ctx, name); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
		return Errorf(CodeUnavailable, "delete stream %s: %w", name, err)
	}
	return nil
}
