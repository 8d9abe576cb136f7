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
	left     []*entry // read, without their large bodies, and not asked for yet
	count    uint64   // messages that came
	bodies   *bodyReader
}

const fetchAtOnce = 256

// read gives the items of a lane with the numbers from…to that lie in the log, as far as it came before ctx ended or
// there were bytes enough.
func (j *journal) read(ctx context.Context, want load) (got loaded, err error) {
	r := j.readers[want.lane]
	if r == nil || r.at != want.after && len(r.left) == 0 || len(r.left) > 0 && r.left[0].n > want.from {
		if r, err = j.newReader(ctx, want); err != nil {
			return loaded{}, err
		}
		j.readers[want.lane] = r
	}
	got.upTo, got.last = want.from-1, want.after
	for bytes := int64(0); ; {
		for len(r.left) > 0 && r.left[0].n <= want.to {
			if got.upTo >= want.from && bytes >= want.bytes {
				return got, nil
			}
			e := r.left[0]
			if e.n >= want.from && !want.done.has(e.n) {
				if err := j.fetchBody(ctx, r, e); err != nil {
					return j.broken(want, got, err)
				}
				got.entries, bytes = append(got.entries, e), bytes+weight(&e.Item)
			} else if e.n >= want.from {
				got.passed = append(got.passed, strayOf(e, max(e.size, len(e.Body))))
			}
			r.left[0] = nil // its body may be large
			r.left = r.left[1:]
			got.upTo, got.last = max(got.upTo, e.n), e.seq
		}
		if len(r.left) > 0 || got.upTo == want.to {
			got.upTo = want.to
			return got, nil
		}
		more, err := j.fetch(ctx, r, want.lane, min(fetchAtOnce, int(want.to-want.from)+1))
		if err == nil && !more {
			more, err = r.more(ctx)
			if err == nil && !more {
				got.upTo = want.to
				return got, nil
			}
		}
		if err != nil {
			return j.broken(want, got, err)
		}
	}
}

// broken gives what was read before something went wrong. The next read begins with a new reader.
func (j *journal) broken(want load, got loaded, err error) (loaded, error) {
	delete(j.readers, want.lane)
	if got.upTo >= want.from {
		return got, nil
	}
	return loaded{}, err
}

// more says whether something more lies in the lane. A fetch that came back empty does not prove the contrary: the
// server may have been slow.
func (r *reader) more(ctx context.Context) (bool, error) {
	more, err := unread(ctx, r.consumer, r.count)
	if err != nil {
		return false, err
	}
	return more, wait(ctx, time.Millisecond)
}

// inOrder counts the messages of a consumer. One that is missing was lost on its way, with a connection: what it said must not
// be taken for absent.
func inOrder(m jetstream.Msg, count *uint64) error {
	meta, err := m.Metadata()
	if err != nil {
		return err
	}
	if *count++; meta.Sequence.Consumer != *count {
		return bus.Errorf(bus.CodeUnavailable, "message %d of the log was lost on its way", meta.Sequence.Stream)
	}
	return nil
}

// unread says whether a consumer has more than the messages that came. That nothing came proves nothing.
func unread(ctx context.Context, c jetstream.Consumer, count uint64) (bool, error) {
	info, err := c.Info(ctx)
	if err == nil && info.Delivered.Consumer > count {
		err = bus.Errorf(bus.CodeUnavailable, "%d messages of the log were lost on their way", info.Delivered.Consumer-count)
	}
	if err != nil {
		return false, err
	}
	return info.NumPending > 0, nil
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
					r.at = e.seq
				}
				r.count = count
				r.left = append(r.left, got...)
				return more, nil
			}
			e, err := entryOf(m, l)
			if err == nil {
				err = inOrder(m, &count)
			}
			if err != nil {
				return false, err
			}
			more = true
			if !j.isVoid(e.seq) {
				got = append(got, e)
			}
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
	e := &entry{Item: lb.item(l.stream.spec.Name, l.priority, m.Data()), lane: l, n: lb.N, seq: meta.Sequence.Stream}
	if len(lb.At) > 0 {
		e.stash, e.size = &stash{shelf: l.shelf, at: lb.At}, lb.Size
	}
	return e, nil
}

// fetchBody gives an item that was read its body, if that lies apart.
func (j *journal) fetchBody(ctx context.Context, r *reader, e *entry) (err error) {
	if e.stash == nil {
		return nil
	}
	if r.bodies == nil {
		if r.bodies, err = j.newBodyReader(ctx, e.lane.shelf, e.stash.at[0][0]); err != nil {
			return err
		}
	}
	if e.Body, err = r.bodies.read(ctx, e.stash.at, e.size); err != nil {
		return bus.Errorf(bus.CodeOf(err), "pipeline %s: item %d of stream %s: %w", j.at.Name, e.n, e.lane.stream.spec.Name, err)
	}
	return nil
}

// each visits the newest message of every subject that matches, in the order of the log.
func (j *journal) each(ctx context.Context, filter string, do func(m jetstream.Msg, seq uint64) error) error {
	return eachLast(ctx, j.stream, filter, func(m jetstream.Msg, seq uint64) error {
		if j.isVoid(seq) {
			return nil
		}
		return do(m, seq)
	})
}

func eachLast(ctx context.Context, s jetstream.Stream, filter string, do func(m jetstream.Msg, seq uint64) error) error {
	return eachOf(ctx, s, jetstream.ConsumerConfig{FilterSubject: filter}, do)
}

// eachOf visits the messages that a consumer would get.
func eachOf(ctx context.Context, s jetstream.Stream, cfg jetstream.ConsumerConfig, do func(m jetstream.Msg, seq uint64) error) error {
	cfg.AckPolicy, cfg.DeliverPolicy = jetstream.AckNonePolicy, jetstream.DeliverAllPolicy
	cfg.InactiveThreshold, cfg.MemoryStorage, cfg.Replicas = 30*time.Second, true, 1
	c, err := s.CreateConsumer(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { _ = s.DeleteConsumer(context.WithoutCancel(ctx), c.CachedInfo().Name) }() // else it goes by itself
	for count := uint64(0); ; {
		batch, err := c.FetchNoWait(fetchAtOnce)
		if err != nil {
			return err
		}
		n := 0
		for m := range batch.Messages() {
			n++
			meta, err := m.Metadata()
			if err == nil {
				err = inOrder(m, &count)
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
		if more, err := unread(ctx, c, count); err != nil || !more {
			return err
		}
		if err := wait(ctx, time.Millisecond); err != nil {
			return err
		}
	}
}

// lastWord is the last token of a subject.
func lastWord(subject string) string { return subject[strings.LastIndexByte(subject, '.')+1:] }
