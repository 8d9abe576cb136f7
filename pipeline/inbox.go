package pipeline

import (
	"troupe/pipeline/flow"
)

import "sync"

// event is something that happened. It is applied by the engine's loop, which owns all state.
type event interface{ apply(p *Pipeline) }

// eventFunc is an event that is rare enough to be a function.
type eventFunc func(p *Pipeline)

func (f eventFunc) apply(p *Pipeline) { f(p) }

type resultEvent struct{ flow.Result }

func (e *resultEvent) apply(p *Pipeline) { p.flow.Finish(e.Result) }

// inbox is where events wait for the loop. Those who bring them are bounded: by credits, by the line before a stream, by
// the one commit under way.
type inbox struct {
	wakeCh chan struct{} // holds one

	mu     sync.Mutex // guards what follows
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

// take returns what has come since the last time. It is valid until the next take.
func (b *inbox) take() []event {
	b.mu.Lock()
	defer b.mu.Unlock()
	clear(b.spare[:cap(b.spare)])
	b.events, b.spare = b.spare[:0], b.events
	return b.spare
}
