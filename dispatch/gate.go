package dispatch

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"

	"troupe/bus"
)

// maxHeld is how many calls of one process may wait for the restart of a role's ranks.
const maxHeld = 10_000

// Gate keeps calls back whose ranks are being restarted, and sends them in their order when the ranks are back. The shapes
// of one role share one gate. It is safe for concurrent use.
type Gate struct {
	// SentFunc is told when calls that had waited were sent, from the goroutine that released them. Nil: nobody wants to know.
	SentFunc func()

	active atomic.Bool // a rank is away or a call waits: what most calls look at alone

	mu      sync.Mutex // guards what follows
	away    map[int]*bus.Error
	over    *bus.Error
	held    []heldCall
	changed chan struct{} // closed and replaced when ranks leave or come back; nil: nobody waits
}

// heldCall is one call that waits.
type heldCall struct {
	gather *bus.Gather
	ranks  []int
	gens   func() map[int]uint32
}

// Hold keeps back the calls to some ranks from now on; why is what a call is told that does not wait.
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

// Release sends the calls that waited for the ranks that are not in stillAway.
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

// End fails every call that waits, and lets no more wait: the role has ended.
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

// Away are the ranks whose calls wait, and a channel that is closed when that changes.
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

// sendLocked sends what waits for nobody any more, each call after those before it to the same rank. The lock is held
// meanwhile, so that no new call overtakes them.
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

func isDone(g *bus.Gather) bool {
	select {
	case <-g.Done():
		return true
	default:
		return false
	}
}

// scatter sends a call, or has it wait.
func (t *Gate) scatter(ctx context.Context, g *Group, call bus.Call, noWait bool) (*bus.Gather, error) {
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
		call.Gens = g.gens() // they may have changed since the call was prepared
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

// waitsLocked is why a call to some ranks cannot be sent now: one of them is away, or a call to it waits already.
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

// roomLocked forgets calls that were given up, and refuses one too many.
func (t *Gate) roomLocked() error {
	if len(t.held) < maxHeld {
		return nil
	}
	t.held = slices.DeleteFunc(t.held, func(h heldCall) bool { return isDone(h.gather) })
	if len(t.held) < maxHeld {
		return nil
	}
	return bus.Errorf(bus.CodeBusy, "%d calls wait for workers that are being restarted, which is the most; make fewer, or set NoWait", maxHeld)
}
