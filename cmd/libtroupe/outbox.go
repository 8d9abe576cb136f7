package main

import (
	"sync/atomic"

	"troupe/bus"
)

// outbox is the connections that the other side speaks on: one, as a rule. What is said by a call or an answer is written by
// the thread that says it, if nothing follows at once; else a moment later, with what follows. The other side says which.
type outbox struct{ buses atomic.Pointer[[]*bus.Bus] }

func (o *outbox) set(all []*bus.Bus) { o.buses.Store(&all) }

// together does something and sends what is said by it together: now, if that is what it returns.
func (o *outbox) together(do func() (now bool)) {
	var now bool
	if all := o.buses.Load(); all != nil {
		for _, b := range *all {
			cork := b.BatchWrites()
			defer func() { cork.Flush(now) }()
		}
	}
	now = do()
}

// push sends what is held back: the other side is about to wait.
func (o *outbox) push() {
	if all := o.buses.Load(); all != nil {
		for _, b := range *all {
			b.Push()
		}
	}
}
