package roles_test

import (
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/roles"
	"troupe/roles/registry"
)

// A role that a goroutine of a worker creates works, and ends with the process that hosts the worker.
func TestAWorkerInTheDriversProcessCreatesARole(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	probe := newWorkerProbe()
	driver, err := roles.Open(t.Context(), roles.Config{Bus: bustest.Open(t, bus.Config{InProcess: srv}), Classes: []*actors.Class{probe.class()}})
	require.NoError(t, err)
	c := create(t, driver, roles.Spec{Name: "actors", Class: "actor", World: 2})
	sum, err := roles.Call[int](patient(t), c, "create", "below")
	require.NoError(t, err)
	require.Equal(t, 3, sum)
	require.Equal(t, 5, probe.living())
	_, err = c.Call(patient(t), "create", "below")
	require.ErrorIs(t, err, bus.ErrExists)

	other := open(t, roles.Config{Bus: bustest.Open(t, bus.Config{InProcess: srv})})
	attach(t, other, "below")
	require.NoError(t, driver.Close(patient(t)))
	require.Zero(t, probe.living())
	require.Empty(t, rolesOf(t, other))
}

// Roles of three levels end with the worker that created them, whether it is killed or stops; devices are free again.
func TestRolesOfAWorkerProcessEndWithIt(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	stop, err := registry.HostWatch{Bus: tr.bus}.Start(t.Context()) // as an agent's
	require.NoError(t, err)
	t.Cleanup(stop)
	rt := tr.driver(t, roles.Config{})
	for _, end := range []string{"killed", "destroyed"} {
		top := create(t, rt, workerSpec("top", 1, 0))
		own, err := roles.CallEach[int](patient(t), top, "pid")
		require.NoError(t, err)
		pids, err := roles.Call[[]int](patient(t), top, "grow", growRequest{Name: "middle", Devices: 1000, Below: "leaves"})
		require.NoError(t, err)
		require.Len(t, pids, 4)
		require.Len(t, rolesOf(t, rt), 3)
		require.NotEmpty(t, tr.reservations(t))
		begun := time.Now()
		if end == "killed" {
			require.NoError(t, syscall.Kill(own[0], syscall.SIGKILL))
		} else {
			require.NoError(t, top.Destroy(patient(t)))
		}
		gone(t, append(pids, own...)...)
		eventually(t, "the names are free", func() bool {
			all := rolesOf(t, rt)
			return all["middle"].Name == "" && all["leaves"].Name == ""
		})
		t.Logf("%s: after %v", end, time.Since(begun))
		require.NoError(t, top.Destroy(patient(t)))
		require.Empty(t, tr.reservations(t))
	}
}

// A role that ends with the run outlives the worker that created it, and ends with the driver.
func TestARoleOfAWorkerEndsWithTheRun(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	stop, err := registry.HostWatch{Bus: tr.bus}.Start(t.Context())
	require.NoError(t, err)
	t.Cleanup(stop)
	driver, err := roles.Open(t.Context(), roles.Config{BusConfig: bus.Config{InProcess: tr.server}, Lease: 2 * time.Second})
	require.NoError(t, err)
	top := create(t, driver, workerSpec("top", 1, 0))
	pids, err := roles.Call[[]int](patient(t), top, "grow", growRequest{Name: "kept", EndsWithRun: true})
	require.NoError(t, err)
	ended, err := roles.Call[[]int](patient(t), top, "grow", growRequest{Name: "ended"})
	require.NoError(t, err)
	require.NoError(t, top.Destroy(patient(t)))
	gone(t, ended...)
	kept := attach(t, driver, "kept")
	now, err := roles.CallEach[int](patient(t), kept, "pid")
	require.NoError(t, err)
	require.Equal(t, pids, now)
	require.NoError(t, driver.Close(patient(t)))
	gone(t, pids...)
	other := tr.driver(t, roles.Config{})
	require.Empty(t, rolesOf(t, other))
}
