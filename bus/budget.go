package bus

import (
	"slices"
	"sync"
)

// Budget is the byte budget of one receiving connection. Downloads reserve bytes before they start. Reservations are
// granted in order, so that none starves. A reservation larger than the whole budget gets all of it.
type Budget struct {
	mu    sync.Mutex
	total int64
	free  int64
	queue []*Admission // oldest first
}

// Admission is one reservation.
type Admission struct {
	n     int64
	grant func() // called once, without locks, from the goroutine that released the bytes
}

// NewBudget makes a budget of so many bytes.
func NewBudget(total int64) *Budget { return &Budget{total: total, free: total} }

// Acquire reserves n bytes and calls grant when they are available, perhaps before it returns.
func (b *Budget) Acquire(n int64, grant func()) *Admission {
	a := &Admission{n: min(n, b.total), grant: grant}
	b.mu.Lock()
	b.queue = append(b.queue, a)
	b.mu.Unlock()
	b.serve()
	return a
}

// Release returns the bytes of a. It must be called once for each admission that was granted.
func (b *Budget) Release(a *Admission) {
	b.mu.Lock()
	b.free += a.n
	b.mu.Unlock()
	b.serve()
}

// Cancel removes a waiting admission from the queue. It reports false if a was granted already; then it must be
// released.
func (b *Budget) Cancel(a *Admission) bool {
	b.mu.Lock()
	i := slices.Index(b.queue, a)
	if i >= 0 {
		b.queue = slices.Delete(b.queue, i, i+1)
	}
	b.mu.Unlock()
	if i >= 0 {
		b.serve() // the head of the queue may fit now
	}
	return i >= 0
}

func (b *Budget) serve() {
	for {
		b.mu.Lock()
		if len(b.queue) == 0 || b.queue[0].n > b.free {
			b.mu.Unlock()
			return
		}
		a := b.queue[0]
		b.queue[0] = nil // the array of the queue would keep the admission, and with it a whole body
		b.queue = b.queue[1:]
		b.free -= a.n
		b.mu.Unlock()
		a.grant()
	}
}
