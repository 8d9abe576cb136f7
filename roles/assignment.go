package roles

import (
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/nodes"
)

// Assignment is what a driver passes to one worker process, through the agent that starts it. Its encoding is msgpack.
type Assignment struct {
	Namespace   string        `msgpack:"namespace"`
	Role        string        `msgpack:"role"`
	Incarnation string        `msgpack:"incarnation"`
	Class       string        `msgpack:"class"`
	Rank        int           `msgpack:"rank"`
	World       int           `msgpack:"world"`
	Gen         uint32        `msgpack:"gen"`
	Mesh        dispatch.Mesh `msgpack:"mesh"`
	Config      wire.Raw      `msgpack:"config"` // argument of the constructor; nil: none
	Ordered     bool          `msgpack:"ordered"`
	QueueLimit  int           `msgpack:"queue_limit"`
	PanicFails  bool          `msgpack:"panic_fails"`
	Devices     []string      `msgpack:"devices"` // UUIDs of the visible devices, in the order of the worker's indices

	Driver  string `msgpack:"driver,omitempty"`  // session of the run's driver
	Private bool   `msgpack:"private,omitempty"` // the head ends with the run's driver

	// Output is the part of this worker's output that its driver shows. Workers that it creates have the same; it passes their output on.
	Output nodes.OutputMode `msgpack:"output,omitempty"`

	// Slices are the subjects of mesh slices to subscribe to; nil: the rank's own slice of the mesh. BeatEvery is the
	// interval of heartbeats; zero: a second.
	Slices    []actors.Slice `msgpack:"slices,omitempty"`
	BeatEvery time.Duration  `msgpack:"beat_every,omitempty"`
}

// Spec is the worker's specification for its host.
func (a Assignment) Spec() actors.WorkerSpec {
	slices := a.Slices
	if slices == nil {
		slices = []actors.Slice{{Mesh: defaultMesh, N: a.Mesh.Coord(a.Rank).DP}}
	}
	return actors.WorkerSpec{
		Address: bus.Address{Namespace: a.Namespace, Role: a.Role, Incarnation: a.Incarnation},
		Class:   a.Class, Rank: a.Rank, World: a.World, Gen: a.Gen, Config: a.Config, Ordered: a.Ordered,
		QueueLimit: a.QueueLimit, PanicFails: a.PanicFails,
		Slices: slices,
	}
}

func (a Assignment) check() error {
	if mesh, err := a.Mesh.Resolve(a.World); err != nil || mesh != a.Mesh {
		return bus.Errorf(bus.CodeMalformed, "the assignment has world %d and mesh %s, which do not match", a.World, a.Mesh)
	}
	if a.Rank < 0 || a.Rank >= a.World {
		return bus.Errorf(bus.CodeMalformed, "the assignment has rank %d in a world of %d", a.Rank, a.World)
	}
	return nil
}
