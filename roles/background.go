package roles

import (
	"context"
	"errors"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/roles/life"
)

// errStarting is the error of calls that do not wait for the start of their role.
var errStarting = bus.Errorf(bus.CodeUnavailable, "the role is starting")

// holdStart makes calls wait until the start is complete.
func (s *starter) holdStart() {
	s.c.life.mu.Lock() // endError reads it
	s.startedCh = make(chan struct{})
	s.c.life.mu.Unlock()
	s.c.gate.Hold(s.c.Record().AllRanks(), func(rank int) *bus.Error {
		e := *errStarting
		e.Role, e.Rank = s.c.Name(), rank
		return &e
	})
}

// startInBackground starts the workers, and sends the calls that wait. On an error it destroys the role, and the calls fail
// with the error.
func (s *starter) startInBackground(ctx context.Context, config wire.Raw) {
	defer close(s.startedCh)
	err := s.start(ctx, config)
	if err == nil {
		return
	}
	why := startError(bus.AsError(err))
	s.mu.Lock()
	s.startErr = why
	s.mu.Unlock()
	s.c.life.feed(life.Event{Kind: life.NotStarted, Why: why})
	if err := s.undoStart(ctx); err != nil && !errors.Is(err, bus.ErrClosed) {
		s.c.rt.log.Warn("roles: destroying a role that did not start failed", "role", s.c.Name(), "error", err)
	}
}

// startError is the error of calls to a role that did not start: an exception of a constructor is the application's error, as it
// is of a call.
func startError(why *bus.Error) *bus.Error {
	_, isType := why.Details["type"]
	_, exited := why.Details["exit_code"]
	_, signalled := why.Details["signal"]
	e := *why
	e.Rank = -1 // it is the error of every call, not of a call to another rank
	if e.Code == bus.CodeWorkerLost && isType && !exited && !signalled {
		e.Code = bus.CodeApplication
	}
	return &e
}

// isStarting reports whether the workers of a role that was created with Begin are being started.
func (s *starter) isStarting() bool { return s.startedCh != nil && s.c.life.state() == life.Starting }

// WaitStarted returns when the start of a role that was created with Begin is complete, with its error. For other roles it
// returns at once.
func (c *Cluster) WaitStarted(ctx context.Context) error {
	if c.starter.startedCh == nil {
		return nil
	}
	select {
	case <-c.starter.startedCh:
	case <-ctx.Done():
		return bus.Errorf(bus.CodeOf(ctx.Err()), "role %s is starting: %w", c.Name(), ctx.Err())
	}
	c.starter.mu.Lock()
	defer c.starter.mu.Unlock()
	if c.starter.startErr != nil {
		return c.starter.startErr
	}
	return nil
}

// Death is the end of a worker that did not stop in order, or of the whole role.
type Death struct {
	Rank int // -1: the role
	Gen  uint32
	Why  *bus.Error
}

// Deaths waits until more than seen deaths have happened, and returns those after them, and their number in all; with seen
// below zero it waits for the next one. The end of the
// role is the last: later calls return no deaths and ok false. The counts belong to this Cluster. At most maxLosses are kept.
func (c *Cluster) Deaths(ctx context.Context, seen int) (deaths []Death, all int, ok bool, err error) {
	for {
		losses, dropped, changedCh := c.life.failures()
		all = dropped + len(losses)
		if seen < 0 {
			seen = all
		}
		from := min(max(seen-dropped, 0), len(losses))
		for _, one := range losses[from:] {
			deaths = append(deaths, Death{Rank: one.rank, Gen: one.gen, Why: one.why()})
		}
		switch ended := c.life.err(); {
		case ended != nil && seen > all:
			return nil, seen, false, nil
		case ended != nil:
			return append(deaths, Death{Rank: -1, Why: ended}), all + 1, true, nil
		case len(deaths) > 0:
			return deaths, all, true, nil
		}
		select {
		case <-changedCh:
		case <-c.rt.ctx.Done():
			return nil, all, false, nil
		case <-ctx.Done():
			return nil, all, false, ctx.Err()
		}
	}
}
