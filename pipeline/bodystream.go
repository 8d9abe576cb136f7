package pipeline

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
	"troupe/pipeline/flow"
)

// bodyStream opens a body stream, and creates or updates it if create is set. A large body is stored before the commit
// of its item and counts only once an item refers to it. Each lane has a body stream of its own: completed bodies are
// then purged from its beginning, whole files at a time.
func (j *journal) bodyStream(ctx context.Context, sh *flow.BodyStream, create bool) (jetstream.Stream, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if s := j.bodyStreams[sh]; s != nil {
		return s, nil
	}
	cfg := jetstream.StreamConfig{
		Name: j.at.BodyStream(sh.Name, sh.Priority), Subjects: []string{j.at.Bodies(sh.Name, sh.Priority)}, Storage: jetstream.FileStorage,
		Discard: jetstream.DiscardNew, MaxBytes: sh.MaxBytes, AllowAtomicPublish: true, Replicas: j.replicas,
	}
	s, err := j.b.JetStream().Stream(ctx, cfg.Name)
	if create && (errors.Is(err, jetstream.ErrStreamNotFound) || err == nil && differs(s.CachedInfo().Config, cfg)) {
		s, err = j.b.JetStream().CreateOrUpdateStream(ctx, cfg)
	}
	if err == nil {
		j.bodyStreams[sh] = s
	}
	return s, err
}

// differs reports whether a stream has other bounds or replicas than wanted.
func differs(have, want jetstream.StreamConfig) bool {
	return have.MaxBytes != want.MaxBytes || have.Replicas != max(1, want.Replicas)
}

// lastBodySeq is the last sequence of a body stream; 0: it has none.
func (j *journal) lastBodySeq(ctx context.Context, sh *flow.BodyStream) (uint64, error) {
	s, err := j.bodyStream(ctx, sh, false)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	info, err := s.Info(ctx)
	if err != nil {
		return 0, err
	}
	return info.State.LastSeq, nil
}

// bodyReader reads the bodies of a stream in order. Messages in between belong to completed items, or to items that
// were never committed.
type bodyReader struct{ consumer jetstream.Consumer }

const chunksPerFetch = 16

func (j *journal) newBodyReader(ctx context.Context, sh *flow.BodyStream, from uint64) (*bodyReader, error) {
	s, err := j.bodyStream(ctx, sh, false)
	if err != nil {
		return nil, err
	}
	c, err := s.CreateConsumer(ctx, jetstream.ConsumerConfig{
		AckPolicy: jetstream.AckNonePolicy, DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: from,
		InactiveThreshold: time.Minute, MemoryStorage: true, Replicas: 1,
	})
	return &bodyReader{c}, err
}

// read reads on to the body at the given sequences.
func (r *bodyReader) read(ctx context.Context, at flow.SeqRanges, size int) ([]byte, error) {
	seqs := at.All()
	body := make([]byte, 0, size)
	for len(seqs) > 0 {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		batch, err := r.consumer.Fetch(min(len(seqs), chunksPerFetch), jetstream.FetchMaxWait(attemptTimeout))
		if err != nil {
			return nil, err
		}
		n := 0
		for m := range batch.Messages() {
			n++
			meta, err := m.Metadata()
			if err != nil {
				return nil, err
			}
			switch seq := meta.Sequence.Stream; {
			case len(seqs) > 0 && seq == seqs[0]:
				body, seqs = append(body, m.Data()...), seqs[1:]
			case len(seqs) > 0 && seq > seqs[0]:
				return nil, bus.Errorf(bus.CodeNotFound, "the body at sequence %d is missing", seqs[0])
			}
		}
		if err := batch.Error(); err != nil {
			return nil, err
		}
		if n == 0 {
			return nil, bus.Errorf(bus.CodeTimedOut, "the body at sequence %d was not delivered", seqs[0])
		}
	}
	if len(body) != size {
		return nil, bus.Errorf(bus.CodeMalformed, "the body at %v has %d bytes instead of %d", at, len(body), size)
	}
	return body, nil
}

// readBody reads one body.
func (j *journal) readBody(ctx context.Context, sh *flow.BodyStream, at flow.SeqRanges, size int) ([]byte, error) {
	r, err := j.newBodyReader(ctx, sh, at[0][0])
	if err != nil {
		return nil, err
	}
	defer r.close(ctx, j, sh)
	return r.read(ctx, at, size)
}

func (r *bodyReader) close(ctx context.Context, j *journal, sh *flow.BodyStream) {
	if s, err := j.bodyStream(ctx, sh, false); err == nil {
		_ = s.DeleteConsumer(context.WithoutCancel(ctx), r.consumer.CachedInfo().Name) // otherwise it expires
	}
}

const maxDeletesInFlight = 32

// deleteMessages deletes messages one by one. A message that does not exist is no error.
func deleteMessages(ctx context.Context, s jetstream.Stream, seqs []uint64) error {
	var group sync.WaitGroup
	var mu sync.Mutex
	var first error
	roomCh := make(chan struct{}, maxDeletesInFlight)
	for _, seq := range seqs {
		roomCh <- struct{}{}
		group.Go(bus.Guard(func() {
			defer func() { <-roomCh }()
			err := s.DeleteMsg(ctx, seq)
			if err != nil && !errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) {
				mu.Lock()
				first = errors.Join(first, err)
				mu.Unlock()
			}
		}))
	}
	group.Wait()
	return first
}
