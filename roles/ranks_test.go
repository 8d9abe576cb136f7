package roles_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/roles"
)

// This must not happen: a balancer over the ranks of a role does not learn of a loss, a new generation, growth, shrinking or the
// end of the role, unless it polls.
func TestRankChanges(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	c := create(t, rt, restartable("infer", 2, roles.RestartRank, 100*time.Millisecond))
	ctx, cancel := context.WithCancel(patient(t))
	defer cancel()
	ch := c.RankChanges(ctx)
	seen := map[int]roles.RankChange{}
	until := func(want roles.RankChange) {
		t.Helper()
		for seen[want.Rank] != want {
			change, ok := <-ch
			require.True(t, ok, "the channel is closed before %v; the last states are %v", want, seen)
			seen[change.Rank] = change
		}
	}
	until(roles.RankChange{Rank: 0, State: roles.RankReady})
	until(roles.RankChange{Rank: 1, State: roles.RankReady})
	kill(t, c, 1)
	until(roles.RankChange{Rank: 1, State: roles.RankRestarting})
	until(roles.RankChange{Rank: 1, Gen: 1, State: roles.RankReady})
	require.Equal(t, roles.RankChange{Rank: 0, State: roles.RankReady}, seen[0], "rank 0 has not changed")

	require.NoError(t, c.Grow(patient(t), 1))
	until(roles.RankChange{Rank: 2, Gen: 2, State: roles.RankReady})
	require.NoError(t, c.Shrink(patient(t), 1))
	until(roles.RankChange{Rank: 2, Gen: 2, State: roles.RankRemoved})

	require.NoError(t, c.Destroy(patient(t)))
	until(roles.RankChange{Rank: 0, State: roles.RankRemoved})
	until(roles.RankChange{Rank: 1, Gen: 1, State: roles.RankRemoved})
	_, open := <-ch
	require.False(t, open)

	second := create(t, rt, restartable("other", 1, roles.RestartRank, time.Second))
	ch = second.RankChanges(ctx)
	require.Equal(t, roles.RankChange{State: roles.RankReady}, <-ch)
	cancel()
	_, open = <-ch
	require.False(t, open, "ctx ends the changes")
}

// A balancer that lost a rank must not wait for ever for one that does not come back, nor miss one that does.
func TestAwaitRestart(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	c := create(t, rt, restartable("infer", 2, roles.RestartRank, 100*time.Millisecond))
	w, err := c.Worker(1)
	require.NoError(t, err)
	require.NoError(t, w.AwaitRestart(patient(t), w.Generation()), "the worker lives after all")
	kill(t, c, 1)
	require.NoError(t, w.AwaitRestart(patient(t), 0))
	require.EqualValues(t, 1, w.Generation())

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, w.AwaitRestart(ctx, 7), context.Canceled)
	endedCh := make(chan error, 1)
	go func() { endedCh <- w.AwaitRestart(patient(t), 7) }()
	require.NoError(t, c.Destroy(patient(t)))
	if err := <-endedCh; err != nil { // otherwise the worker was trusted before the end came
		require.True(t, roles.IsWorkerLost(err), "%v", err)
	}
	once := create(t, rt, restartable("once", 1, roles.FailRole, time.Second))
	w, err = once.Worker(0)
	require.NoError(t, err)
	require.ErrorContains(t, w.AwaitRestart(patient(t), 0), "does not restart ranks")
}
