package actors

import (
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

// call is one call at one worker, from its arrival until its answer is acknowledged. The worker's mutex guards it. When it
// is forgotten, and nobody refers to it any more, its memory is used again.
type call struct {
	worker   *Worker
	header   *wire.Header // shared with the other ranks of this process; read only
	session  *session
	binding  *binding     // nil: it was refused
	ctx      *callContext // nil until it runs
	delivery *delivery    // that it is part of, if it has that for itself
	body     []byte
	bodyErr  error
	arrived  instant
	started  instant // 0: it has not
	deadline instant // 0: none
	buf      []byte  // what the answer is written into, while it runs
	reply    bus.Reply
	older    *call // among those that are answered and kept
	newer    *call
	phase    phase
	slot     int // where it stands among the worker's active calls, while it runs
	bodyHere bool
	dropped  bool // the caller gave up: no answer is sent
	panicked bool // the method did, and no error of another's panic
}

// free frees a body of the call, an argument or a result, that nobody needs any more.
func (c *call) free(body []byte) {
	if c.binding != nil {
		bus.FreeBody(c.binding.memory, body)
	}
}

// callList is calls in the order in which they were put there. The zero callList is empty.
type callList struct {
	oldest *call
	newest *call
	n      int
}

func (l *callList) push(c *call) {
	c.older, l.newest = l.newest, c
	if c.older == nil {
		l.oldest = c
	} else {
		c.older.newer = c
	}
	l.n++
}

// remove takes out a call that is in the list.
func (l *callList) remove(c *call) {
	if c.older == nil {
		l.oldest = c.newer
	} else {
		c.older.newer = c.newer
	}
	if c.newer == nil {
		l.newest = c.older
	} else {
		c.newer.older = c.older
	}
	c.older, c.newer = nil, nil
	l.n--
}

// instant is a moment by the monotonic clock of this process; it is smaller than a time.Time, and never 0.
type instant int64

var epoch = time.Now()

func instantOf(t time.Time) instant { return instant(t.Sub(epoch)) + 1 }

func (i instant) sub(earlier instant) time.Duration { return time.Duration(i - earlier) }

// time is that moment by the clock on the wall, as it is set now.
func (i instant) time() time.Time {
	now := time.Now()
	return now.Add(i.sub(instantOf(now)))
}

// phase is how far a call has come.
type phase uint8

const (
	queued    phase = iota
	running         // in a method
	answered        // reply is what was sent
	forgotten       // it ran or was cancelled, and its answer is no longer here
)
