package placement_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/wire"
	"troupe/gpu"
	"troupe/nodes/protocol"
	"troupe/placement"
)

// doomed adds a node on a connection that can be cut.
func (s *testCluster) doomed(name string) (*bustest.Faults, *gpu.Sim) {
	f := bustest.NewFaults(s.srv)
	b := s.busAt(bus.Config{InProcess: f})
	sim := gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: 2}, name)[0]
	s.addNode(b, name, sim)
	return f, sim
}

// nodeEvents returns the events of nodes from now on, as "kind on node".
func (s *testCluster) nodeEvents() <-chan string {
	s.t.Helper()
	ch := make(chan string, 64)
	b := s.bus()
	_, err := b.Subscribe(bus.Events(""), func(m *bus.Msg) {
		var e protocol.Event
		if wire.Unmarshal(m.Data, &e) == nil && strings.HasPrefix(e.Kind, "node_") {
			ch <- e.Kind + " on " + e.Node
		}
	})
	require.NoError(s.t, err)
	require.NoError(s.t, b.Flush(s.t.Context()))
	return ch
}

func on(node string, devices int) placement.Bundle {
	return placement.Bundle{Node: node, Devices: placement.Wholes(devices)}
}

// state returns the state of a reservation; empty if it does not exist.
func state(t testing.TB, c *placement.Client, id string) placement.State {
	list, err := c.List(within(t, 2*time.Minute))
	require.NoError(t, err)
	for _, r := range list.Records {
		if r.ID == id {
			return r.State
		}
	}
	return ""
}

func nodeState(t testing.TB, c *placement.Client, name string) (placement.NodeState, bool) {
	nodes, err := c.Nodes(within(t, 2*time.Minute))
	require.NoError(t, err)
	for _, n := range nodes {
		if n.Report.Node == name {
			return n.State, true
		}
	}
	return "", false
}

// Devices of a lost node are granted again only after its lease has expired.
func TestNodeLoss(t *testing.T) {
	t.Parallel()
	s := newTestCluster(t, "sim:1x2")
	s.service(placement.Config{})
	c := s.client("default")
	f, sim := s.doomed("far")
	s.ready(c, 2)
	ctx := within(t, 2*time.Minute)
	alone, err := c.Reserve(ctx, placement.Request{ID: "alone", Bundles: []placement.Bundle{on("far", 1)}})
	require.NoError(t, err)
	both, err := c.Reserve(ctx, placement.Request{ID: "both", Bundles: []placement.Bundle{on("n0", 1), on("far", 1)}})
	require.NoError(t, err)
	time.Sleep(s.lease) // the leader declares no node lost before

	events := s.nodeEvents()
	f.Freeze()
	s.eventually(func() bool { return state(t, c, "alone") == placement.StateLost }, "lost")
	require.Equal(t, "node_lost on far", <-events)
	require.Equal(t, placement.StateLost, state(t, c, "both"))
	_, err = c.TryReserve(ctx, placement.Request{ID: "x", Bundles: []placement.Bundle{on("far", 1)}})
	require.ErrorIs(t, err, placement.ErrMustWait)
	require.ErrorContains(t, err, "no heartbeat")

	f.Thaw() // before the lease has expired: nothing has ended
	s.eventually(func() bool { return state(t, c, "alone") == placement.StateGranted }, "restored")
	s.eventually(func() bool { return state(t, c, "both") == placement.StateGranted }, "restored")
	require.Equal(t, "node_joined on far", <-events)

	f.Freeze()
	s.eventually(func() bool { return state(t, c, "alone") == "" }, "ended with the lease")
	require.Equal(t, placement.StateLost, state(t, c, "both"), "what it has elsewhere may be in use")
	_, err = c.TryReserve(ctx, gang("x", 1, 2))
	require.ErrorIs(t, err, placement.ErrMustWait)
	require.NoError(t, c.Release(ctx, "alone", alone.Token), "released already")

	// A foreign process makes a returned device unfit.
	devices, err := sim.Devices(t.Context())
	require.NoError(t, err)
	require.NoError(t, sim.AddProcess(devices[0].UUID, gpu.Process{PID: 99, Kind: gpu.Compute}))
	f.Thaw()
	s.ready(c, 2)
	require.Equal(t, "node_lost on far", <-events, "one event, when its heartbeats stop, and none when its lease expires")
	require.Equal(t, "node_joined on far", <-events)
	require.NoError(t, c.Release(ctx, "both", both.Token))
	_, err = c.TryReserve(ctx, placement.Request{ID: "x", Bundles: []placement.Bundle{on("far", 2)}})
	require.ErrorIs(t, err, placement.ErrMustWait)
	require.NoError(t, sim.Recover(devices[0].UUID))
	_, err = c.Reserve(ctx, placement.Request{ID: "x", Bundles: []placement.Bundle{on("far", 2)}})
	require.NoError(t, err, "shown clean")
}

// After a server outage, nodes whose heartbeats could not arrive are not declared lost.
func TestNoNodeIsLostAfterAnOutage(t *testing.T) {
	t.Parallel()
	s := newTestCluster(t, "sim:2x2")
	s.service(placement.Config{})
	c := s.client("default")
	s.ready(c, 2)
	a, err := c.Reserve(t.Context(), gang("a", 2, 2))
	require.NoError(t, err)
	time.Sleep(s.lease)
	events := make(chan placement.Event, 8)
	require.NoError(t, c.Events(t.Context(), func(e placement.Event) { events <- e }))

	s.srv.Stop()
	time.Sleep(s.lease + 500*time.Millisecond) // longer than any lease
	s.srv.Restart()
	ctx := within(t, 2*time.Minute)
	again, err := c.Reserve(ctx, gang("a", 2, 2))
	require.NoError(t, err)
	require.Equal(t, a.Token, again.Token)
	s.ready(c, 2)
	// A request for all devices waits and does not fail, whichever nodes have returned.
	_, err = c.TryReserve(ctx, gang("b", 2, 2))
	require.ErrorIs(t, err, placement.ErrMustWait)
	time.Sleep(s.lease + time.Second)
	require.Equal(t, placement.StateGranted, state(t, c, "a"))
	require.Empty(t, events)
}

// A node that leaves in order is gone at once, and its rank is free.
func TestNodeLeaves(t *testing.T) {
	s := newTestCluster(t, "sim:3x1")
	s.service(placement.Config{})
	c := s.client("default")
	s.ready(c, 3)
	a, err := c.Reserve(t.Context(), placement.Request{ID: "a", Bundles: []placement.Bundle{on("n1", 1)}})
	require.NoError(t, err)
	events := s.nodeEvents()
	s.nodes[1].stop()
	require.Equal(t, "node_left on n1", <-events)
	s.eventually(func() bool { _, there := nodeState(t, c, "n1"); return !there }, "gone")
	require.Equal(t, placement.State(""), state(t, c, "a"))
	require.NoError(t, c.Release(t.Context(), "a", a.Token))
	_, err = c.Reserve(within(t, 2*time.Minute), gang("b", 3, 1))
	require.ErrorIs(t, err, placement.ErrNeverFits)

	s.addNodes("sim:1x1")
	s.ready(c, 3)
	require.Equal(t, "node_joined on n3", <-events)
	b, err := c.Reserve(within(t, 2*time.Minute), placement.Request{ID: "b", Bundles: []placement.Bundle{on("n3", 1)}})
	require.NoError(t, err)
	require.Equal(t, 1, b.Workers[0].NodeRank, "the rank that was free")
}

// A new leader keeps the ranks of nodes.
func TestRanksOutliveTheLeader(t *testing.T) {
	s := newTestCluster(t, "sim:1x1")
	s.addNode(s.bus(), "zz", gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: 1}, "zz")[0])
	s.addNode(s.bus(), "aa", gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: 1}, "aa")[0])
	first := s.service(placement.Config{})
	c := s.client("default")
	s.ready(c, 3)
	ranks := func() map[string]int {
		nodes, err := c.Nodes(t.Context())
		require.NoError(t, err)
		found := map[string]int{}
		for _, n := range nodes {
			found[n.Report.Node] = n.Rank
		}
		return found
	}
	before := ranks()
	require.Len(t, before, 3)
	first.stop()
	s.service(placement.Config{})
	s.ready(c, 3)
	require.Equal(t, before, ranks())
}

// A leader that hears nothing, because its own connection hangs, takes no node for lost.
func TestALeaderThatHearsNothingLosesNoNode(t *testing.T) {
	t.Parallel()
	s := newTestCluster(t, "sim:2x2")
	line := bustest.NewFaults(s.srv)
	s.service(placement.Config{Bus: s.busAt(bus.Config{InProcess: line}), Lead: 10 * time.Second})
	c := s.client("default")
	s.ready(c, 2)
	time.Sleep(s.lease) // a new leader judges only after that
	events := s.nodeEvents()
	line.Freeze()
	time.Sleep(2 * time.Second) // four times what a node may be silent
	line.Thaw()
	_, err := c.List(within(t, 2*time.Minute))
	require.NoError(t, err)
	select {
	case e := <-events:
		require.Fail(t, e)
	case <-time.After(time.Second):
	}
}
