package pipeline_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/wire"
	"troupe/nodes"
	"troupe/pipeline"
	"troupe/roles"
)

// Workers that are killed with several tasks, again and again, do not count as attempts of the items, and no item
// becomes a dead letter.
func TestAWorkerRestartDoesNotCountAsAFailure(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	b := bustest.Open(t, bus.Config{InProcess: srv})
	rt, err := roles.Open(t.Context(), roles.Config{Bus: b})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rt.Close(context.Background())) })
	p := open(t, b, roleStage("hold", func(s *pipeline.StageSpec) { s.Style, s.InFlight, s.Losses = pipeline.Items, 2, 2 }))
	require.NoError(t, p.Put(testContext(t), "in", items(4)...))
	for round := range 3 {
		victim := spawn(t, rt, fmt.Sprintf("victims%d", round), srv.URL())
		t.Cleanup(victim.kill)
		require.NoError(t, p.Join(testContext(t), "work", victim.cluster))
		require.Eventually(t, func() bool { return status(t, p).Stages[0].InFlight == 4 }, 2*time.Minute, time.Millisecond)
		victim.kill()
		require.NoError(t, p.Lost(testContext(t), "work", victim.cluster, bus.Errorf(bus.CodeWorkerLost, "killed")))
	}
	require.EqualValues(t, 12, status(t, p).Stages[0].Lost)
	tr := newWorkerSet()
	close(tr.goCh)
	require.NoError(t, p.Join(testContext(t), "work", startRole(t, b, tr, "survivors", 2)))
	drainSink(t, p, "out", 4)
	require.Zero(t, status(t, p).Dead)
}

// A role that restarts because of one rank does not count as a loss for the items of its other ranks.
func TestARestartForAnotherRankDoesNotCountAsALoss(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	tr := newWorkerSet()
	c := startRole(t, b, tr, "judges", 2)
	p := open(t, b, roleStage("hold", func(s *pipeline.StageSpec) { s.Style, s.Losses = pipeline.Items, 2 }))
	require.NoError(t, p.Put(testContext(t), "in", items(1)...))
	culprit := bus.Errorf(bus.CodeWorkerLost, "its process was killed by SIGKILL")
	culprit.Role, culprit.Rank = "judges", 1
	why := bus.Errorf(bus.CodeWorkerLost, "the role is restarted because of rank 1").WithCause(culprit)
	for range 5 {
		require.NoError(t, p.Join(testContext(t), "work", c, 0))
		tr.came(t)
		require.NoError(t, p.Lost(testContext(t), "work", c, why, 0))
	}
	require.EqualValues(t, 5, status(t, p).Stages[0].Lost)
	require.Zero(t, status(t, p).Dead)
	// The death of the item's own rank is a loss.
	culprit.Rank = 0
	for range 2 {
		require.NoError(t, p.Join(testContext(t), "work", c, 0))
		tr.came(t)
		require.NoError(t, p.Lost(testContext(t), "work", c, culprit, 0))
	}
	require.Eventually(t, func() bool { return status(t, p).Dead == 1 }, 2*time.Minute, time.Millisecond)
	dead, err := p.Dead(testContext(t))
	require.NoError(t, err)
	require.Equal(t, "losses 2", fmt.Sprint(dead[0].Reason, " ", dead[0].Attempts))
}

// An item that kills its worker in every attempt is isolated from the items that run with it and becomes a dead letter;
// the others succeed.
func TestAnItemThatKillsItsWorkersBecomesADeadLetter(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	b := bustest.Open(t, bus.Config{InProcess: srv})
	rt, err := roles.Open(t.Context(), roles.Config{Bus: b})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rt.Close(context.Background())) })
	p := open(t, b, roleStage("fragile", func(s *pipeline.StageSpec) { s.InFlight, s.Losses = 4, 2 }))
	all := items(8)
	all[3].ID = "poison"
	all[3].Body, err = wire.Marshal(-1)
	require.NoError(t, err)
	require.NoError(t, p.Put(testContext(t), "in", all...))
	deaths := 0
	for status(t, p).Streams[0].Items > 0 {
		require.Less(t, deaths, 12, "the item does not become a dead letter")
		one := spawn(t, rt, fmt.Sprintf("fragile%d", deaths), srv.URL())
		t.Cleanup(one.kill)
		require.NoError(t, p.Join(testContext(t), "work", one.cluster))
		died := false
		require.Eventually(t, func() bool {
			select {
			case <-one.diedCh:
				died = true
			default:
			}
			return died || status(t, p).Streams[0].Items == 0
		}, 2*time.Minute, time.Millisecond)
		if died {
			deaths++
			require.NoError(t, p.Lost(testContext(t), "work", one.cluster, bus.Errorf(bus.CodeWorkerLost, "it has ended")))
		}
	}
	require.LessOrEqual(t, deaths, 6+2+1)
	dead, err := p.Dead(testContext(t))
	require.NoError(t, err)
	require.Len(t, dead, 1)
	require.Equal(t, "poison losses", dead[0].ID+" "+dead[0].Reason)
	require.Len(t, drainSink(t, p, "out", 7), 7)
}

// Dead letters are reported in events, at most one a second, and in the status.
func TestDeadLettersAreReported(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	require.NoError(t, nodes.CreateEventStream(t.Context(), b, 0))
	p := open(t, b, refuses())
	var bad []pipeline.Item
	for i := range 50 {
		bad = append(bad, pipeline.Item{ID: fmt.Sprint("bad", i)})
	}
	require.NoError(t, p.Put(testContext(t), "in", bad...))
	require.Eventually(t, func() bool { return status(t, p).Dead == 50 }, 2*time.Minute, time.Millisecond)
	require.NoError(t, p.Put(testContext(t), "in", pipeline.Item{ID: "bad-last"}))
	var told []nodes.Event
	require.Eventually(t, func() bool {
		told = nil
		require.NoError(t, nodes.ReadEvents(testContext(t), b, nodes.EventQuery{Namespace: "default"}, func(e nodes.Event) error {
			told = append(told, e)
			return nil
		}))
		count := 0
		for _, e := range told {
			n, err := strconv.Atoi(e.Details["count"])
			require.NoError(t, err)
			count += n
		}
		return count == 51
	}, 2*time.Minute, 20*time.Millisecond)
	require.LessOrEqual(t, len(told), 4, "and not one each")
	require.True(t, slices.IsSortedFunc(told, func(a, b nodes.Event) int { return a.At.Compare(b.At) }))
	e := told[0]
	require.Equal(t, pipeline.EventDeadLettered, e.Kind)
	require.Equal(t, "p in bad0 1 1 refused", fmt.Sprint(e.Details["pipeline"], " ", e.Details["stream"], " ", e.Details["item"], " ", e.Details["number"], " ",
		e.Details["tries"], " ", e.Details["cause"]))
	require.Contains(t, e.Text, "gave up item bad0 of stream in after 1 tries (failures): refused")
	require.EqualValues(t, 51, status(t, p).GivenUp)
	n, err := p.DropDead(testContext(t), nil, true)
	require.NoError(t, err)
	require.Equal(t, 51, n)
	require.Equal(t, "0 51", fmt.Sprint(status(t, p).Dead, " ", status(t, p).GivenUp))
}
