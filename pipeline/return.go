package pipeline

import (
	"context"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/roles"
)

// backEvery is how often a rank that is being restarted is looked for.
const backEvery = 50 * time.Millisecond

// sameWorker is after how long a rank that is said to be lost and says that it is ready is believed: that it died would be
// known by then.
const sameWorker = 3 * time.Second

// genOf is the generation of a rank's worker: each that takes the place of another has a higher one.
func genOf(rank roles.Worker) uint32 {
	if beats := rank.Cluster().Health(); rank.Rank() < len(beats) {
		return beats[rank.Rank()].Gen
	}
	return 0
}

// isBack says from its beat whether a rank is there again that was lost in a generation. What was last heard of it may be of
// before: then it is ready, and the next call would be lost at once.
func isBack(beat actors.Heartbeat, gen uint32, lost time.Time) bool {
	return beat.State == actors.Ready && (beat.Gen > gen || time.Since(lost) >= sameWorker)
}

// awaitBack gives a rank its place in the stage again when its role has restarted it. It is called in the loop.
func (p *Pipeline) awaitBack(s *stage, rank roles.Worker, gen uint32) {
	c := rank.Cluster()
	if policy := c.Record().Policy; policy != roles.RestartRank && policy != roles.RestartRole {
		return // it does not come back
	}
	lost := time.Now()
	p.group.Go(bus.Guard(func() {
		for wait(p.ctx, backEvery) == nil {
			switch c.Record().State {
			case roles.RoleFailed, roles.RoleStopping:
				return
			}
			beats := c.Health()
			if rank.Rank() >= len(beats) {
				return // the role has shrunk
			}
			if isBack(beats[rank.Rank()], gen, lost) {
				p.inbox.push(eventFunc(func(p *Pipeline) {
					if len(p.ofCluster(s, c, []int{rank.Rank()})) == 0 {
						_ = p.enlist(s, c, []int{rank.Rank()}) // the rank exists
					}
				}))
				return
			}
		}
	}))
}

// resize gives a stage of a role of processes more ranks or fewer: those that go get nothing more, and finish first.
func (p *Pipeline) resize(ctx context.Context, name string, workers int) error {
	var c *roles.Cluster
	err := p.inStage(ctx, name, func(s *stage) error {
		for _, h := range s.hands.all {
			if w, ok := p.workers[h].(*rankWorker); ok {
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
