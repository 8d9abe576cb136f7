package pipeline

import (
	"context"
	"errors"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/pipeline/flow"
)

// bodyStream opens a body stream, and creates or updates it if create is set. A large body is stored before the commit
// of its item and counts only once an item refers to it. Each lane has a body stream of its own: completed bodies are
// then purged from its beginning, whole files at a time.
func (j *journal) bodyStream(ctx context.Context, bs *flow.BodyStream, create bool) (s *stream.Stream, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if s := j.bodyStreams[bs]; s != nil {
		return s, nil
	}
	name := j.at.BodyStream(bs.Name, bs.Priority)
	if create {
		s, err = stream.Create(ctx, j.b, stream.Config{Name: name, Subject: j.at.Bodies(bs.Name, bs.Priority), MaxBytes: bs.MaxBytes, Replicas: j.replicas})
	} else {
		s, err = stream.Find(ctx, j.b, name)
	}
	if err == nil && create {
		j.bodyStreams[bs] = s
	}
	return s, err
}

// lastBodySeq is the last sequence of a body stream; 0: it has none.
func (j *journal) lastBodySeq(ctx context.Context, bs *flow.BodyStream) (uint64, error) {
	s, err := j.bodyStream(ctx, bs, false)
	if errors.Is(err, bus.ErrNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	state, err := s.State(ctx)
	return state.LastSeq, err
}

// bodyReader reads the bodies of a stream in order. Messages in between belong to completed items, or to items that were
// never committed.
type bodyReader struct{ *stream.Reader }

const chunksPerFetch = 16

func (j *journal) newBodyReader(ctx context.Context, bs *flow.BodyStream, from uint64) (*bodyReader, error) {
	s, err := j.bodyStream(ctx, bs, false)
	if err != nil {
		return nil, err
	}
	r, err := s.Reader(ctx, stream.ReadOptions{From: from})
	return &bodyReader{r}, err
}

// read reads on to the body at the given sequences.
func (r *bodyReader) read(ctx context.Context, at flow.SeqRanges, size int) ([]byte, error) {
	seqs := at.All()
	body := make([]byte, 0, size)
	for len(seqs) > 0 {
		msgs, err := r.Next(ctx, min(len(seqs), chunksPerFetch))
		if err != nil {
			return nil, err
		}
		for _, m := range msgs {
			if len(seqs) > 0 && m.Seq == seqs[0] {
				body, seqs = append(body, m.Data...), seqs[1:]
			}
		}
		if len(seqs) > 0 && (len(msgs) == 0 || msgs[len(msgs)-1].Seq > seqs[0]) {
			return nil, bus.Errorf(bus.CodeNotFound, "the body at sequence %d is missing", seqs[0])
		}
	}
	if len(body) != size {
		return nil, bus.Errorf(bus.CodeMalformed, "the body at %v has %d bytes instead of %d", at, len(body), size)
	}
	return body, nil
}

// readBody reads one body.
func (j *journal) readBody(ctx context.Context, bs *flow.BodyStream, at flow.SeqRanges, size int) ([]byte, error) {
	r, err := j.newBodyReader(ctx, bs, at[0][0])
	if err != nil {
		return nil, err
	}
	defer r.Close(ctx)
	return r.read(ctx, at, size)
}
