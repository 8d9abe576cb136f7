package pipeline

import (
	"encoding/json"
	"slices"
	"time"
)

// commit is what goes into the log at once: new items, marks of what is dealt with, and the record that says so.
type commit struct {
	number   uint64
	changes  []*change
	entries  []*entry
	dead     []*DeadLetter
	revived  []revival
	endings  map[uint64][]byte // blocks of the letters that are ended, as they are then; nil: under the floor
	closings []*closing
	sources  map[string]uint64
	record   record
}

// record is the state of the pipeline in the log: what of each stream is dealt with. It is written with the outputs of
// what it marks as dealt with, in one atomic batch, and outlives them: an item that is handled twice cannot give its
// outputs twice, because the second record would have to replace one that is no longer there.
type record struct {
	Commit  uint64                  `json:"commit"`
	Engine  string                  `json:"engine"` // who wrote it
	By      string                  `json:"by"`     // the same, for people
	At      time.Time               `json:"at"`
	Version Version                 `json:"version"`
	Closed  bool                    `json:"closed,omitempty"` // it is the last of an engine that was closed, and not killed
	Paused  []string                `json:"paused,omitempty"`
	Streams map[string]streamRecord `json:"streams"`
	Letters *lettersRecord          `json:"letters,omitempty"` // nil: it is of a version that did not number them
	Void    place                   `json:"void,omitempty"`    // of the log: halves of batches, which count for nothing if they come back
}

type streamRecord struct {
	Bytes int64        `json:"bytes"`
	Lanes []laneRecord `json:"lanes"`
	Hands []place      `json:"hands,omitempty"` // of each lane, what functions have in hand
}

type laneRecord struct {
	Head uint64 `json:"head"`
	ordinals
}

// pending is how many items of the lane are not dealt with.
func (l laneRecord) pending() int { return int(l.Head - l.Floor - l.above()) }

// Limits of one commit. The server takes 1,000 messages.
const (
	maxCommit      = 990
	maxCommitBytes = 4 << 20
)

// build takes from the queue what fits into one commit, and gives the new items their numbers. From here on the state
// is that of after the commit: one that cannot be made ends the pipeline's run.
func (f *flow) build() *commit {
	c := &commit{sources: map[string]uint64{}, endings: map[uint64][]byte{}}
	messages, bytes := 0, int64(0)
	f.queue.takeIf(f.free(), func(ch *change) (take, more bool) {
		m, b := ch.messages(), ch.size()
		if len(c.changes) > 0 && (messages+m > maxCommit || bytes+b > maxCommitBytes) {
			return false, false
		}
		messages, bytes = messages+m, bytes+b
		f.queued -= m
		f.queuedBytes -= b
		f.include(c, ch)
		return true, true
	})
	for block := range c.endings {
		c.endings[block] = f.endings.text(block)
	}
	f.number++
	c.number = f.number
	c.record = f.recordNow()
	return c
}

// buildable says that there is something to commit whose bodies are stored.
func (f *flow) buildable() bool { return slices.ContainsFunc(f.queue.all(), f.free()) }

// free gives a function that says of each change, asked of them in order, whether it may be committed: its bodies are
// stored, and it does not overtake one with items of the same lanes, nor, in an ordered stage, one with items from the
// same. So a body that waits for room on its shelf does not hold up those who make the room, and order is kept.
func (f *flow) free() func(*change) bool {
	f.scan++
	passed := false
	return func(c *change) bool {
		ok := c.pending == 0 && !(c.behind && passed) && !slices.ContainsFunc(c.puts, func(e *entry) bool { return e.lane.waits == f.scan }) &&
			!(c.ordered && slices.ContainsFunc(c.done, func(e *entry) bool { return e.lane.ends == f.scan }))
		if ok {
			return true
		}
		passed = true
		for _, e := range c.puts {
			e.lane.waits = f.scan
		}
		for _, e := range c.done {
			if c.ordered {
				e.lane.ends = f.scan
			}
		}
		return false
	}
}

func (f *flow) include(c *commit, ch *change) {
	c.changes = append(c.changes, ch)
	for _, e := range ch.done {
		e.lane.done.add(e.n)
		e.lane.stream.stored -= weight(&e.Item)
	}
	for _, e := range ch.puts {
		e.lane.head++
		e.n = e.lane.head
		if e.ID == "" {
			e.ID = idOf(e)
		}
		e.lane.stream.stored += weight(&e.Item)
		c.entries = append(c.entries, e)
	}
	for _, d := range ch.dead {
		d.ordinal = f.endings.next()
		c.dead = append(c.dead, d)
	}
	for _, r := range ch.revived {
		f.endings.end(r.ordinal)
		c.endings[blockOf(r.ordinal)] = nil
		c.revived = append(c.revived, r)
	}
	f.moved = max(f.moved, ch.moved)
	if ch.closed != nil {
		c.closings = append(c.closings, ch.closed)
	}
	if ch.source != "" {
		c.sources[ch.source] = max(c.sources[ch.source], ch.seq)
	}
}

func (f *flow) recordNow() record {
	r := record{Commit: f.number, At: f.now.UTC(), Version: f.version, Closed: f.final, Streams: map[string]streamRecord{}}
	for _, s := range f.stages {
		if s.paused {
			r.Paused = append(r.Paused, s.spec.Name)
		}
	}
	for _, s := range f.streams {
		sr := streamRecord{Bytes: s.stored, Hands: f.handsOf(s)}
		for _, l := range s.lanes {
			sr.Lanes = append(sr.Lanes, laneRecord{Head: l.head, ordinals: l.done.clone()})
		}
		f.keepRetired(s.spec.Name, &sr)
		r.Streams[s.spec.Name] = sr
	}
	for name, sr := range f.retired {
		if _, declared := r.Streams[name]; !declared {
			r.Streams[name] = sr
		}
	}
	r.Letters = &lettersRecord{Head: f.endings.head, Floor: f.endings.floor, Moved: f.moved}
	return r
}

// keepRetired adds the lanes of priorities that are not declared any more. Their numbers go on when they are declared again:
// what was stored there before, and comes back when a server is killed, must not be taken for what is stored then.
func (f *flow) keepRetired(name string, sr *streamRecord) {
	if lanes := f.retired[name].Lanes; len(lanes) > len(sr.Lanes) {
		sr.Lanes = append(sr.Lanes, lanes[len(sr.Lanes):]...)
	}
}

// landed takes in that the commit is in the log, its first item at first.
func (f *flow) landed(c *commit, first uint64) {
	last, bodies := map[*lane]*entry{}, map[*lane]uint64{}
	for i, e := range c.entries {
		if e.stash != nil {
			bodies[e.lane] = max(bodies[e.lane], e.stash.at.last())
		}
		e.seq = first + uint64(i)
		e.lane.appear(e, f.window)
		last[e.lane] = e
	}
	for l, e := range last {
		l.marks.push(mark{e.n, e.seq, bodies[l]})
	}
	for _, s := range f.streams {
		for p, l := range s.lanes {
			l.settled = c.record.Streams[s.spec.Name].Lanes[p].Floor
		}
	}
	for _, ch := range c.changes {
		for _, e := range ch.done {
			if e.n > e.lane.settled {
				e.lane.pushStray(e)
			}
		}
	}
	for i, d := range c.dead {
		d.Seq = first + uint64(len(c.entries)+i)
	}
	for name, seq := range c.sources {
		if src := f.sources[name]; src != nil {
			src.stored = max(src.stored, seq)
		}
	}
	for _, ch := range c.changes {
		for _, token := range ch.tokens {
			f.answers = append(f.answers, answer{token, nil})
		}
		for _, t := range ch.starts {
			if t.stage.running[t.id] == t { // it may have been taken back
				f.starts = append(f.starts, t)
			}
		}
	}
}

// restore takes the state up where the record left it. What lies in the log is read as it is needed.
func (f *flow) restore(r *record) {
	f.number, f.version = r.Commit, r.Version
	if r.Letters != nil {
		f.endings.head, f.endings.floor, f.moved = r.Letters.Head, r.Letters.Floor, r.Letters.Moved
	}
	for _, name := range r.Paused {
		if s := f.stageOf(name); s != nil {
			s.paused = true
		}
	}
	for name, sr := range r.Streams {
		f.retired[name] = streamRecord{Lanes: sr.Lanes}
		s := f.streamOf(name)
		if s == nil {
			continue
		}
		s.bytes, s.stored = sr.Bytes, sr.Bytes
		for p, lr := range sr.Lanes {
			if p >= len(s.lanes) {
				break
			}
			l := s.lanes[p]
			l.head, l.visible, l.done, l.loaded = lr.Head, lr.Head, lr.ordinals.clone(), lr.Floor
			l.unread = lr.pending() > 0
			s.items += lr.pending()
		}
	}
}

// misfit says what lies in the log and has no place in the pipeline as it is declared now; empty: nothing.
func (r *record) misfit(spec Spec) string {
	declared := map[string]int{}
	for _, s := range spec.withDefaults().Streams {
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

func (r *record) encode() ([]byte, error) { return json.Marshal(r) }
