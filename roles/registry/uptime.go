package registry

import (
	"context"
	"sync"
	"time"

	"troupe/bus"
)

// Uptime is since when the server has answered without interruption. A lease that is missing after an outage may not have
// been renewed yet: it proves nothing before the server has answered for the length of the lease.
type Uptime struct {
	mu      sync.Mutex // guards what follows
	bus     *bus.Bus   // nil: unknown, as if the server did not answer
	since   time.Time  // counts from here at the earliest
	blocked bool       // the server answers, but refuses writes
}

// Follow counts the uptime of the server of a bus.
func (r *Uptime) Follow(b *bus.Bus) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.bus = b
	b.Answering() // begins to ask
}

// Block records whether the server refuses writes.
func (r *Uptime) Block(on bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.blocked = on; !on {
		r.since = time.Now()
	}
}

// Restart counts from now, as after an outage.
func (r *Uptime) Restart() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.since = time.Now()
}

// Remaining is the time until the server has answered for d; all of d while it does not answer.
func (r *Uptime) Remaining(d time.Duration) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.bus == nil || r.blocked {
		return d
	}
	since, _ := r.bus.Answering()
	if since.IsZero() {
		return d
	}
	return max(0, d-min(time.Since(since), time.Since(r.since)))
}

// Await returns when the server has answered for d.
func (r *Uptime) Await(ctx context.Context, d time.Duration) error {
	for {
		left := r.Remaining(d)
		if left == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(left):
		}
	}
}
