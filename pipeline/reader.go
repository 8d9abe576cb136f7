package pipeline

import (
	"context"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
)

// reader reads one lane of the log in order. It is used by one goroutine at a time.
type reader struct {
	consumer jetstream.Consumer
	at       uint64   // where it is in the log
	left     []*entry // read and not asked for yet
	bodies   jetstream.Consumer
}

const fetchAtOnce = 256

// read gives the items of a lane with the numbers from…to that lie in the log, as far as it came before ctx ended: up to
// which number that was, and where the last of them lies.
func (j *journal) read(ctx context.Context, want load) (entries []*entry, upTo, last uint64, err error) {
	r := j.readers[want.lane]
	if r == nil || r.at != want.after && len(r.left) == 0 || len(r.left) > 0 && r.left[0].n > want.from {
		if r, err = j.newReader(ctx, want); err != nil {
			return nil, 0, 0, err
		}
		j.readers[want.lane] = r
	}
	last = want.after
	for {
		for len(r.left) > 0 && r.left[0].n <= want.to {
			e := r.left[0]
			r.left = r.left[1:]
			last = e.seq
			if e.n >= want.from {
				entries = append(entries, e)
			}
		}
		if len(r.left) > 0 || len(entries) > 0 && entries[len(entries)-1].n == want.to {
			return entries, want.to, last, nil
		}
		more, err := j.fetch(ctx, r, want.lane, min(fetchAtOnce, int(want.to-want.from)+1))
		if err == nil && !more {
			more, err = r.more(ctx)
			if err == nil && !more {
				return entries, want.to, last, nil
			}
		}
		if err != nil {
			delete(j.readers, want.lane)
			if len(entries) > 0 {
				return entries, entries[len(entries)-1].n, last, nil
			}
			return nil, 0, 0, err
		}
	}
}

// more says whether something more lies in the lane. A fetch that came back empty does not prove the contrary: the
// server may have been slow.
func (r *reader) more(ctx context.Context) (bool, error) {
	info, err := r.consumer.Info(ctx)
	if err != nil {
		return false, err
	}
	return info.NumPending > 0, wait(ctx, time.Millisecond)
}

func (j *journal) newReader(ctx context.Context, want load) (*reader, error) {
	c, err := j.stream.CreateConsumer(ctx, jetstream.ConsumerConfig{
		FilterSubject: j.at.Items(want.lane.stream.spec.Name, want.lane.priority), AckPolicy: jetstream.AckNonePolicy,
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: want.after + 1,
		InactiveThreshold: time.Minute, MemoryStorage: true, Replicas: 1,
	})
	if err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "pipeline %s: read its log: %w", j.at.Name, err)
	}
	return &reader{consumer: c, at: want.after}, nil
}

// fetch reads up to n messages more; it reports false when there are none.
func (j *journal) fetch(ctx context.Context, r *reader, l *lane, n int) (more bool, err error) {
	batch, err := r.consumer.FetchNoWait(n)
	if err != nil {
		return false, err
	}
	var got []*entry
	for {
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case m, ok := <-batch.Messages():
			if !ok {
				if err := batch.Error(); err != nil {
					return false, err
				}
				return more, j.keep(ctx, r, l, got)
			}
			e, err := entryOf(m, l)
			if err != nil {
				return false, err
			}
			more = true
			got = append(got, e)
		}
	}
}

func entryOf(m jetstream.Msg, l *lane) (*entry, error) {
	meta, err := m.Metadata()
	if err != nil {
		return nil, err
	}
	lb, err := parseLabel(m.Headers().Get(headerLabel))
	if err != nil {
		return nil, bus.Errorf(bus.CodeMalformed, "an item at %d of the log has no label that can be read: %w", meta.Sequence.Stream, err)
	}
	return &entry{Item: lb.item(l.stream.spec.Name, l.priority, m.Data()), lane: l, n: lb.N, seq: meta.Sequence.Stream, bodySeq: lb.BodySeq}, nil
}

// keep gives the items that were read their bodies.
func (j *journal) keep(ctx context.Context, r *reader, l *lane, got []*entry) error {
	for _, e := range got {
		if e.bodySeq > 0 {
			if err := j.readBody(ctx, r, l, e); err != nil {
				return err
			}
		}
	}
	for _, e := range got {
		r.at = e.seq
		r.left = append(r.left, e)
	}
	return nil
}

// readBody reads on among the bodies of the lane until that of e. Those in between belong to items that are done, or
// that never came to be.
func (j *journal) readBody(ctx context.Context, r *reader, l *lane, e *entry) error {
	if r.bodies == nil {
		s, err := j.bodies(ctx, l, false)
		if err != nil {
			return err
		}
		r.bodies, err = s.CreateConsumer(ctx, jetstream.ConsumerConfig{
			AckPolicy: jetstream.AckNonePolicy, DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: e.bodySeq,
			InactiveThreshold: time.Minute, MemoryStorage: true, Replicas: 1,
		})
		if err != nil {
			return err
		}
	}
	for {
		m, err := r.bodies.Next(jetstream.FetchMaxWait(attemptLimit))
		if err != nil {
			return err
		}
		meta, err := m.Metadata()
		if err != nil {
			return err
		}
		switch at := meta.Sequence.Stream; {
		case at == e.bodySeq:
			e.Body = m.Data()
			return nil
		case at > e.bodySeq:
			return bus.Errorf(bus.CodeNotFound, "pipeline %s: the body at %d, of item %d of stream %s, is not in the log", j.at.Name, e.bodySeq, e.n, l.stream.spec.Name)
		}
	}
}

// each visits the newest message of every subject that matches, in the order of the log.
func (j *journal) each(ctx context.Context, filter string, do func(m jetstream.Msg, seq uint64) error) error {
	return eachLast(ctx, j.stream, filter, do)
}

func eachLast(ctx context.Context, s jetstream.Stream, filter string, do func(m jetstream.Msg, seq uint64) error) error {
	c, err := s.CreateConsumer(ctx, jetstream.ConsumerConfig{
		FilterSubject: filter, AckPolicy: jetstream.AckNonePolicy, DeliverPolicy: jetstream.DeliverAllPolicy,
		InactiveThreshold: 30 * time.Second, MemoryStorage: true, Replicas: 1,
	})
	if err != nil {
		return err
	}
	defer func() { _ = s.DeleteConsumer(context.WithoutCancel(ctx), c.CachedInfo().Name) }() // else it goes by itself
	for {
		batch, err := c.FetchNoWait(fetchAtOnce)
		if err != nil {
			return err
		}
		n := 0
		for m := range batch.Messages() {
			n++
			meta, err := m.Metadata()
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
		if n == 0 {
			return ctx.Err()
		}
	}
}

// lastWord is the last token of a subject.
func lastWord(subject string) string { return subject[strings.LastIndexByte(subject, '.')+1:] }
