package roles

import (
	"slices"
	"sync"
	"sync/atomic"

	"troupe/bus"
	"troupe/roles/life"
	"troupe/roles/registry"
)

const (
	maxLosses   = 4 * registry.MaxWorld // remembered losses, for calls sent while they became known
	maxFailures = 4096                  // failed workers that Deaths returns
)

// effects carries out what the life of a role asks for.
type effects interface {
	gateCalls(life.Action)        // HoldCalls and SendCalls
	perform(life.Action)          // the others; what takes long goes on in the background, except Restart
	endError(life.End) *bus.Error // the error of calls to a role that has ended; it may not use the lifecycle
}

// lifecycle is the loop around the life of one role: it reports events to it, and has its actions carried out. All that it
// knows of the process that it runs in are the effects.
type lifecycle struct {
	do     effects
	gens   atomic.Pointer[map[int]uint32] // of replaced ranks; nil: none
	gateMu sync.Mutex                     // held while calls are held or sent, in the order of the events; taken with mu held

	lossMu  sync.Mutex // guards what follows
	losses  []loss
	failed  []loss // of workers that did not stop in order
	dropped int    // losses that are no longer in failed

	mu        sync.Mutex // guards what follows
	role      *life.Role
	replaced  int           // of the role, when gens was set
	changedCh chan struct{} // closed and replaced at each change of a state
	ended     *bus.Error    // why calls are refused; nil: they are not
}

// loss is the end of a worker.
type loss struct {
	rank int
	gen  uint32
	slow bool // answers of it may be in transit
	life.Loss
}

func (l loss) why() *bus.Error { return bus.AsError(l.Why) }

func newLifecycle(cfg life.Config, do effects) *lifecycle {
	l := &lifecycle{do: do, role: life.New(cfg), replaced: -1, changedCh: make(chan struct{})}
	l.publishLocked()
	return l
}

// feed reports an event, and has the actions carried out. Calls are held and sent before it returns.
func (l *lifecycle) feed(e life.Event) {
	l.mu.Lock()
	version := l.role.Version()
	actions := l.role.Handle(e)
	if end := l.role.End(); end != nil && l.ended == nil {
		l.ended = l.do.endError(*end)
	}
	l.remember(actions)
	if l.role.Version() != version {
		l.publishLocked()
		close(l.changedCh)
		l.changedCh = make(chan struct{})
	}
	l.gateMu.Lock()
	l.mu.Unlock()
	for _, a := range actions {
		if a.Kind == life.HoldCalls || a.Kind == life.SendCalls {
			l.do.gateCalls(a)
		}
	}
	l.gateMu.Unlock()
	for _, a := range actions {
		if a.Kind != life.HoldCalls && a.Kind != life.SendCalls {
			l.do.perform(a)
		}
	}
}

// remember keeps the losses among actions.
func (l *lifecycle) remember(actions []life.Action) {
	for _, a := range actions {
		if a.Kind != life.FailCalls || a.Loss.Why == nil {
			continue
		}
		one := loss{rank: a.Rank, gen: a.Gen, slow: a.Slow, Loss: a.Loss}
		l.lossMu.Lock()
		if len(l.losses) >= maxLosses {
			l.losses = slices.Delete(l.losses, 0, maxLosses/2) // their callers have been told
		}
		l.losses = append(l.losses, one)
		if !one.slow {
			if len(l.failed) >= maxFailures {
				l.failed, l.dropped = slices.Delete(l.failed, 0, maxFailures/2), l.dropped+maxFailures/2
			}
			l.failed = append(l.failed, one)
		}
		l.lossMu.Unlock()
	}
}

// publishLocked publishes the generations of replaced ranks, for calls.
func (l *lifecycle) publishLocked() {
	if l.replaced == l.role.Replaced() {
		return
	}
	l.replaced = l.role.Replaced()
	gens := map[int]uint32{}
	for rank, k := range l.role.Ranks() {
		if k.Gen != 0 {
			gens[rank] = k.Gen
		}
	}
	if len(gens) > 0 {
		l.gens.Store(&gens)
	}
}

// generations is the generations of replaced ranks, for calls.
func (l *lifecycle) generations() map[int]uint32 {
	if gens := l.gens.Load(); gens != nil {
		return *gens
	}
	return nil
}

func (l *lifecycle) state() life.State {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.role.State()
}

// isOver reports whether calls are refused, and err is their error.
func (l *lifecycle) isOver() bool { return l.err() != nil }

func (l *lifecycle) err() *bus.Error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ended
}

// failure is the error of calls to a role that has ended because of a worker's failure; nil: it has not.
func (l *lifecycle) failure() *bus.Error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if end := l.role.End(); end == nil || !end.Failure {
		return nil
	}
	return l.ended
}

// replaces reports whether lost workers are replaced.
func (l *lifecycle) replaces() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.role.Replaces()
}

// recovers reports whether the role still recovers, as in that episode; zero: the current one, which it returns.
func (l *lifecycle) recovers(episode int) (int, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s, now := l.role.State(), l.role.Episode()
	return now, (s == life.Recovering || s == life.Restarting) && (episode == 0 || episode == now)
}

// unlessRestarting does something short, unless this process restarts workers and owns the record.
func (l *lifecycle) unlessRestarting(do func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.role.State() == life.Restarting {
		return false
	}
	do()
	return true
}

// lost is the losses of the ranks that are lost, the first one first.
func (l *lifecycle) lost() (out []loss) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ranks := l.role.LostRanks()
	l.lossMu.Lock()
	defer l.lossMu.Unlock()
	for _, one := range l.losses {
		if at := slices.Index(ranks, one.rank); at >= 0 && one.gen == l.role.Ranks()[one.rank].Gen {
			out, ranks = append(out, one), slices.Delete(ranks, at, at+1)
		}
	}
	return out
}

// ranks returns the ranks, and a channel that is closed at the next change.
func (l *lifecycle) ranks() ([]life.Rank, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.role.Ranks()), l.changedCh
}

// rank is one rank; the zero Rank if there is none.
func (l *lifecycle) rank(rank int) (k life.Rank, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if all := l.role.Ranks(); rank >= 0 && rank < len(all) {
		return all[rank], true
	}
	return k, false
}

// notOver is the given ranks that have not ended, and a channel that is closed at the next change.
func (l *lifecycle) notOver(ranks []int) (left []int, changedCh <-chan struct{}) {
	all, changedCh := l.ranks()
	for _, rank := range ranks {
		if rank >= len(all) || !all[rank].State.Over() {
			left = append(left, rank)
		}
	}
	return left, changedCh
}

// lossOf is why a rank is lost.
func (l *lifecycle) lossOf(rank int) error {
	if k, ok := l.rank(rank); ok && k.Loss.Why != nil {
		return k.Loss.Why
	}
	return bus.Errorf(bus.CodeWorkerLost, "rank %d is lost", rank)
}

// failures returns the workers that did not stop in order, the number of earlier ones that are no longer kept, and a channel that
// is closed at the next change.
func (l *lifecycle) failures() (failed []loss, dropped int, changedCh <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lossMu.Lock()
	defer l.lossMu.Unlock()
	return slices.Clone(l.failed), l.dropped, l.changedCh
}

// repeat fails the calls of lost workers again: one may have been sent while the loss became known.
func (l *lifecycle) repeat() {
	l.lossMu.Lock()
	losses := l.losses
	l.lossMu.Unlock()
	for _, one := range losses {
		l.do.perform(life.Action{Kind: life.FailCalls, Rank: one.rank, Gen: one.gen, Loss: one.Loss, Slow: one.slow})
	}
}
