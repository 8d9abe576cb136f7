package pipeline_test

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/nodes"
	"troupe/pipeline"
	"troupe/roles"
)

// logText is what a logger has written.
type logText struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logText) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *logText) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// A stage whose role died, while it was idle or busy, says which role, when and of what: in the status, in the error of
// Drain, here and from another process, in the log and in an event. It works again when other ranks join.
func TestAStageWhoseRoleDiedSaysSo(t *testing.T) {
	t.Parallel()
	for _, busy := range []bool{false, true} {
		srv := bustest.StartServer(t, bustest.Options{Listen: true})
		b := bustest.Open(t, bus.Config{InProcess: srv})
		require.NoError(t, nodes.CreateEventStream(t.Context(), b, 0))
		rt, err := roles.Open(t.Context(), roles.Config{Bus: b})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, rt.Close(context.Background())) })
		logged := &logText{}
		p := open(t, b, roleStage("hold", func(s *pipeline.StageSpec) { s.Style, s.InFlight, s.Losses = pipeline.Items, 2, 9 }),
			func(c *pipeline.Config) { c.Logger = slog.New(slog.NewTextHandler(logged, nil)) })
		victim := spawn(t, rt, "victims", srv.URL())
		t.Cleanup(victim.kill)
		require.NoError(t, p.Join(testContext(t), "work", victim.cluster))
		if busy {
			require.NoError(t, p.Put(testContext(t), "in", items(4)...))
			require.Eventually(t, func() bool { return status(t, p).Stages[0].InFlight == 4 }, 2*time.Minute, time.Millisecond)
		}
		before := time.Now()
		victim.kill()
		require.Eventually(t, func() bool { return status(t, p).Stages[0].Death != nil }, 2*time.Minute, time.Millisecond)
		stage := status(t, p).Stages[0]
		require.Zero(t, stage.Workers)
		require.Equal(t, "victims", stage.Death.Role)
		require.WithinRange(t, stage.Death.At, before, time.Now())
		require.Regexp(t, "gone|heartbeat", stage.Death.Cause)
		require.Contains(t, logged.String(), "role=victims")
		require.ErrorContains(t, p.Scale(testContext(t), "work", 4), "role victims died")

		if !busy {
			require.NoError(t, p.Put(testContext(t), "in", items(4)...))
		}
		client, err := pipeline.Connect(bustest.Open(t, bus.Config{InProcess: srv}), "default", "p")
		require.NoError(t, err)
		for _, drain := range []func(context.Context) error{p.Drain, client.Drain} {
			err := drain(testContext(t))
			require.ErrorIs(t, err, bus.ErrWorkerLost)
			require.ErrorContains(t, err, "stage work has no workers: role victims died at "+stage.Death.At.Format(time.RFC3339))
			require.ErrorContains(t, err, "4 items wait for it")
		}
		require.Eventually(t, func() bool {
			told := 0
			require.NoError(t, nodes.ReadEvents(testContext(t), b, nodes.EventQuery{Namespace: "default"}, func(e nodes.Event) error {
				if e.Kind == pipeline.EventStageDead && e.Details["role"] == "victims" {
					told++
				}
				return nil
			}))
			return told > 0
		}, 2*time.Minute, 20*time.Millisecond)

		tr := newWorkerSet()
		close(tr.goCh)
		require.NoError(t, p.Join(testContext(t), "work", startRole(t, b, tr, "survivors", 2)))
		require.Nil(t, status(t, p).Stages[0].Death)
		require.NoError(t, p.Drain(testContext(t)))
		drainSink(t, p, "out", 4)
	}
}

// A pipeline without items for the stage is drained although its role has died.
func TestADeadStageWithoutItemsIsDrained(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	c := startRole(t, b, newWorkerSet(), "judges", 1)
	p := open(t, b, roleStage("score"), with(c))
	require.NoError(t, c.Destroy(testContext(t)))
	require.Eventually(t, func() bool { return status(t, p).Stages[0].Death != nil }, 2*time.Minute, time.Millisecond)
	require.Contains(t, status(t, p).Stages[0].Death.Cause, "destroyed")
	require.NoError(t, p.Drain(testContext(t)))
}

// A stage whose role has no such method is refused before anything is stored or started.
func TestAStageOfAnUnknownMethodIsRefused(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	c := startRole(t, b, newWorkerSet(), "judges", 1)
	for _, more := range []func(*pipeline.StageSpec){
		func(s *pipeline.StageSpec) { s.Method = "scroe" },
		func(s *pipeline.StageSpec) { s.AbortMethod = "abotr" },
	} {
		_, err := pipeline.Open(testContext(t), pipeline.Config{Bus: b, Clusters: []*roles.Cluster{c}}, roleStage("score", more))
		require.ErrorIs(t, err, bus.ErrInvalid)
		require.ErrorContains(t, err, "stage work: role judges (class judge) has no method")
		require.ErrorContains(t, err, "did you mean")
		require.ErrorContains(t, err, "it has abort, fragile, hold, same, score, split, sum")
	}
	names, err := pipeline.List(testContext(t), b, "default")
	require.NoError(t, err)
	require.Empty(t, names)
	p := open(t, b, roleStage("judge"))
	require.ErrorContains(t, p.Join(testContext(t), "work", c), `has no method "judge"`)
}
