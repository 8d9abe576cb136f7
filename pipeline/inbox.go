package pipeline

import (
	"troupe/pipeline/flow"
)

import "sync"

// event is something that happened. The loop, which owns all state, applies it.
type event interface{ apply(p *Pipeline) }

// eventFunc is an event for rare cases.
type eventFunc func(p *Pipeline)

func (f eventFunc) apply(p *Pipeline) { f(p) }

type resultEvent struct{ flow.Result }

func (e *resultEvent) apply(p *Pipeline) { p.flow.Finish(e.Result) }

// inbox holds events for the loop. Its length is bounded by credits, by the puts that may wait, and by the commits in
// flight.
type inbox struct {
	wakeCh chan struct{} // capacity one

	mu     sync.Mutex // guards the following fields
	events []event
	spare  []event
}

func newInbox() *inbox { return &inbox{wakeCh: make(chan struct{}, 1)} }

func (b *inbox) push(e event) {
	b.mu.Lock()
	b.events = append(b.events, e)
	first := len(b.events) == 1
	b.mu.Unlock()
	if first {
		select {
		case b.wakeCh <- struct{}{}:
		default:
		}
	}
}

// take returns the events since the last call. They are valid until the next call.
func (b *inbox) take() []event {
	b.mu.Lock()
	defer b.mu.Unlock()
	clear(b.spare[:cap(b.spare)])
	b.events, b.spare = b.spare[:0], b.events
	return b.spare
}
