package nodes

import (
	"context"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/nodes/protocol"
)

// Event is one entry of the event stream that operators read.
type Event = protocol.Event

// Emit tells of an event. It does not wait: an event that is lost in an outage is lost.
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
	if err := b.Conn().Publish(bus.Events(e.Namespace), data); err != nil {
		return bus.Errorf(bus.CodeUnavailable, "event %s: %w", e.Kind, err)
	}
	return nil
}

// KeepEvents creates the stream in which events are stored, with so many replicas, as in bus.KVConfig.
func KeepEvents(ctx context.Context, b *bus.Bus, replicas int) error {
	cfg := eventStreamConfig()
	cfg.Replicas = replicas
	_, err := openStream(ctx, b, cfg)
	return err
}

// EventQuery says which events are wanted.
type EventQuery struct {
	Namespace string    // zero: all
	Since     time.Time // zero: from the beginning
	Follow    bool
}

// ReadEvents calls f with the stored events, and with Follow goes on until ctx ends, which is no error then.
func ReadEvents(ctx context.Context, b *bus.Bus, q EventQuery, f func(Event) error) error {
	filter := bus.AllEvents()
	if q.Namespace != "" {
		filter = bus.Events(q.Namespace)
	}
	return readStream(ctx, b, eventStreamConfig(), filter, q.Since, q.Follow, func(m jetstream.Msg) error {
		var e Event
		if err := wire.Unmarshal(m.Data(), &e); err != nil {
			return bus.Errorf(bus.CodeMalformed, "an event on %s: %w", m.Subject(), err)
		}
		return f(e)
	})
}
