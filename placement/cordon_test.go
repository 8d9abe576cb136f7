package placement_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/placement"
	"troupe/placement/planner"
)

// Nothing new is granted on a cordoned node or device, reservations there are not affected, and a new leader keeps the
// cordon.
func TestCordon(t *testing.T) {
	s := newTestCluster(t, "sim:2x2")
	first := s.service(placement.Config{})
	c, op := s.client("default"), s.client("")
	s.ready(op, 2)
	ctx := within(t, 2*time.Minute)
	before, err := c.Reserve(ctx, placement.Request{ID: "before", Bundles: []placement.Bundle{on("n1", 1)}})
	require.NoError(t, err)

	kept, err := op.Cordon(ctx, placement.Cordon{Node: "n1", By: "anna", Why: "a new fan"})
	require.NoError(t, err)
	require.False(t, kept.Since.IsZero())
	device, err := op.Cordon(ctx, placement.Cordon{Node: "n0", Device: "1", By: "ben"})
	require.NoError(t, err)
	require.Contains(t, device.Device, "GPU-sim", "by UUID, whatever was given")
	again, err := op.Cordon(ctx, placement.Cordon{Node: "n1", By: "carl"})
	require.NoError(t, err)
	require.Equal(t, kept.Since, again.Since)

	closed := func() {
		t.Helper()
		_, err := c.TryReserve(ctx, placement.Request{ID: "x", Bundles: []placement.Bundle{on("n1", 1)}})
		require.ErrorIs(t, err, placement.ErrMustWait)
		require.ErrorContains(t, err, "node n1: cordoned by carl since 2")
		x, err := c.Explain(ctx, gang("y", 1, 2))
		require.NoError(t, err)
		require.False(t, x.Granted)
		require.Equal(t, planner.ReasonCordoned, x.Reasons[2].Code)
		require.Contains(t, x.Reasons[1].Text, "1 cordoned by ben since 2")
		require.Equal(t, placement.StateGranted, state(t, c, "before"))
		nodes, err := op.Nodes(ctx)
		require.NoError(t, err)
		require.Equal(t, []placement.Cordon{device}, nodes[0].Cordons)
		require.Equal(t, []placement.Cordon{again}, nodes[1].Cordons)
	}
	closed()
	first.stop()
	s.service(placement.Config{})
	s.ready(op, 2)
	closed()

	// A node that leaves and returns is still cordoned; while it is absent, its cordon is listed and can be removed.
	require.NoError(t, c.Release(ctx, "before", before.Token))
	s.nodes[1].stop()
	s.eventually(func() bool {
		nodes, err := op.Nodes(ctx)
		return err == nil && len(nodes) == 2 && nodes[1].Rank == -1 && len(nodes[1].Cordons) == 1
	}, "n1 is away")
	s.addNode(s.bus(), "n1", s.sims[1])
	s.ready(op, 2)
	_, err = c.TryReserve(ctx, placement.Request{ID: "x", Bundles: []placement.Bundle{on("n1", 1)}})
	require.ErrorContains(t, err, "cordoned by carl")

	// A waiting request is granted as soon as the cordon is removed.
	waiting := make(chan error, 1)
	go func() {
		_, err := c.Reserve(ctx, gang("all", 2, 2))
		waiting <- err
	}()
	s.eventually(func() bool { l, err := c.List(ctx); return err == nil && len(l.Waiting) == 1 }, "it waits")
	was, err := op.Uncordon(ctx, "n1", "")
	require.NoError(t, err)
	require.True(t, was)
	was, err = op.Uncordon(ctx, "n1", "")
	require.NoError(t, err)
	require.False(t, was, "idempotent")
	require.Empty(t, waiting)
	was, err = op.Uncordon(ctx, "n0", device.Device)
	require.NoError(t, err)
	require.True(t, was)
	require.NoError(t, <-waiting)
}

func TestCordonBadInput(t *testing.T) {
	s := newTestCluster(t, "sim:2x2")
	s.service(placement.Config{})
	op := s.client("")
	s.ready(op, 2)
	ctx := within(t, 2*time.Minute)
	_, err := op.Cordon(ctx, placement.Cordon{Node: "n7"})
	require.ErrorIs(t, err, planner.ErrUnknownNode)
	require.ErrorContains(t, err, "there are n0, n1")
	_, err = op.Cordon(ctx, placement.Cordon{Node: "n0", Device: "5"})
	require.ErrorIs(t, err, planner.ErrUnknownDevice)
	require.ErrorContains(t, err, "it has 0 (GPU-sim")
	_, err = op.Uncordon(ctx, "n7", "")
	require.ErrorIs(t, err, planner.ErrUnknownNode)
	_, err = s.client("default").Cordon(ctx, placement.Cordon{Node: "n0"})
	require.ErrorIs(t, err, bus.ErrRefused)
}
