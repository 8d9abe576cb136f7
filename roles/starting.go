package roles

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"troupe/actors"
	"troupe/bus"
)

// constructorGrace is how long constructors that were told to give up have for their last words.
const constructorGrace = time.Second

// start makes the workers of a role, all at once. The first that fails is the error, and the others are told to give up;
// those that had started stay for the caller to stop. A constructor that does not return is left to itself, and what it
// makes in the end is stopped.
func (l *Local) start(ctx context.Context, spec Spec, specs []actors.WorkerSpec) ([]*actors.Worker, error) {
	begun := time.Now()
	making, giveUp := context.WithCancel(ctx)
	defer giveUp()
	s := &starting{workers: make([]*actors.Worker, len(specs)), left: len(specs), allCh: make(chan struct{})}
	for rank, w := range specs {
		construct := func() {
			worker, err := l.startOne(making, spec, w)
			if s.note(rank, worker, err); err != nil {
				giveUp()
			}
		}
		if err := l.spawn(construct); err != nil {
			s.note(rank, nil, err)
			giveUp()
		}
	}
	s.wait(making)
	workers, err := s.end()
	code := bus.CodeOf(err)
	if ctx.Err() != nil && (err == nil || code == bus.CodeTimedOut || code == bus.CodeCancelled) {
		return workers, overdue(spec.Name, workers, time.Since(begun), ctx.Err())
	}
	if err != nil || spec.OwnConnections {
		return workers, err
	}
	return workers, settle(ctx, l.bus)
}

// starting is the workers of a role while they are made.
type starting struct {
	mu      sync.Mutex
	workers []*actors.Worker
	left    int
	first   error // of the worker that failed first
	over    bool  // nobody waits any more

	allCh chan struct{} // closed when none is left
}

// note takes in what became of one worker. One that comes too late is stopped.
func (s *starting) note(rank int, w *actors.Worker, err error) {
	s.mu.Lock()
	over := s.over
	if !over {
		s.workers[rank] = w
		if s.left--; s.left == 0 {
			close(s.allCh)
		}
		if s.first == nil {
			s.first = err
		}
	}
	s.mu.Unlock()
	if over && w != nil {
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		_ = w.Stop(ended) // nobody is left to tell
	}
}

// wait returns when all have been made or have failed, or, some time after ctx, without them.
func (s *starting) wait(ctx context.Context) {
	select {
	case <-s.allCh:
		return
	case <-ctx.Done():
	}
	select {
	case <-s.allCh:
	case <-time.After(constructorGrace):
	}
}

func (s *starting) end() ([]*actors.Worker, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over = true
	return s.workers, s.first
}

// overdue says which workers were missing when time was up.
func overdue(role string, workers []*actors.Worker, after time.Duration, why error) error {
	words := "its last rank had just been made"
	var missing []string
	for rank, w := range workers {
		if w == nil {
			missing = append(missing, fmt.Sprint(rank))
		}
	}
	if len(missing) > 0 {
		words = "rank " + strings.Join(missing, ", ") + " had not been made"
	}
	return bus.Errorf(bus.CodeOf(why), "role %s had not started after %s: %s: %w", role, after.Round(time.Millisecond), words, why)
}
