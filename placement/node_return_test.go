package placement_test

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/kv"
	"troupe/bus/wire"
	"troupe/gpu"
	agent "troupe/nodes"
	"troupe/nodes/protocol"
	"troupe/placement"
)

// addAgent starts an agent with one simulated node of two devices, on a connection that can be cut.
func (s *testCluster) addAgent(name string) *bustest.Faults {
	s.t.Helper()
	line := bustest.NewFaults(s.srv)
	readyCh := make(chan struct{})
	a, err := agent.NewAgent(agent.AgentConfig{
		Bus: s.busAt(bus.Config{InProcess: line}), Dir: s.t.TempDir(), Grace: time.Second, ReadyFunc: func() { close(readyCh) },
		Access: agent.Access{URLs: []string{"nats://127.0.0.1:1"}},
		Nodes: []agent.Config{{
			Name: name, CPUs: 4, Lease: s.lease, Beat: 50 * time.Millisecond,
			Inventory: gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: 2}, name)[0],
		}},
	})
	require.NoError(s.t, err)
	s.run(name, a.Run)
	<-readyCh
	return line
}

// sleeper starts a worker that does not end by itself for each bundle of a reservation, and returns the pids.
func (s *testCluster) sleeper(r placement.Record) []int {
	s.t.Helper()
	client := agent.NewClient(s.bus())
	var pids []int
	for _, w := range r.Workers {
		l := agent.Launch{
			Node: w.Node, Reservation: r.ID, Token: r.Token, Over: r.SharesWith, Program: agent.Program{Command: []string{"sh", "-c", "exec sleep 1000"}},
			Workers: []agent.Start{{ID: agent.WorkerID{Namespace: "default", Role: r.ID, Incarnation: fmt.Sprint(r.Token), Rank: w.Rank}, Name: r.ID}},
		}
		for _, slot := range w.Slots {
			l.Workers[0].Devices = append(l.Workers[0].Devices, slot.UUID)
		}
		started, err := client.Launch(within(s.t, 20*time.Second), l)
		require.NoError(s.t, err)
		require.Nil(s.t, started[0].Err)
		pids = append(pids, started[0].PID)
	}
	return pids
}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

// The devices of a node that was cut off for longer than its lease are granted only after the workers of the ended
// reservation are gone.
func TestReturningNode(t *testing.T) {
	t.Parallel()
	s := newTestCluster(t, "sim:1x1")
	s.service(placement.Config{})
	c := s.client("default")
	line := s.addAgent("far")
	s.ready(c, 2)
	ctx := within(t, 2*time.Minute)
	old, err := c.Reserve(ctx, placement.Request{ID: "old", Bundles: []placement.Bundle{on("far", 2)}})
	require.NoError(t, err)
	pids := s.sleeper(old)
	time.Sleep(s.lease) // the leader declares no node lost before

	line.Freeze()
	s.eventually(func() bool { return state(t, c, "old") == "" }, "ended with the lease")
	next := make(chan placement.Record, 1)
	go func() {
		r, err := c.Reserve(ctx, placement.Request{ID: "next", AwaitNodes: true, Bundles: []placement.Bundle{on("far", 2)}})
		if err != nil {
			t.Error(err)
		}
		next <- r
	}()
	require.True(t, alive(pids[0]), "it computes, cut off as it is")
	line.Thaw()
	began := time.Now()
	r := <-next
	require.False(t, alive(pids[0]), "the devices were granted while the old worker was on them")
	require.Less(t, time.Since(began), 20*time.Second, "it is killed at once, and not at the next sweep")
	require.Greater(t, r.Token, old.Token)

	// A late kill order does not affect the new holder, and a late start under the old token is refused.
	fresh := s.sleeper(r)
	question, err := wire.Marshal(protocol.ReportRequest{Ended: []protocol.KillOrder{{Reservation: "next", Token: old.Token}, {Reservation: "old", Token: old.Token}}})
	require.NoError(t, err)
	require.NoError(t, s.bus().Publish(bus.NodeAsk("far"), question))
	client := agent.NewClient(s.bus())
	_, err = client.Workers(ctx, "far")
	require.NoError(t, err)
	started, err := client.Launch(ctx, agent.Launch{
		Node: "far", Reservation: "old", Token: old.Token, Program: agent.Program{Command: []string{"sleep", "1000"}},
		Workers: []agent.Start{{ID: agent.WorkerID{Namespace: "default", Role: "late", Incarnation: "x"}, Name: "late"}},
	})
	require.NoError(t, err)
	require.Equal(t, bus.CodeFenced, started[0].Err.Code)
	require.True(t, alive(fresh[0]))
}

// The workers of a gang whose reservation still exists are not killed when a lost node of it returns.
func TestReturningNodeOfAGang(t *testing.T) {
	t.Parallel()
	s := newTestCluster(t, "sim:1x1")
	s.service(placement.Config{})
	c := s.client("default")
	line := s.addAgent("far")
	s.addAgent("near")
	s.ready(c, 3)
	ctx := within(t, 2*time.Minute)
	both, err := c.Reserve(ctx, placement.Request{ID: "both", Bundles: []placement.Bundle{on("far", 1), on("near", 1)}})
	require.NoError(t, err)
	pids := s.sleeper(both)
	time.Sleep(s.lease)
	line.Freeze()
	s.eventually(func() bool { n, there := nodeState(t, c, "far"); return !there || n == placement.NodeUnproven }, "gone")
	require.Equal(t, placement.StateLost, state(t, c, "both"))
	line.Thaw()
	s.ready(c, 3)
	_, err = c.TryReserve(ctx, placement.Request{ID: "all", Bundles: []placement.Bundle{on("far", 2)}})
	require.ErrorIs(t, err, placement.ErrMustWait, "its holder has not released it")
	require.True(t, alive(pids[0]))
	require.NoError(t, c.Release(ctx, "both", both.Token)) // its workers still run: the agents kill them
	_, err = c.Reserve(ctx, placement.Request{ID: "all", Bundles: []placement.Bundle{on("far", 2), on("near", 2)}})
	require.NoError(t, err)
	require.False(t, alive(pids[0]) || alive(pids[1]))
}

// This must not happen: a new leader's question to all nodes is one that agents do not understand, so that it knows them late.
func TestNewLeaderAsksAllNodes(t *testing.T) {
	s := newTestCluster(t, "sim:1x1")
	questions := make(chan *bus.Msg, 64)
	_, err := s.bus().SubscribeChan(bus.NodeAsk(""), questions)
	require.NoError(t, err)
	s.service(placement.Config{})
	m := <-questions
	require.NoError(t, wire.Unmarshal(m.Data, new(protocol.ReportRequest)))
}

// A delayed report that was made before a node was lost does not verify that its devices are empty.
func TestDelayedReportVerifiesNothing(t *testing.T) {
	s := newTestCluster(t, "sim:1x1")
	s.service(placement.Config{})
	c := s.client("default")
	s.ready(c, 1)
	b := s.bus()
	bucket, err := kv.Open(t.Context(), b, kv.Config{Bucket: protocol.LeaseBucket, Memory: true, Leases: true})
	require.NoError(t, err)
	report := protocol.Report{
		Node: "slow", Session: "one", Seq: 1, CPUs: 1, RunningComplete: true, Answered: protocol.NoStamp,
		Devices: []gpu.Device{{UUID: "GPU-slow", Index: 0}},
	}
	value, err := wire.Marshal(report)
	require.NoError(t, err)
	requests := make(chan *bus.Msg, 64)
	_, err = b.SubscribeChan(bus.NodeAsk("slow"), requests)
	require.NoError(t, err)
	lease, err := bucket.Lease(t.Context(), protocol.LeaseKey("slow"), value, s.lease)
	require.NoError(t, err)
	t.Cleanup(func() { _ = lease.Release(t.Context()) })
	beat := func() {
		report.Seq++
		data, err := wire.Marshal(protocol.Heartbeat{Node: "slow", Session: "one", Report: &report})
		require.NoError(t, err)
		require.NoError(t, b.Publish(bus.NodeBeat("slow"), data))
	}
	s.eventually(func() bool { beat(); _, there := nodeState(t, c, "slow"); return there }, "known")
	beat() // not an answer to the newest request
	_, err = c.TryReserve(t.Context(), placement.Request{ID: "x", Bundles: []placement.Bundle{on("slow", 1)}})
	require.ErrorIs(t, err, placement.ErrMustWait)
	m := <-requests
	var q protocol.ReportRequest
	require.NoError(t, wire.Unmarshal(m.Data, &q))
	require.Greater(t, q.Stamp, uint64(protocol.NoStamp))
	report.Answered = q.Stamp
	s.eventually(func() bool {
		beat()
		_, err := c.TryReserve(t.Context(), placement.Request{ID: "x", Bundles: []placement.Bundle{on("slow", 1)}})
		return err == nil
	}, "proven")
}
