package troupe

import (
	"context"
	"os"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/recorder"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles"
)

// A driver: the session, roles and their running workers.
type (
	Config       = roles.Config
	BusConfig    = bus.Config       // of a server to connect to, or of one inside this process
	ServerConfig = bus.ServerConfig // BusConfig.Server
	Runtime      = roles.Runtime
	Spec         = roles.Spec
	Process      = roles.Process
	Cluster      = roles.Cluster
	Worker       = roles.Worker
	Group        = roles.Group
	Handle       = roles.Handle
	Failure      = roles.Failure
)

// What happens when a worker process fails; see Process.Policy.
const (
	FailRole    = roles.FailRole
	RestartRank = roles.RestartRank
	RestartRole = roles.RestartRole
	Ignore      = roles.Ignore
)

// Open starts a driver's session. A Config without a server starts a private one inside this process.
func Open(ctx context.Context, cfg Config) (*Runtime, error) { return roles.Open(ctx, cfg) }

// FindHead is the Config.BusConfig of the head that the environment names (TROUPE_URL and the variables beside it), or of
// the head on this machine.
func FindHead() (BusConfig, error) { return nodes.FindHead(os.Getenv) }

// FromContext is the session of the worker whose method has this context, for calls of its own.
func FromContext(ctx context.Context) (*Runtime, error) { return roles.FromContext(ctx) }

// Main runs the worker if an agent started this process as one, and does not return then. A program that is both driver
// and worker calls it first.
func Main(classes ...*Class) { roles.Main(classes...) }

// Self is the command that starts this program again, as a worker.
func Self() []string { return roles.Self() }

// GPUs is what each worker of a role needs: n whole devices on one node.
func GPUs(n int) placement.Request {
	return placement.Request{Bundles: []placement.Bundle{{Devices: placement.Wholes(n)}}}
}

// Errors of calls, for errors.Is. An error says which rank failed, on which node and how.
var (
	ErrApplication    = bus.ErrApplication
	ErrRefused        = bus.ErrRefused
	ErrTimedOut       = bus.ErrTimedOut
	ErrUnavailable    = bus.ErrUnavailable
	ErrWorkerLost     = bus.ErrWorkerLost
	ErrOutcomeUnknown = bus.ErrOutcomeUnknown
)

// A class of workers and its methods.
type (
	Class          = actors.Class
	ClassOf[T any] = actors.ClassOf[T]
	Setup          = actors.Setup
	Lane           = actors.Lane
	Args           = actors.Args
	None           = actors.None
	Health         = actors.Health
)

var (
	Serial  = actors.Serial
	Control = actors.Control
)

// VerbHealth is a method that every worker has; with FutureCall.Control it is answered while the worker is busy.
const VerbHealth = actors.VerbHealth

// Concurrent is a lane that runs up to n calls at once.
func Concurrent(n int) Lane { return actors.Concurrent(n) }

// NewClass declares a class. Each worker gets its object from construct.
func NewClass[T any](name string, construct func(ctx context.Context, s Setup) (*T, error)) *ClassOf[T] {
	return actors.NewClass(name, construct)
}

// MethodOptions are the options of Method.
type MethodOptions struct {
	Mode   Mode // how a call is spread over the ranks; zero: OneToAll
	Lane   Lane // zero: Serial
	Replay bool // call the method again, with its last arguments, on a worker that was restarted
}

// Method adds a method to a class, usually a method expression: Method(counter, "add", (*Counter).Add). It panics if the
// class has the method already.
func Method[T, A, R any](c *ClassOf[T], name string, f func(*T, context.Context, A) (R, error), opts ...MethodOptions) {
	var inner []actors.MethodOptions
	for _, o := range opts {
		inner = append(inner, actors.MethodOptions{Mode: string(o.Mode), Lane: o.Lane, Replay: o.Replay})
	}
	actors.Method(c, name, f, inner...)
}

// Mode is how one call becomes many and many answers become one.
type Mode = dispatch.Mode

const (
	RankZero                    = dispatch.RankZero
	OneToAll                    = dispatch.OneToAll
	OneToAllOne                 = dispatch.OneToAllOne
	AllToAll                    = dispatch.AllToAll
	DPMPCompute                 = dispatch.DPMPCompute
	DPMPDispatchFirst           = dispatch.DPMPDispatchFirst
	DPMPDispatchFirstCollectAll = dispatch.DPMPDispatchFirstCollectAll
)

// Calls and values.
type (
	Mesh       = dispatch.Mesh
	RankInfo   = dispatch.RankInfo
	FutureCall = dispatch.Call // a call with all its options, for Cluster.Go
	Future     = dispatch.Future
	Batch      = dispatch.Batch
	Tensor     = wire.Tensor
)

// Call calls a method in the mode that its class declares, and decodes the result.
func Call[R any](ctx context.Context, c *Cluster, method string, args ...any) (R, error) {
	return roles.Call[R](ctx, c, method, args...)
}

// CallEach is Call for the modes that give one answer for each rank.
func CallEach[R any](ctx context.Context, c *Cluster, method string, args ...any) ([]R, error) {
	return roles.CallEach[R](ctx, c, method, args...)
}

// Await waits for a future and decodes its result; AwaitEach decodes one answer for each rank.
func Await[R any](ctx context.Context, f *Future) (R, error) { return dispatch.Await[R](ctx, f) }

func AwaitEach[R any](ctx context.Context, f *Future) ([]R, error) {
	return dispatch.AwaitEach[R](ctx, f)
}

// TensorOf is a tensor of a shape and its elements, in C order; Values are the elements of a tensor.
func TensorOf[T wire.Element](shape []int, values []T) (Tensor, error) {
	return wire.TensorOf(shape, values)
}

func Values[T wire.Element](t Tensor) ([]T, error) { return wire.Values[T](t) }

// Span marks a section of a method, or of a driver, in the timeline of its process (`troupe timeline`); the function that it returns
// ends the section:
//
//	defer troupe.Span(ctx, "generate")()
func Span(ctx context.Context, name string) (end func()) {
	s := recorder.Begin(recorder.ScopeOf(ctx), "", name)
	return func() { s.End(false) }
}
