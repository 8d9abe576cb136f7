package main

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/dispatch"
	"troupe/roles"
)

func TestMain(m *testing.M) { bustest.Main(m) }

// TestRun attaches to a role of another driver, twice. examples/trainer tests the two programs.
func TestRun(t *testing.T) {
	type line struct{}
	class := actors.NewClass("line", func(context.Context, actors.Setup) (*line, error) { return &line{}, nil })
	asked := 0
	actors.Method(class, "predict", func(_ *line, _ context.Context, xs []float64) ([]float64, error) {
		asked += len(xs)
		return xs, nil
	}, actors.MethodOptions{Mode: string(dispatch.RankZero)})

	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	rt, err := roles.Open(t.Context(), roles.Config{BusConfig: bus.Config{InProcess: srv}, Classes: []*actors.Class{class.Class}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rt.Close(context.Background())) })
	role, err := rt.Create(t.Context(), roles.Spec{Name: "line", Class: "line", World: 2})
	require.NoError(t, err)

	require.NoError(t, run(t.Context(), srv.URL(), "line"))
	require.NoError(t, run(t.Context(), srv.URL(), "line"), "the role outlives the program")
	_, err = role.Info(t.Context())
	require.NoError(t, err)
	require.Equal(t, 4, asked)
	require.ErrorIs(t, run(t.Context(), srv.URL(), "critic"), bus.ErrNotFound)
	srv.Stop()
	require.ErrorIs(t, run(t.Context(), srv.URL(), "line"), bus.ErrUnavailable)
	srv.Restart()
}
