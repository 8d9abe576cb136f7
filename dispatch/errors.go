package dispatch

import "troupe/bus"

// invalid is the error for a call that is wrong before anything was sent: bus.ErrInvalid.
func invalid(format string, args ...any) error {
	return bus.Errorf(bus.CodeInvalid, format, args...)
}

// unjoinable is the error for answers that do not fit together. The workers ran, and what they gave back is the
// application's: bus.ErrApplication.
func unjoinable(format string, args ...any) error {
	return bus.Errorf(bus.CodeApplication, format, args...)
}
