package roles

import (
	"context"
	"sync"
	"time"

	"troupe/bus"
)

// serverUptime is since when the server has been reachable without interruption. A lease that is missing after an outage may
// not have been renewed yet: it proves nothing before the server has been reachable for the length of the lease.
type serverUptime struct {
	mu      sync.Mutex
	since   time.Time // zero: unreachable
	blocked bool      // reachable, but refuses writes
}

// watch follows the connection until ctx ends or the bus is closed.
func (r *serverUptime) watch(ctx context.Context, b *bus.Bus) {
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

func (r *serverUptime) set(up bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case !up:
		r.since = time.Time{}
	case r.since.IsZero():
		r.since = time.Now()
	}
}

// block records whether the server refuses writes.
func (r *serverUptime) block(on bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.blocked = on; !on && !r.since.IsZero() {
		r.since = time.Now()
	}
}

// restart counts from now, as after an outage.
func (r *serverUptime) restart() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.since.IsZero() {
		r.since = time.Now()
	}
}

// remaining is the time until the server has been reachable for d; all of d while it is unreachable.
func (r *serverUptime) remaining(d time.Duration) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.since.IsZero() || r.blocked {
		return d
	}
	return max(0, d-time.Since(r.since))
}

// await returns when the server has been reachable for d.
func (r *serverUptime) await(ctx context.Context, d time.Duration) error {
	for {
		left := r.remaining(d)
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
