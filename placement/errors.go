package placement

import (
	"errors"
	"fmt"

	"troupe/bus"
	"troupe/placement/internal/text"
	"troupe/placement/planner"
)

var (
	// ErrStaleToken matches every *StaleTokenError: the reservation has been granted again since.
	ErrStaleToken = errors.New("the token is stale")

	// ErrEnded reports that a reservation was granted and has ended before its client received the answer. Client
	// repeats the request by itself.
	ErrEnded = errors.New("the reservation has ended")

	// ErrLedgerUntrusted matches every *LedgerError: the ledger has lost data, and nothing is granted until that is
	// resolved.
	ErrLedgerUntrusted = errors.New("the ledger cannot be trusted")
)

// StaleTokenError refuses a call with a token other than the current one of the reservation. It matches bus.ErrFenced.
type StaleTokenError struct {
	ID    string `msgpack:"id"`
	Token uint64 `msgpack:"token"` // of the call
	Now   uint64 `msgpack:"now"`   // the current one
}

func (e *StaleTokenError) Error() string {
	return fmt.Sprintf("reservation %q: token %d is stale; it is held under %d now", text.Clip(e.ID), e.Token, e.Now)
}

// Unwrap makes errors.Is match ErrStaleToken and bus.ErrFenced.
func (e *StaleTokenError) Unwrap() []error { return []error{ErrStaleToken, bus.ErrFenced} }

// LedgerError refuses a grant because the ledger has lost data: devices may be in use that it does not know of.
type LedgerError struct {
	Why    string   `msgpack:"why"`              // what is missing
	Awaits []string `msgpack:"awaits,omitempty"` // nodes that have not reported yet what runs on them
}

func (e *LedgerError) Error() string {
	said := e.Why + "; nothing is granted until every known node has reported what runs on it"
	if len(e.Awaits) > 0 {
		said += " (missing: " + text.Join(", ", e.Awaits) + ")"
	}
	return said + ", or an operator accepts the loss with troupe ledger accept"
}

// Unwrap makes errors.Is match ErrLedgerUntrusted.
func (e *LedgerError) Unwrap() error { return ErrLedgerUntrusted }

// WaitError is a request that was withdrawn because its context ended. It matches the cause, such as
// context.DeadlineExceeded.
type WaitError struct {
	ID    string
	Wait  *planner.Wait // what it waited for, as last reported by the service
	cause error
}

func (e *WaitError) Error() string {
	said := fmt.Sprintf("reservation %s: %v", e.ID, e.cause)
	if e.Wait == nil {
		return said + ", and the placement service has given no reason"
	}
	said += "; " + e.Wait.Text
	for i, o := range e.Wait.WaitsFor {
		if i == text.JoinLimit {
			return said + fmt.Sprintf("; and %d more", len(e.Wait.WaitsFor)-i)
		}
		said += "; " + o.String()
	}
	return said
}

func (e *WaitError) Unwrap() error { return e.cause }
