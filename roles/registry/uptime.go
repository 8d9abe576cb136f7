package registry

import (
	"context"
	"sync"
	"time"

	"troupe/bus"
)

// Uptime is since when the server has been reachable without interruption. A lease that is missing after an outage may
// not have been renewed yet: it proves nothing before the server has been reachable for the length of the lease.
type Uptime struct {
	mu      sync.Mutex
	since   time.Time // zero: unreachable
	blocked bool      // reachable, but refuses writes
}

// Watch follows the connection until ctx ends or the bus is closed.
func (r *Uptime) Watch(ctx context.Context, b *bus.Bus) {
	upCh, stop := b.Connections()
	defer stop()
	r.set(b.Connected())
	for {
		select {
		case <-ctx.Done():
			return
		case <-b.Done():
			return
		case up := <-upCh:
			r.set(up)
		}
	}
}

func (r *Uptime) set(up bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case !up:
		r.since = time.Time{}
	case r.since.IsZero():
		r.since = time.Now()
	}
}

// Block records whether the server refuses writes.
func (r *Uptime) Block(on bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.blocked = on; !on && !r.since.IsZero() {
		r.since = time.Now()
	}
}

// Restart counts from now, as after an outage.
func (r *Uptime) Restart() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.since.IsZero() {
		r.since = time.Now()
	}
}

// Remaining is the time until the server has been reachable for d; all of d while it is unreachable.
func (r *Uptime) Remaining(d time.Duration) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.since.IsZero() || r.blocked {
		return d
	}
	return max(0, d-time.Since(r.since))
}

// Await returns when the server has been reachable for d.
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
