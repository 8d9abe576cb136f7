package placement

import (
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/nodes/protocol"
)

// emit publishes an event for operators. An event that is lost in an outage is not sent again.
func (t *leaderTerm) emit(e protocol.Event) { t.record(bus.Events(e.Namespace), e) }

// audit records what was done for a call.
func (t *leaderTerm) audit(c *call, e protocol.Event) {
	e.By = c.By
	if c.local != nil {
		e.By = &protocol.Actor{Name: c.local.request.Holder, Credential: "head"}
	}
	t.record(bus.Audit(e.Namespace), e)
}

func (t *leaderTerm) record(subject string, e protocol.Event) {
	if t.cfg.Bus == nil {
		return
	}
	e.At = t.planner.Now.UTC()
	data, err := wire.Marshal(e)
	if err == nil {
		t.publish(subject, data)
	}
}

func (t *leaderTerm) emitNode(kind, node, text string) {
	t.emit(protocol.Event{Kind: kind, Node: node, Text: text})
}

// reservationEvent returns an event about a reservation.
func reservationEvent(e *ledgerEntry, kind, text string) protocol.Event {
	return protocol.Event{Kind: kind, Namespace: e.Namespace, Text: text, Details: map[string]string{"reservation": e.ID, "holder": e.Holder}}
}
