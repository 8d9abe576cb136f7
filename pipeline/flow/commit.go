package flow

import (
	"encoding/json"
	"slices"
	"time"

	"troupe/pipeline/spec"
)

// Commit is one atomic write to the log: new items, dead letters, retry states, and the checkpoint.
type Commit struct {
	Number         uint64
	changes        []*change
	Entries        []*Entry
	DeadLetters    []*DeadLetter
	Resolved       []ResolvedLetter
	ResolvedBlocks map[uint64][]byte // changed blocks of ResolvedLetters; nil: below the floor
	ClosedGroups   []*ClosedGroup
	Sources        map[string]uint64
	Checkpoint     Checkpoint
}

// Checkpoint is the state of the pipeline in the log: which items of each stream are completed. It is written in one
// atomic batch with the outputs of the items it marks as completed. An item that is handled twice cannot produce its
// outputs twice: the second commit would have to follow a log position that is no longer the last one.
type Checkpoint struct {
	Commit    uint64                      `json:"commit"`
	Engine    string                      `json:"engine"` // id of the engine that wrote it
	By        string                      `json:"by"`     // the process of that engine, for operators
	At        time.Time                   `json:"at"`
	Version   spec.Version                `json:"version"`
	Closed    bool                        `json:"closed,omitempty"` // the engine was closed, not killed
	Paused    []string                    `json:"paused,omitempty"`
	Streams   map[string]StreamCheckpoint `json:"streams"`
	Letters   LetterCheckpoint            `json:"letters"`
	Discarded SeqRanges                   `json:"discarded,omitempty"` // sequences of partial batches; a killed server may restore these messages
}

type StreamCheckpoint struct {
	Bytes   int64            `json:"bytes"`
	Lanes   []LaneCheckpoint `json:"lanes"`
	Running []SeqRanges      `json:"running,omitempty"` // per lane, ordinals that functions are running
}

type LaneCheckpoint struct {
	Head uint64 `json:"head"`
	OrdinalSet
}

// pending is the number of items that are not completed.
func (l LaneCheckpoint) pending() int { return int(l.Head - l.Floor - l.countAbove()) }

// Limits of one commit. The server accepts batches of 1,000 messages.
const (
	maxCommit      = 990
	MaxCommitBytes = 4 << 20
)

// BuildCommit takes the next changes from the queue and assigns ordinals to new items. The state of the flow is then
// that after the commit, so a commit that cannot be written ends the engine.
func (f *Flow) BuildCommit() *Commit {
	c := &Commit{Sources: map[string]uint64{}, ResolvedBlocks: map[uint64][]byte{}}
	messages, bytes := 0, int64(0)
	f.queue.takeIf(f.commitFilter(), func(ch *change) (take, more bool) {
		m, b := ch.messages(), ch.size()
		if len(c.changes) > 0 && (messages+m > maxCommit || bytes+b > MaxCommitBytes) {
			return false, false
		}
		messages, bytes = messages+m, bytes+b
		f.queued -= m
		f.queuedBytes -= b
		f.include(c, ch)
		return true, true
	})
	for block := range c.ResolvedBlocks {
		c.ResolvedBlocks[block] = f.Resolved.encodeBlock(block)
	}
	f.CommitNumber++
	c.Number = f.CommitNumber
	c.Checkpoint = f.checkpoint()
	return c
}

// CanCommit reports whether a queued change can be committed now.
func (f *Flow) CanCommit() bool { return slices.ContainsFunc(f.queue.all(), f.commitFilter()) }

// commitFilter returns a function that is called with the queued changes in order and reports whether each may be
// committed: its bodies are stored, no earlier blocked change has new items in the same lanes, and, for an ordered
// stage, no earlier blocked change completes items of the same lanes. So a body that waits for room does not block the
// changes that make room, and order is kept.
func (f *Flow) commitFilter() func(*change) bool {
	f.scanNumber++
	passed := false
	return func(c *change) bool {
		ok := c.pendingBodies == 0 && !(c.afterAll && passed) && !slices.ContainsFunc(c.puts, func(e *Entry) bool { return e.Lane.blockedScan == f.scanNumber }) &&
			!(c.ordered && slices.ContainsFunc(c.done, func(e *Entry) bool { return e.Lane.endedScan == f.scanNumber }))
		if ok {
			return true
		}
		passed = true
		for _, e := range c.puts {
			e.Lane.blockedScan = f.scanNumber
		}
		for _, e := range c.done {
			if c.ordered {
				e.Lane.endedScan = f.scanNumber
			}
		}
		return false
	}
}

func (f *Flow) include(c *Commit, ch *change) {
	c.changes = append(c.changes, ch)
	for _, e := range ch.done {
		e.Lane.done.Add(e.Ordinal)
		e.Lane.stream.storedBytes -= Weight(&e.Item)
	}
	for _, e := range ch.puts {
		e.Lane.head++
		e.Ordinal = e.Lane.head
		if e.ID == "" {
			e.ID = defaultID(e)
		}
		e.Lane.stream.storedBytes += Weight(&e.Item)
		c.Entries = append(c.Entries, e)
	}
	for _, d := range ch.dead {
		d.Ordinal = f.Resolved.nextNumber()
		c.DeadLetters = append(c.DeadLetters, d)
	}
	for _, r := range ch.resolved {
		f.Resolved.add(r.ordinal)
		c.ResolvedBlocks[blockOf(r.ordinal)] = nil
		c.Resolved = append(c.Resolved, r)
	}
	if ch.closed != nil {
		c.ClosedGroups = append(c.ClosedGroups, ch.closed)
	}
	if ch.source != "" {
		c.Sources[ch.source] = max(c.Sources[ch.source], ch.seq)
	}
}

func (f *Flow) checkpoint() Checkpoint {
	r := Checkpoint{Commit: f.CommitNumber, At: f.Now.UTC(), Version: f.Version, Closed: f.finalEnqueued, Streams: map[string]StreamCheckpoint{}}
	for _, s := range f.Stages {
		if s.paused {
			r.Paused = append(r.Paused, s.Spec.Name)
		}
	}
	for _, s := range f.streams {
		sr := StreamCheckpoint{Bytes: s.storedBytes, Running: f.runningOrdinals(s)}
		for _, l := range s.lanes {
			sr.Lanes = append(sr.Lanes, LaneCheckpoint{Head: l.head, OrdinalSet: l.done.Clone()})
		}
		f.keepRetired(s.spec.Name, &sr)
		r.Streams[s.spec.Name] = sr
	}
	for name, sr := range f.retired {
		if _, declared := r.Streams[name]; !declared {
			r.Streams[name] = sr
		}
	}
	r.Letters = LetterCheckpoint{Head: f.Resolved.head, Floor: f.Resolved.floor}
	return r
}

// keepRetired adds the lanes of priorities that are no longer declared. If they are declared again, their ordinals
// continue: items stored there before may be restored by a killed server and must not be mistaken for new ones.
func (f *Flow) keepRetired(name string, sr *StreamCheckpoint) {
	if lanes := f.retired[name].Lanes; len(lanes) > len(sr.Lanes) {
		sr.Lanes = append(sr.Lanes, lanes[len(sr.Lanes):]...)
	}
}

// Committed is called when the commit is in the log; first is the sequence of its first message.
func (f *Flow) Committed(c *Commit, first uint64) {
	last, bodies := map[*Lane]*Entry{}, map[*Lane]uint64{}
	for i, e := range c.Entries {
		if e.BodyRef != nil {
			bodies[e.Lane] = max(bodies[e.Lane], e.BodyRef.Seqs.last())
		}
		e.Seq = first + uint64(i)
		e.Lane.committed(e, f.window)
		last[e.Lane] = e
	}
	for l, e := range last {
		l.purgePoints.push(PurgePoint{e.Ordinal, e.Seq, bodies[l]})
	}
	for _, s := range f.streams {
		for p, l := range s.lanes {
			l.committedFloor = c.Checkpoint.Streams[s.spec.Name].Lanes[p].Floor
		}
	}
	for _, ch := range c.changes {
		for _, e := range ch.done {
			if e.Ordinal > e.Lane.committedFloor {
				e.Lane.pushCompleted(e)
			}
		}
	}
	for i, d := range c.DeadLetters {
		d.Seq = first + uint64(len(c.Entries)+i)
	}
	for name, seq := range c.Sources {
		if src := f.sources[name]; src != nil {
			src.stored = max(src.stored, seq)
		}
	}
	for _, ch := range c.changes {
		for _, token := range ch.tokens {
			f.Replies = append(f.Replies, Reply{token, nil})
		}
		for _, t := range ch.starts {
			if t.Stage.running[t.ID] == t { // it may have been revoked
				f.Starts = append(f.Starts, t)
			}
		}
	}
}

// restore continues from a checkpoint. Items are read from the log as they are needed.
func (f *Flow) restore(r *Checkpoint) {
	f.CommitNumber, f.Version = r.Commit, r.Version
	for _, name := range r.Paused {
		if s := f.StageNamed(name); s != nil {
			s.paused = true
		}
	}
	for name, sr := range r.Streams {
		f.retired[name] = StreamCheckpoint{Lanes: sr.Lanes}
		s := f.StreamNamed(name)
		if s == nil {
			continue
		}
		s.bytes, s.storedBytes = sr.Bytes, sr.Bytes
		for p, lr := range sr.Lanes {
			if p >= len(s.lanes) {
				break
			}
			l := s.lanes[p]
			l.head, l.visible, l.done, l.loaded = lr.Head, lr.Head, lr.OrdinalSet.Clone(), lr.Floor
			l.firstUnread = lr.pending() > 0
			s.items += lr.pending()
		}
	}
}

// UndeclaredStream names a stream that has items in the log and is not declared, or not with enough priorities; empty:
// none.
func (r *Checkpoint) UndeclaredStream(current spec.Spec) string {
	declared := map[string]int{}
	for _, s := range current.WithDefaults().Streams {
		declared[s.Name] = s.Priorities
	}
	for name, sr := range r.Streams {
		for p, l := range sr.Lanes {
			if l.pending() > 0 && p >= declared[name] {
				return name
			}
		}
	}
	return ""
}

func (r *Checkpoint) Encode() ([]byte, error) { return json.Marshal(r) }

// RetryStates returns the items whose retry state is written, and completed items whose retry state is deleted.
func (c *Commit) RetryStates() (failed []FailedItem, gone []*Entry) {
	for _, ch := range c.changes {
		failed = append(failed, ch.retried...)
		for _, e := range ch.done {
			if e.Retries != nil {
				gone = append(gone, e)
			}
		}
	}
	return failed, gone
}

// FreedBodies returns the sequences of the bodies of resolved dead letters.
func (c *Commit) FreedBodies() (out []uint64) {
	for _, ch := range c.changes {
		out = append(out, ch.freedBodies...)
	}
	return out
}
