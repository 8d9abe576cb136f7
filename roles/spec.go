package roles

import (
	"errors"
	"time"

	"troupe/bus"
	"troupe/dispatch"
	"troupe/roles/registry"
)

const (
	defaultMesh         = "main"
	defaultStartTimeout = 60 * time.Second
	defaultStopGrace    = 10 * time.Second
)

// Spec describes a role.
type Spec struct {
	Name  string
	Class string
	World int
	// Mesh is the layout of the ranks. Zero axes are 1; dp is computed from World, or checked if it is set.
	Mesh dispatch.Mesh
	// Config is the argument of every worker's constructor: any value the wire can encode.
	Config any

	// Ordered gives calls of several drivers one order on all ranks, which roles with collectives need. It costs one
	// hop per call.
	Ordered bool
	// Detached roles outlive their driver until they are destroyed. It is refused where the workers would end with the
	// driver: goroutines without a Config.Local, and a private head. Zero: the role ends with the driver's lease.
	Detached bool
	// Replace destroys a role of this name in the namespace first, whichever driver owns it; its running calls have half a
	// second. Zero: a taken name is a TakenError.
	Replace bool
	// EndsWithRun makes a role that a worker creates end with the run's driver. Zero: it ends with the worker.
	EndsWithRun bool
	// OwnConnections gives each worker a connection of its own. Zero: the workers of one process share one, which is
	// several times as fast.
	OwnConnections bool
	// PanicFails fails the worker, and with it the role, when a method panics. Zero: the call fails.
	PanicFails bool
	// QueueLimit is the number of calls that may wait in one lane of a worker. Zero: 10,000.
	QueueLimit int
	// Process runs the workers as processes on the nodes. Zero: goroutines of this process; see Config.Local.
	Process *Process
	// OnFailure is called for each failed worker, from a goroutine of its own.
	OnFailure func(Failure)
	// StartTimeout bounds the start, from the claim of the name to the barrier, with the wait for devices. Worker
	// processes that have not started then are killed. Zero: one minute.
	StartTimeout time.Duration
	// StopGrace is how long running calls may continue when the role is destroyed. Zero: ten seconds.
	StopGrace time.Duration
}

func (s Spec) withDefaults() Spec {
	if s.StartTimeout == 0 {
		s.StartTimeout = defaultStartTimeout
	}
	if s.StopGrace == 0 {
		s.StopGrace = defaultStopGrace
	}
	if s.Process != nil {
		s.Process = s.Process.withDefaults(s.StartTimeout)
	}
	return s
}

// resolve returns all errors at once, or the mesh with all its sizes.
func (s Spec) resolve() (dispatch.Mesh, error) {
	var errs []error
	if err := bus.CheckRoleName(s.Name); err != nil {
		errs = append(errs, err)
	}
	if err := bus.CheckName("class", s.Class); err != nil {
		errs = append(errs, err)
	}
	if s.StartTimeout < 0 || s.StopGrace < 0 {
		errs = append(errs, bus.Errorf(bus.CodeInvalid, "role %q: StartTimeout %v and StopGrace %v must not be negative", s.Name, s.StartTimeout, s.StopGrace))
	}
	if s.QueueLimit < 0 {
		errs = append(errs, bus.Errorf(bus.CodeInvalid, "role %q: QueueLimit %d must not be negative", s.Name, s.QueueLimit))
	}
	if s.World > registry.MaxWorld {
		errs = append(errs, bus.Errorf(bus.CodeInvalid, "role %q: World %d: the maximum is %d", s.Name, s.World, registry.MaxWorld))
	}
	mesh, err := s.Mesh.Resolve(s.World)
	if err != nil {
		errs = append(errs, bus.Errorf(bus.CodeInvalid, "role %q: %w", s.Name, err))
	}
	if s.Process != nil && err == nil {
		errs = append(errs, s.Process.check(s.Name, mesh.World()), s.checkReplicas(mesh.DP))
	}
	return mesh, errors.Join(errs...)
}
