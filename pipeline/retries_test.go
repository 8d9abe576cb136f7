package pipeline_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/pipeline"
)

// Failures of an item are stored in the log: a pipeline that is opened again continues to count.
func TestFailuresPersist(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	spec := oneStage(pipeline.StageSpec{Failures: 3, Backoff: time.Hour, Func: func(ctx context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
		if in[0].ID == "good" && in[0].Attempt == 2 {
			return pass(ctx, in)
		}
		return nil, fmt.Errorf("%s failed in attempt %d", in[0].ID, in[0].Attempt)
	}})
	p := open(t, b, spec)
	require.NoError(t, p.Put(testContext(t), "in", pipeline.Item{ID: "bad"}, pipeline.Item{ID: "good"}))
	for range 2 {
		want := status(t, p).Stages[0].Retries
		require.Eventually(t, func() bool { return status(t, p).Stages[0].Retries > want || status(t, p).Streams[0].Items == 1 }, 2*time.Minute, time.Millisecond)
		require.Eventually(t, func() bool { return status(t, p).Stages[0].InFlight == 0 }, 2*time.Minute, time.Millisecond)
		require.NoError(t, p.Close(testContext(t)))
		p = open(t, b, spec)
	}
	require.Equal(t, []string{"good"}, ids(drainSink(t, p, "out", 1)))
	require.Eventually(t, func() bool { return status(t, p).Dead == 1 }, 2*time.Minute, time.Millisecond)
	dead, err := p.Dead(testContext(t))
	require.NoError(t, err)
	require.Equal(t, 3, dead[0].Attempts)
	for i, f := range dead[0].Failures {
		require.Equal(t, fmt.Sprintf("bad failed in attempt %d", i+1), f.Error)
	}
	s := findStream(t, b, pipeline.Address{Namespace: "default", Name: "p"}.Stream())
	require.Eventually(t, func() bool {
		st, err := s.State(testContext(t))
		return err == nil && st.Messages == 2 // the checkpoint and the dead letter
	}, 2*time.Minute, 50*time.Millisecond, "the retry state is deleted with its item")
}

func TestLossesPersist(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	tr := newWorkerSet()
	c := startRole(t, b, tr, "judges", 1)
	spec := roleStage("hold", func(s *pipeline.StageSpec) { s.Style, s.Losses = pipeline.Items, 3 })
	p := open(t, b, spec, with(c))
	require.NoError(t, p.Put(testContext(t), "in", items(1)...))
	for range 2 {
		tr.came(t)
		require.NoError(t, p.Lost(testContext(t), "work", c, bus.Errorf(bus.CodeWorkerLost, "killed")))
		require.NoError(t, p.Close(testContext(t)))
		p = open(t, b, spec, with(c))
	}
	tr.came(t)
	require.NoError(t, p.Lost(testContext(t), "work", c, bus.Errorf(bus.CodeWorkerLost, "killed")))
	require.Eventually(t, func() bool { return status(t, p).Dead == 1 }, 2*time.Minute, time.Millisecond)
	dead, err := p.Dead(testContext(t))
	require.NoError(t, err)
	require.Equal(t, "losses 3", fmt.Sprint(dead[0].Reason, " ", dead[0].Attempts))
}

// An item that ends the engine's process in every attempt becomes a dead letter in the end, and the items beside it
// succeed.
func TestAnItemThatKillsTheEngineBecomesADeadLetter(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	b := bustest.Open(t, bus.Config{InProcess: srv})
	c, err := pipeline.Connect(b, "default", "p")
	require.NoError(t, err)
	paused := open(t, b, poisoned())
	require.NoError(t, paused.Pause(testContext(t), "work"))
	require.NoError(t, paused.Put(testContext(t), "in", append(items(6), pipeline.Item{ID: "poison"})...))
	require.NoError(t, paused.Put(testContext(t), "in", pipeline.Item{ID: "behind"}))
	require.NoError(t, paused.Close(testContext(t)))
	starts := 0
	for done := false; !done; {
		starts++
		require.Less(t, starts, 10, "it does not become a dead letter")
		engine, err := spawnQuietly(testContext(t), nil, poisonRole, srv.URL())
		if err != nil {
			continue // it ended before it was ready
		}
		t.Cleanup(engine.kill)
		_ = c.Resume(testContext(t), "work") // it may be dead already
		require.Eventually(t, func() bool {
			select {
			case <-engine.diedCh:
				return true
			default:
			}
			st, err := c.Status(testContext(t))
			done = err == nil && st.Dead > 0 && st.Streams[0].Items == 0
			return done
		}, 2*time.Minute, 5*time.Millisecond)
	}
	dead, err := c.Dead(testContext(t), false)
	require.NoError(t, err)
	require.Len(t, dead, 1)
	require.Equal(t, "poison losses", dead[0].ID+" "+dead[0].Reason)
	require.LessOrEqual(t, starts, 6, "the second attempt at the latest is stored")
}
