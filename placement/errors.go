package placement

import (
	"errors"
	"fmt"

	"troupe/bus"
	"troupe/placement/internal/text"
	"troupe/placement/planner"
)

var (
	// ErrStaleToken is every *StaleTokenError: the reservation is another's now, or another grant of the same name.
	ErrStaleToken = errors.New("the token is stale")

	// ErrEnded is a reservation that was granted and has ended before its client heard of it. Client asks again by itself.
	ErrEnded = errors.New("the reservation has ended")

	// ErrLedgerDoubt is every *LedgerError: the ledger has lost something, and nothing is granted until that is resolved.
	ErrLedgerUntrusted = errors.New("the ledger cannot be trusted")
)

// StaleTokenError refuses what was asked under another token than that of the reservation as it is now. It matches
// bus.ErrFenced.
type StaleTokenError struct {
	ID    string `msgpack:"id"`
	Token uint64 `msgpack:"token"` // that was given
	Now   uint64 `msgpack:"now"`   // that is valid
}

func (e *StaleTokenError) Error() string {
	return fmt.Sprintf("reservation %q: token %d is stale; it is held under %d now", text.Clip(e.ID), e.Token, e.Now)
}

// Unwrap lets errors.Is find ErrStaleToken and bus.ErrFenced.
func (e *StaleTokenError) Unwrap() []error { return []error{ErrStaleToken, bus.ErrFenced} }

// LedgerError refuses a grant because the ledger has lost something: devices may be in use that it knows nothing of.
type LedgerError struct {
	Why    string   `msgpack:"why"`              // what is missing
	Awaits []string `msgpack:"awaits,omitempty"` // nodes that have not reported yet what runs on them
}

func (e *LedgerError) Error() string {
	said := e.Why + "; nothing is granted until every node that it knew has reported what runs there"
	if len(e.Awaits) > 0 {
		said += " (missing: " + text.Join(", ", e.Awaits) + ")"
	}
	return said + ", or an operator accepts the loss with troupe ledger accept"
}

// Unwrap lets errors.Is find ErrLedgerDoubt.
func (e *LedgerError) Unwrap() error { return ErrLedgerUntrusted }

// WaitError is a request that was taken back because its client did not wait any longer. It matches the cause of that:
// context.DeadlineExceeded, say.
type WaitError struct {
	ID    string
	Wait  *planner.Wait // what it waited for, as far as the service said
	cause error
}

func (e *WaitError) Error() string {
	said := fmt.Sprintf("reservation %s: %v", e.ID, e.cause)
	if e.Wait == nil {
		return said + ", and the placement service has not said why"
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

// Unwrap is the cause.
func (e *WaitError) Unwrap() error { return e.cause }
