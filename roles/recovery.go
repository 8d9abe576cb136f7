package roles

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"troupe/bus"
	"troupe/roles/life"
	"troupe/roles/registry"
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

// recovery reads the record of a role that recovers. The driver and the head carry out restarts; other processes wait for
// them.
type recovery struct {
	c      *Cluster
	wakeCh chan struct{} // holds one

	mu    sync.Mutex // guards what follows
	begun time.Time  // when the role began to recover, or this process last restarted workers
	seen  uint32     // generation of the last restart that was seen
	at    time.Time  // when it was seen first
}

func (m *recovery) begin() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.begun = time.Now()
}

// times is when the role began to recover, and when the last restart was seen first.
func (m *recovery) times() (begun, seen time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.begun, m.at
}

func (m *recovery) wake() {
	select {
	case m.wakeCh <- struct{}{}:
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
	case <-m.wakeCh:
	case <-time.After(d):
	}
}

// saw records which restart is in the record.
func (m *recovery) saw(rec registry.RoleRecord) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if r := rec.Restart; rec.State == registry.RoleRestarting && r != nil && r.Gen != m.seen {
		m.seen, m.at = r.Gen, time.Now()
	}
}

// runRecovery reads the record until the lost ranks have new workers, or the role has ended. It restarts them when it is
// this process's turn.
func (m *recovery) runRecovery(episode int) {
	m.begin()
	for m.c.rt.ctx.Err() == nil {
		rec, err := m.c.record.readRecord()
		switch _, on := m.c.life.recovers(episode); {
		case !on:
			return
		case errors.Is(err, bus.ErrNotFound):
			m.c.life.feed(life.Event{Kind: life.Read})
		case err == nil:
			m.saw(rec)
			read := lifeRecord(rec)
			read.Turn = m.mayRestart(rec)
			m.c.record.setRecord(rec)
			m.c.life.feed(life.Event{Kind: life.Read, Record: read})
		}
		if _, on := m.c.life.recovers(episode); !on {
			return
		}
		m.wait(m.c.rt.ctx, restartPoll/2+rand.N(restartPoll/2), m.driverTimeLeft())
	}
}

// reportFailure reports a failure to the driver.
func (m *recovery) reportFailure(l loss, then string) {
	why := l.why()
	m.c.rt.log.Warn("roles: a worker failed", "role", m.c.Name(), "rank", l.rank, "node", why.Node, "error", why.Message, "then", then)
	m.c.output.emit(eventFailed, &l.rank, why.Node, why.Message+"; "+then)
	if m.c.spec.OnFailure == nil {
		return
	}
	f := Failure{Role: m.c.Name(), Rank: l.rank, Gen: l.gen, Node: why.Node, Err: why, Then: then}
	bus.Go(func() { m.c.spec.OnFailure(f) }) // the callback may block
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
