package versions

import "troupe/bus/wire"

// ErrUnbound is the error of a request of a process that has bound nothing, as far as is known: it binds, and asks again.
var ErrUnbound = &wire.Error{Code: wire.CodeNotFound, AppCode: "weights_unbound", Message: "no tensors are bound; call bind first", Rank: -1}

// ErrSuperseded is the error of a request for a version that a newer one has replaced: take the newest.
var ErrSuperseded = &wire.Error{Code: wire.CodeNotFound, AppCode: "weights_superseded", Message: "a newer version has replaced it", Rank: -1}

// superseded is an ErrSuperseded with the reason.
func superseded(format string, args ...any) error {
	e := wire.Errorf(wire.CodeNotFound, format, args...)
	e.AppCode = ErrSuperseded.AppCode
	return e
}
