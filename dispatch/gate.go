package dispatch

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"

	"troupe/bus"
	"troupe/bus/calls"
)

// maxHeld bounds the calls of one process that wait for restarting ranks of a role.
const maxHeld = 10_000

// Gate delays calls to ranks that are being restarted, and sends them in their order when the ranks are back. All
// groups of a role share one Gate. It is safe for concurrent use.
type Gate struct {
	// SentFunc is called after delayed calls were sent, on the goroutine of Release. It may be nil.
	SentFunc func()

	active atomic.Bool // a rank is restarting or a call waits; the quick check of most calls

	mu      sync.Mutex // guards what follows
	away    map[int]*bus.Error
	over    *bus.Error
	held    []heldCall
	changed chan struct{} // closed and replaced when the set of restarting ranks changes; nil: no reader
}

// heldCall is a call that waits.
type heldCall struct {
	gather *calls.Gather
	ranks  []int
	gens   func() map[int]uint32
}

// Hold delays calls to these ranks from now on; why returns the error for calls with NoWait.
func (t *Gate) Hold(ranks []int, why func(rank int) *bus.Error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over != nil {
		return
	}
	if t.away == nil {
		t.away = map[int]*bus.Error{}
	}
	for _, rank := range ranks {
		t.away[rank] = why(rank)
	}
	t.changedLocked()
}

// Release sends the calls that waited for ranks that are not in stillAway.
func (t *Gate) Release(stillAway []int) {
	t.mu.Lock()
	for rank := range t.away {
		if !slices.Contains(stillAway, rank) {
			delete(t.away, rank)
		}
	}
	sent := t.sendLocked()
	t.changedLocked()
	t.mu.Unlock()
	if sent && t.SentFunc != nil {
		t.SentFunc()
	}
}

// End fails every waiting call, and lets none wait: the role has ended.
func (t *Gate) End(why *bus.Error) {
	t.mu.Lock()
	held := t.held
	if t.over == nil {
		t.over = why
	}
	t.held, t.away = nil, nil
	t.changedLocked()
	t.mu.Unlock()
	for _, h := range held {
		h.gather.Fail(why)
	}
}

// Away returns the restarting ranks, and a channel that is closed when the set changes.
func (t *Gate) Away() ([]int, <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ranks := make([]int, 0, len(t.away))
	for rank := range t.away {
		ranks = append(ranks, rank)
	}
	slices.Sort(ranks)
	if t.changed == nil {
		t.changed = make(chan struct{})
	}
	return ranks, t.changed
}

func (t *Gate) changedLocked() {
	t.active.Store(len(t.away)+len(t.held) > 0)
	if t.changed != nil {
		close(t.changed)
		t.changed = nil
	}
}

// sendLocked sends the calls whose ranks are all back, in order for each rank. The lock is held so that no new call
// overtakes them.
func (t *Gate) sendLocked() (sent bool) {
	blocked := map[int]bool{}
	t.held = slices.DeleteFunc(t.held, func(h heldCall) bool {
		waits := slices.ContainsFunc(h.ranks, func(rank int) bool { return blocked[rank] || t.away[rank] != nil })
		if waits && !isDone(h.gather) {
			for _, rank := range h.ranks {
				blocked[rank] = true
			}
			return false
		}
		if !waits {
			h.gather.Send(h.gens())
			sent = true
		}
		return true
	})
	return sent
}

func isDone(g *calls.Gather) bool {
	select {
	case <-g.Done():
		return true
	default:
		return false
	}
}

// scatter sends a call or lets it wait.
func (t *Gate) scatter(ctx context.Context, g *Group, call calls.Call, noWait bool) (*calls.Gather, error) {
	if !t.active.Load() {
		return g.Endpoint.Scatter(ctx, call)
	}
	var ranks []int
	for i := range call.Parts {
		ranks = append(ranks, call.Parts[i].Ranks...)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	why, behind := t.waitsLocked(ranks)
	switch {
	case why == nil && !behind:
		call.Gens = g.gens() // generations may have changed since prepare
		return g.Endpoint.Scatter(ctx, call)
	case why != nil && noWait:
		e := *why
		return nil, &e
	}
	if err := t.roomLocked(); err != nil {
		return nil, err
	}
	call.Deferred = true
	gather, err := g.Endpoint.Scatter(ctx, call)
	if err == nil {
		t.held = append(t.held, heldCall{gather: gather, ranks: ranks, gens: g.gens})
		t.active.Store(true)
	}
	return gather, err
}

// waitsLocked returns why a call cannot be sent now: one of its ranks is restarting, or another call to one of them
// waits.
func (t *Gate) waitsLocked(ranks []int) (why *bus.Error, behind bool) {
	for _, rank := range ranks {
		if e := t.away[rank]; e != nil {
			return e, false
		}
	}
	for _, h := range t.held {
		if slices.ContainsFunc(h.ranks, func(rank int) bool { return slices.Contains(ranks, rank) }) {
			return nil, true
		}
	}
	return nil, false
}

// roomLocked drops ended calls and refuses a call above the bound.
func (t *Gate) roomLocked() error {
	if len(t.held) < maxHeld {
		return nil
	}
	t.held = slices.DeleteFunc(t.held, func(h heldCall) bool { return isDone(h.gather) })
	if len(t.held) < maxHeld {
		return nil
	}
	return bus.Errorf(bus.CodeBusy, "%d calls already wait for restarting workers; make fewer calls, or set NoWait", maxHeld)
}
