package placement_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/placement"
	"troupe/placement/planner"
)

// waits starts a reserve call that has to wait, and returns the channel of its result.
func (s *testCluster) waits(c *placement.Client, r placement.Request) chan error {
	s.t.Helper()
	before, err := c.List(s.t.Context())
	require.NoError(s.t, err)
	doneCh := make(chan error, 1)
	go func() {
		_, err := c.Reserve(within(s.t, 30*time.Second), r)
		doneCh <- err
	}()
	s.eventually(func() bool {
		now, err := c.List(s.t.Context())
		return err == nil && len(now.Waiting) == len(before.Waiting)+1
	}, "%s waits", r.ID)
	return doneCh
}

func urgent(r placement.Request, priority int) placement.Request {
	r.Priority = priority
	return r
}

// The queue is served by priority and age; small requests are backfilled unless they would delay the head.
func TestQueueOrder(t *testing.T) {
	s := newTestCluster(t, "sim:2x4")
	s.service(placement.Config{})
	c := s.client("default")
	s.ready(c, 2)
	ctx := within(t, 2*time.Minute)
	a, err := c.Reserve(ctx, placement.Request{ID: "a", Bundles: []placement.Bundle{on("n0", 3)}})
	require.NoError(t, err)
	b, err := c.Reserve(ctx, placement.Request{ID: "b", Bundles: []placement.Bundle{on("n1", 2)}})
	require.NoError(t, err)

	low := s.waits(c, gang("low", 1, 4)) // it will use n1 after the release of b
	high := s.waits(c, urgent(gang("high", 2, 4), 5))
	list, err := c.List(ctx)
	require.NoError(t, err)
	require.Equal(t, []string{"high", "low"}, []string{list.Waiting[0].ID, list.Waiting[1].ID})
	_, err = c.TryReserve(ctx, gang("small", 1, 1))
	require.ErrorIs(t, err, placement.ErrMustWait, "everything is kept for the head")

	require.NoError(t, c.Release(ctx, "a", a.Token))
	require.NoError(t, c.Release(ctx, "b", b.Token))
	require.NoError(t, <-high)
	require.Empty(t, low)
	list, err = c.List(ctx)
	require.NoError(t, err)
	require.NoError(t, c.Release(ctx, "high", list.Records[0].Token))
	require.NoError(t, <-low)

	// The head needs the node of low; the small request is backfilled on the other one.
	list, err = c.List(ctx)
	require.NoError(t, err)
	full := list.Records[0].Workers[0].Node
	big := s.waits(c, placement.Request{ID: "big", Bundles: []placement.Bundle{on(full, 4)}})
	small, err := c.TryReserve(ctx, gang("small", 1, 1))
	require.NoError(t, err, "beside what is kept")
	require.NotEqual(t, full, small.Workers[0].Node)
	require.Empty(t, big)
	require.NoError(t, c.Release(ctx, "low", list.Records[0].Token))
	require.NoError(t, <-big)
}

// Without a rule that allows it, no reservation is preempted.
func TestPreemptionIsOffByDefault(t *testing.T) {
	s := newTestCluster(t, "sim:1x2")
	s.service(placement.Config{})
	c := s.client("default")
	s.ready(c, 1)
	_, err := c.Reserve(t.Context(), gang("low", 1, 2))
	require.NoError(t, err)
	high := s.waits(c, urgent(gang("high", 1, 1), 100))
	x, err := c.Explain(t.Context(), urgent(gang("higher", 1, 1), 200))
	require.NoError(t, err)
	require.Empty(t, x.Preempts)
	require.Equal(t, placement.StateGranted, state(t, c, "low"))
	require.Empty(t, high)

	// After an operator has allowed preemption, the victim is notified and its grace period is respected.
	require.NoError(t, s.client("").SetRules(t.Context(), placement.Rules{Policy: planner.Policy{Preempt: true}, Grace: 200 * time.Millisecond}))
	require.NoError(t, <-high)
}

// Of several services one leads; the next one takes over, at once if the leader ends in order.
func TestStandBy(t *testing.T) {
	s := newTestCluster(t, "sim:1x2")
	services := []*background{s.service(placement.Config{ID: "first"})}
	c := s.client("default")
	s.ready(c, 1)
	for range 2 {
		services = append(services, s.service(placement.Config{ID: "stand-by"}))
	}
	first, err := c.Reserve(t.Context(), gang("r", 1, 1))
	require.NoError(t, err)
	for _, leader := range services[:2] {
		leader.stop()
		again, err := c.Reserve(within(t, 2*time.Minute), gang("r", 1, 1))
		require.NoError(t, err)
		require.Equal(t, first, again, "found again, by another")
	}
}

// The end of a reservation ends the reservations inside it, and refuses the requests that wait for one of its bundles.
func TestEndOfAParent(t *testing.T) {
	s := newTestCluster(t, "sim:1x2")
	s.service(placement.Config{})
	c := s.client("default")
	s.ready(c, 1)
	ctx := within(t, 2*time.Minute)
	parent, err := c.Reserve(ctx, gang("parent", 1, 1))
	require.NoError(t, err)
	inside := func(id string) placement.Request {
		return placement.Request{ID: id, Parent: "parent", Bundles: []placement.Bundle{{Devices: placement.Whole}}}
	}
	child, err := c.Reserve(ctx, inside("child"))
	require.NoError(t, err)
	require.Equal(t, parent.Workers[0].Slots, child.Workers[0].Slots)
	waiting := s.waits(c, inside("waiting"))
	require.NoError(t, c.Release(ctx, "parent", parent.Token))
	require.ErrorIs(t, <-waiting, planner.ErrUnknownReservation)
	s.eventually(func() bool { return state(t, c, "child") == "" }, "the reservation inside has ended")
	s.eventually(func() bool {
		_, err := c.TryReserve(ctx, gang("all", 1, 2))
		return err == nil
	}, "the devices are free again")
}
