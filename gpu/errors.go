package gpu

import (
	"errors"
	"fmt"
	"strings"
)

var (
	// ErrClosed is returned by an inventory that has been closed.
	ErrClosed = errors.New("inventory is closed")
	// ErrUnknownDevice is returned when a UUID names no device of the inventory.
	ErrUnknownDevice = errors.New("no such device")
	// ErrNotHeld is returned when a simulated device is released by a holder that does not use it.
	ErrNotHeld = errors.New("device is not held")
)

// NoDriverError reports that the machine has no driver, and so no GPUs of that vendor. [Open] turns it into a [None]
// with the reason.
type NoDriverError struct {
	Reason string
}

func (e *NoDriverError) Error() string { return "no GPU driver: " + e.Reason }

// InvalidError is one error in a simulation spec or a declaration file.
type InvalidError struct {
	Source  string // the spec, or the name of the file
	Line    int    // in the file, from 1; 0 for a spec
	Field   string // that is invalid: "nodes", "memory"; "" for the whole
	Problem string // with the allowed values
}

func (e *InvalidError) Error() string {
	at := e.Source
	if e.Line > 0 {
		at = fmt.Sprintf("%s:%d", e.Source, e.Line)
	}
	if e.Field == "" {
		return at + ": " + e.Problem
	}
	return at + ": " + e.Field + ": " + e.Problem
}

// OveruseError reports that more than the whole of a simulated device was requested.
type OveruseError struct {
	UUID    string
	Holders []string // in order of arrival; the last one exceeds the device
	Milli   int      // total of the holders, in thousandths
}

func (e *OveruseError) Error() string {
	return fmt.Sprintf("device %s over-used: %d of 1000 thousandths by %s", e.UUID, e.Milli, strings.Join(e.Holders, ", "))
}
