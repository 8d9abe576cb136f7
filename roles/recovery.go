package roles

import (
	"context"
	"slices"
	"sync"
	"time"

	"troupe/bus"
)

// Failure is the failure of a worker, and its consequence.
type Failure struct {
	Role string
	Rank int
	Gen  uint32
	Node string
	Err  error
	Then string // for display: "the role fails", "the rank is restarted (1 of 3)"
}

// recovery is the state of a role's restarts in one cluster. The driver and the head carry them out; other processes
// wait for them. One goroutine at a time works on it.
type recovery struct {
	gateMu sync.Mutex // held while a loss is added and the gate closed, and while the gate is set from the record

	mu      sync.Mutex // guards what follows
	lost    []loss     // to be handled
	changed bool       // the record must be read
	running bool
	wakeCh  chan struct{} // holds one; nil before the first use
}

// take removes and returns the losses.
func (m *recovery) take() []loss {
	m.mu.Lock()
	defer m.mu.Unlock()
	lost := m.lost
	m.lost, m.changed = nil, false
	return lost
}

func (m *recovery) add(l loss) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lost = append(m.lost, l)
}

// pending is the losses that were not taken.
func (m *recovery) pending() []loss {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.lost)
}

// waiting reports whether losses are pending.
func (m *recovery) waiting() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.lost) > 0
}

func (m *recovery) ch() chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.wakeCh == nil {
		m.wakeCh = make(chan struct{}, 1)
	}
	return m.wakeCh
}

func (m *recovery) wake() {
	select {
	case m.ch() <- struct{}{}:
	default:
	}
}

// wait returns when wake is called, or after the shorter time; a second time of zero does not count.
func (m *recovery) wait(ctx context.Context, d, or time.Duration) {
	if or > 0 {
		d = min(d, or)
	}
	select {
	case <-ctx.Done():
	case <-m.ch():
	case <-time.After(d):
	}
}

// handleFailure handles a worker's failure by the role's policy; false: the role fails.
func (c *Cluster) handleFailure(l loss) bool {
	if !c.isStarted() && c.origin == created {
		return false // the first start fails
	}
	switch rec := c.Record(); {
	case rec.Policy == Ignore:
		c.reportFailure(l, "the others continue")
		return true
	case !rec.ReplacesWorkers():
		return false
	}
	m := &c.recovery
	m.mu.Lock() // the loss was added by hold
	if !m.running {
		m.running = c.rt.spawn(c.runRecovery)
	}
	running := m.running
	m.mu.Unlock()
	m.wake()
	return running
}

// runRecovery restarts lost workers, or waits for their restart by another process, until no loss is left.
func (c *Cluster) runRecovery() {
	for {
		m := &c.recovery
		m.mu.Lock()
		lost, news := m.lost, m.changed
		m.lost, m.changed = nil, false
		if len(lost) == 0 && !news || c.isOver() {
			m.running = false
			m.mu.Unlock()
			return
		}
		m.mu.Unlock()
		if err := c.recover(lost); err != nil {
			last := loss{why: err, rank: max(err.Rank, 0), failed: true}
			if len(lost) > 0 {
				last = lost[0]
			}
			last.why = err
			c.failWith(last, true)
		}
	}
}

func (c *Cluster) isOver() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ended != nil
}

// reportFailure reports a failure to the driver.
func (c *Cluster) reportFailure(l loss, then string) {
	c.rt.log.Warn("roles: a worker failed", "role", c.Name(), "rank", l.rank, "node", l.why.Node, "error", l.why.Message, "then", then)
	c.emit(eventFailed, &l.rank, l.why.Node, l.why.Message+"; "+then)
	if c.spec.OnFailure == nil {
		return
	}
	f := Failure{Role: c.Name(), Rank: l.rank, Gen: l.gen, Node: l.why.Node, Err: l.why, Then: then}
	bus.Go(func() { c.spec.OnFailure(f) }) // the callback may block
}

func ranksOf(lost []loss) []int {
	var ranks []int
	for _, l := range lost {
		if !slices.Contains(ranks, l.rank) {
			ranks = append(ranks, l.rank)
		}
	}
	slices.Sort(ranks)
	return ranks
}
