package flow

import (
	"time"

	"troupe/pipeline/spec"
)

// enqueue adds a change to the queue. Its completed items stop counting against the bounds of their streams.
func (f *Flow) enqueue(c *change) {
	for _, e := range c.done {
		e.Lane.stream.uncount(&e.Item)
	}
	for _, e := range c.puts {
		e.BodyRef = f.storeSeparately(c, e.Body, e.Lane.Bodies)
	}
	for _, d := range c.dead {
		if d.BodyRef == nil { // a rewritten dead letter keeps its stored body
			d.BodyRef = f.storeSeparately(c, d.Body, f.DeadBodies)
		}
	}
	f.queue.push(c)
	f.queued += c.messages()
	f.queuedBytes += c.size()
}

// change is a set of writes that are committed together or not at all.
type change struct {
	done          []*Entry // completed items
	puts          []*Entry // new items
	dead          []*DeadLetter
	retried       []FailedItem     // items whose retry state is written
	starts        []*Task          // tasks to start once the change is committed
	resolved      []ResolvedLetter // dead letters that were retried or dropped
	freedBodies   []uint64         // sequences of their bodies
	closed        *ClosedGroup
	advance       spec.Version
	source        string
	seq           uint64
	tokens        []any // answered when the change is committed
	pendingBodies int   // bodies to be stored before the commit
	ordered       bool  // it completes items of an ordered stage
	afterAll      bool  // it is committed after every change that was queued before it
}

// ClosedGroup is a group that was handed over before all of its items arrived: items that arrive later are late.
type ClosedGroup struct {
	Stage, Group string
	Missing      int
	Remember     time.Duration
}

// ResolvedLetter is a dead letter that was retried or dropped.
type ResolvedLetter struct {
	Subject string
	ordinal uint64
}

// messages is the number of messages the change needs in the log.
func (c *change) messages() int {
	n := len(c.puts) + len(c.dead) + 2*len(c.resolved) + len(c.retried)
	for _, e := range c.done {
		if e.Retries != nil {
			n++
		}
	}
	if c.closed != nil {
		n++
	}
	if c.source != "" {
		n++
	}
	return n
}

func (c *change) size() (n int64) {
	for _, e := range c.puts {
		if n += Weight(&e.Item); e.BodyRef != nil {
			n -= int64(len(e.Body))
		}
	}
	for _, d := range c.dead {
		if n += 1024; d.BodyRef == nil {
			n += int64(len(d.Body))
		}
	}
	return n
}

// HasQueued reports whether changes wait for a commit.
func (f *Flow) HasQueued() bool { return f.queue.len() > 0 }

func (f *Flow) Backlog() (messages int, bytes int64) { return f.queued, f.queuedBytes }
