package placement

import (
	"cmp"
	"errors"
	"hash/fnv"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/nodes/protocol"
	"troupe/placement/planner"
)

// verb is the operation of a call.
type verb string

const (
	verbReserve  verb = "reserve"
	verbRelease  verb = "release"
	verbWithdraw verb = "withdraw" // ends a reserve call whose client has given up
	verbExplain  verb = "explain"
	verbList     verb = "list"
	verbNodes    verb = "nodes"
	verbRules    verb = "rules"
	verbSetRules verb = "set_rules"
	verbCordon   verb = "cordon"
	verbUncordon verb = "uncordon"
	verbConfirm  verb = "confirm" // the client still holds reservations
	verbLedger   verb = "ledger"
	verbAccept   verb = "accept_ledger"
)

// changes reports whether the answer must be kept for repetitions.
func (v verb) changes() bool {
	return v == verbReserve || v == verbRelease || v == verbWithdraw || v == verbSetRules || v == verbCordon || v == verbUncordon
}

// audited reports whether the audit trail has the operation.
func (v verb) audited() bool { return v.changes() && v != verbWithdraw || v == verbAccept }

// message is sent by a client. A call is (Session, Seq) and may arrive any number of times.
type message struct {
	Session string `msgpack:"session"`
	Seq     uint64 `msgpack:"seq"`
	Floor   uint64 `msgpack:"floor"` // the client has received the answers of all calls up to this one
	Attempt uint32 `msgpack:"attempt"`
	Verb    verb   `msgpack:"verb"`

	// Epoch is the leader that the message is for. Until is its deadline, in microseconds of that leader's term. A
	// message that is delayed beyond it, or over a leader change, has no effect.
	Epoch uint64 `msgpack:"epoch"`
	Until int64  `msgpack:"until"`

	Request wire.Raw `msgpack:"request,omitempty"` // wireRequest, of reserve and explain
	Try     bool     `msgpack:"try,omitempty"`     // grant at once or fail
	Waited  int64    `msgpack:"waited,omitempty"`  // microseconds since the first message
	ID      string   `msgpack:"id,omitempty"`      // of a release; of a list, the last item of the previous page
	Working bool     `msgpack:"working,omitempty"` // of a list of nodes: those alone whose agents may run workers
	Token   uint64   `msgpack:"token,omitempty"`
	Call    uint64   `msgpack:"call,omitempty"` // of a withdrawal: the reserve call that it ends
	Rules   *Rules   `msgpack:"rules,omitempty"`
	Cordon  *Cordon  `msgpack:"cordon,omitempty"`

	By *protocol.Actor `msgpack:"by,omitempty"` // of what the audit trail records

	Refs  []ReservationRef `msgpack:"refs,omitempty"`  // of a confirmation
	Claim wire.Raw         `msgpack:"claim,omitempty"` // of a confirmation: the storedRecord of the only ref, in case the ledger has lost it
}

// wireRequest is a request with equal bundles run-length encoded.
type wireRequest struct {
	Request
	Runs []bundleRun `msgpack:"runs,omitempty"`
}

type bundleRun struct {
	N      int    `msgpack:"n"`
	Bundle Bundle `msgpack:"bundle"`
}

func encodeRequest(r Request) (wire.Raw, error) {
	if err := r.CheckSize(); err != nil {
		return nil, err
	}
	w := wireRequest{Request: r}
	for i := range r.Bundles {
		if last := len(w.Runs) - 1; last >= 0 && w.Runs[last].Bundle.Equal(&r.Bundles[i]) {
			w.Runs[last].N++
			continue
		}
		w.Runs = append(w.Runs, bundleRun{1, r.Bundles[i]})
	}
	w.Bundles = nil
	return wire.Marshal(w)
}

func decodeRequest(raw wire.Raw) (Request, error) {
	var w wireRequest
	if err := wire.UnmarshalWith(raw, &w, wire.UnmarshalOptions{Strict: true}); err != nil {
		return Request{}, err
	}
	total := 0
	for _, run := range w.Runs {
		if run.N < 0 || run.N > planner.MaxBundles || total > planner.MaxBundles {
			return Request{}, &RequestError{Problem: planner.ErrTooManyBundles, Detail: "the request has too many bundles"}
		}
		total += run.N
	}
	if total > 0 {
		w.Bundles = make([]Bundle, 0, total)
	}
	for _, run := range w.Runs {
		w.Bundles = append(w.Bundles, Repeat(run.N, run.Bundle)...)
	}
	return w.Request, w.Request.CheckSize()
}

// digest tells whether two requests under one id are equal.
func digest(raw wire.Raw) uint64 {
	h := fnv.New64a()
	_, _ = h.Write(raw) // never fails
	return h.Sum64()
}

// answerKind is the effect of an answer on its call.
type answerKind string

const (
	answerResync answerKind = "hello"  // the message had no effect: send it again for this leader and its time
	answerWaits  answerKind = "waits"  // the request is in the queue
	answerDone   answerKind = "done"   // the call has ended with success
	answerFailed answerKind = "failed" // the call has ended with an error
)

// answer is sent by the service.
type answer struct {
	Seq     uint64     `msgpack:"seq"`
	Attempt uint32     `msgpack:"attempt"`
	Kind    answerKind `msgpack:"kind"`
	Epoch   uint64     `msgpack:"epoch"`
	Now     int64      `msgpack:"now"` // microseconds of the term

	Error       *wireError    `msgpack:"error,omitempty"`
	Record      wire.Raw      `msgpack:"record,omitempty"` // storedRecord
	Token       uint64        `msgpack:"token,omitempty"`
	Wait        *planner.Wait `msgpack:"wait,omitempty"`
	Position    int           `msgpack:"position,omitempty"`
	Explanation *Explanation  `msgpack:"explanation,omitempty"`
	Records     []Record      `msgpack:"records,omitempty"`
	Waiting     []Waiting     `msgpack:"waiting,omitempty"`
	Nodes       []NodeStatus  `msgpack:"nodes,omitempty"`
	Next        string        `msgpack:"next,omitempty"` // last item of the page, if there are more
	Rules       *Rules        `msgpack:"rules,omitempty"`
	Cordon      *Cordon       `msgpack:"cordon,omitempty"` // that is stored, or was removed

	Unknown []ReservationRef `msgpack:"unknown,omitempty"` // of a confirmation: not in the ledger
	Ledger  *LedgerStatus    `msgpack:"ledger,omitempty"`
}

// Explanation is what would happen to a request now.
type Explanation struct {
	planner.Plan
	Position int           `json:"position,omitempty" msgpack:"position,omitempty"` // in the queue, from 1, if it would wait
	Wait     *planner.Wait `json:"wait,omitempty" msgpack:"wait,omitempty"`         // what it would wait for
	Held     *Record       `json:"held,omitempty" msgpack:"held,omitempty"`         // the reservation with the same id, if there is one
	Preempts []string      `json:"preempts,omitempty" msgpack:"preempts,omitempty"` // reservations that would be preempted for it
}

// Waiting is a request in the queue.
type Waiting struct {
	ID        string       `json:"id" msgpack:"id"`
	Namespace string       `json:"namespace,omitempty" msgpack:"namespace,omitempty"`
	Holder    string       `json:"holder,omitempty" msgpack:"holder,omitempty"`
	Priority  int          `json:"priority,omitempty" msgpack:"priority,omitempty"`
	Devices   Share        `json:"devices" msgpack:"devices"`
	Waited    int64        `json:"waited_ms" msgpack:"waited"` // milliseconds
	Wait      planner.Wait `json:"wait" msgpack:"wait"`
}

// NodeStatus is a node as the leader sees it.
type NodeStatus struct {
	Rank    int             `json:"rank" msgpack:"rank"` // -1: the node is absent and only its cordons are known
	State   NodeState       `json:"state,omitempty" msgpack:"state,omitempty"`
	Why     string          `json:"why,omitempty" msgpack:"why,omitempty"`
	Cordons []Cordon        `json:"cordons,omitempty" msgpack:"cordons,omitempty"` // of the node, then of its devices
	Report  protocol.Report `json:"report" msgpack:"report"`

	// Unverified is why healthy devices are not granted, by UUID: no report has shown them empty since their last use.
	Unverified map[string]string `json:"unverified,omitempty" msgpack:"unverified,omitempty"`
}

// wireError is an error in an answer: its code and text, and the fields of typed errors.
type wireError struct {
	Code     bus.Code            `msgpack:"code"`
	Message  string              `msgpack:"message"`
	Problems []RequestError      `msgpack:"problems,omitempty"`
	Capacity *NoCapacityError    `msgpack:"capacity,omitempty"`
	Quota    *planner.QuotaError `msgpack:"quota,omitempty"`
	Stale    *StaleTokenError    `msgpack:"stale,omitempty"`
	Exists   bool                `msgpack:"exists,omitempty"`
	Ended    bool                `msgpack:"ended,omitempty"`
	Ledger   *LedgerError        `msgpack:"ledger,omitempty"`
}

func encodeError(err error) *wireError {
	w := &wireError{Code: codeOf(err), Message: err.Error(), Problems: problemsOf(err), Exists: errors.Is(err, ErrDuplicate), Ended: errors.Is(err, ErrEnded)}
	if e, ok := errors.AsType[*NoCapacityError](err); ok {
		told := *e
		told.Reasons, told.WaitsFor = clipList(e.Reasons), clipList(e.WaitsFor)
		w.Capacity = &told
	}
	w.Quota, _ = errors.AsType[*planner.QuotaError](err)
	w.Stale, _ = errors.AsType[*StaleTokenError](err)
	w.Ledger, _ = errors.AsType[*LedgerError](err)
	return w
}

// clipList limits lists about thousands of nodes to the size of a message.
func clipList[T any](list []T) []T { return list[:min(len(list), maxListed)] }

func codeOf(err error) bus.Code {
	switch {
	case errors.Is(err, ErrInvalid):
		return bus.CodeInvalid
	case errors.Is(err, ErrNeverFits):
		return bus.CodeRefused
	case errors.Is(err, ErrMustWait):
		return bus.CodeBusy
	case errors.Is(err, ErrDuplicate):
		return bus.CodeExists
	case errors.Is(err, ErrStaleToken):
		return bus.CodeFenced
	case errors.Is(err, ErrLedgerUntrusted):
		return bus.CodeUnavailable
	}
	return bus.CodeOf(err)
}

// problemsOf returns every *RequestError in err, which may be several joined.
func problemsOf(err error) []RequestError {
	if e, ok := err.(*RequestError); ok {
		return []RequestError{*e}
	}
	switch e := err.(type) {
	case interface{ Unwrap() []error }:
		var all []RequestError
		for _, one := range e.Unwrap() {
			all = append(all, problemsOf(one)...)
		}
		return all
	case interface{ Unwrap() error }:
		return problemsOf(e.Unwrap())
	}
	return nil
}

// decode returns the error with its typed causes.
func (w *wireError) decode() error {
	cause := make([]error, 0, 4)
	for i := range w.Problems {
		cause = append(cause, &w.Problems[i])
	}
	if w.Capacity != nil {
		cause = append(cause, w.Capacity)
	}
	if w.Quota != nil {
		cause = append(cause, w.Quota)
	}
	if w.Stale != nil {
		cause = append(cause, w.Stale)
	}
	if w.Ledger != nil {
		cause = append(cause, w.Ledger)
	}
	if w.Exists {
		cause = append(cause, ErrDuplicate)
	}
	if w.Ended {
		cause = append(cause, ErrEnded)
	}
	return bus.Errorf(cmp.Or(w.Code, bus.CodeInternal), "%s", w.Message).WithCause(errors.Join(cause...))
}

// EventKind is the kind of an Event.
type EventKind string

const (
	EventLost      EventKind = "lost"      // a node of it is lost
	EventRestored  EventKind = "restored"  // all its nodes have returned, and no part of it had ended
	EventLeave     EventKind = "leave"     // preempted: the holder has Grace to release it
	EventPreempted EventKind = "preempted" // evicted after its grace period; the token is stale
	EventEnded     EventKind = "ended"     // the leases of all its nodes have expired; the token is stale
	EventAdopted   EventKind = "adopted"   // the ledger had lost it and an agent runs it: it is reserved again under the same token
	EventDropped   EventKind = "dropped"   // the ledger had it, and neither an agent nor the holder confirmed it; the token is stale
)

// Event reports a change of a reservation to its holder. Events may be lost; the ledger has the current state.
type Event struct {
	Kind      EventKind `json:"kind" msgpack:"kind"`
	ID        string    `json:"id" msgpack:"id"`
	Namespace string    `json:"namespace" msgpack:"namespace"`
	Token     uint64    `json:"token" msgpack:"token"`
	Why       string    `json:"why,omitempty" msgpack:"why,omitempty"`
	Grace     int64     `json:"grace_ms,omitempty" msgpack:"grace,omitempty"` // milliseconds
}
