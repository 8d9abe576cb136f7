package flow

import (
	"time"

	"troupe/bus"
	"troupe/pipeline/spec"
)

// producerState is the last accepted and the last committed put of a producer.
type producerState struct {
	accepted, stored uint64
	used             time.Time
}

// Put is a request to store items in a stream.
type Put struct {
	Stream *StreamState
	Items  []spec.Item
	bytes  int64
	Source string // the producer; Source and Seq identify a repeat
	Seq    uint64
	Token  any // identifies the request in Reply
}

// Put accepts, queues or rejects items.
func (f *Flow) Put(p *Put) {
	if err := p.Stream.check(p.Items, f.maxBody); err != nil {
		f.Replies = append(f.Replies, Reply{p.Token, err})
		return
	}
	if f.isRepeat(p) {
		return
	}
	if f.IntakeClosed {
		f.Replies = append(f.Replies, Reply{p.Token, bus.Errorf(bus.CodeClosed, "the pipeline accepts no items: it is being drained or shut down")})
		return
	}
	for i := range p.Items {
		p.bytes += Weight(&p.Items[i])
	}
	if p.Stream.waiting.len() > 0 || !f.admit(p) {
		f.enqueuePut(p)
	}
}

// isRepeat reports whether the put was accepted before, and then answers it, at once or when the first one is
// committed.
func (f *Flow) isRepeat(p *Put) bool {
	src := f.sources[p.Source]
	if p.Source == "" {
		return false
	}
	if src == nil || p.Seq > src.accepted {
		return f.joinWaiting(p)
	}
	src.used = f.Now
	if p.Seq <= src.stored {
		f.Replies = append(f.Replies, Reply{p.Token, nil})
	} else {
		f.enqueue(&change{tokens: []any{p.Token}, afterAll: true}) // the first one is ahead of this change in the queue
	}
	return true
}

// joinWaiting finds the same put in the queue of its stream; the last request gets the answer.
func (f *Flow) joinWaiting(p *Put) bool {
	for _, w := range p.Stream.waiting.all() {
		if w.Source == p.Source && w.Seq == p.Seq {
			w.Token = p.Token
			return true
		}
	}
	return false
}

// maxWaiting bounds the puts that wait for room in a stream.
const maxWaiting = 4096

func (f *Flow) enqueuePut(p *Put) {
	s := p.Stream
	switch {
	case s.spec.Full == spec.Refuse:
		f.Replies = append(f.Replies, Reply{p.Token, bus.Errorf(bus.CodeBusy, "stream %s is full: %d of %d items, %d of %d bytes", s.spec.Name, s.items, s.spec.Items, s.bytes, s.spec.Bytes)})
	case s.waiting.len() >= maxWaiting:
		f.Replies = append(f.Replies, Reply{p.Token, bus.Errorf(bus.CodeBusy, "stream %s is full, and %d puts wait for room", s.spec.Name, maxWaiting)})
	default:
		s.waiting.push(p)
	}
}

// admit accepts a put if the stream has room, or room can be made.
func (f *Flow) admit(p *Put) bool {
	c := &change{source: p.Source, seq: p.Seq}
	if p.Token != nil {
		c.tokens = []any{p.Token}
	}
	if p.Stream.spec.Full == spec.DropOldest {
		f.dropOldest(p.Stream, len(p.Items), p.bytes, c)
	}
	if !p.Stream.fits(len(p.Items), p.bytes) && len(c.done) == 0 {
		return false
	}
	for _, it := range p.Items {
		if !it.Stamped {
			it.Version, it.Stamped = f.Version, true
		}
		c.puts = append(c.puts, f.newEntry(p.Stream, it))
	}
	if p.Source != "" {
		src := f.sources[p.Source]
		if src == nil {
			src = &producerState{}
			f.sources[p.Source] = src
		}
		src.accepted, src.used = max(src.accepted, p.Seq), f.Now
	}
	f.enqueue(c)
	return true
}

// newEntry makes the item an entry that counts against the bounds of the stream. It gets its ordinal when it is
// committed.
func (f *Flow) newEntry(to *StreamState, it spec.Item) *Entry {
	it.Stored, it.Stream, it.Attempt, it.Stale = f.Now, to.spec.Name, 0, false
	it.Priority = min(it.Priority, to.spec.Priorities-1)
	to.count(&it)
	return &Entry{Item: it, Lane: to.lanes[it.Priority]}
}

// dropOldest drops the oldest items that are not running until the new ones fit.
func (f *Flow) dropOldest(s *StreamState, items int, bytes int64, c *change) {
	var freed int
	var freedBytes int64
	for _, e := range c.done {
		if e.Lane.stream == s {
			freed, freedBytes = freed+1, freedBytes+Weight(&e.Item)
		}
	}
	for !s.fits(items-freed, bytes-freedBytes) {
		e, ok := s.popOldest()
		if !ok {
			return
		}
		s.dropped++
		c.done = append(c.done, e)
		freed, freedBytes = freed+1, freedBytes+Weight(&e.Item)
	}
}

// WithdrawPut removes puts that still wait for room.
func (f *Flow) WithdrawPut(token any) {
	for _, s := range f.streams {
		s.waiting.remove(func(p *Put) bool { return p.Token == token })
	}
}

// WasAccepted reports whether a put of this producer is committed or queued.
func (f *Flow) WasAccepted(name string, seq uint64) bool {
	src := f.sources[name]
	return src != nil && seq <= src.accepted
}

// RestoreSource sets the last committed put of a producer, as read from the log.
func (f *Flow) RestoreSource(name string, seq uint64) {
	f.sources[name] = &producerState{accepted: seq, stored: seq, used: f.Now}
}

// CheckSize rejects an item that could never be stored in the stream; size is the length of its body.
func (f *Flow) CheckSize(s *StreamState, it *spec.Item, size int) error {
	return s.checkSize(it, size, f.maxBody)
}
