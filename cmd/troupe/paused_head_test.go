package main

import (
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus/bustest"
	"troupe/placement"
	"troupe/roles"
)

// A head that hangs, as on a machine that swaps or is migrated, ends nothing: its drivers do not take its silence for that of
// their workers, and it does not take the leases that nobody could renew for the ends of drivers.
func TestAHeadThatHangsEndsNothing(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	store := t.TempDir()
	cmd, out := u.process("up", "--json", "--listen", "127.0.0.1:0", "--store", store, "--gpus", "sim:1x2", "--name", "box")
	u.killAfter(store)
	head := u.ready(out)
	const lease, lostAfter, hangs = 3 * time.Second, 3 * time.Second, 8 * time.Second
	rt, err := roles.Open(t.Context(), roles.Config{BusConfig: head.access(), Namespace: "run", Classes: []*actors.Class{calcClass()}, Lease: lease, LostAfter: lostAfter})
	require.NoError(t, err)
	c, err := rt.Create(t.Context(), roles.Spec{
		Name: "held", Class: "calc", World: 2, Process: &roles.Process{Needs: placement.Request{Bundles: []placement.Bundle{{Devices: 1000}}}},
	})
	require.NoError(t, err)
	began, record := time.Now(), c.Record()
	require.Eventually(t, func() bool { return time.Since(began) > 2*lease }, 2*time.Minute, 50*time.Millisecond, "the head has answered for longer than a lease")

	bustest.Freeze(t, cmd.Process.Pid)
	frozen := time.Now()
	require.Eventually(t, func() bool { return time.Since(frozen) > hangs }, 2*time.Minute, 50*time.Millisecond)
	require.NoError(t, cmd.Process.Signal(syscall.SIGCONT))
	resumed := time.Now()
	_, err = rt.Create(t.Context(), roles.Spec{Name: "later", Class: "calc", World: 1, Process: &roles.Process{}})
	require.NoError(t, err, "it waits until the driver has its lease again")
	for time.Since(resumed) < lease+lostAfter+2*time.Second {
		ranks, err := roles.CallEach[int](t.Context(), c, "rank")
		require.NoError(t, err)
		require.Equal(t, []int{0, 1}, ranks)
		time.Sleep(100 * time.Millisecond)
	}
	require.Equal(t, record.Placements, c.Record().Placements, "no worker was replaced")
	require.NoError(t, rt.Close(t.Context()))
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, cmd.Wait())
}
