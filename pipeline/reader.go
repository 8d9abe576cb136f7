package pipeline

import (
	"context"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
	"troupe/pipeline/flow"
)

// laneReader reads one lane of the log in order. It is used by one goroutine at a time.
type laneReader struct {
	consumer  jetstream.Consumer
	at        uint64        // last sequence read
	unclaimed []*flow.Entry // read, without large bodies, and not returned yet
	count     uint64        // messages received
	bodies    *bodyReader
}

const fetchBatch = 256

// read reads the items of a lane in a range of ordinals. It returns early when it has read enough bytes, or what it has
// when an error occurs.
func (j *journal) read(ctx context.Context, want flow.ReadRequest) (got flow.ReadResult, err error) {
	r := j.readers[want.Lane]
	if r == nil || r.at != want.AfterSeq && len(r.unclaimed) == 0 || len(r.unclaimed) > 0 && r.unclaimed[0].Ordinal > want.From {
		if r, err = j.newReader(ctx, want); err != nil {
			return flow.ReadResult{}, err
		}
		j.readers[want.Lane] = r
	}
	got.UpTo, got.LastSeq = want.From-1, want.AfterSeq
	for bytes := int64(0); ; {
		for len(r.unclaimed) > 0 && r.unclaimed[0].Ordinal <= want.To {
			if got.UpTo >= want.From && bytes >= want.MaxBytes {
				return got, nil
			}
			e := r.unclaimed[0]
			if e.Ordinal >= want.From && !want.Done.Contains(e.Ordinal) {
				if err := j.fetchBody(ctx, r, e); err != nil {
					return j.abandonReader(want, got, err)
				}
				got.Entries, bytes = append(got.Entries, e), bytes+flow.Weight(&e.Item)
			} else if e.Ordinal >= want.From {
				got.Completed = append(got.Completed, flow.NewCompletedItem(e, max(e.BodySize, len(e.Body))))
			}
			r.unclaimed[0] = nil // the body may be large
			r.unclaimed = r.unclaimed[1:]
			got.UpTo, got.LastSeq = max(got.UpTo, e.Ordinal), e.Seq
		}
		if len(r.unclaimed) > 0 || got.UpTo == want.To {
			got.UpTo = want.To
			return got, nil
		}
		more, err := j.fetch(ctx, r, want.Lane, min(fetchBatch, int(want.To-want.From)+1))
		if err == nil && !more {
			more, err = r.more(ctx)
			if err == nil && !more {
				got.UpTo = want.To
				return got, nil
			}
		}
		if err != nil {
			return j.abandonReader(want, got, err)
		}
	}
}

// abandonReader returns what was read before an error. The next read uses a new consumer.
func (j *journal) abandonReader(want flow.ReadRequest, got flow.ReadResult, err error) (flow.ReadResult, error) {
	delete(j.readers, want.Lane)
	if got.UpTo >= want.From {
		return got, nil
	}
	return flow.ReadResult{}, err
}

// more reports whether the lane has more messages. An empty fetch is not proof: the server may have been slow.
func (r *laneReader) more(ctx context.Context) (bool, error) {
	more, err := hasUnread(ctx, r.consumer, r.count)
	if err != nil {
		return false, err
	}
	return more, sleep(ctx, time.Millisecond)
}

// checkOrder counts the messages of a consumer. A gap is a message that was lost with a connection, and must not be
// mistaken for a deleted one.
func checkOrder(m jetstream.Msg, count *uint64) error {
	meta, err := m.Metadata()
	if err != nil {
		return err
	}
	if *count++; meta.Sequence.Consumer != *count {
		return bus.Errorf(bus.CodeUnavailable, "message %d of the log was lost in transit", meta.Sequence.Stream)
	}
	return nil
}

// hasUnread asks the server whether the consumer has more messages than were received: an empty fetch is not proof.
func hasUnread(ctx context.Context, c jetstream.Consumer, count uint64) (bool, error) {
	info, err := c.Info(ctx)
	if err == nil && info.Delivered.Consumer > count {
		err = bus.Errorf(bus.CodeUnavailable, "%d messages of the log were lost in transit", info.Delivered.Consumer-count)
	}
	if err != nil {
		return false, err
	}
	return info.NumPending > 0, nil
}

func (j *journal) newReader(ctx context.Context, want flow.ReadRequest) (*laneReader, error) {
	c, err := j.stream.CreateConsumer(ctx, jetstream.ConsumerConfig{
		FilterSubject: j.at.Items(want.Lane.StreamName(), want.Lane.Priority), AckPolicy: jetstream.AckNonePolicy,
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: want.AfterSeq + 1,
		InactiveThreshold: time.Minute, MemoryStorage: true, Replicas: 1,
	})
	if err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "pipeline %s: read its log: %w", j.at.Name, err)
	}
	return &laneReader{consumer: c, at: want.AfterSeq}, nil
}

// fetch reads up to n more messages; it reports false when there are none.
func (j *journal) fetch(ctx context.Context, r *laneReader, l *flow.Lane, n int) (more bool, err error) {
	batch, err := r.consumer.FetchNoWait(n)
	if err != nil {
		return false, err
	}
	var got []*flow.Entry
	count := r.count
	for {
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case m, ok := <-batch.Messages():
			if !ok {
				if err := batch.Error(); err != nil {
					return false, err
				}
				for _, e := range got {
					r.at = e.Seq
				}
				r.count = count
				r.unclaimed = append(r.unclaimed, got...)
				return more, nil
			}
			e, err := entryOf(m, l)
			if err == nil {
				err = checkOrder(m, &count)
			}
			if err != nil {
				return false, err
			}
			more = true
			if !j.isDiscarded(e.Seq) {
				got = append(got, e)
			}
		}
	}
}

func entryOf(m jetstream.Msg, l *flow.Lane) (*flow.Entry, error) {
	meta, err := m.Metadata()
	if err != nil {
		return nil, err
	}
	lb, err := parseLabel(m.Headers().Get(headerItem))
	if err != nil {
		return nil, bus.Errorf(bus.CodeMalformed, "the item at sequence %d of the log has no valid label: %w", meta.Sequence.Stream, err)
	}
	e := &flow.Entry{Item: lb.item(l.StreamName(), l.Priority, m.Data()), Lane: l, Ordinal: lb.N, Seq: meta.Sequence.Stream}
	if len(lb.Body) > 0 {
		e.BodyRef, e.BodySize = &flow.PendingBody{Stream: l.Bodies, Seqs: lb.Body}, lb.Size
	}
	return e, nil
}

// fetchBody reads the large body of an item.
func (j *journal) fetchBody(ctx context.Context, r *laneReader, e *flow.Entry) (err error) {
	if e.BodyRef == nil {
		return nil
	}
	if r.bodies == nil {
		if r.bodies, err = j.newBodyReader(ctx, e.Lane.Bodies, e.BodyRef.Seqs[0][0]); err != nil {
			return err
		}
	}
	if e.Body, err = r.bodies.read(ctx, e.BodyRef.Seqs, e.BodySize); err != nil {
		return bus.Errorf(bus.CodeOf(err), "pipeline %s: item %d of stream %s: %w", j.at.Name, e.Ordinal, e.Lane.StreamName(), err)
	}
	return nil
}

// each visits the messages of all matching subjects in log order, without partial batches.
func (j *journal) each(ctx context.Context, filter string, do func(m jetstream.Msg, seq uint64) error) error {
	return eachMessage(ctx, j.stream, filter, func(m jetstream.Msg, seq uint64) error {
		if j.isDiscarded(seq) {
			return nil
		}
		return do(m, seq)
	})
}

func eachMessage(ctx context.Context, s jetstream.Stream, filter string, do func(m jetstream.Msg, seq uint64) error) error {
	return eachOfConsumer(ctx, s, jetstream.ConsumerConfig{FilterSubject: filter}, do)
}

// eachOfConsumer visits the messages that a consumer with this configuration delivers.
func eachOfConsumer(ctx context.Context, s jetstream.Stream, cfg jetstream.ConsumerConfig, do func(m jetstream.Msg, seq uint64) error) error {
	cfg.AckPolicy, cfg.DeliverPolicy = jetstream.AckNonePolicy, jetstream.DeliverAllPolicy
	cfg.InactiveThreshold, cfg.MemoryStorage, cfg.Replicas = 30*time.Second, true, 1
	c, err := s.CreateConsumer(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { _ = s.DeleteConsumer(context.WithoutCancel(ctx), c.CachedInfo().Name) }() // otherwise it expires
	for count := uint64(0); ; {
		batch, err := c.FetchNoWait(fetchBatch)
		if err != nil {
			return err
		}
		n := 0
		for m := range batch.Messages() {
			n++
			meta, err := m.Metadata()
			if err == nil {
				err = checkOrder(m, &count)
			}
			if err != nil {
				return err
			}
			if m.Headers().Get(jetstream.MarkerReasonHeader) != "" {
				continue
			}
			if err := do(m, meta.Sequence.Stream); err != nil {
				return err
			}
		}
		if err := batch.Error(); err != nil {
			return err
		}
		if n > 0 {
			continue
		}
		if more, err := hasUnread(ctx, c, count); err != nil || !more {
			return err
		}
		if err := sleep(ctx, time.Millisecond); err != nil {
			return err
		}
	}
}

func lastToken(subject string) string { return subject[strings.LastIndexByte(subject, '.')+1:] }
