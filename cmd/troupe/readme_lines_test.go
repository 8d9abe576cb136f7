package main_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/dispatch"
	"troupe/placement"
	"troupe/roles"
)

// The lines that the README shows work as they stand there; TestReadmeProgram compares them.
func TestReadmeLines(t *testing.T) {
	judge := actors.NewClass("judge", func(_ context.Context, s actors.Setup) (*Judge, error) { return &Judge{rank: s.Rank}, nil })
	actors.Method(judge, "score", (*Judge).Score)
	trainer := actors.NewClass("trainer", func(context.Context, actors.Setup) (*Trainer, error) { return &Trainer{}, nil })
	actors.Method(trainer, "sync_weights", (*Trainer).SyncWeights, actors.MethodOptions{Mode: string(dispatch.RankZero)})
	ctx := t.Context()
	rt, err := roles.Open(ctx, roles.Config{Classes: []*actors.Class{judge.Class, trainer.Class}})
	require.NoError(t, err)
	defer func() { require.NoError(t, rt.Close(context.Background())) }()
	reward, err := rt.Create(ctx, roles.Spec{Name: "reward", Class: "judge", World: 4, Mesh: dispatch.Mesh{DP: 2, TP: 2}})
	require.NoError(t, err)
	_, err = rt.Create(ctx, roles.Spec{Name: "actor_train", Class: "trainer", World: 1})
	require.NoError(t, err)

	texts := []string{"a", "few"}
	f, err := reward.Go(ctx, dispatch.Call{Method: "score", Args: []any{texts}, Timeout: time.Minute}) // a future
	require.NoError(t, err)
	require.NoError(t, f.Wait(ctx))
	all, err := reward.ExecuteAll(ctx, "score", texts) // every rank, one answer each
	require.NoError(t, err)
	require.Len(t, all, 4)
	info, err := reward.Info(ctx) // answered while the workers are busy
	require.NoError(t, err)
	require.Len(t, info, 4)
	group, err := reward.Where("tp=0") // ranks by coordinates
	require.NoError(t, err)
	require.Len(t, group, 2)
	other, err := rt.Attach(ctx, "actor_train") // a role of another program
	require.NoError(t, err)
	n, err := roles.Call[int](ctx, other, "sync_weights", reward.Handle()) // a role is a value
	require.NoError(t, err)
	require.Equal(t, 4, n)

	tokenFile := "token"
	cfg := roles.Config{BusConfig: bus.Config{URLs: []string{"nats://127.0.0.1:7422"}, TokenFile: tokenFile}}
	require.Equal(t, tokenFile, cfg.BusConfig.TokenFile)

	var spec roles.Spec
	spec.Process = &roles.Process{
		Command: roles.Self(), // this program; main calls roles.Main(judge.Class) first
		Needs:   placement.Request{Bundles: []placement.Bundle{{Devices: placement.Wholes(1)}}},
		Policy:  roles.RestartRank,
		Output:  os.Stdout,
	}
	require.NotEmpty(t, spec.Process.Command)
}

type Trainer struct{}

func (*Trainer) SyncWeights(ctx context.Context, to roles.Handle) (int, error) {
	target, err := to.Open(ctx)
	if err != nil {
		return 0, err
	}
	all, err := target.ExecuteAll(ctx, "score", []string{"weights"})
	return len(all), err
}
