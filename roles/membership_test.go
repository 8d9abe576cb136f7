package roles_test

import (
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles"
)

// A role has one epoch after each change, with its cause, and any driver may ask for a change.
func TestMembership(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	spec := restartable("infer", 2, roles.RestartRank, 10*time.Millisecond)
	c := create(t, tr.driver(t, roles.Config{}), spec)
	other := attach(t, tr.driver(t, roles.Config{Name: "an operator"}), "infer")
	initialize(t, c, "seven")
	first, err := c.Members(patient(t))
	require.NoError(t, err)
	pids, err := roles.CallEach[int](patient(t), c, "pid")
	require.NoError(t, err)
	require.Equal(t, uint64(1), first.Epoch)
	for rank, member := range first.Members {
		require.Equal(t, roles.Member{Rank: rank, Replica: rank, Node: c.Record().Placements[rank].Node, PID: pids[rank], State: roles.RankReady}, member)
	}
	changes := make(chan roles.MembershipChange, 10)
	c.OnChange(t.Context(), func(change roles.MembershipChange) { changes <- change })

	require.NoError(t, other.Resize(patient(t), 3))
	require.Equal(t, 3, other.WorldSize())
	require.Equal(t, 3, c.WorldSize())
	change := <-changes
	require.Equal(t, uint64(2), change.Epoch)
	require.Contains(t, change.Cause, "resized to 3 replicas: asked for by an operator")
	require.Len(t, change.Came, 1)
	require.Empty(t, change.Left)

	require.NoError(t, other.Replace(patient(t), 1, "its device is slow"))
	change = <-changes
	require.Equal(t, uint64(3), change.Epoch)
	require.Contains(t, change.Cause, "its device is slow, asked for by an operator")
	require.Equal(t, 1, change.Came[0].Rank)
	require.Equal(t, pids[1], first.Members[1].PID)
	require.NotEqual(t, pids[1], change.Members[1].PID)
	require.Equal(t, pids[0], change.Members[0].PID)
	require.Greater(t, change.Members[1].Gen, change.Left[0].Gen)
	require.Empty(t, c.Record().Recent, "a replacement that was asked for does not count as a failure")
	for _, said := range initialized(t, c) {
		require.Equal(t, "1 seven 5", said, "each rank has the replayed call once")
	}
	now, err := other.Changed(patient(t), 2)
	require.NoError(t, err)
	require.Equal(t, uint64(3), now.Epoch)

	require.ErrorContains(t, c.Replace(patient(t), 7, ""), "no rank 7")
	fixed := create(t, tr.driver(t, roles.Config{}), workerSpec("fixed", 1, placement.Wholes(0)))
	require.ErrorContains(t, fixed.Replace(patient(t), 0, ""), "restart_rank")
	changed := make(chan error, 1)
	go func() { _, err := c.Changed(patient(t), 3); changed <- err }()
	require.NoError(t, c.Destroy(patient(t)))
	require.ErrorIs(t, <-changed, bus.ErrNotFound)
}

// A call that a rank runs when it is replaced has the role's StopGrace, and names what happened if that is not enough; it is not run again.
func TestReplaceUnderACall(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	spec := restartable("infer", 2, roles.RestartRank, 10*time.Millisecond)
	spec.StopGrace = 300 * time.Millisecond
	c := create(t, tr.driver(t, roles.Config{}), spec)
	f := waiting(t, c, 2)
	replaced := make(chan error, 1)
	go func() { replaced <- c.Replace(patient(t), 1, "a test") }()
	eventually(t, "new calls wait", func() bool { return slices.Equal(c.Restarting(), []int{1}) })
	later, err := c.ExecuteAllAsync(patient(t), "add", 1)
	require.NoError(t, err)
	err = f.Wait(patient(t))
	require.ErrorIs(t, err, bus.ErrWorkerLost)
	require.ErrorContains(t, err, "rank 1 (generation 0) is replaced: a test")
	require.NoError(t, <-replaced)
	require.NoError(t, later.Wait(patient(t)))
}

// This must not happen: a role waits for a rank whose process is stopped, or that runs one call for ever.
func TestAStalledRankIsReplaced(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	spec := restartable("infer", 2, roles.RestartRank, 10*time.Millisecond)
	spec.Process.StallAfter = 2 * time.Second
	c := create(t, tr.driver(t, roles.Config{}), spec)
	now, err := c.Members(patient(t))
	require.NoError(t, err)
	begun := time.Now()
	require.NoError(t, syscall.Kill(now.Members[1].PID, syscall.SIGSTOP))
	now, err = c.Changed(patient(t), now.Epoch)
	require.NoError(t, err)
	require.Less(t, time.Since(begun), 30*time.Second)
	t.Logf("replaced %v after SIGSTOP", time.Since(begun))
	require.Contains(t, now.Cause, "it stalls")

	w, err := c.Worker(0)
	require.NoError(t, err)
	_, err = w.Call(patient(t), "wait", t.TempDir()+"/forever")
	require.ErrorContains(t, err, "it runs wait for")
	now, err = c.Changed(patient(t), now.Epoch)
	require.NoError(t, err)
	require.Equal(t, []uint32{2, 1}, []uint32{now.Members[0].Gen, now.Members[1].Gen})
	eventually(t, "the stacks are stored with the events", func() bool {
		var stacks []string
		require.NoError(t, nodes.ReadEvents(patient(t), tr.bus, nodes.EventQuery{Namespace: "default"}, func(e nodes.Event) error {
			if e.Kind == "worker_stalled" {
				stacks = append(stacks, e.Details["stacks"])
			}
			return nil
		}))
		return len(stacks) == 2 && strings.Contains(stacks[1], ".Wait")
	})
}
