package roles

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"troupe/bus"
	"troupe/nodes"
	"troupe/roles/life"
)

const (
	stallStacks   = 700 * time.Millisecond // timeout of the stacks of a rank that stalls
	maxEventStack = 16 << 10               // bytes of stacks in an event
)

// stall is a rank that was found to stall: in which generation, and since when.
type stall struct {
	gen   uint32
	since time.Time
}

// suspicion is why a rank may stall.
type suspicion struct {
	rank   int
	gen    uint32
	since  time.Time
	silent bool
	why    string
}

// watchStalls looks for ranks that stall, by the heartbeats: one that runs a call for longer than StallAfter while no other rank runs any, or
// whose process is silent for that long. Where all ranks run calls, as in a collective, the one whose stacks differ stalls.
func (m *membership) watchStalls(now time.Time) {
	c := m.c
	after := c.stallAfter(0)
	if after == 0 || c.life.state() != life.Serving {
		return
	}
	suspects, idle := []suspicion{}, 0
	c.liveness.mu.Lock()
	for rank, sign := range c.liveness.signs[:min(len(c.liveness.signs), c.WorldSize())] {
		k, _ := c.life.rank(rank)
		s := suspicion{rank: rank, gen: sign.Gen}
		silence := now.Sub(sign.at)
		switch {
		case sign.at.IsZero() || k.Gen != sign.Gen || k.State != life.Ready || k.Retired:
			continue
		case silence > after:
			s.silent, s.since = true, sign.at
			s.why = fmt.Sprintf("its process was not heard of for %v and does not answer: it is stopped or starved", silence.Round(100*time.Millisecond))
		case sign.Busy == 0:
			idle++
			continue
		case sign.Busy+silence > after:
			s.since = sign.at.Add(-sign.Busy).Round(time.Second)
			s.why = fmt.Sprintf("it runs %s for %v while the others wait", sign.Method, (sign.Busy + silence).Round(100*time.Millisecond))
		default:
			continue
		}
		suspects = append(suspects, s)
	}
	c.liveness.mu.Unlock()
	world := c.WorldSize()
	all := len(suspects) == world && world > 2
	if !all {
		suspects = slices.DeleteFunc(suspects, func(s suspicion) bool { return !s.silent && idle != world-1 })
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	suspects = slices.DeleteFunc(suspects, func(s suspicion) bool {
		known, ok := m.stalls[s.rank]
		return ok && known.gen == s.gen && s.since.Sub(known.since).Abs() < after
	})
	if len(suspects) == 0 || m.examining {
		return
	}
	m.examining = c.rt.spawn(func() { m.examine(suspects, all) })
}

// examine takes the stacks of ranks that seem to stall, stores them with an event, and replaces the ranks if the policy of the role says so.
func (m *membership) examine(suspects []suspicion, all bool) {
	c := m.c
	defer func() {
		m.mu.Lock()
		m.examining = false
		m.mu.Unlock()
	}()
	ranks := make([]int, len(suspects))
	for i, s := range suspects {
		ranks[i] = s.rank
	}
	ctx, cancel := context.WithTimeout(c.rt.ctx, stallStacks)
	defer cancel()
	stacks, err := c.Stacks(ctx, ranks...)
	if err != nil {
		return
	}
	folded := nodes.FoldStacks(stacks)
	for _, s := range suspects {
		if all && !s.silent && (len(folded) != 2 || !slices.Equal(folded[0].Ranks, []int{s.rank})) {
			continue // no rank, or no single one, does something else than the others
		}
		if k, _ := c.life.rank(s.rank); k.Gen != s.gen || k.State != life.Ready || s.silent && c.liveness.heardSince(s.rank, s.since) {
			continue
		}
		m.mu.Lock()
		m.stalls[s.rank] = stall{gen: s.gen, since: s.since}
		m.mu.Unlock()
		m.handleStall(s, folded)
	}
}

func (m *membership) handleStall(s suspicion, folded []nodes.FoldedStacks) {
	c := m.c
	then := "the policy of the role replaces no worker: replace or kill it yourself"
	if c.Record().ReplacesWorkers() {
		then = "it is replaced"
	}
	var text strings.Builder
	for _, group := range folded {
		fmt.Fprintf(&text, "%s", group)
	}
	stacks := text.String()
	c.output.emitDetails(eventStalled, &s.rank, c.Record().Placements[s.rank].Node, s.why+"; "+then, map[string]string{"stacks": stacks[:min(len(stacks), maxEventStack)]})
	c.rt.log.Warn("roles: a worker stalls", "role", c.Name(), "rank", s.rank, "why", s.why, "then", then)
	if !c.Record().ReplacesWorkers() {
		return
	}
	c.rt.spawn(func() {
		ctx, cancel := context.WithTimeout(c.rt.ctx, c.spec.StartTimeout)
		defer cancel()
		if err := m.replace(ctx, s.rank, s.gen, "it stalls: "+s.why, 0); err != nil && bus.CodeOf(err) != bus.CodeCancelled {
			c.rt.log.Warn("roles: replacing a worker that stalls failed", "role", c.Name(), "rank", s.rank, "error", err)
		}
	})
}

// stallAfter is the StallAfter of the role, or another duration if it has none.
func (c *Cluster) stallAfter(otherwise time.Duration) time.Duration {
	if p := c.spec.Process; c.origin == created && p != nil && p.StallAfter > 0 {
		return p.StallAfter
	}
	return otherwise
}

// heardSince reports whether a rank was heard of after a time.
func (l *liveness) heardSince(rank int, since time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return rank < len(l.signs) && l.signs[rank].at.After(since)
}
