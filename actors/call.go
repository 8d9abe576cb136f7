package actors

import (
	"time"

	"troupe/bus/calls"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// call is one call at one worker, from its arrival until its answer is acknowledged. The worker's mutex guards it.
type call struct {
	worker   *Worker
	header   *wire.Header // shared with other ranks of this process; read only
	delivery *delivery    // the memory of header and call; nil: other calls use it too
	caller   *callerState
	binding  *binding     // nil: the call was refused
	ctx      *callContext // nil until the call runs
	body     []byte
	bodyErr  error
	arrived  instant
	started  instant // 0: not started
	deadline instant // 0: none
	buf      []byte  // the answer is written here while the call runs
	reply    calls.Reply
	args     *callArguments            // nil: no argument is a reference
	spilled  values.Memory             // of a result that was written to disk; nil: it is in memory
	refs     values.RetainedReferences // inside the result, until the caller has taken them
	older    *call                     // neighbours in the worker's list of unacknowledged answers
	newer    *call
	phase    phase
	slot     int // index in the worker's active calls, while it runs
	bodyHere bool
	dropped  bool // the caller cancelled: no answer is sent
	sends    bool // a large result does not stay here; see SendResult
	panicked bool // this method panicked; false for the error of another call's panic
}

// free frees a body in the memory of the call's object.
func (c *call) free(body []byte) {
	if c.binding != nil {
		values.FreeBody(c.binding.memory, body)
	}
}

// freeResult frees the result.
func (c *call) freeResult(body []byte) {
	if c.spilled != nil {
		c.spilled.Free(body)
		return
	}
	c.free(body)
}

// resultMemory is the memory of the result.
func (c *call) resultMemory() values.Memory {
	if c.spilled != nil {
		return c.spilled
	}
	return c.binding.memory
}

// callList is a list of calls in insertion order. The zero callList is empty.
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

// remove takes a call of the list out of it.
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

// instant is a time on the process's monotonic clock; it is smaller than a time.Time and never 0.
type instant int64

var clockStart = time.Now()

func instantOf(t time.Time) instant { return instant(t.Sub(clockStart)) + 1 }

func (i instant) sub(earlier instant) time.Duration { return time.Duration(i - earlier) }

// time converts the instant to wall-clock time.
func (i instant) time() time.Time {
	now := time.Now()
	return now.Add(i.sub(instantOf(now)))
}

// phase is the progress of a call.
type phase uint8

const (
	queued    phase = iota
	running         // the method runs
	answered        // reply holds the answer
	forgotten       // the call is over and its answer is not kept
)
