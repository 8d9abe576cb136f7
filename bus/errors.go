package bus

import (
	"context"
	"errors"
	"strings"

	"troupe/bus/wire"

	"github.com/nats-io/nats.go"
)

// Errors are defined in bus/wire, because they cross the wire. These are the same types and values under the name that
// the packages above use.
type (
	Code  = wire.Code
	Error = wire.Error
)

const (
	CodeApplication    = wire.CodeApplication
	CodePanic          = wire.CodePanic
	CodeRefused        = wire.CodeRefused
	CodeBusy           = wire.CodeBusy
	CodeNotFound       = wire.CodeNotFound
	CodeExists         = wire.CodeExists
	CodeConflict       = wire.CodeConflict
	CodeFenced         = wire.CodeFenced
	CodeTimedOut       = wire.CodeTimedOut
	CodeCancelled      = wire.CodeCancelled
	CodeWorkerLost     = wire.CodeWorkerLost
	CodeOutcomeUnknown = wire.CodeOutcomeUnknown
	CodeUnavailable    = wire.CodeUnavailable
	CodeNoSpace        = wire.CodeNoSpace
	CodeClosed         = wire.CodeClosed
	CodeVersion        = wire.CodeVersion
	CodeMalformed      = wire.CodeMalformed
	CodeInvalid        = wire.CodeInvalid
	CodeInternal       = wire.CodeInternal
)

var (
	ErrApplication    = wire.ErrApplication
	ErrPanic          = wire.ErrPanic
	ErrRefused        = wire.ErrRefused
	ErrBusy           = wire.ErrBusy
	ErrNotFound       = wire.ErrNotFound
	ErrExists         = wire.ErrExists
	ErrConflict       = wire.ErrConflict
	ErrFenced         = wire.ErrFenced
	ErrTimedOut       = wire.ErrTimedOut
	ErrCancelled      = wire.ErrCancelled
	ErrWorkerLost     = wire.ErrWorkerLost
	ErrOutcomeUnknown = wire.ErrOutcomeUnknown
	ErrUnavailable    = wire.ErrUnavailable
	ErrNoSpace        = wire.ErrNoSpace
	ErrClosed         = wire.ErrClosed
	ErrVersion        = wire.ErrVersion
	ErrMalformed      = wire.ErrMalformed
	ErrInvalid        = wire.ErrInvalid
	ErrInternal       = wire.ErrInternal
)

// Errorf makes an *Error of the given code. A %w in format is kept as the local cause. A refusal whose cause is a full
// store becomes CodeNoSpace, because the layers between the store and the caller do not know a better remedy. An unknown
// outcome stays unknown.
func Errorf(code Code, format string, args ...any) *Error {
	e := wire.Errorf(code, format, args...)
	if (code == CodeRefused || code == CodeUnavailable || code == CodeNoSpace) && noSpace(e.Unwrap()) {
		e.Code = CodeNoSpace
		if !strings.Contains(e.Message, noSpaceText) {
			e.Message += ": " + noSpaceText
		}
	}
	return e
}

// CodeOf is the code of err: its own if it is an *Error, CodeApplication otherwise; empty for nil.
func CodeOf(err error) Code { return wire.CodeOf(err) }

// AsError converts any error into the *Error that crosses the wire.
func AsError(err error) *Error { return wire.AsError(err) }

// RegisterError gives an application's sentinel error a code; see wire.RegisterError.
func RegisterError(code Code, sentinel error) { wire.RegisterError(code, sentinel) }

// natsError converts an error of NATS into an *Error.
func (b *Bus) natsError(doing string, err error) error {
	switch {
	case errors.Is(err, nats.ErrConnectionClosed), errors.Is(err, nats.ErrConnectionDraining):
		if b.closedUnasked() { // it is being replaced
			return Errorf(CodeUnavailable, "%s: the server has closed the connection; it is opened again (%w)", doing, err)
		}
		return Errorf(CodeClosed, "%s: the connection to the bus is closed (%w)", doing, err)
	case errors.Is(err, nats.ErrReconnectBufExceeded), errors.Is(err, nats.ErrDisconnected), errors.Is(err, nats.ErrConnectionReconnecting):
		return Errorf(CodeUnavailable, "%s: the server is unreachable (%w)", doing, err)
	case errors.Is(err, nats.ErrNoResponders):
		e := Errorf(CodeUnavailable, "%s: no process serves it (%w)", doing, err)
		e.AppCode = ErrNoResponders.AppCode
		return e
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, nats.ErrTimeout):
		return Errorf(CodeTimedOut, "%s: %w", doing, err)
	case errors.Is(err, context.Canceled):
		return Errorf(CodeCancelled, "%s: %w", doing, err)
	}
	return Errorf(CodeInternal, "%s: %w", doing, err)
}
