package actors

import (
	"time"

	"troupe/bus"
)

// call is one call at one worker, from its arrival until its answer is acknowledged. The worker's mutex guards it, but
// for its context, which guards itself.
type call struct {
	worker   *Worker
	header   *bus.Header // shared with the other ranks of this process; read only
	session  *session
	queue    *queue
	ctx      callContext
	body     []byte
	bodyErr  error
	arrived  time.Time
	started  time.Time
	deadline time.Time // zero: none
	reply    bus.Reply
	phase    phase
	slot     int // where it stands among the worker's active calls, while it runs
	bodyHere bool
	dropped  bool // the caller gave up: no answer is sent
	panicked bool // the method did, and no error of another's panic
}

// phase is how far a call has come.
type phase uint8

const (
	queued    phase = iota
	running         // in a method
	answered        // reply is what was sent
	forgotten       // it ran or was cancelled, and its answer is no longer here
)
