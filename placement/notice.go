package placement

import (
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

// Notice is something about reservations that an operator may want to know of. It is stored with the other events, whose
// form on the wire it has, and read with them.
type Notice struct {
	At        time.Time         `msgpack:"at"`
	Kind      string            `msgpack:"kind"`
	Namespace string            `msgpack:"namespace,omitempty"` // of the reservation; empty: it is about none
	Node      string            `msgpack:"node,omitempty"`
	Text      string            `msgpack:"text"`
	Details   map[string]string `msgpack:"details,omitempty"`
}

const (
	NoticePreempted     = "reservation_preempted" // it was told to go, to make room for a request: Details has reservation and for
	NoticeEvicted       = "reservation_evicted"   // its grace was over
	NoticeAdopted       = "reservation_adopted"   // an agent runs it, and the ledger did not have it
	NoticeDropped       = "reservation_dropped"   // the ledger had it, and neither an agent nor its holder knew of it
	NoticeStaleWorkers  = "stale_workers"         // an agent is told to kill workers whose reservation has ended
	NoticeLedgerDoubt   = "ledger_doubt"          // the ledger has lost something: nothing is granted
	NoticeLedgerTrusted = "ledger_trusted"        // grants are made again
)

// record tells of something. One that is lost in an outage is lost.
func (r *reign) record(n Notice) {
	if r.cfg.Bus == nil {
		return
	}
	n.At = r.book.Now.UTC()
	data, err := wire.Marshal(n)
	if err == nil {
		r.publish(bus.Events(n.Namespace), data)
	}
}

// noticeOf is a notice about a reservation.
func noticeOf(e *entry, kind, text string) Notice {
	return Notice{Kind: kind, Namespace: e.Namespace, Text: text, Details: map[string]string{"reservation": e.ID, "holder": e.Holder}}
}
