package plan

import "troupe/bus/wire"

// invalid is the error of a call that is wrong before anything was sent: bus.ErrInvalid.
func invalid(format string, args ...any) error {
	return wire.Errorf(wire.CodeInvalid, format, args...)
}

// joinError is the error of answers that do not fit together: bus.ErrApplication, because the workers ran.
func joinError(format string, args ...any) error {
	return wire.Errorf(wire.CodeApplication, format, args...)
}
