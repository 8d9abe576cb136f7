package nodes

import (
	"context"
	"time"

	"troupe/bus"
	"troupe/nodes/protocol"
)

const (
	lostFor  = 24 * time.Hour // how long a node that does not return counts as lost
	mostLost = 4096           // nodes that are remembered
)

// LostNodes are the nodes that were lost and have not returned, with the event of each. A node leaves the placement service when its lease
// has expired, so that only its events tell that it is missing. A node whose agent has ended in order is not lost.
type LostNodes map[string]Event

// ReadLost reads the events of the last day.
func ReadLost(ctx context.Context, b *bus.Bus) (LostNodes, error) {
	lost := LostNodes{}
	err := ReadEvents(ctx, b, EventQuery{Since: time.Now().Add(-lostFor)}, func(ev Event) error { lost.Apply(ev); return nil })
	return lost, err
}

// Apply takes the events in their order; those that are not about nodes have no effect.
func (l LostNodes) Apply(ev Event) {
	switch _, known := l[ev.Node]; {
	case ev.Kind == protocol.EventNodeLost && (known || len(l) < mostLost):
		l[ev.Node] = ev
	case ev.Kind == protocol.EventNodeJoined || ev.Kind == protocol.EventNodeLeft:
		delete(l, ev.Node)
	}
}

// Expire forgets the nodes that were lost a day ago.
func (l LostNodes) Expire(now time.Time) {
	for name, ev := range l {
		if now.Sub(ev.At) > lostFor {
			delete(l, name)
		}
	}
}
