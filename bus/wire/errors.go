package wire

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
)

// Code is the stable name of a kind of failure. Codes cross the wire, Python maps them to classes, and errors.Is
// compares them; the message of an error may change.
type Code string

const (
	CodeApplication    Code = "application"     // the method itself returned an error
	CodePanic          Code = "panic"           // the method panicked; the stack is the worker's
	CodeRefused        Code = "refused"         // the receiver refused: bad argument, wrong state, no permission
	CodeBusy           Code = "busy"            // a bounded queue is full; try again later
	CodeNotFound       Code = "not_found"       // no such role, method, object, key
	CodeExists         Code = "exists"          // the name or key is taken
	CodeConflict       Code = "conflict"        // compare-and-set failed: another writer was faster
	CodeFenced         Code = "fenced"          // the writer's fencing token is stale
	CodeTimedOut       Code = "timed_out"       // the deadline passed
	CodeCancelled      Code = "cancelled"       // the caller gave up, or a sibling failed first
	CodeWorkerLost     Code = "worker_lost"     // the worker is known to be dead
	CodeOutcomeUnknown Code = "outcome_unknown" // the operation may or may not have run; it will not be repeated
	CodeUnavailable    Code = "unavailable"     // the server cannot be reached
	CodeNoSpace        Code = "no_space"        // the head's store is full; nothing was written
	CodeClosed         Code = "closed"          // the local bus, endpoint or handle is closed
	CodeVersion        Code = "version"         // the peer uses another major version of the wire
	CodeMalformed      Code = "malformed"       // the frame or body violates the wire format
	CodeInvalid        Code = "invalid"         // the caller's own input is wrong; nothing was sent
	CodeInternal       Code = "internal"        // a bug in the peer
)

// Sentinels, one for each code. errors.Is(err, wire.ErrTimedOut) holds for every error of that code, local or received.
var (
	ErrApplication    = &Error{Code: CodeApplication, Message: "the method returned an error"}
	ErrPanic          = &Error{Code: CodePanic, Message: "the method panicked"}
	ErrRefused        = &Error{Code: CodeRefused, Message: "refused"}
	ErrBusy           = &Error{Code: CodeBusy, Message: "a bounded queue is full"}
	ErrNotFound       = &Error{Code: CodeNotFound, Message: "not found"}
	ErrExists         = &Error{Code: CodeExists, Message: "already exists"}
	ErrConflict       = &Error{Code: CodeConflict, Message: "another writer was faster"}
	ErrFenced         = &Error{Code: CodeFenced, Message: "the token is stale"}
	ErrTimedOut       = &Error{Code: CodeTimedOut, Message: "the deadline passed"}
	ErrCancelled      = &Error{Code: CodeCancelled, Message: "cancelled"}
	ErrWorkerLost     = &Error{Code: CodeWorkerLost, Message: "the worker is lost"}
	ErrOutcomeUnknown = &Error{Code: CodeOutcomeUnknown, Message: "the outcome is unknown"}
	ErrUnavailable    = &Error{Code: CodeUnavailable, Message: "the server cannot be reached"}
	ErrNoSpace        = &Error{Code: CodeNoSpace, Message: "no space left in the head's store"}
	ErrClosed         = &Error{Code: CodeClosed, Message: "closed"}
	ErrVersion        = &Error{Code: CodeVersion, Message: "another version of the wire"}
	ErrMalformed      = &Error{Code: CodeMalformed, Message: "malformed frame"}
	ErrInvalid        = &Error{Code: CodeInvalid, Message: "invalid input"}
	ErrInternal       = &Error{Code: CodeInternal, Message: "internal error"}
)

// Error is the only error type that crosses the wire. The fields after Message say where it happened, if known.
type Error struct {
	Code    Code              `msgpack:"code"`
	Message string            `msgpack:"message"`
	Role    string            `msgpack:"role,omitempty"`
	Rank    int               `msgpack:"rank"` // -1 or meaningless when Role is empty
	Node    string            `msgpack:"node,omitempty"`
	Method  string            `msgpack:"method,omitempty"`
	Stack   string            `msgpack:"stack,omitempty"`   // the worker's own stack or traceback
	AppCode Code              `msgpack:"app,omitempty"`     // a code registered with RegisterError
	Details map[string]string `msgpack:"details,omitempty"` // facts for programs: exit_code, signal, type, …
	cause   error             // local only
}

// Errorf makes an *Error of the given code. A %w in format is kept as the local cause.
func Errorf(code Code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Message: err.Error(), Rank: -1, cause: errors.Unwrap(err)}
}

func (e *Error) Error() string {
	var where []string
	if e.Role != "" {
		if e.Rank >= 0 {
			where = append(where, fmt.Sprintf("%s[%d]", e.Role, e.Rank))
		} else {
			where = append(where, e.Role)
		}
	}
	if e.Method != "" {
		where = append(where, e.Method)
	}
	if e.Node != "" {
		where = append(where, "on "+e.Node)
	}
	if len(where) == 0 {
		return e.Message
	}
	return strings.Join(where, " ") + ": " + e.Message
}

// Is compares codes, so that the sentinels above match received errors, and matches the sentinel that is registered
// under the error's application code.
func (e *Error) Is(target error) bool {
	if t, ok := target.(*Error); ok {
		return t.Code == e.Code && (t.AppCode == "" || t.AppCode == e.AppCode)
	}
	switch e.Code {
	case CodeTimedOut:
		if target == context.DeadlineExceeded {
			return true
		}
	case CodeCancelled:
		if target == context.Canceled {
			return true
		}
	}
	return e.AppCode != "" && registeredError(e.AppCode) == target
}

// Unwrap returns the local cause. A received error has none.
func (e *Error) Unwrap() error { return e.cause }

// WithCause returns a copy of e whose local cause is err.
func (e *Error) WithCause(err error) *Error {
	c := *e
	c.cause = err
	return &c
}

// CodeOf is the code of err: its own if it is an *Error, CodeApplication otherwise; empty for nil.
func CodeOf(err error) Code {
	var e *Error
	switch {
	case err == nil:
		return ""
	case errors.As(err, &e):
		return e.Code
	case errors.Is(err, context.DeadlineExceeded):
		return CodeTimedOut
	case errors.Is(err, context.Canceled):
		return CodeCancelled
	}
	return CodeApplication
}

// registry holds the application sentinels. Written at start-up by RegisterError, read for every failed call.
var registry = struct {
	sync.RWMutex
	byCode map[Code]error
}{byCode: map[Code]error{}}

// RegisterError gives an application's sentinel error a code, so that errors.Is(err, sentinel) holds in the caller when
// a worker returned it. Both programs register it, usually in a package variable or init. It panics when the code is
// empty or taken by another error.
func RegisterError(code Code, sentinel error) {
	registry.Lock()
	defer registry.Unlock()
	if code == "" || sentinel == nil {
		panic("wire: RegisterError needs a code and an error")
	}
	if old, taken := registry.byCode[code]; taken && old != sentinel {
		panic(fmt.Sprintf("wire: error code %q is registered twice", code))
	}
	registry.byCode[code] = sentinel
}

func registeredError(code Code) error {
	registry.RLock()
	defer registry.RUnlock()
	return registry.byCode[code]
}

// AsError converts any error into the *Error that crosses the wire.
func AsError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		c := *e
		if err != error(e) { // wrapped: the outer message includes the location
			c.Message = err.Error()
			c.Role, c.Rank, c.Method, c.Node = "", -1, "", ""
		}
		return &c
	}
	e = &Error{Code: CodeOf(err), Message: err.Error(), Rank: -1, cause: err}
	registry.RLock()
	defer registry.RUnlock()
	for code, sentinel := range registry.byCode {
		if errors.Is(err, sentinel) {
			e.AppCode = code
		}
	}
	return e
}

// Clip bounds the length of a name in an error message.
func Clip(s string) string {
	if len(s) > 80 {
		return strings.ToValidUTF8(s[:80], "") + "…"
	}
	return s
}
