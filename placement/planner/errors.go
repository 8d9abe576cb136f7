package planner

import (
	"errors"
	"fmt"

	"troupe/placement/internal/text"
)

// Problem is the kind of a *RequestError, as a constant that errors.Is finds. Its text is stable and serves as a code
// on the wire.
type Problem string

func (p Problem) Error() string { return string(p) }

const (
	ErrEmptyRequest       Problem = "empty request"           // no bundle and no mapping, or a mapping for no workers
	ErrUnknownStrategy    Problem = "unknown strategy"        // not one of the four
	ErrBadShare           Problem = "bad share"               // negative, finer than thousandths, a fraction above one device, or above the limit
	ErrTooManyBundles     Problem = "too many bundles"        // above the limit
	ErrBadMapping         Problem = "bad mapping"             // a syntax error, a repeated device, or a count that does not divide
	ErrUnknownDevice      Problem = "unknown device"          // a mapping names a device that does not exist
	ErrBadTopology        Problem = "bad topology preference" // an unknown group of devices, or nothing that is required
	ErrBundleTooLarge     Problem = "bundle too large"        // larger than any node
	ErrUnknownReservation Problem = "unknown reservation"     // colocation with, or a bundle of, a reservation that does not exist in the namespace
	ErrUnknownNode        Problem = "unknown node"            // a bundle is pinned to a node that does not exist
	ErrNoSuchLabel        Problem = "no such label"           // no node carries the labels of a bundle
	ErrBadInstances       Problem = "bad instances"           // the bundles do not divide into instances
	ErrBadParent          Problem = "bad parent"              // a request inside a reservation that does not have exactly one bundle, or that has no such bundle
)

var (
	// ErrInvalid matches every *RequestError: the request is invalid for these nodes, and repeating it does not help.
	ErrInvalid = errors.New("the request is invalid")

	// ErrNeverFits matches a *NoCapacityError that no release, repair or return of a node can resolve.
	ErrNeverFits = errors.New("the request can never fit")

	// ErrMustWait matches a *NoCapacityError that lists what the request waits for.
	ErrMustWait = errors.New("the request must wait")

	// ErrDuplicate reports that the id of a reservation is in use, by a reservation or by others that are still
	// colocated with it.
	ErrDuplicate = errors.New("the reservation exists")
)

// RequestError is an invalid request, with a hint about what would be valid.
type RequestError struct {
	Problem Problem `msgpack:"problem"`
	Detail  string  `msgpack:"wrong"`            // what is invalid, quoted from the request
	Hint    string  `msgpack:"exists,omitempty"` // what would be valid, or what exists
}

func (e *RequestError) Error() string {
	if e.Hint == "" {
		return e.Detail
	}
	return e.Detail + "; " + e.Hint
}

// Unwrap makes errors.Is match the Problem and ErrInvalid.
func (e *RequestError) Unwrap() []error { return []error{e.Problem, ErrInvalid} }

// NoCapacityError is a refusal as an error; Plan.Err returns it.
type NoCapacityError struct {
	Never    bool       `msgpack:"never,omitempty"` // no release and no repair makes the request fit
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

// Unwrap makes errors.Is match ErrNeverFits or ErrMustWait.
func (e *NoCapacityError) Unwrap() error { return e.sentinel() }

func (e *NoCapacityError) sentinel() error {
	if e.Never {
		return ErrNeverFits
	}
	return ErrMustWait
}

// QuotaError is a request that exceeds the quota of its namespace.
type QuotaError struct {
	Namespace string `msgpack:"namespace"`
	Quota     Share  `msgpack:"quota"`
	Held      Share  `msgpack:"held"`
	Asked     Share  `msgpack:"asked"`
}

func (e *QuotaError) Error() string {
	return fmt.Sprintf("namespace %q may hold %s devices and holds %s; %s more are asked for", e.Namespace, e.Quota, e.Held, e.Asked)
}

// Unwrap returns ErrNeverFits for a request that exceeds the quota alone, and ErrMustWait for one that waits for
// releases in its namespace.
func (e *QuotaError) Unwrap() error {
	if e.Asked > e.Quota {
		return ErrNeverFits
	}
	return ErrMustWait
}

// ConflictError is a reservation of a device that another reservation holds. The planner is unchanged.
type ConflictError struct {
	Reservation string
	Slot        Slot
	Holders     []string
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("reservation %q: device %d of node %q is held by %s", e.Reservation, e.Slot.Index, e.Slot.Node, text.Join(", ", e.Holders))
}

// SnapshotError is an inconsistent snapshot.
type SnapshotError struct {
	Node string
	Why  string
}

func (e *SnapshotError) Error() string { return fmt.Sprintf("node %q: %s", e.Node, e.Why) }
