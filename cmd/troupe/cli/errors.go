package cli

import "fmt"

// UsageError is a mistake on the command line; the exit code is 2.
type UsageError struct{ error }

func (e *UsageError) Unwrap() error { return e.error }

// Usagef is a UsageError.
func Usagef(format string, args ...any) error { return &UsageError{fmt.Errorf(format, args...)} }

// TryLaterError is an error of a command that may succeed later; the exit code is 75.
type TryLaterError struct{ error }

// TryLater makes err a TryLaterError.
func TryLater(err error) error { return &TryLaterError{err} }

func (e *TryLaterError) Unwrap() error { return e.error }

// ExitError ends the program with an exit code and without a message.
type ExitError struct{ Code int }

func (e *ExitError) Error() string { return fmt.Sprintf("exit code %d", e.Code) }
