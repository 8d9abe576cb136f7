package main

import (
	"sync/atomic"

	"troupe/bus"
)

// outbox is the connections that Python uses, usually one. Messages of a call or an answer are written by the thread
// that makes it, or, if Python says that more follows, a moment later together with those.
type outbox struct{ buses atomic.Pointer[[]*bus.Bus] }

func (o *outbox) set(all []*bus.Bus) { o.buses.Store(&all) }

// together runs do and batches the messages it sends: they are written now if do returns true.
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

// push writes delayed messages, because Python is about to wait.
func (o *outbox) push() {
	if all := o.buses.Load(); all != nil {
		for _, b := range *all {
			b.Push()
		}
	}
}
