package roles

import (
	"context"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// reach is since when the server can be reached without a break. A lease that is missing right after an outage means
// that it has not been renewed yet: nobody is judged by it before it has had its whole length to come back.
type reach struct {
	mu      sync.Mutex
	since   time.Time // zero while the server cannot be reached
	blocked bool      // it can be reached, and takes no writes
}

// watch follows the connection until ctx ends or it is closed.
func (r *reach) watch(ctx context.Context, nc *nats.Conn) {
	statusCh := nc.StatusChanged()
	defer nc.RemoveStatusListener(statusCh)
	r.set(nc.Status())
	for {
		select {
		case <-ctx.Done():
			return
		case s, ok := <-statusCh:
			if !ok {
				return
			}
			r.set(s)
		}
	}
}

func (r *reach) set(s nats.Status) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case s != nats.CONNECTED:
		r.since = time.Time{}
	case r.since.IsZero():
		r.since = time.Now()
	}
}

// block notes that the server takes no writes, or takes them again.
func (r *reach) block(on bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.blocked = on; !on && !r.since.IsZero() {
		r.since = time.Now()
	}
}

// restart counts from now, as after an outage.
func (r *reach) restart() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.since.IsZero() {
		r.since = time.Now()
	}
}

// missing is how much longer the server must be reachable until it has been for d; all of d while it is not.
func (r *reach) missing(d time.Duration) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.since.IsZero() || r.blocked {
		return d
	}
	return max(0, d-time.Since(r.since))
}

// await returns when the server has been reachable for d.
func (r *reach) await(ctx context.Context, d time.Duration) error {
	for {
		left := r.missing(d)
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
