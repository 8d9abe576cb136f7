package nodes

import (
	"context"
	"fmt"
	"strings"
	"time"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/bus/wire"
)

// Kinds of events of this package and the head. Other packages have their own.
const (
	EventNodeJoined = "node_joined"
	EventNodeLeft   = "node_left"
	EventNodeLost   = "node_lost"
	EventWorkerExit = "worker_exit"
	EventLogsFailed = "logs_failed"
)

// Event is one line for the operator.
type Event struct {
	At        time.Time         `json:"at" msgpack:"at"` // zero: now
	Kind      string            `json:"kind" msgpack:"kind"`
	Namespace string            `json:"namespace,omitempty" msgpack:"namespace,omitempty"` // of a run; empty: of none
	Role      string            `json:"role,omitempty" msgpack:"role,omitempty"`
	Rank      *int              `json:"rank,omitempty" msgpack:"rank,omitempty"`
	Node      string            `json:"node,omitempty" msgpack:"node,omitempty"`
	Text      string            `json:"text" msgpack:"text"`
	Details   map[string]string `json:"details,omitempty" msgpack:"details,omitempty"`
}

// String is the event for display, without its time.
func (e Event) String() string {
	words := []string{e.Kind}
	switch {
	case e.Role != "" && e.Rank != nil:
		words = append(words, fmt.Sprintf("%s/%s/%d", e.Namespace, e.Role, *e.Rank))
	case e.Role != "":
		words = append(words, e.Namespace+"/"+e.Role)
	}
	if e.Node != "" {
		words = append(words, "on "+e.Node)
	}
	return strings.Join(words, " ") + ": " + e.Text
}

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
	if err := b.Publish(bus.Events(e.Namespace), data); err != nil {
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
