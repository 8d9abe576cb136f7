package nodes

import (
	"context"
	"fmt"
	"time"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/bus/wire"
	"troupe/nodes/protocol"
)

// AuditKept is how long actions are kept, unless a head was started with another time.
const AuditKept = 90 * 24 * time.Hour

const auditStream = "troupe_audit"

func auditStreamConfig(replicas int) stream.Config {
	return stream.Config{Lossy: true, Name: auditStream, Subject: bus.AllAudit(), MaxBytes: 32 << 20, MaxAge: AuditKept, Replicas: replicas}
}

// ActorOf is who uses a connection.
func ActorOf(b *bus.Bus) *protocol.Actor {
	return &protocol.Actor{Name: bus.ProcessName(), Credential: b.CredentialID()}
}

// Audit records an action in the audit trail and does not wait: like an event it is lost in an outage. Without By it is of this process. That
// of a process with a team's credential passes the head, which says whose credential it is.
func Audit(b *bus.Bus, e Event) error {
	if e.By == nil {
		e.By = ActorOf(b)
	}
	return publishEvent(b, e, bus.Audit(e.Namespace))
}

// CreateAuditStream creates the stream that stores actions; replicas as in bus.AllReplicas. It keeps them for a time; 0 leaves that as it is.
func CreateAuditStream(ctx context.Context, b *bus.Bus, replicas int, kept time.Duration) error {
	s, err := stream.Open(ctx, b, auditStreamConfig(replicas))
	if err != nil || kept == 0 {
		return err
	}
	return s.KeepFor(ctx, kept)
}

// actionOf is what a process with a team's credential did, as the head records it.
func (d *EventDoor) actionOf(c bus.Caller, e Event, now time.Time) (Event, bool) {
	ok, dropped := d.actions.admit(c.Namespace, now)
	if !ok {
		return e, false
	}
	e.At, e.Namespace, e.By.Credential = now.UTC(), c.Namespace, c.ID
	if dropped > 0 {
		e.Text += fmt.Sprintf(" (%d actions of the namespace before it were too many in too short a time, and are not recorded)", dropped)
	}
	return e, true
}

// publishEvent publishes an event on a subject; that of a process with a credential goes to the head's door.
func publishEvent(b *bus.Bus, e Event, subject string) error {
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
	reply := ""
	if caller, ok := b.AtDoors(); ok { // an inbox says that the message is for a door; nothing is answered
		subject, reply = caller.DoorSubject(eventDoor), b.NewInbox()
	}
	if err := b.PublishRequest(subject, reply, data); err != nil {
		return bus.Errorf(bus.CodeUnavailable, "event %s: %w", e.Kind, err)
	}
	return nil
}
