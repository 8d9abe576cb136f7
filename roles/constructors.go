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

// constructorGrace is how long cancelled constructors may take to return their error.
const constructorGrace = time.Second

// start starts the workers of a role concurrently. It returns the first error and cancels the other constructors; the
// caller stops the workers that have started. A constructor that does not return is abandoned, and its worker is
// stopped if it ever returns.
func (l *Local) start(ctx context.Context, spec Spec, specs []actors.WorkerSpec) ([]*actors.Worker, error) {
	begun := time.Now()
	making, giveUp := context.WithCancel(ctx)
	defer giveUp()
	s := &constructors{workers: make([]*actors.Worker, len(specs)), left: len(specs), allCh: make(chan struct{})}
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
	return workers, flushSubscriptions(ctx, l.bus)
}

// constructors is the workers of a role while they are constructed.
type constructors struct {
	mu      sync.Mutex
	workers []*actors.Worker
	left    int
	first   error // of the first worker that failed
	over    bool  // the caller no longer waits

	allCh chan struct{} // closed when all have returned
}

// note records the result of one constructor. A late worker is stopped.
func (s *constructors) note(rank int, w *actors.Worker, err error) {
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
		_ = w.Stop(ended) // no caller is left
	}
}

// wait returns when all constructors have returned, or some time after ctx has ended.
func (s *constructors) wait(ctx context.Context) {
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

func (s *constructors) end() ([]*actors.Worker, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over = true
	return s.workers, s.first
}

// overdue is the error of a start that took too long, with the missing ranks.
func overdue(role string, workers []*actors.Worker, after time.Duration, why error) error {
	words := "its last rank had just started"
	var missing []string
	for rank, w := range workers {
		if w == nil {
			missing = append(missing, fmt.Sprint(rank))
		}
	}
	if len(missing) > 0 {
		words = "rank " + strings.Join(missing, ", ") + " had not started"
	}
	return bus.Errorf(bus.CodeOf(why), "role %s had not started after %s: %s: %w", role, after.Round(time.Millisecond), words, why)
}
