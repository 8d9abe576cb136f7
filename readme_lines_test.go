package troupe_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe"
)

// TestReadmeLines runs the single lines of the README; TestReadmeProgram compares the text.
func TestReadmeLines(t *testing.T) {
	judge := troupe.NewClass("judge", func(_ context.Context, s troupe.Setup) (*Judge, error) { return &Judge{rank: s.Rank}, nil })
	troupe.Method(judge, "score", (*Judge).Score)
	trainer := troupe.NewClass("trainer", func(context.Context, troupe.Setup) (*Trainer, error) { return &Trainer{}, nil })
	troupe.Method(trainer, "sync_weights", (*Trainer).SyncWeights, troupe.MethodOptions{Mode: troupe.RankZero})
	ctx := t.Context()
	rt, err := troupe.Open(ctx, troupe.Config{Classes: []*troupe.Class{judge.Class, trainer.Class}})
	require.NoError(t, err)
	defer func() { require.NoError(t, rt.Close(context.Background())) }()
	reward, err := rt.Create(ctx, troupe.Spec{Name: "reward", Class: "judge", World: 4, Mesh: troupe.Mesh{DP: 2, TP: 2}})
	require.NoError(t, err)
	_, err = rt.Create(ctx, troupe.Spec{Name: "actor_train", Class: "trainer", World: 1})
	require.NoError(t, err)

	texts := []string{"a", "few"}
	f, err := reward.Go(ctx, troupe.FutureCall{Method: "score", Args: []any{texts}, Timeout: time.Minute}) // a future
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
	other, err := rt.Attach(ctx, "actor_train") // a role that another program created
	require.NoError(t, err)
	n, err := troupe.Call[int](ctx, other, "sync_weights", reward.Handle()) // a role can be an argument
	require.NoError(t, err)
	require.Equal(t, 4, n)

	t.Setenv("TROUPE_URL", "nats://127.0.0.1:7422")
	head, err := troupe.FindHead() // TROUPE_URL, or the head on this machine
	require.NoError(t, err)
	require.Equal(t, []string{"nats://127.0.0.1:7422"}, head.URLs)
	tokenFile := "token"
	cfg := troupe.Config{BusConfig: troupe.BusConfig{URLs: []string{"nats://127.0.0.1:7422"}, TokenFile: tokenFile}}
	require.Equal(t, tokenFile, cfg.BusConfig.TokenFile)

	var spec troupe.Spec
	spec.Process = &troupe.Process{
		Command: troupe.Self(),  // this program; main calls troupe.Main(judge.Class) first
		Needs:   troupe.GPUs(1), // for each worker
		Policy:  troupe.RestartRank,
		Output:  os.Stdout,
	}
	require.NotEmpty(t, spec.Process.Command)
}

type Judge struct{ rank int }

func (j *Judge) Score(_ context.Context, texts []string) ([]string, error) { return texts, nil }

type Trainer struct{}

func (*Trainer) SyncWeights(ctx context.Context, to troupe.Handle) (int, error) {
	target, err := to.Open(ctx)
	if err != nil {
		return 0, err
	}
	all, err := target.ExecuteAll(ctx, "score", []string{"weights"})
	return len(all), err
}
