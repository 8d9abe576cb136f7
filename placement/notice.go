package placement

import (
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/nodes/protocol"
)

// emit publishes an event for operators. An event that is lost in an outage is not sent again.
func (r *reign) emit(e protocol.Event) {
	if r.cfg.Bus == nil {
		return
	}
	e.At = r.book.Now.UTC()
	data, err := wire.Marshal(e)
	if err == nil {
		r.publish(bus.Events(e.Namespace), data)
	}
}

func (r *reign) emitNode(kind, node, text string) {
	r.emit(protocol.Event{Kind: kind, Node: node, Text: text})
}

// reservationEvent returns an event about a reservation.
func reservationEvent(e *entry, kind, text string) protocol.Event {
	return protocol.Event{Kind: kind, Namespace: e.Namespace, Text: text, Details: map[string]string{"reservation": e.ID, "holder": e.Holder}}
}
