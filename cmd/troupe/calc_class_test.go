package main

import (
	"context"
	"errors"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus/wire"
	"troupe/cmd/troupe/cli"
	"troupe/dispatch"
	"troupe/roles"
)

// calc is the class of the roles that tests call.
type calc struct{ rank int }

type addends struct {
	A int `msgpack:"a"`
	B int `msgpack:"b"`
}

func calcClass() *actors.Class {
	c := actors.NewClass("calc", func(_ context.Context, s actors.Setup) (*calc, error) { return &calc{s.Rank}, nil })
	actors.Method(c, "rank", (*calc).rankOf)
	actors.Method(c, "double", (*calc).double, actors.MethodOptions{Mode: string(dispatch.DPMPCompute)})
	actors.Method(c, "add", (*calc).add, actors.MethodOptions{Mode: string(dispatch.RankZero)})
	actors.Method(c, "same", func(_ *calc, _ context.Context, v any) (any, error) { return v, nil }, actors.MethodOptions{Mode: string(dispatch.RankZero)})
	actors.Method(c, "own", func(k *calc, _ context.Context, n int) (int, error) { return n + 100*k.rank, nil }, actors.MethodOptions{Mode: string(dispatch.AllToAll)})
	actors.Method(c, "ones", (*calc).ones, actors.MethodOptions{Mode: string(dispatch.RankZero)})
	actors.Method(c, "fail", (*calc).fail)
	actors.Method(c, "wait", (*calc).wait)
	actors.Method(c, "step", (*calc).step)
	return c.Class
}

func (k *calc) rankOf(context.Context, actors.None) (int, error) { return k.rank, nil }

func (k *calc) double(_ context.Context, rows []int) ([]int, error) {
	for i := range rows {
		rows[i] *= 2
	}
	return rows, nil
}

func (k *calc) add(_ context.Context, v addends) (int, error) { return v.A + v.B, nil }

func (k *calc) ones(_ context.Context, n int) (wire.Tensor, error) {
	ones := make([]float32, n)
	for i := range ones {
		ones[i] = 1
	}
	return wire.TensorOf([]int{n, 1}, ones)
}

func (k *calc) fail(context.Context, actors.None) (actors.None, error) {
	if k.rank == 1 {
		return actors.None{}, errors.New("out of luck")
	}
	return actors.None{}, nil
}

func (k *calc) wait(ctx context.Context, _ actors.None) (actors.None, error) {
	<-ctx.Done()
	return actors.None{}, ctx.Err()
}

// runs creates roles of class calc at the head, with a session of its own, until the test ends.
func (u *shell) runs(specs ...roles.Spec) *roles.Runtime {
	u.t.Helper()
	s, err := (&cli.CLI{Err: u.t.Output(), Env: u.getenv}).Server()
	require.NoError(u.t, err)
	rt, err := roles.Open(u.t.Context(), roles.Config{BusConfig: s.Bus, Namespace: s.Namespace, Name: "a test", Classes: []*actors.Class{calcClass()}})
	require.NoError(u.t, err)
	u.t.Cleanup(func() { require.NoError(u.t, rt.Close(context.Background())) })
	for _, spec := range specs {
		spec.Class = "calc"
		_, err := rt.Create(u.t.Context(), spec)
		require.NoError(u.t, err)
	}
	return rt
}

// step waits in a collective, at which rank 2 does not arrive, until it is cancelled.
func (k *calc) step(ctx context.Context, _ actors.None) (actors.None, error) {
	if k.rank == 2 {
		return k.load(ctx)
	}
	return k.allReduce(ctx)
}

//go:noinline
func (k *calc) load(ctx context.Context) (actors.None, error) {
	<-ctx.Done()
	return actors.None{}, ctx.Err()
}

//go:noinline
func (k *calc) allReduce(ctx context.Context) (actors.None, error) {
	<-ctx.Done()
	return actors.None{}, ctx.Err()
}

// four is a role with two replicas of two ranks.
var four = roles.Spec{Name: "four", World: 4, Mesh: dispatch.Mesh{TP: 2}}
