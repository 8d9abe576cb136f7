package registry

import (
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

// Heard is for how long the server has answered; zero while it does not answer. It is evidence.Signs.Heard of drivers.
func (r *Uptime) Heard() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.bus == nil || r.blocked {
		return 0
	}
	since, _ := r.bus.Answering()
	if since.IsZero() {
		return 0
	}
	return max(0, min(time.Since(since), time.Since(r.since)))
}
