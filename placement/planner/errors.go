package planner

import (
	"errors"
	"fmt"

	"troupe/placement/internal/text"
)

// Problem is what is wrong with a request, as a constant that errors.Is finds inside a *RequestError. Its text is
// stable and may be used as a code on the wire.
type Problem string

// Error makes a Problem a sentinel.
func (p Problem) Error() string { return string(p) }

const (
	ErrEmptyRequest       Problem = "empty request"           // no bundle, no mapping, or a world of nobody
	ErrUnknownStrategy    Problem = "unknown strategy"        // not one of the four
	ErrBadShare           Problem = "bad share"               // negative, finer than thousandths, 1.5 devices, absurdly many
	ErrTooManyBundles     Problem = "too many bundles"        // beyond what anybody runs
	ErrBadMapping         Problem = "bad mapping"             // not one of the forms, a repeat, does not divide
	ErrUnknownDevice      Problem = "unknown device"          // a mapping out of range
	ErrBadTopology        Problem = "bad topology preference" // an unknown neighbourhood, or nothing required
	ErrBundleTooLarge     Problem = "bundle too large"        // larger than any node, however empty
	ErrUnknownReservation Problem = "unknown reservation"     // colocation with what is not held in this namespace
	ErrUnknownNode        Problem = "unknown node"            // a bundle pinned to a node that is not there
	ErrNoSuchLabel        Problem = "no such label"           // no node carries the labels a bundle asks for
	ErrBadInstances       Problem = "bad instances"           // the bundles do not divide into instances
)

var (
	// ErrInvalid is every *RequestError: the request makes no sense here, and asking again will not help.
	ErrInvalid = errors.New("the request makes no sense")

	// ErrNeverFits is a *NoCapacityError for which no release, repair or return of a node would be enough.
	ErrNeverFits = errors.New("the request can never fit")

	// ErrMustWait is a *NoCapacityError that names what it waits for.
	ErrMustWait = errors.New("the request must wait")

	// ErrDuplicate is a reservation whose id is in use, by itself or by what is still laid over it.
	ErrDuplicate = errors.New("the reservation exists")
)

// RequestError says what is wrong with a request and what there is instead.
type RequestError struct {
	Problem Problem `msgpack:"problem"`
	Detail  string  `msgpack:"wrong"`            // what the request said, quoted
	Hint    string  `msgpack:"exists,omitempty"` // what would have been understood, or what there is
}

func (e *RequestError) Error() string {
	if e.Hint == "" {
		return e.Detail
	}
	return e.Detail + "; " + e.Hint
}

// Unwrap lets errors.Is find the Problem and ErrInvalid.
func (e *RequestError) Unwrap() []error { return []error{e.Problem, ErrInvalid} }

// NoCapacityError is a refusal as an error: Plan.Err makes it.
type NoCapacityError struct {
	Never    bool       `msgpack:"never,omitempty"` // nothing that could be released or repaired would make it fit
	Reasons  []Reason   `msgpack:"reasons,omitempty"`
	WaitsFor []Obstacle `msgpack:"waits_for,omitempty"`
}

func (e *NoCapacityError) Error() string {
	said := make([]string, 0, len(e.WaitsFor)+1)
	if len(e.Reasons) > 0 {
		said = append(said, e.Reasons[0].Text)
	}
	for _, o := range e.WaitsFor {
		said = append(said, o.String())
	}
	return e.sentinel().Error() + ": " + text.Join("; ", said)
}

// Unwrap lets errors.Is tell ErrNeverFits from ErrMustWait.
func (e *NoCapacityError) Unwrap() error { return e.sentinel() }

func (e *NoCapacityError) sentinel() error {
	if e.Never {
		return ErrNeverFits
	}
	return ErrMustWait
}

// QuotaError is a namespace at its limit.
type QuotaError struct {
	Namespace string `msgpack:"namespace"`
	Quota     Share  `msgpack:"quota"`
	Held      Share  `msgpack:"held"`
	Asked     Share  `msgpack:"asked"`
}

func (e *QuotaError) Error() string {
	return fmt.Sprintf("namespace %q may hold %s devices and holds %s; %s more are asked for", e.Namespace, e.Quota, e.Held, e.Asked)
}

// Unwrap tells a request that exceeds the quota by itself from one that waits for its namespace to release something.
func (e *QuotaError) Unwrap() error {
	if e.Asked > e.Quota {
		return ErrNeverFits
	}
	return ErrMustWait
}

// ConflictError is a reservation that would hold what another one holds. The book is as it was.
type ConflictError struct {
	Reservation string
	Slot        Slot
	Holders     []string
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("reservation %q: device %d of node %q is held by %s", e.Reservation, e.Slot.Index, e.Slot.Node, text.Join(", ", e.Holders))
}

// SnapshotError is a snapshot that contradicts itself.
type SnapshotError struct {
	Node string
	Why  string
}

func (e *SnapshotError) Error() string { return fmt.Sprintf("node %q: %s", e.Node, e.Why) }
