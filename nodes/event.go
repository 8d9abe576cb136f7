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
func Emit(b *bus.Bus, e Event) error {
	if e.At.IsZero() {
		e.At = time.Now().UTC()
	}
	if e.Namespace != "" {
		if err := bus.CheckName("namespace", e.Namespace); err != nil {
			return err
		}
	}
	data, err := wire.Marshal(e)
	if err != nil {
		return bus.Errorf(bus.CodeInvalid, "event %s: %w", e.Kind, err)
	}
	subject, reply := bus.Events(e.Namespace), ""
	if team, ok := b.Team(); ok { // an inbox says that the message is for a door; nothing is answered
		subject, reply = team.DoorSubject(eventDoor), b.NewInbox()
	}
	if err := b.PublishRequest(subject, reply, data); err != nil {
		return bus.Errorf(bus.CodeUnavailable, "event %s: %w", e.Kind, err)
	}
	return nil
}

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
}

// ReadEvents calls f with the selected events; with Follow it waits for later ones until ctx ends, which is no error
// then.
func ReadEvents(ctx context.Context, b *bus.Bus, q EventQuery, f func(Event) error) error {
	filter := bus.AllEvents()
	if q.Namespace != "" {
		filter = bus.Events(q.Namespace)
	}
	return readStream(ctx, b, eventStreamConfig(0), stream.ReadOptions{Subject: filter, Since: q.Since}, q.Follow, func(m stream.Message) error {
		var e Event
		if err := wire.Unmarshal(m.Data, &e); err != nil {
			return bus.Errorf(bus.CodeMalformed, "the event on %s: %w", m.Subject, err)
		}
		return f(e)
	})
}
