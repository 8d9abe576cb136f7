package protocol

import (
	"fmt"
	"strings"
	"time"
)

// Kinds of events. The placement service emits the events of nodes, reservations and the ledger; agents emit the others.
const (
	EventNodeJoined = "node_joined" // the agent of a node has registered, or its heartbeats have resumed
	EventNodeLeft   = "node_left"   // the agent has ended in order
	EventNodeLost   = "node_lost"   // the heartbeats have stopped, or the lease has expired

	EventHeadLost = "head_lost" // an agent reached no head for its grace and has ended its workers; it is emitted when a head is back

	EventWorkerExit = "worker_exit"
	EventLogsFailed = "logs_failed"

	EventReservationPreempted = "reservation_preempted" // Details: reservation, holder, for
	EventReservationEvicted   = "reservation_evicted"   // the grace period of a preempted reservation has ended
	EventReservationAdopted   = "reservation_adopted"   // an agent runs it and the ledger had no record of it
	EventReservationDropped   = "reservation_dropped"   // the ledger had a record that neither an agent nor the holder confirmed
	EventStaleWorkers         = "stale_workers"         // an agent is ordered to kill workers whose reservation has ended
	EventLedgerDoubt          = "ledger_doubt"          // the ledger has lost data: nothing is granted
	EventLedgerTrusted        = "ledger_trusted"        // grants are made again

	EventCredential = "credential" // one was issued or revoked by command
)

// Kinds of actions in the audit trail: what somebody has done. Those on roles are in the package of roles.
const (
	ActionReserved       = "reserved"
	ActionReleased       = "released"
	ActionCordoned       = "cordoned" // by drain too
	ActionUncordoned     = "uncordoned"
	ActionRules          = "rules_changed"
	ActionLedgerAccepted = "ledger_accepted"
	ActionIssued         = "credential_issued"
	ActionRevoked        = "credential_revoked"
)

// Event is one entry of the event stream that operators read.
type Event struct {
	At        time.Time         `json:"at" msgpack:"at"`
	Kind      string            `json:"kind" msgpack:"kind"`
	Namespace string            `json:"namespace,omitempty" msgpack:"namespace,omitempty"` // of the run that the event belongs to, if any
	Role      string            `json:"role,omitempty" msgpack:"role,omitempty"`
	Rank      *int              `json:"rank,omitempty" msgpack:"rank,omitempty"`
	Node      string            `json:"node,omitempty" msgpack:"node,omitempty"`
	Text      string            `json:"text" msgpack:"text"`
	Details   map[string]string `json:"details,omitempty" msgpack:"details,omitempty"`
	By        *Actor            `json:"by,omitempty" msgpack:"by,omitempty"` // of an action: who did it
}

// Actor is who has done something. The head vouches for the credential of those who have one for a team; what holders of its token say of
// themselves is not verified.
type Actor struct {
	Name       string `json:"name" msgpack:"name"`             // user, host and program, as they say themselves
	Credential string `json:"credential" msgpack:"credential"` // id of a team's credential; token: that of the head
}

// String describes the actor in a few words.
func (a *Actor) String() string {
	if a == nil {
		return "unknown"
	}
	if a.Credential == "token" {
		return a.Name
	}
	return a.Name + " with credential " + a.Credential
}

// String describes the event in one line, without its time.
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
