package pipeline

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/pipeline/flow"
	"troupe/pipeline/spec"
)

// backoff is the delay between attempts to reach the server.
var backoff = bus.Backoff{First: 5 * time.Millisecond, Most: 500 * time.Millisecond}

const (
	headerItem       = "Troupe-Item"
	headerLetter     = "Troupe-Letter"
	headerCheckpoint = "Troupe-Record"

	attemptTimeout = 2 * time.Second
	producerTTL    = 24 * time.Hour
	tombstoneTTL   = time.Second // of messages that delete the previous one of their subject
	headerRoom     = 8 << 10     // bytes reserved in a message for our headers
)

// journal is the log of a pipeline: one JetStream stream, which only the engine writes. A commit is one atomic batch
// that ends with the checkpoint, or one message that carries it in a header. It names the sequence it has to follow, so
// a commit that is repeated, late, or from a replaced engine is rejected as a whole.
type journal struct {
	b      *bus.Bus
	at     Address
	stream *stream.Stream // the log
	engine string
	by     string

	replicas int

	readers map[*flow.Lane]*laneReader // owned by the read loop

	mu          sync.Mutex // guards the following fields
	bodyStreams map[*flow.BodyStream]*stream.Stream
	discarded   flow.SeqRanges // see Checkpoint.Discarded
}

// openJournal opens or creates the log. It returns the last checkpoint (nil: none yet) and the last sequence.
func openJournal(ctx context.Context, b *bus.Bus, at Address, declared spec.Spec, by string) (_ *journal, rec *flow.Checkpoint, last uint64, err error) {
	j := &journal{b: b, at: at, engine: bus.NewID(), by: by, replicas: declared.Replicas, readers: map[*flow.Lane]*laneReader{}, bodyStreams: map[*flow.BodyStream]*stream.Stream{}}
	if j.stream, err = stream.Create(ctx, b, j.config(declared)); err != nil {
		return nil, nil, 0, bus.Errorf(bus.CodeUnavailable, "pipeline %s: cannot open its log: %w", at.Name, err)
	}
	if rec, last, err = j.readCheckpoint(ctx); err != nil {
		return nil, nil, 0, err
	}
	if rec != nil {
		if name := rec.UndeclaredStream(declared); name != "" {
			return nil, nil, 0, bus.Errorf(bus.CodeInvalid, "pipeline %s: stream %s, or one of its priorities, has items in the log but is no longer declared; declare it, or remove the pipeline's log", at.Name, name)
		}
	}
	return j, rec, last, nil
}

// config is the configuration of the log. Its bound is the sum of the streams' bounds, with room for completed items
// that are not purged yet. Beyond it the server rejects commits, and the pipeline waits.
func (j *journal) config(declared spec.Spec) stream.Config {
	var bytes int64
	for _, s := range declared.WithDefaults().Streams {
		bytes += s.Bytes
	}
	return stream.Config{Name: j.at.Stream(), Subject: j.at.Log(), MaxBytes: bytes + bytes/4 + 64<<20, Replicas: j.replicas, Replace: true}
}

// readCheckpoint reads the last checkpoint and the last sequence from the leader. The last message is a checkpoint or
// carries one, unless a server stopped in the middle of a batch and could not complete it. Such a partial batch is
// given time to become complete, then deleted.
func (j *journal) readCheckpoint(ctx context.Context) (rec *flow.Checkpoint, last uint64, err error) {
	var before uint64
	for tries := 0; ; tries++ {
		var partial []uint64
		if rec, last, partial, err = j.findCheckpoint(ctx); err != nil {
			return rec, last, err
		}
		j.restoreDiscarded(rec, last)
		if len(partial) == 0 {
			return rec, last, nil
		}
		if tries >= partialChecks && last == before {
			j.discard(partial)
			return rec, last, j.stream.DeleteMessages(ctx, partial)
		}
		before = last
		if err := bus.Sleep(ctx, partialCheckPause); err != nil {
			return nil, 0, err
		}
	}
}

const (
	partialChecks      = 3
	partialCheckPause  = 100 * time.Millisecond
	maxPartial         = 2000 // messages of a partial batch at the end of the log; every batch is shorter
	noCheckpointFormat = "pipeline %s: the last messages of its log have no checkpoint; has another program written to it?"
)

// findCheckpoint searches backwards from the end of the log for the last checkpoint and the messages after it (partial).
// If a commit arrives meanwhile, it starts again.
func (j *journal) findCheckpoint(ctx context.Context) (rec *flow.Checkpoint, last uint64, partial []uint64, err error) {
	for {
		before, err := j.stream.State(ctx)
		if err != nil || before.LastSeq == 0 {
			return nil, 0, nil, err
		}
		rec, last, partial, err = j.scanBack(ctx, before)
		after, stateErr := j.stream.State(ctx)
		if stateErr != nil {
			return nil, 0, nil, stateErr
		}
		if after.LastSeq == before.LastSeq {
			return rec, last, partial, err
		}
	}
}

func (j *journal) scanBack(ctx context.Context, state stream.State) (rec *flow.Checkpoint, last uint64, partial []uint64, err error) {
	last = state.LastSeq
	for seq := last; seq > 0 && last-seq < maxPartial; seq-- {
		m, err := j.stream.Get(ctx, seq)
		if errors.Is(err, bus.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, 0, nil, err
		}
		text := []byte(m.Header.Get(headerCheckpoint))
		if m.Subject == j.at.State() {
			text = m.Data
		}
		if len(text) == 0 {
			partial = append(partial, seq)
			continue
		}
		rec = &flow.Checkpoint{}
		if err := json.Unmarshal(text, rec); err != nil {
			return nil, 0, nil, bus.Errorf(bus.CodeMalformed, noCheckpointFormat+" %w", j.at.Name, err)
		}
		return rec, last, partial, nil
	}
	if state.Messages == 0 {
		return nil, last, nil, nil
	}
	return nil, 0, nil, bus.Errorf(bus.CodeMalformed, noCheckpointFormat, j.at.Name)
}

// restoreDiscarded takes over the discarded sequences of a checkpoint. Those after the end of the log are forgotten: a
// server that was killed after their deletion may assign them again.
func (j *journal) restoreDiscarded(rec *flow.Checkpoint, last uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if rec != nil && len(j.discarded) == 0 {
		j.discarded = slices.Clone(rec.Discarded)
	}
	j.discarded = slices.DeleteFunc(slices.Clone(j.discarded), func(r [2]uint64) bool { return r[1] > last })
}

// maxDiscarded bounds the ranges that are remembered; each one is a server killed in the middle of a batch. Ordinals in
// older ranges are below the floors of their lanes.
const maxDiscarded = 64

// discard remembers a partial batch before its deletion: a killed server may restore it.
func (j *journal) discard(partial []uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	discarded := append(slices.Clone(j.discarded), [2]uint64{slices.Min(partial), slices.Max(partial)}) // everything after the checkpoint
	j.discarded = discarded[max(0, len(discarded)-maxDiscarded):]
}

// isDiscarded reports whether a message belongs to a partial batch.
func (j *journal) isDiscarded(seq uint64) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.discarded.Contains(seq)
}

// writeFirst writes the first commit of an engine; from then on commits of the previous engine are rejected. It returns
// the first and the last sequence of the commit.
func (j *journal) writeFirst(ctx context.Context, c *flow.Commit, last uint64) (first, end uint64, err error) {
	fl, err := j.encodeCommit(c)
	if err != nil {
		return 0, 0, err
	}
	for waits := backoff.Start(); ; {
		fl.expectAfter(last)
		if err = j.append(ctx, fl); err == nil {
			return fl.firstSeq(), fl.lastSeq(), nil
		}
		rec, at, lookErr := j.readCheckpoint(ctx)
		switch {
		case lookErr == nil && rec != nil && rec.Engine == j.engine && rec.Commit == c.Number:
			return fl.firstSeq(), fl.lastSeq(), nil
		case lookErr == nil && at != last:
			return 0, 0, j.fenced(rec)
		}
		if waits.Wait(ctx) != nil {
			return 0, 0, bus.Errorf(bus.CodeUnavailable, "pipeline %s: cannot write its log: %w", j.at.Name, err)
		}
	}
}

func (j *journal) fenced(rec *flow.Checkpoint) error {
	if rec == nil {
		return bus.Errorf(bus.CodeFenced, "pipeline %s: its log has been removed", j.at.Name)
	}
	return bus.Errorf(bus.CodeFenced, "pipeline %s: run by %s since %s", j.at.Name, rec.By, rec.At.Format(time.RFC3339))
}

// deleteCompleted deletes items and their bodies one by one.
func (j *journal) deleteCompleted(ctx context.Context, l *flow.Lane, items []flow.CompletedItem) error {
	var seqs, bodies []uint64
	for _, it := range items {
		seqs, bodies = append(seqs, it.Seq), append(bodies, it.Body.All()...)
	}
	if err := j.stream.DeleteMessages(ctx, seqs); err != nil || len(bodies) == 0 {
		return err
	}
	return j.deleteBodies(ctx, l.Bodies, bodies)
}

// deleteBodies deletes messages of a body stream.
func (j *journal) deleteBodies(ctx context.Context, bs *flow.BodyStream, seqs []uint64) error {
	s, err := j.bodyStream(ctx, bs, false)
	if err != nil {
		return err
	}
	return s.DeleteMessages(ctx, seqs)
}

// purge purges the items of a lane up to a purge point, and their bodies.
func (j *journal) purge(ctx context.Context, l *flow.Lane, m flow.PurgePoint) error {
	err := j.stream.Purge(ctx, j.at.Items(l.StreamName(), l.Priority), m.Seq+1)
	if m.BodySeq == 0 || err != nil {
		return err
	}
	s, err := j.bodyStream(ctx, l.Bodies, false)
	if err == nil {
		err = s.Purge(ctx, "", m.BodySeq+1)
	}
	return err
}
