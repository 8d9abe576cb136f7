package placement

import (
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/nodes/protocol"
)

// emit publishes an event for operators. An event that is lost in an outage is not sent again.
func (t *leaderTerm) emit(e protocol.Event) {
	if t.cfg.Bus == nil {
		return
	}
	e.At = t.planner.Now.UTC()
	data, err := wire.Marshal(e)
	if err == nil {
		t.publish(bus.Events(e.Namespace), data)
	}
}

func (t *leaderTerm) emitNode(kind, node, text string) {
	t.emit(protocol.Event{Kind: kind, Node: node, Text: text})
}

// reservationEvent returns an event about a reservation.
func reservationEvent(e *ledgerEntry, kind, text string) protocol.Event {
	return protocol.Event{Kind: kind, Namespace: e.Namespace, Text: text, Details: map[string]string{"reservation": e.ID, "holder": e.Holder}}
}
