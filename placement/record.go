package placement

import (
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/placement/planner"
)

// Record is a reservation as the ledger has it.
type Record struct {
	planner.Reservation

	// Token is the fencing token of the grant: greater than that of any earlier grant of the same id or of one of the
	// same devices. Whoever works for the reservation shows it, and is refused once it is stale.
	Token uint64 `json:"token" msgpack:"token,omitempty"`

	State State  `json:"state" msgpack:"state"`
	Why   string `json:"why,omitempty" msgpack:"why,omitempty"`     // why it is not simply granted
	Unmet string `json:"unmet,omitempty" msgpack:"unmet,omitempty"` // as in Plan

	// Unconfirmed is why the ledger alone is not believed about it; empty: it is. It is dropped when no agent runs it and
	// its holder does not confirm it in time, see Client.Confirm.
	Unconfirmed string `json:"unconfirmed,omitempty" msgpack:"unconfirmed,omitempty"`
}

// State is what has become of a reservation that is still in the ledger. What has been released is not there any more.
//
//	          node lost             its lease over, no other node left
//	granted ────────────▶ lost ───────────────────────────────────────▶ gone
//	   │ ▲                 │ └──────────released by its holder─────────▶ gone
//	   │ └──node is back───┘  (before its lease is over)
//	   ├──preempted──▶ leaving ──released, or the grace is over──▶ gone
//	   └──released by its holder──▶ gone
type State string

const (
	StateGranted State = "granted" // it is held and all is well
	StateLost    State = "lost"    // a node of it was lost; what it has elsewhere is held until it is released
	StateLeaving State = "leaving" // it is preempted and has until the end of its grace to go
)

const recordVersion = 1

// stored is a record as it is written, with what is needed to know a repeated request again.
type storedRecord struct {
	Version int `msgpack:"v"`
	Record
	Session string   `msgpack:"session,omitempty"` // the call that made it
	Seq     uint64   `msgpack:"seq,omitempty"`
	Digest  uint64   `msgpack:"digest,omitempty"` // of the request
	Ended   []string `msgpack:"ended,omitempty"`  // nodes of it whose lease is over

	Offset  uint64 `msgpack:"offset,omitempty"`  // the token is the revision plus this, unless it says its token
	Adopted bool   `msgpack:"adopted,omitempty"` // it is known only from agents' reports
}

func reservationKey(id string) string { return "reservation." + id }

// encode is the record as a value of the ledger. The token of a grant is the revision it is written at, which is not
// known yet: it is left out then, and put in when the record is rewritten.
func (s *storedRecord) encode() ([]byte, error) {
	s.Version = recordVersion
	return wire.Marshal(s)
}

// decodeRecord reads what was written at a revision.
func decodeRecord(w pendingValue) (*storedRecord, error) {
	var s storedRecord
	if err := wire.Unmarshal(w.value, &s); err != nil {
		return nil, err
	}
	if s.Version != recordVersion {
		return nil, bus.Errorf(bus.CodeVersion, "it is of version %d; this service writes %d", s.Version, recordVersion)
	}
	if s.Token == 0 {
		s.Token = w.revision + s.Offset
	}
	return &s, nil
}

// seat is a node's rank, which it keeps for as long as it is there or somebody has something on it.
type storedRank struct {
	Rank int `msgpack:"rank"`
}

func rankKey(node string) string { return "node." + node }

const rulesKey = "rules"
