package placement_test

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus/bustest"
	"troupe/gpu"
	agent "troupe/nodes"
	"troupe/nodes/protocol"
	"troupe/placement"
	"troupe/placement/planner"
)

// addOwn starts a reporter of one node with four devices whose agent takes every process on them for its own.
func (s *testCluster) addOwn(name string) *gpu.Sim {
	s.t.Helper()
	sim := gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: 4}, name)[0]
	readyCh := make(chan struct{})
	r, err := agent.NewReporter(agent.Config{
		Bus: s.bus(), Name: name, CPUs: 16, Inventory: sim, Lease: s.lease, Beat: 50 * time.Millisecond,
		OwnFunc: func(int) bool { return true }, RegisteredFunc: func() { close(readyCh) },
	})
	require.NoError(s.t, err)
	s.run(name, r.Run)
	<-readyCh
	return sim
}

// While the devices of the first victim wait for verification, no second victim is preempted for the same request.
func TestOnePreemptionPerRequest(t *testing.T) {
	t.Parallel()
	s := &testCluster{t: t, srv: bustest.StartServer(t, bustest.Options{}), lease: 2 * time.Second}
	require.NoError(t, agent.CreateEventStream(t.Context(), s.bus(), 0))
	s.service(placement.Config{Rules: placement.Rules{Policy: planner.Policy{Preempt: true}, Grace: 100 * time.Millisecond}})
	c := s.client("default")
	sim := s.addOwn("host")
	s.ready(c, 1)
	ctx := within(t, 2*time.Minute)
	small, err := c.Reserve(ctx, gang("small", 1, 1))
	require.NoError(t, err)
	_, err = c.Reserve(ctx, gang("large", 1, 3))
	require.NoError(t, err)
	uuid := small.Workers[0].Slots[0].UUID
	require.NoError(t, sim.AddProcess(uuid, gpu.Process{PID: 99, Kind: gpu.Compute})) // its worker, which takes time to end
	var mu sync.Mutex
	var told []placement.Event
	require.NoError(t, c.Events(ctx, func(e placement.Event) { mu.Lock(); defer mu.Unlock(); told = append(told, e) }))

	urgentCh := s.waits(c, urgent(gang("urgent", 1, 1), 5))
	s.eventually(func() bool { return state(t, c, "small") == "" }, "the smaller is sent away")
	time.Sleep(time.Second) // many rounds, and ten times the grace period
	require.Equal(t, placement.StateGranted, state(t, c, "large"), "a second one was sent away for nothing")
	require.Empty(t, urgentCh)
	require.NoError(t, sim.Recover(uuid))
	require.NoError(t, <-urgentCh)
	require.Equal(t, placement.StateGranted, state(t, c, "large"))

	mu.Lock()
	defer mu.Unlock()
	for _, e := range told {
		require.Equal(t, "small", e.ID)
		require.Contains(t, e.Why, "preempted for role-urgent")
	}
	require.Len(t, told, 2, "it is told to go, and that it is over")
	var stored []agent.Event
	require.NoError(t, agent.ReadEvents(ctx, s.bus(), agent.EventQuery{Namespace: "default"}, func(e agent.Event) error {
		if e.Kind == protocol.EventReservationPreempted {
			stored = append(stored, e)
		}
		return nil
	}))
	require.Len(t, stored, 1)
	require.Equal(t, "small", stored[0].Details["reservation"])
	require.Equal(t, "urgent", stored[0].Details["for"])
	require.Contains(t, stored[0].Text, "urgent")
}
