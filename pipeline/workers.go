package pipeline

import (
	"context"
	"fmt"

	"troupe/bus"
	"troupe/pipeline/flow"
	"troupe/roles"
)

// startWorkers gives every stage its workers.
func (p *Pipeline) startWorkers() error {
	for _, s := range p.flow.Stages {
		if s.Spec.Func != nil {
			p.addFuncWorker(s)
			continue
		}
		for _, c := range p.cfg.Clusters {
			if c.Name() == s.Spec.Role {
				if err := p.addRankWorkers(s, c, nil); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// addFuncWorker starts the goroutines of a function.
func (p *Pipeline) addFuncWorker(s *flow.StageState) {
	credits := s.Spec.Workers * s.Spec.InFlight
	slots := p.flow.AddWorker(s, "func", credits)
	p.workers[slots] = newFuncWorker(p, s, s.Spec.Workers, credits)
}

// addRankWorkers adds ranks of a cluster to a stage; no ranks: all.
func (p *Pipeline) addRankWorkers(s *flow.StageState, c *roles.Cluster, ranks []int) error {
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
		slots := p.flow.AddWorker(s, fmt.Sprintf("%s[%d]", c.Name(), r), s.Spec.InFlight)
		slots.Generation = rank.Generation()
		slots.Suspended = s.Spec.Workers > 0 && len(s.Workers.All) > s.Spec.Workers
		p.workers[slots] = &rankWorker{p: p, rank: rank, cancels: map[uint64]context.CancelCauseFunc{}}
	}
	p.watchRole(s, c)
	return nil
}

// Join adds ranks of a cluster to a stage, all of them if none is given.
func (p *Pipeline) Join(ctx context.Context, to string, c *roles.Cluster, ranks ...int) error {
	return p.inStage(ctx, to, func(s *flow.StageState) error {
		if s.Spec.Func != nil {
			return bus.Errorf(bus.CodeInvalid, "stage %s is a function and has no ranks; use Scale", to)
		}
		if err := checkMethod(s.Spec, c); err != nil {
			return err
		}
		return p.addRankWorkers(s, c, ranks)
	})
}

// Leave removes ranks of a cluster from a stage, all of them if none is given. They get no more tasks, and it waits
// until they have finished the ones they have.
func (p *Pipeline) Leave(ctx context.Context, to string, c *roles.Cluster, ranks ...int) error {
	var left []*flow.WorkerSlots
	err := p.inStage(ctx, to, func(s *flow.StageState) error {
		for _, slots := range p.workersOf(s, c, ranks) {
			slots.Draining = true
			p.flow.Unassign(s, slots)
			left = append(left, slots)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return p.awaitState(ctx, func(p *Pipeline) bool {
		for _, slots := range left {
			if slots.Running > 0 {
				return false
			}
		}
		s := p.flow.StageNamed(to)
		for _, slots := range left {
			p.flow.RemoveWorker(s, slots, flow.Revoked, 0, nil)
			delete(p.workers, slots)
		}
		return true
	})
}

// Lost reports ranks of a cluster as dead, all of them if none is given: their tasks are given to other workers at
// once. Failed calls have the same effect.
func (p *Pipeline) Lost(ctx context.Context, to string, c *roles.Cluster, why error, ranks ...int) error {
	return p.inStage(ctx, to, func(s *flow.StageState) error {
		p.removeLostWorkers(s, p.workersOf(s, c, ranks), why)
		return nil
	})
}

// removeLostWorkers removes workers that died together from their stage. It is called in the loop.
func (p *Pipeline) removeLostWorkers(s *flow.StageState, all []*flow.WorkerSlots, why error) {
	tasks := 0
	for _, slots := range all {
		tasks += slots.Running
	}
	for _, slots := range all {
		p.removeLostWorker(s, slots, tasks-slots.Running, why)
	}
}

// removeLostWorker removes a dead worker from its stage. others is the number of tasks of workers that died with it. It
// is called in the loop.
func (p *Pipeline) removeLostWorker(s *flow.StageState, slots *flow.WorkerSlots, others int, why error) {
	w, ok := p.workers[slots].(*rankWorker)
	delete(p.workers, slots)
	end := flow.WorkerLost
	if ok && w.isDisplaced(why) {
		end = flow.WorkerStopped
	}
	p.flow.RemoveWorker(s, slots, end, others, why)
	if ok {
		w.cancelAll()
		p.awaitRestart(s, w.rank, slots.Generation, why)
	}
}

func (p *Pipeline) workersOf(s *flow.StageState, c *roles.Cluster, ranks []int) []*flow.WorkerSlots {
	var out []*flow.WorkerSlots
	for _, slots := range s.Workers.All {
		w, ok := p.workers[slots].(*rankWorker)
		if !ok || w.rank.Cluster() != c {
			continue
		}
		wanted := len(ranks) == 0
		for _, r := range ranks {
			wanted = wanted || r == w.rank.Rank()
		}
		if wanted {
			out = append(out, slots)
		}
	}
	return out
}
