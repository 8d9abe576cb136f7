package placement

import (
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/placement/planner"
)

// Record is a reservation in the ledger.
type Record struct {
	planner.Reservation

	// Token is the fencing token of the grant: greater than that of any earlier grant of the same id or of one of its
	// devices. Agents refuse work under a stale token.
	Token uint64 `json:"token" msgpack:"token,omitempty"`

	State State  `json:"state" msgpack:"state"`
	Why   string `json:"why,omitempty" msgpack:"why,omitempty"`     // of states other than granted
	Unmet string `json:"unmet,omitempty" msgpack:"unmet,omitempty"` // as in planner.Plan

	// Unconfirmed is why the record alone does not prove the reservation; empty: it does. An unconfirmed reservation is
	// dropped if no agent runs it and its holder does not confirm it in time, see Client.Confirm.
	Unconfirmed string `json:"unconfirmed,omitempty" msgpack:"unconfirmed,omitempty"`
}

// State is the state of a reservation in the ledger. Reservations that have ended are deleted.
//
//	          node lost             its lease expired, no other node left
//	granted ────────────▶ lost ───────────────────────────────────────▶ gone
//	   │ ▲                 │ └──────────released by its holder─────────▶ gone
//	   │ └──node returned──┘  (before its lease expired)
//	   ├──preempted──▶ leaving ──released, or grace period over──▶ gone
//	   └──released by its holder──▶ gone
type State string

const (
	StateGranted State = "granted"
	StateLost    State = "lost"    // a node of it is lost; the rest remains reserved until it is released
	StateLeaving State = "leaving" // preempted; it is evicted when its grace period is over
)

const recordVersion = 1

// storedRecord is a record as stored, with what identifies a repeated request.
type storedRecord struct {
	Version int `msgpack:"v"`
	Record
	Session string   `msgpack:"session,omitempty"` // of the call that made it
	Seq     uint64   `msgpack:"seq,omitempty"`
	Digest  uint64   `msgpack:"digest,omitempty"` // of the request
	Ended   []string `msgpack:"ended,omitempty"`  // nodes whose lease has expired

	Offset  uint64 `msgpack:"offset,omitempty"`  // token = revision + Offset, unless Token is set
	Adopted bool   `msgpack:"adopted,omitempty"` // known from reports of agents only
}

func reservationKey(id string) string { return "reservation." + id }

// encode returns the value for the ledger. The token of a new grant is its revision, which is not known yet: it is left
// out, and set when the record is written again.
func (s *storedRecord) encode() ([]byte, error) {
	s.Version = recordVersion
	return wire.Marshal(s)
}

// decodeRecord decodes a value that was written at a revision.
func decodeRecord(w pendingValue) (*storedRecord, error) {
	var s storedRecord
	if err := wire.Unmarshal(w.value, &s); err != nil {
		return nil, err
	}
	if s.Version != recordVersion {
		return nil, bus.Errorf(bus.CodeVersion, "the record has version %d; this service supports %d", s.Version, recordVersion)
	}
	if s.Token == 0 {
		s.Token = w.revision + s.Offset
	}
	return &s, nil
}

// storedRank is the rank of a node, which the node keeps while it is present or a reservation uses it.
type storedRank struct {
	Rank int `msgpack:"rank"`
}

func rankKey(node string) string { return "node." + node }

const rulesKey = "rules"
