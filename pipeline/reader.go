package pipeline

import (
	"context"
	"strings"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/pipeline/flow"
)

// laneReader reads one lane of the log in order. The read loop owns it.
type laneReader struct {
	*stream.Reader
	at        uint64        // last sequence read
	unclaimed []*flow.Entry // read, without large bodies, and not returned yet
	bodies    *bodyReader
}

const itemsPerFetch = 256

// read reads the items of a lane in a range of ordinals. It returns early when it has read enough bytes, or what it has
// when an error occurs.
func (j *journal) read(ctx context.Context, want flow.ReadRequest) (got flow.ReadResult, err error) {
	r, err := j.laneReader(ctx, want)
	if err != nil {
		return flow.ReadResult{}, err
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
		more, err := j.fetch(ctx, r, want.Lane, min(itemsPerFetch, int(want.To-want.From)+1))
		if err != nil {
			return j.abandonReader(want, got, err)
		}
		if !more {
			got.UpTo = want.To
			return got, nil
		}
	}
}

// laneReader returns the reader of the lane if it continues where the request starts, otherwise a new one.
func (j *journal) laneReader(ctx context.Context, want flow.ReadRequest) (*laneReader, error) {
	r := j.readers[want.Lane]
	if r != nil && (len(r.unclaimed) == 0 && r.at == want.AfterSeq || len(r.unclaimed) > 0 && r.unclaimed[0].Ordinal <= want.From) {
		return r, nil
	}
	sr, err := j.stream.Reader(ctx, stream.ReadOptions{Subject: j.at.Items(want.Lane.StreamName(), want.Lane.Priority), From: want.AfterSeq + 1})
	if err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "pipeline %s: read its log: %w", j.at.Name, err)
	}
	r = &laneReader{Reader: sr, at: want.AfterSeq}
	j.readers[want.Lane] = r
	return r, nil
}

// abandonReader returns what was read before an error. The next read uses a new reader.
func (j *journal) abandonReader(want flow.ReadRequest, got flow.ReadResult, err error) (flow.ReadResult, error) {
	delete(j.readers, want.Lane)
	if got.UpTo >= want.From {
		return got, nil
	}
	return flow.ReadResult{}, err
}

// fetch reads up to n more messages; it reports false at the end of the lane.
func (j *journal) fetch(ctx context.Context, r *laneReader, l *flow.Lane, n int) (more bool, err error) {
	msgs, err := r.Next(ctx, n)
	if err != nil {
		return false, err
	}
	for _, m := range msgs {
		if j.isDiscarded(m.Seq) {
			continue
		}
		e, err := entryOf(m, l)
		if err != nil {
			return false, err
		}
		r.at = e.Seq
		r.unclaimed = append(r.unclaimed, e)
	}
	return len(msgs) > 0, nil
}

func entryOf(m stream.Message, l *flow.Lane) (*flow.Entry, error) {
	label, err := parseLabel(m.Header.Get(headerItem))
	if err != nil {
		return nil, bus.Errorf(bus.CodeMalformed, "the item at sequence %d of the log has no valid label: %w", m.Seq, err)
	}
	e := &flow.Entry{Item: label.item(l.StreamName(), l.Priority, m.Data), Lane: l, Ordinal: label.N, Seq: m.Seq}
	if len(label.Body) > 0 {
		e.BodyRef, e.BodySize = &flow.PendingBody{Stream: l.Bodies, Seqs: label.Body}, label.Size
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
			r.bodies = nil
			return err
		}
	}
	if e.Body, err = r.bodies.read(ctx, e.BodyRef.Seqs, e.BodySize); err != nil {
		return bus.Errorf(bus.CodeOf(err), "pipeline %s: item %d of stream %s: %w", j.at.Name, e.Ordinal, e.Lane.StreamName(), err)
	}
	return nil
}

// each visits the messages of all matching subjects in log order, without partial batches.
func (j *journal) each(ctx context.Context, subject string, do func(m stream.Message) error) error {
	return j.stream.Each(ctx, stream.ReadOptions{Subject: subject}, func(m stream.Message) error {
		if j.isDiscarded(m.Seq) {
			return nil
		}
		return do(m)
	})
}

func lastToken(subject string) string { return subject[strings.LastIndexByte(subject, '.')+1:] }
