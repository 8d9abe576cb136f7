package pipeline

import (
	"context"

	"troupe/bus"
	"troupe/pipeline/flow"
	"troupe/roles"
)

// awaitRestart adds a rank to the stage again when its role has restarted it. why is the reason of its loss. It is called
// in the loop.
func (p *Pipeline) awaitRestart(s *flow.StageState, rank roles.Worker, gen uint32, why error) {
	s.Restarting++
	p.group.Go(bus.Guard(func() {
		err := rank.AwaitRestart(p.ctx, gen)
		p.inbox.push(eventFunc(func(p *Pipeline) {
			s.Restarting--
			c := rank.Cluster()
			if err == nil && len(p.workersOf(s, c, []int{rank.Rank()})) == 0 {
				_ = p.addRankWorkers(s, c, []int{rank.Rank()}) // the rank exists
			}
			p.noteDeath(s, c, why)
		}))
	}))
}

// resize grows or shrinks the role of a stage; ranks that are removed finish their tasks first.
func (p *Pipeline) resize(ctx context.Context, name string, workers int) error {
	var c *roles.Cluster
	err := p.inStage(ctx, name, func(s *flow.StageState) error {
		for _, slots := range s.Workers.All {
			if w, ok := p.workers[slots].(*rankWorker); ok {
				if c != nil && c != w.rank.Cluster() {
					return bus.Errorf(bus.CodeRefused, "stage %s has ranks of several roles (%s, %s); join or leave them one by one", name, c.Name(), w.rank.Cluster().Name())
				}
				c = w.rank.Cluster()
			}
		}
		if c == nil && s.Death != nil {
			return bus.Errorf(bus.CodeRefused, "%s", deathText(name, s.Death))
		}
		if c == nil {
			return bus.Errorf(bus.CodeRefused, "stage %s has no ranks yet", name)
		}
		return nil
	})
	if err != nil {
		return err
	}
	have := c.WorldSize()
	if workers > have {
		if err := c.Grow(ctx, workers-have); err != nil {
			return err
		}
	} else if workers == have {
		return nil
	}
	var ranks []int
	for r := min(have, workers); r < max(have, workers); r++ {
		ranks = append(ranks, r)
	}
	if workers > have {
		return p.Join(ctx, name, c, ranks...)
	}
	if err := p.Leave(ctx, name, c, ranks...); err != nil {
		return err
	}
	return c.Shrink(ctx, have-workers)
}
