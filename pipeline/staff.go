package pipeline

import (
	"context"
	"fmt"

	"troupe/bus"
	"troupe/roles"
)

// staff gives every stage its workers.
func (p *Pipeline) staff() error {
	for _, s := range p.flow.stages {
		if s.spec.Func != nil {
			p.hire(s)
			continue
		}
		for _, c := range p.cfg.Clusters {
			if c.Name() == s.spec.Role {
				if err := p.enlist(s, c, nil); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// hire makes goroutines for a function.
func (p *Pipeline) hire(s *stage) {
	credits := s.spec.Workers * s.spec.InFlight
	h := p.flow.join(s, "func", credits)
	p.workers[h] = newFuncWorker(p, s, s.spec.Workers, credits)
}

// enlist makes workers of ranks of a cluster; no ranks: all.
func (p *Pipeline) enlist(s *stage, c *roles.Cluster, ranks []int) error {
	if len(ranks) == 0 {
		for r := range c.WorldSize() {
			ranks = append(ranks, r)
		}
	}
	for _, r := range ranks {
		rank, err := c.Worker(r)
		if err != nil {
			return err
		}
		h := p.flow.join(s, fmt.Sprintf("%s[%d]", c.Name(), r), s.spec.InFlight)
		h.gen = genOf(rank)
		h.suspended = s.spec.Workers > 0 && len(s.hands.all) > s.spec.Workers
		p.workers[h] = &rankWorker{p: p, rank: rank, cancels: map[uint64]context.CancelCauseFunc{}}
	}
	return nil
}

// Join gives a stage more workers: ranks of a cluster, or all of them.
func (p *Pipeline) Join(ctx context.Context, to string, c *roles.Cluster, ranks ...int) error {
	return p.inStage(ctx, to, func(s *stage) error {
		if s.spec.Func != nil {
			return bus.Errorf(bus.CodeInvalid, "stage %s is a function and has no ranks; use Scale", to)
		}
		return p.enlist(s, c, ranks)
	})
}

// Leave takes ranks of a cluster out of a stage, all of them if none is named. They get nothing more, and it waits until
// they have finished what they have.
func (p *Pipeline) Leave(ctx context.Context, to string, c *roles.Cluster, ranks ...int) error {
	var left []*hand
	err := p.inStage(ctx, to, func(s *stage) error {
		for _, h := range p.ofCluster(s, c, ranks) {
			h.draining = true
			p.flow.returnQueue(s, h)
			left = append(left, h)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return p.await(ctx, func(p *Pipeline) bool {
		for _, h := range left {
			if h.running > 0 {
				return false
			}
		}
		s := p.flow.stageOf(to)
		for _, h := range left {
			p.flow.part(s, h, returned, 0, nil)
			delete(p.workers, h)
		}
		return true
	})
}

// Lost says that ranks of a cluster are dead, all of them if none is named: what they had is handed to others at once.
// Whoever learns of a death calls it; calls that fail because of one have the same effect.
func (p *Pipeline) Lost(ctx context.Context, to string, c *roles.Cluster, why error, ranks ...int) error {
	return p.inStage(ctx, to, func(s *stage) error {
		all, tasks := p.ofCluster(s, c, ranks), 0
		for _, h := range all {
			tasks += h.running
		}
		for _, h := range all {
			p.gone(s, h, tasks-h.running, why)
		}
		return nil
	})
}

// gone takes a dead worker out of its stage, in the loop. Those that died with it had so many other tasks.
func (p *Pipeline) gone(s *stage, h *hand, others int, why error) {
	w, ok := p.workers[h].(*rankWorker)
	delete(p.workers, h)
	end := lost
	if ok && w.isDisplaced(why) {
		end = displaced
	}
	p.flow.part(s, h, end, others, why)
	if ok {
		w.abandon()
		p.awaitBack(s, w.rank, h.gen)
	}
}

func (p *Pipeline) ofCluster(s *stage, c *roles.Cluster, ranks []int) []*hand {
	var out []*hand
	for _, h := range s.hands.all {
		w, ok := p.workers[h].(*rankWorker)
		if !ok || w.rank.Cluster() != c {
			continue
		}
		wanted := len(ranks) == 0
		for _, r := range ranks {
			wanted = wanted || r == w.rank.Rank()
		}
		if wanted {
			out = append(out, h)
		}
	}
	return out
}
