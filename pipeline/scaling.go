package pipeline

import (
	"context"
	"sync"

	"troupe/bus"
)

// scalings is the stages that requests of other processes scale, by name. New workers may take longer to start than a
// request may last, so the client repeats its request until the scaling has ended.
type scalings struct {
	mu      sync.Mutex // guards what follows
	running map[string]*scaling
}

// scaling is one change of the number of a stage's workers.
type scaling struct {
	workers int
	doneCh  chan struct{}
	err     error // set before doneCh is closed
}

// scaleStep begins to scale a stage, or continues to wait for it, and reports whether that has ended. A repeat after its end
// begins again, and changes nothing.
func (p *Pipeline) scaleStep(ctx context.Context, stage string, workers int) (ended bool, _ error) {
	s, err := p.scalings.join(stage, workers, func(s *scaling) {
		p.group.Go(bus.Guard(func() {
			defer close(s.doneCh)
			s.err = p.Scale(p.ctx, stage, workers)
		}))
	})
	if err != nil {
		return false, err
	}
	select {
	case <-s.doneCh:
		p.scalings.remove(stage, s)
		return true, s.err
	case <-ctx.Done():
		return false, nil
	}
}

// join is the running scaling of a stage, or a new one.
func (all *scalings) join(stage string, workers int, begin func(*scaling)) (*scaling, error) {
	all.mu.Lock()
	defer all.mu.Unlock()
	s := all.running[stage]
	if s != nil && s.workers != workers {
		select {
		case <-s.doneCh: // its client has gone
			s = nil
		default:
			return nil, bus.Errorf(bus.CodeBusy, "stage %s is being scaled to %d workers; try again when that has ended", stage, s.workers)
		}
	}
	if s == nil {
		s = &scaling{workers: workers, doneCh: make(chan struct{})}
		if all.running == nil {
			all.running = map[string]*scaling{}
		}
		all.running[stage] = s
		begin(s)
	}
	return s, nil
}

func (all *scalings) remove(stage string, s *scaling) {
	all.mu.Lock()
	defer all.mu.Unlock()
	if all.running[stage] == s {
		delete(all.running, stage)
	}
}
