package placement_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/gpu"
	"troupe/placement"
	"troupe/placement/planner"
)

func TestReserveAndRelease(t *testing.T) {
	s := newTestCluster(t, "sim:2x4")
	s.service(placement.Config{})
	c := s.client("default")
	s.ready(c, 2)
	ctx := within(t, 2*time.Minute)

	a, err := c.Reserve(ctx, gang("a", 3, 2))
	require.NoError(t, err)
	require.Equal(t, placement.StateGranted, a.State)
	require.NotZero(t, a.Token)
	require.Len(t, a.Workers, 3)
	require.Equal(t, []int{0, 1}, a.Workers[0].Devices)
	require.Equal(t, "n1", a.Workers[2].Node)

	again, err := c.Reserve(ctx, gang("a", 3, 2))
	require.NoError(t, err)
	require.Equal(t, a, again, "found again by its id")
	_, err = c.Reserve(ctx, gang("a", 1, 1))
	require.ErrorIs(t, err, placement.ErrDuplicate)
	require.ErrorIs(t, err, bus.ErrExists)

	_, err = c.TryReserve(ctx, gang("b", 2, 4))
	var short *placement.NoCapacityError
	require.ErrorAs(t, err, &short)
	require.ErrorIs(t, err, placement.ErrMustWait)
	require.ErrorIs(t, err, bus.ErrBusy)
	require.Equal(t, "a", short.WaitsFor[0].Reservation)
	require.Equal(t, "role-a", short.WaitsFor[0].Holder)
	require.NotEmpty(t, short.Reasons)

	waiting := make(chan error, 1)
	var b placement.Record
	go func() {
		var err error
		b, err = c.Reserve(ctx, gang("b", 2, 4))
		waiting <- err
	}()
	s.eventually(func() bool { l, err := c.List(ctx); return err == nil && len(l.Waiting) == 1 }, "b waits")
	x, err := c.Explain(ctx, gang("x", 1, 2))
	require.NoError(t, err)
	require.False(t, x.Granted, "what is free is kept for b")
	require.Equal(t, 2, x.Position)
	require.Equal(t, planner.WaitBehind, x.Wait.Code)
	require.Equal(t, "b", x.Wait.Behind)

	require.ErrorIs(t, c.Release(ctx, "a", a.Token-1), placement.ErrStaleToken)
	require.ErrorIs(t, c.Release(ctx, "a", a.Token+1), bus.ErrFenced)
	require.NoError(t, c.Release(ctx, "a", a.Token))
	require.NoError(t, c.Release(ctx, "a", a.Token), "idempotent")
	require.NoError(t, <-waiting)
	require.Greater(t, b.Token, a.Token)

	list, err := c.List(ctx)
	require.NoError(t, err)
	require.Equal(t, []placement.Record{b}, list.Records)
	require.NoError(t, c.Release(ctx, "b", b.Token))
	list, err = c.List(ctx)
	require.NoError(t, err)
	require.Empty(t, list.Records)
}

// Invalid requests and requests that never fit are refused at once.
func TestBadInput(t *testing.T) {
	s := newTestCluster(t, "sim:2x4")
	s.service(placement.Config{})
	c := s.client("default")
	s.ready(c, 2)
	bundle := func(b placement.Bundle) placement.Request { return placement.Request{Bundles: []placement.Bundle{b}} }
	one := placement.Bundle{Devices: placement.Whole}
	for name, tc := range map[string]struct {
		r    placement.Request
		is   error
		says string
	}{
		"strategy":     {placement.Request{Strategy: "SIDEWAYS", Bundles: []placement.Bundle{one}}, planner.ErrUnknownStrategy, "SIDEWAYS"},
		"negative":     {bundle(placement.Bundle{Devices: -1000}), planner.ErrBadShare, "-1"},
		"beyond whole": {bundle(placement.Bundle{Devices: 1500}), planner.ErrBadShare, "1.5"},
		"out of range": {placement.Request{Mapping: &placement.Mapping{World: 2, Devices: []int{0, 99}}}, planner.ErrUnknownDevice, "99"},
		"repeats":      {placement.Request{Mapping: &placement.Mapping{World: 2, Devices: []int{1, 1}}}, planner.ErrBadMapping, "twice"},
		"too large":    {bundle(placement.Bundle{Devices: 9000}), planner.ErrBundleTooLarge, "9"},
		"colocate":     {placement.Request{Colocate: "nobody", Bundles: []placement.Bundle{one}}, planner.ErrUnknownReservation, "nobody"},
		"empty":        {placement.Request{}, planner.ErrEmptyRequest, "no bundles"},
		"labels":       {bundle(placement.Bundle{Devices: 1000, Labels: map[string]string{"rack": "z"}}), planner.ErrNoSuchLabel, "rack"},
		"node":         {bundle(placement.Bundle{Devices: 1000, Node: "n9"}), planner.ErrUnknownNode, "n9"},
		"topology":     {placement.Request{Topology: placement.Topology{Within: "galaxy"}, Bundles: []placement.Bundle{one}}, planner.ErrBadTopology, "galaxy"},
		"instances":    {placement.Request{PerInstance: 2, Bundles: placement.Repeat(4, one)}, planner.ErrBadInstances, "instance"},
		"never":        {placement.Request{Strategy: placement.StrictSpread, Bundles: placement.Repeat(3, one)}, placement.ErrNeverFits, "STRICT_SPREAD"},
		"id":           {placement.Request{ID: "a.b", Bundles: []placement.Bundle{one}}, bus.ErrInvalid, "a.b"},
		"namespace":    {placement.Request{Namespace: "other", Bundles: []placement.Bundle{one}}, bus.ErrInvalid, "other"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := c.Reserve(within(t, 2*time.Minute), tc.r)
			require.ErrorIs(t, err, tc.is)
			require.ErrorContains(t, err, tc.says)
		})
	}
	require.NoError(t, c.Release(t.Context(), "nobody", 7), "unknown is released")
	require.ErrorIs(t, c.SetRules(t.Context(), placement.Rules{}), bus.ErrRefused)
	list, err := s.client("").List(t.Context())
	require.NoError(t, err)
	require.Empty(t, list.Records)
	require.Empty(t, list.Waiting)
}

// A withdrawn request is not granted and does not hold back others.
func TestGivingUpWithdraws(t *testing.T) {
	s := newTestCluster(t, "sim:1x2")
	s.service(placement.Config{})
	c := s.client("default")
	s.ready(c, 1)
	a, err := c.Reserve(t.Context(), gang("a", 1, 1))
	require.NoError(t, err)

	_, err = c.Reserve(within(t, 300*time.Millisecond), gang("b", 1, 2))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	var waited *placement.WaitError
	require.ErrorAs(t, err, &waited)
	require.Equal(t, "a", waited.Wait.WaitsFor[0].Reservation)
	require.ErrorContains(t, err, "held by role-a")

	_, err = c.TryReserve(t.Context(), gang("c", 1, 1))
	require.NoError(t, err, "nothing is kept for b any more")
	require.NoError(t, c.Release(t.Context(), "a", a.Token))
	list, err := c.List(t.Context())
	require.NoError(t, err)
	require.Len(t, list.Records, 1)
	require.Empty(t, list.Waiting)
}

func TestRulesOutliveTheLeader(t *testing.T) {
	s := newTestCluster(t, "sim:1x4")
	first := s.service(placement.Config{})
	op, c := s.client(""), s.client("small")
	s.ready(op, 1)
	rules := placement.Rules{Policy: planner.Policy{Quotas: map[string]placement.Share{"small": placement.Wholes(2), "*": placement.Wholes(1)}}, MaxPriority: map[string]int{"small": 3, "*": 0}, Grace: time.Second}
	require.NoError(t, op.SetRules(t.Context(), rules))
	a, err := c.Reserve(t.Context(), gang("a", 1, 2))
	require.NoError(t, err)

	first.stop()
	s.service(placement.Config{})
	got, err := op.Rules(t.Context())
	require.NoError(t, err)
	require.Equal(t, rules, got)
	s.ready(op, 1)
	_, err = c.TryReserve(t.Context(), gang("b", 1, 1))
	var over *planner.QuotaError
	require.ErrorAs(t, err, &over)
	require.Equal(t, placement.Wholes(2), over.Held)
	_, err = c.Reserve(t.Context(), gang("c", 1, 3))
	require.ErrorIs(t, err, placement.ErrNeverFits)
	require.NoError(t, c.Release(t.Context(), "a", a.Token), "the token holds over the change of leaders")
	_, err = c.TryReserve(t.Context(), gang("b", 1, 1))
	require.NoError(t, err)
	for namespace, most := range map[string]int{"small": 3, "other": 0} {
		urgent := gang("urgent", 1, 1)
		urgent.Priority = most + 1
		_, err = s.client(namespace).Reserve(t.Context(), urgent)
		require.ErrorIs(t, err, bus.ErrRefused)
		require.ErrorContains(t, err, fmt.Sprintf("its priority %d is above %d, the highest of namespace %s", most+1, most, namespace))
	}
	for _, namespace := range []string{"other", "third"} { // each has the quota of the namespaces that have none
		_, err = s.client(namespace).TryReserve(t.Context(), gang(namespace+"-large", 1, 2))
		require.ErrorIs(t, err, placement.ErrNeverFits)
		require.ErrorAs(t, err, &over)
		require.Equal(t, namespace, over.Namespace)
		_, err = s.client(namespace).TryReserve(t.Context(), gang(namespace, 1, 1))
		require.NoError(t, err)
	}
}

// The holder is notified before an eviction, and its devices are granted only after verification.
func TestPreemption(t *testing.T) {
	s := newTestCluster(t, "sim:1x2")
	s.service(placement.Config{Rules: placement.Rules{Policy: planner.Policy{Preempt: true}, Grace: 300 * time.Millisecond}})
	c := s.client("default")
	s.ready(c, 1)
	events := make(chan placement.Event, 8)
	require.NoError(t, c.Events(t.Context(), func(e placement.Event) { events <- e }))
	low, err := c.Reserve(t.Context(), gang("low", 1, 2))
	require.NoError(t, err)
	urgent := gang("high", 1, 1)
	urgent.Priority = 5
	asked := time.Now()
	high, err := c.Reserve(within(t, 2*time.Minute), urgent)
	require.NoError(t, err)
	require.GreaterOrEqual(t, time.Since(asked), 300*time.Millisecond)
	leave, gone := <-events, <-events
	require.Equal(t, placement.EventLeave, leave.Kind)
	require.EqualValues(t, 300, leave.Grace)
	require.Equal(t, low.Token, leave.Token)
	require.Contains(t, leave.Why, "preempted for role-high (high of namespace default)")
	require.Contains(t, leave.Why, "whose priority 5 is higher")
	require.Equal(t, placement.EventPreempted, gone.Kind)
	require.Greater(t, high.Token, low.Token)
	require.NoError(t, c.Release(t.Context(), "low", low.Token), "released already")
}

// Unfit devices are not granted until they recover.
func TestUnfitDevicesAreRefusedByName(t *testing.T) {
	s := newTestCluster(t, "sim:1x2")
	s.service(placement.Config{})
	c := s.client("default")
	s.ready(c, 1)
	devices, err := s.sims[0].Devices(t.Context())
	require.NoError(t, err)
	require.NoError(t, s.sims[0].AddProcess(devices[0].UUID, gpu.Process{PID: 4711, Name: "python3", Kind: gpu.Compute}))
	require.NoError(t, s.sims[0].Fail(devices[1].UUID, "XID 79"))
	var short *placement.NoCapacityError
	s.eventually(func() bool {
		r, err := c.TryReserve(t.Context(), gang("", 1, 2))
		if err == nil { // not reported yet
			require.NoError(t, c.Release(t.Context(), r.ID, r.Token))
		}
		return errors.As(err, &short) && len(short.WaitsFor) == 2
	}, "both are refused")
	require.ErrorContains(t, short, "process 4711 (python3) is on it")
	require.ErrorContains(t, short, "XID 79")
	require.NoError(t, s.sims[0].Recover(devices[0].UUID))
	require.NoError(t, s.sims[0].Recover(devices[1].UUID))
	_, err = c.Reserve(within(t, 2*time.Minute), gang("a", 1, 2))
	require.NoError(t, err, "grantable again")
}
