package placement

import (
	"sync"

	"troupe/nodes/protocol"
)

// inbox is everything that reaches the leader, in the order of arrival. Subscriptions put in, the loop takes all there
// is at once: so what waits while one round is committed makes up the next.
type inbox struct {
	wakeCh chan struct{}

	mu    sync.Mutex // guards what follows
	items []item
	calls int // of them, requests
	want  int // requests that must be there before one more wakes the loop
}

// item is one of: a request, a beat, news of a lease.
type item struct {
	call  *call
	beat  *protocol.Heartbeat
	lease *leaseNews
}

// leaseNews is what the watch of the nodes' leases has seen.
type leaseNews struct {
	report *protocol.Report // taken or renewed
	gone   string           // the node whose lease is over
	all    bool             // those that there are have been seen
}

func newInbox() *inbox { return &inbox{wakeCh: make(chan struct{}, 1)} }

// put reports false if there is no room; only requests are refused.
func (b *inbox) put(it item) bool {
	b.mu.Lock()
	full := len(b.items) >= inboxLimit && it.call != nil
	if !full {
		b.items = append(b.items, it)
	}
	if !full && it.call != nil {
		b.calls++
	}
	wake := !full && b.calls >= b.want
	b.mu.Unlock()
	if wake {
		select {
		case b.wakeCh <- struct{}{}:
		default:
		}
	}
	return !full
}

// take empties the inbox; spare is a slice to fill next.
func (b *inbox) take(spare []item) []item {
	b.mu.Lock()
	defer b.mu.Unlock()
	items := b.items
	b.items, b.calls, b.want = spare[:0], 0, 0
	return items
}

// waiting is how many requests are there.
func (b *inbox) waiting() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.calls
}

// gather lets the loop sleep until so many requests are there, and reports whether they are already. The next take ends
// that.
func (b *inbox) gather(n int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.want = n
	return b.calls >= n
}
