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
	// ErrNotHeld is returned when a simulated device is released by somebody who does not use it.
	ErrNotHeld = errors.New("device is not held")
)

// NoDriverError says that the machine has no driver, and so no GPUs of that vendor. It is an answer rather than a
// failure: [Open] turns it into a [None] that carries the reason.
type NoDriverError struct {
	Reason string // in words
}

func (e *NoDriverError) Error() string { return "no GPU driver: " + e.Reason }

// InvalidError is one thing wrong with a simulated spec or a declared file.
type InvalidError struct {
	Source  string // the spec as it was given, or the file's name
	Line    int    // in the file, from 1; 0 for a spec
	Field   string // what is wrong: "nodes", "memory"; "" when it is the whole
	Problem string // why, and what is allowed
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

// OveruseError records that a simulated device was asked for more than all of it.
type OveruseError struct {
	UUID    string
	Holders []string // who uses it, in order of arrival; the last one is the one too many
	Milli   int      // what they would use together, in thousandths
}

func (e *OveruseError) Error() string {
	return fmt.Sprintf("device %s over-used: %d of 1000 thousandths by %s", e.UUID, e.Milli, strings.Join(e.Holders, ", "))
}
