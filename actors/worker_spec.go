package actors

import (
	"errors"

	"troupe/bus"
	"troupe/bus/wire"
)

// WorkerSpec says which worker to start.
type WorkerSpec struct {
	Address bus.Address
	Class   string
	Rank    int
	World   int
	Gen     uint32
	Config  wire.Raw
	Slices  []Slice // the data-parallel slices it belongs to
	Ordered bool    // the role has a sequencer; rank 0 runs it
	// QueueLimit is how many calls may wait in one lane; the next one is refused as busy. Zero: 10,000.
	QueueLimit int
	// PanicFails ends the worker when a method panics. Zero: the call fails and the worker lives on.
	PanicFails bool
}

// check refuses a worker that nobody could call.
func (s WorkerSpec) check(namespace string) error {
	errs := []error{s.Address.Check()}
	bad := func(format string, args ...any) { errs = append(errs, bus.Errorf(bus.CodeInvalid, format, args...)) }
	if s.Address.Namespace != namespace {
		bad("worker of %s: its namespace is %q, the host's %q", s.Address.Role, s.Address.Namespace, namespace)
	}
	if s.Rank < 0 || s.Rank >= s.World {
		bad("worker of %s: rank %d is not in a world of %d", s.Address.Role, s.Rank, s.World)
	}
	if s.QueueLimit < 0 {
		bad("worker of %s: QueueLimit %d must not be negative", s.Address.Role, s.QueueLimit)
	}
	for _, slice := range s.Slices {
		errs = append(errs, slice.check())
	}
	return errors.Join(errs...)
}

// Slice is one data-parallel slice of one mesh.
type Slice struct {
	Mesh string `msgpack:"mesh"`
	N    int    `msgpack:"n"`
}

func (s Slice) check() error {
	if s.N < 0 {
		return bus.Errorf(bus.CodeInvalid, "slice %d of mesh %q: the number must not be negative", s.N, s.Mesh)
	}
	return bus.CheckName("mesh", s.Mesh)
}
