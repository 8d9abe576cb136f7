package dispatch

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// methods are the methods of the workers of a test.
type methods map[string]func(ctx context.Context, rank int, args actors.Args) (any, error)

type rankObject struct{ rank int }

// class is a class with these methods, each in the lane.
func (ms methods) class(lane actors.Lane) *actors.Class {
	c := actors.NewClass("methods", func(_ context.Context, s actors.Setup) (*rankObject, error) { return &rankObject{s.Rank}, nil })
	for name, do := range ms {
		call := func(p *rankObject, ctx context.Context, args actors.Args) (any, error) { return do(ctx, p.rank, args) }
		actors.Method(c, name, call, actors.MethodOptions{Lane: lane})
	}
	return c.Class
}

// busFixture is a bus with its own server.
type busFixture struct {
	t   testing.TB
	bus *bus.Bus
}

func newBusFixture(t testing.TB) *busFixture { return &busFixture{t, bustest.Open(t)} }

// patient is a context with a long timeout, for calls that must end earlier.
func patient(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// newGroup starts a role with a serial lane on its own bus.
func newGroup(t testing.TB, mesh Mesh, ms methods) *Group {
	return newBusFixture(t).startRole(mesh, ms.class(actors.Serial))
}

// startRole starts the workers of a role on one connection and returns a group on another.
func (s *busFixture) startRole(mesh Mesh, class *actors.Class) *Group {
	to := s.address()
	s.start(s.bus, to, mesh, class, all(mesh)...)
	return s.newGroup(to, mesh)
}

// startRoleApart is startRole with a connection for each worker.
func (s *busFixture) startRoleApart(mesh Mesh, class *actors.Class) *Group {
	to := s.address()
	for rank := range mesh.World() {
		s.start(s.dial(fmt.Sprint("worker ", rank)), to, mesh, class, rank)
	}
	return s.newGroup(to, mesh)
}

func all(mesh Mesh) []int {
	ranks, _ := mesh.Select(Selector{})
	return ranks
}

func (s *busFixture) address() bus.Address {
	to, err := bus.NewAddress("test", "role", bus.NewID())
	require.NoError(s.t, err)
	return to
}

func (s *busFixture) dial(name string) *bus.Bus {
	b, err := s.bus.Dial(s.t.Context(), name)
	require.NoError(s.t, err)
	s.t.Cleanup(func() { require.NoError(s.t, b.Close()) })
	return b
}

func (s *busFixture) start(b *bus.Bus, to bus.Address, mesh Mesh, class *actors.Class, ranks ...int) {
	ep, err := calls.Open(b, to.Namespace)
	require.NoError(s.t, err)
	host, err := actors.NewHost(ep, actors.HostConfig{Classes: []*actors.Class{class}, Node: "node-a"})
	require.NoError(s.t, err)
	s.t.Cleanup(func() { require.NoError(s.t, host.Close(context.Background())) })
	for _, rank := range ranks {
		_, err := host.Start(s.t.Context(), actors.WorkerSpec{
			Address: to, Class: class.Name, Rank: rank, World: mesh.World(),
			Slices: []actors.Slice{{Mesh: "main", N: mesh.Coord(rank).DP}},
		})
		require.NoError(s.t, err)
	}
	require.NoError(s.t, b.Flush(s.t.Context())) // the server has processed the subscriptions
}

// newGroup is a group on its own connection.
func (s *busFixture) newGroup(to bus.Address, mesh Mesh) *Group {
	ep, err := calls.Open(s.dial("driver"), to.Namespace)
	require.NoError(s.t, err)
	return &Group{Endpoint: ep, To: to, Mesh: mesh, MeshName: "main"}
}

// first decodes the first positional argument.
func first(args actors.Args) (v any, err error) {
	return v, wire.Unmarshal(args.Positional[0], &v)
}

func dp(n int) Mesh { return Mesh{DP: n, TP: 1, PP: 1, CP: 1} }

func TestMain(m *testing.M) { bustest.Main(m) }

func tensor(values ...byte) wire.Tensor {
	return wire.Tensor{DType: "uint8", Shape: []int{len(values)}, Data: values}
}
