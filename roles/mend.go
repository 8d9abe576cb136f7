package roles

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"troupe/bus"
)

// Failure is a worker that failed, and what is done about it.
type Failure struct {
	Role string
	Rank int
	Gen  uint32
	Node string
	Err  error
	Then string // in words: "the role fails", "the rank is restarted (1 of 3)"
}

// mending is the restarts of a role whose policy has them. Only whoever created the role restarts its workers: it alone
// has what they were started with.
type mending struct {
	mu       sync.Mutex
	lost     []loss // to be dealt with
	running  bool
	restarts int
}

// mend deals with a worker's failure by the role's policy; false: the role fails.
func (c *Cluster) mend(l loss) bool {
	if !c.isUp() && c.tie == created {
		return false // it is still being created: its first start fails
	}
	switch policy := c.Record().Policy; {
	case policy == Ignore:
		c.tell(l, "the others go on")
		return true
	case policy == FailRole || c.tie == followed: // who follows a role has nothing to restart it with
		return false
	case c.tie != created:
		return true // its driver sees to it
	}
	m := &c.mending
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lost = append(m.lost, l)
	if !m.running {
		m.running = c.rt.spawn(c.mendAll)
	}
	return m.running
}

// mendAll restarts what was lost until nothing is left to do.
func (c *Cluster) mendAll() {
	for {
		c.mending.mu.Lock()
		lost := c.mending.lost
		c.mending.lost = nil
		if len(lost) == 0 || c.isOver() {
			c.mending.running = false
			c.mending.mu.Unlock()
			return
		}
		c.mending.mu.Unlock()
		if err := c.restart(lost); err != nil {
			last := lost[0]
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

// restart puts new workers in the place of those that were lost, or of all.
func (c *Cluster) restart(lost []loss) *bus.Error {
	p, first := c.spec.Process, lost[0]
	c.mending.restarts++
	n := c.mending.restarts
	if n > p.Restarts {
		why := *first.why
		why.Message = fmt.Sprintf("%s (after %d restarts, and no more are allowed)", why.Message, p.Restarts)
		return &why
	}
	ranks, then := ranksOf(lost), fmt.Sprintf("the rank is restarted (%d of %d)", n, p.Restarts)
	if p.Policy == RestartRole {
		ranks, then = c.Record().allRanks(), fmt.Sprintf("the role is restarted (%d of %d)", n, p.Restarts)
	}
	for _, l := range lost {
		c.tell(l, then)
	}
	if p.Policy == RestartRole {
		c.failOthers(first)
	}
	select {
	case <-c.rt.ctx.Done():
		return nil
	case <-time.After(p.pause(n)):
	}
	ctx, cancel := context.WithTimeout(c.rt.ctx, c.spec.StartTimeout)
	defer cancel()
	if err := c.replace(ctx, ranks); err != nil && !c.isOver() && !c.lostAgain() {
		return bus.Errorf(bus.CodeWorkerLost, "rank %d could not be restarted: %w; it had failed: %s", first.rank, err, first.why.Message)
	}
	return nil
}

// lostAgain reports whether another loss waits to be dealt with: then that is the next thing to do.
func (c *Cluster) lostAgain() bool {
	c.mending.mu.Lock()
	defer c.mending.mu.Unlock()
	return len(c.mending.lost) > 0
}

// failOthers fails the calls of a role that is restarted because of one of its ranks.
func (c *Cluster) failOthers(l loss) {
	because := bus.Errorf(bus.CodeWorkerLost, "the role is restarted because of rank %d: %s", l.rank, l.why.Message).WithCause(l.why)
	because.Node, because.Details = l.why.Node, l.why.Details
	gens := c.life.generations()
	for rank := range c.WorldSize() {
		c.rt.ep.Lost(c.to, rank, gens[rank], because)
	}
}

// replace ends what is left of the ranks' processes and starts others, on the same seats.
func (c *Cluster) replace(ctx context.Context, ranks []int) error {
	if err := c.makeProgram(ctx); err != nil {
		return err
	}
	before := c.Record()
	if err := c.edit(ctx, func(r *Record) {
		r.Gens++
		for _, rank := range ranks {
			r.Seats[rank].Gen = r.Gens
		}
	}); err != nil {
		return err
	}
	rec := c.Record()
	for _, rank := range ranks {
		c.life.renew(rank, rec.Seats[rank].Gen) // what the old ones say from now on is of another generation
	}
	if err := c.endProcesses(ctx, ranks, before); err != nil {
		return err
	}
	if err := c.launch(ctx, ranks, rec); err != nil {
		return err
	}
	if err := c.awaitReady(ctx, ranks); err != nil {
		return err
	}
	if err := c.barrier(ctx, ranks); err != nil {
		return err
	}
	c.life.expectAll()
	return nil
}

// tell tells the driver of a failure.
func (c *Cluster) tell(l loss, then string) {
	c.rt.log.Warn("roles: a worker failed", "role", c.Name(), "rank", l.rank, "node", l.why.Node, "error", l.why.Message, "then", then)
	c.emit(eventFailed, &l.rank, l.why.Node, l.why.Message+"; "+then)
	if c.spec.OnFailure == nil {
		return
	}
	f := Failure{Role: c.Name(), Rank: l.rank, Gen: l.gen, Node: l.why.Node, Err: l.why, Then: then}
	bus.Go(func() { c.spec.OnFailure(f) }) // nobody waits for it: it is the driver's own
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
