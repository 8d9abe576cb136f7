package nodes

import (
	"context"
	"time"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/bus/wire"
	"troupe/nodes/protocol"
)

// Event is one entry of the event stream that operators read.
type Event = protocol.Event

// Emit publishes an event and does not wait: an event is lost in an outage.
func Emit(b *bus.Bus, e Event) error { return publishEvent(b, e, bus.Events(e.Namespace)) }

// CreateEventStream creates the stream that stores events; replicas as in bus.AllReplicas.
func CreateEventStream(ctx context.Context, b *bus.Bus, replicas int) error {
	_, err := stream.Open(ctx, b, eventStreamConfig(replicas))
	return err
}

// EventQuery selects stored events.
type EventQuery struct {
	Namespace string    // zero: all
	Since     time.Time // zero: from the beginning
	Follow    bool
	Audit     bool // the audit trail: who has done what
}

// ReadEvents calls f with the selected events; with Follow it waits for later ones until ctx ends, which is no error
// then.
func ReadEvents(ctx context.Context, b *bus.Bus, q EventQuery, f func(Event) error) error {
	q.Namespace = ownNamespace(b, q.Namespace)
	filter, one, cfg := bus.AllEvents(), bus.Events, eventStreamConfig(0)
	if q.Audit {
		filter, one, cfg = bus.AllAudit(), bus.Audit, auditStreamConfig(0)
	}
	if q.Namespace != "" {
		filter = one(q.Namespace)
	}
	return readStream(ctx, b, cfg, stream.ReadOptions{Subject: filter, Since: q.Since}, q.Follow, func(m stream.Message) error {
		var e Event
		if err := wire.Unmarshal(m.Data, &e); err != nil {
			return bus.Errorf(bus.CodeMalformed, "the event on %s: %w", m.Subject, err)
		}
		return f(e)
	})
}
