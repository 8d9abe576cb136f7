package pipeline

import (
	"context"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/pipeline/flow"
	"troupe/roles"
)

// restartPollInterval is how often a rank that is being restarted is checked.
const restartPollInterval = 50 * time.Millisecond

// trustReadyAfter is after how long a rank that was reported lost and reports itself as ready is trusted: its death
// would be known by then.
const trustReadyAfter = 3 * time.Second

// generationOf is the generation of a rank's worker; a replacement has a higher one.
func generationOf(rank roles.Worker) uint32 {
	if beats := rank.Cluster().Health(); rank.Rank() < len(beats) {
		return beats[rank.Rank()].Gen
	}
	return 0
}

// isRestarted reports whether the beat of a rank shows that it runs again after it was lost. The last beat may be from
// before the loss: then the rank appears ready, and the next call would fail at once.
func isRestarted(beat actors.Heartbeat, gen uint32, lost time.Time) bool {
	return beat.State == actors.Ready && (beat.Gen > gen || time.Since(lost) >= trustReadyAfter)
}

// awaitRestart adds a rank to the stage again when its role has restarted it. It is called in the loop.
func (p *Pipeline) awaitRestart(s *flow.StageState, rank roles.Worker, gen uint32) {
	c := rank.Cluster()
	if policy := c.Record().Policy; policy != roles.RestartRank && policy != roles.RestartRole {
		return // the role does not restart ranks
	}
	lost := time.Now()
	p.group.Go(bus.Guard(func() {
		for bus.Sleep(p.ctx, restartPollInterval) == nil {
			switch c.Record().State {
			case roles.RoleFailed, roles.RoleStopping:
				return
			}
			beats := c.Health()
			if rank.Rank() >= len(beats) {
				return // the role has shrunk
			}
			if isRestarted(beats[rank.Rank()], gen, lost) {
				p.inbox.push(eventFunc(func(p *Pipeline) {
					if len(p.workersOf(s, c, []int{rank.Rank()})) == 0 {
						_ = p.addRankWorkers(s, c, []int{rank.Rank()}) // the rank exists
					}
				}))
				return
			}
		}
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
