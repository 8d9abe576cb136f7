package roles_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/placement"
	"troupe/roles"
)

// elasticSpec is a role of two to eight replicas of one device each; the nodes have eight devices.
func elasticSpec(name string) roles.Spec {
	spec := workerSpec(name, 2, placement.Wholes(1))
	spec.Process.Policy, spec.Process.MinReplicas, spec.Process.MaxReplicas = roles.RestartRank, 2, 8
	return spec
}

func awaitSize(t *testing.T, c *roles.Cluster, replicas int) {
	t.Helper()
	eventually(t, "it has another size", func() bool { return c.WorldSize() == replicas })
}

// callUntil calls a role without a pause until it is stopped, and fails the test if a call fails or an answer is wrong.
func callUntil(t *testing.T, c *roles.Cluster) (stop func()) {
	ctx, cancel := context.WithCancel(patient(t))
	var group sync.WaitGroup
	group.Go(func() {
		for ctx.Err() == nil {
			rows, err := roles.Call[[]int](patient(t), c, "double", slices.Repeat([]int{1}, 840)) // which every size divides
			if err != nil || !slices.Equal(rows, slices.Repeat([]int{2}, 840)) {
				t.Errorf("double: %v %v", rows, err)
				return
			}
		}
	})
	return func() { cancel(); group.Wait() }
}

// A role with MaxReplicas grows while devices are free, gives them up to whoever needs them, and grows again; no call fails.
func TestReplicasFollowFreeDevices(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	client, err := placement.NewClient(tr.bus, "")
	require.NoError(t, err)
	defer client.Close()
	rules := placement.Rules{}
	rules.Preempt = true
	require.NoError(t, client.SetRules(patient(t), rules))
	c := create(t, tr.driver(t, roles.Config{}), elasticSpec("pool"))
	initialize(t, c, "seven")
	stop := callUntil(t, c)
	awaitSize(t, c, 8)
	for _, said := range initialized(t, c) {
		require.Equal(t, "1 seven 5", said)
	}
	urgent, err := tr.driver(t, roles.Config{}).Reserve(patient(t), placement.Request{Bundles: placement.Repeat(3, placement.Bundle{Devices: placement.Wholes(1)})})
	require.NoError(t, err, "the last replicas are preempted for a request of the role's own priority")
	require.LessOrEqual(t, c.WorldSize(), 5)
	awaitSize(t, c, 5)
	require.Contains(t, c.Record().Change, "preempted")
	require.NoError(t, urgent.Release(patient(t)))
	awaitSize(t, c, 8)

	require.NoError(t, c.Resize(patient(t), 4), "what was asked for last")
	require.ErrorContains(t, c.Resize(patient(t), 9), "it may have from 2 to 8 replicas")
	require.ErrorContains(t, attach(t, tr.driver(t, roles.Config{}), "pool").Resize(patient(t), 1), "it may have from 2 to 8 replicas")
	require.Never(t, func() bool { return c.WorldSize() != 4 }, 3*time.Second, 100*time.Millisecond)
	stop()
}

// A role in one reservation that is preempted goes on with the replicas for which there is room.
func TestFewerReplicasAfterPreemption(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	client, err := placement.NewClient(tr.bus, "")
	require.NoError(t, err)
	defer client.Close()
	rules := placement.Rules{Grace: time.Second}
	rules.Preempt = true
	require.NoError(t, client.SetRules(patient(t), rules))
	spec := elasticSpec("pool")
	spec.World, spec.Process.MaxReplicas = 8, 0
	c := create(t, tr.driver(t, roles.Config{}), spec)
	initialize(t, c, "seven")
	_, err = tr.driver(t, roles.Config{}).Reserve(patient(t), placement.Request{Priority: 5, Bundles: placement.Repeat(3, placement.Bundle{Devices: placement.Wholes(1)})})
	require.NoError(t, err)
	awaitSize(t, c, 5)
	require.NoError(t, c.WaitReady(patient(t)))
	for _, said := range initialized(t, c) {
		require.Equal(t, "1 seven 5", said)
	}
}

// The end of a role does not wait for replicas that are being added.
func TestDestroyWhileReplicasStart(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	spec := elasticSpec("pool")
	spec.StartTimeout = 5 * time.Minute
	spec.Process.Command = []string{"sh", "-c", `[ "$RANK" -lt 2 ] || sleep 200; exec "$0"`, roles.Self()[0]}
	c := create(t, tr.driver(t, roles.Config{}), spec)
	eventually(t, "replicas are being added", func() bool { return len(c.Record().Placements) > 2 })
	begun := time.Now()
	require.NoError(t, c.Destroy(patient(t)))
	require.Less(t, time.Since(begun), time.Minute)
	require.Empty(t, tr.reservations(t))
}

// A role with MinReplicas goes on with fewer replicas when its node is drained and the other one is full.
func TestFewerReplicasWhenNoNodeHasRoom(t *testing.T) {
	for policy, spec := range map[string]func(*roles.Spec){
		"the last ranks are lost":  func(*roles.Spec) {},
		"the first ranks are lost": func(*roles.Spec) {},
		"all are started again":    func(s *roles.Spec) { s.Process.Policy = roles.RestartRole },
	} {
		t.Run(policy, func(t *testing.T) {
			t.Parallel()
			tr := startHead(t, false)
			s := workerSpec("pool", 8, placement.Wholes(1))
			s.Process.Policy, s.Process.MinReplicas = roles.RestartRank, 2
			spec(&s)
			c := create(t, tr.driver(t, roles.Config{}), s)
			initialize(t, c, "seven")
			other := attach(t, tr.driver(t, roles.Config{}), "pool")
			rank := 7
			if policy == "the first ranks are lost" {
				rank = 0
			}
			tr.drain(t, c.Record().Placements[rank].Node, "its fans")
			for _, handle := range []*roles.Cluster{c, other} {
				awaitSize(t, handle, 4)
				require.NoError(t, handle.WaitReady(patient(t)))
				rows, err := roles.Call[[]int](patient(t), handle, "double", []int{1, 2, 3, 4})
				require.NoError(t, err)
				require.Equal(t, []int{2, 4, 6, 8}, rows)
				for _, said := range initialized(t, handle) {
					require.Equal(t, "1 seven 5", said)
				}
			}
			require.ErrorContains(t, c.Resize(patient(t), 1), "it may have from 2 replicas")
		})
	}
}

func TestReplicaRangesAreChecked(t *testing.T) {
	t.Parallel()
	rt := startHead(t, false).driver(t, roles.Config{})
	for says, change := range map[string]func(*roles.Spec){
		"MaxReplicas 1 is less than MinReplicas 2": func(s *roles.Spec) { s.Process.MaxReplicas = 1 },
		"it begins with 1 replicas":                func(s *roles.Spec) { s.World = 1 },
		"it begins with 9 replicas":                func(s *roles.Spec) { s.World = 9 },
		"must not be negative":                     func(s *roles.Spec) { s.Process.MinReplicas = -1 },
		"needs the policy restart_rank":            func(s *roles.Spec) { s.Process.Policy = roles.FailRole },
		"not ordered":                              func(s *roles.Spec) { s.Ordered = true },
		"names its devices":                        func(s *roles.Spec) { s.Process.Over = "other" },
	} {
		spec := elasticSpec("pool")
		change(&spec)
		_, err := rt.Create(patient(t), spec)
		require.ErrorContains(t, err, says)
	}
}
