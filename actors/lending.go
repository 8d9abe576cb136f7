package actors

import (
	"sync/atomic"
	"time"

	"troupe/bus"
)

const (
	fastCall  = 100 * time.Microsecond // a call that ended within this was short
	fastCalls = 4                      // so many short calls in a row, and the next one is expected to be
	slowLent  = 5 * time.Millisecond   // a lent call that takes longer has the intake taken over at the next beat
)

// lending is an intake that runs a call itself, which saves a short call the hand-over to another goroutine. Only
// methods whose last calls were short are run like that. One that is not, for once, holds up its worker's intake for a
// beat at most: then another goroutine takes the intake over, and the method is not trusted again before it has been
// short for a while. A timer for each call would tell sooner, and cost more than the hand-over.
type lending struct {
	since atomic.Int64 // the instant at which the call began; 0: none runs; taken: the intake is another's now
}

const taken = -1

// run runs the job; it reports false if the intake has been taken over meanwhile.
func (l *lending) run(j job) bool {
	began := int64(j.call.started)
	l.since.Store(began)
	j.worker.run(j.queue, j.call)
	return l.since.CompareAndSwap(began, 0)
}

// overdue reports whether the intake must be taken over, and claims that for the one who asked.
func (l *lending) overdue() bool {
	since := l.since.Load()
	return since > 0 && int64(instantOf(time.Now()))-since > int64(slowLent) && l.since.CompareAndSwap(since, taken)
}

// rescue has the intake taken over if a call holds it up.
func (h *Host) rescue() {
	if l := h.lending.Load(); l != nil && l.overdue() {
		h.runners.group.Go(bus.Guard(func() { newIntake(h, h.workCh).loop() }))
	}
}
