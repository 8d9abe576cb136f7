package roles_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/dispatch"
	"troupe/roles"
	"troupe/roles/registry"
)

func TestCloseDestroysOwnedRolesOnly(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	probe := newWorkerProbe()
	local := newLocal(t, bustest.Open(t, bus.Config{InProcess: srv}), probe.class())
	driver, err := roles.Open(t.Context(), roles.Config{Bus: bustest.Open(t, bus.Config{InProcess: srv}), Local: local, Name: "the first"})
	require.NoError(t, err)
	create(t, driver, roles.Spec{Name: "owned", Class: "actor", World: 2})
	kept := create(t, driver, roles.Spec{Name: "kept", Class: "actor", World: 2, Detached: true})
	require.NoError(t, kept.Close(patient(t)))
	_, err = kept.Call(patient(t), "rank")
	require.ErrorIs(t, err, bus.ErrClosed)
	require.ErrorContains(t, err, "this handle of role kept is closed")
	rt := open(t, roles.Config{Bus: bustest.Open(t, bus.Config{InProcess: srv})})
	attach(t, rt, "owned")
	require.NoError(t, driver.Close(patient(t)))
	require.Equal(t, 2, probe.living())
	require.Equal(t, "the first", rolesOf(t, rt)["kept"].By)
	require.Len(t, rolesOf(t, rt), 1)

	_, err = rt.Create(patient(t), roles.Spec{Name: "kept", Class: "actor", World: 1})
	require.ErrorIs(t, err, bus.ErrNotFound, "a class that this driver does not have")
	c := attach(t, rt, "kept")
	totals, err := roles.CallEach[int](patient(t), c, "add", 7)
	require.NoError(t, err)
	require.Equal(t, []int{7, 7}, totals)
	require.NoError(t, c.Close(patient(t)))
	require.Equal(t, 2, probe.living(), "Close of a detached role does not end it")
	again := attach(t, rt, "kept")
	require.NoError(t, again.Destroy(patient(t)), "any driver may destroy it")
	require.Zero(t, probe.living())
	require.Equal(t, 0, probe.stopped()[len(probe.stopped())-1], "rank 0 last")
	require.Empty(t, rolesOf(t, rt))
	require.NoError(t, again.Destroy(patient(t)))
}

// A detached role is refused where it would end with its driver, with a remedy.
func TestRefusedDetachedRoles(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	probe := newWorkerProbe()
	spec := roles.Spec{Name: "actors", Class: "actor", World: 2, Detached: true}
	own := open(t, roles.Config{Bus: bustest.Open(t, bus.Config{InProcess: srv}), Classes: []*actors.Class{probe.class()}})
	_, err := own.Create(patient(t), spec)
	require.ErrorIs(t, err, bus.ErrRefused)
	require.ErrorContains(t, err, "goroutines of this driver")
	private := open(t, roles.Config{Bus: bustest.Open(t), Local: nil})
	process := workerSpec("kept", 1, 0)
	process.Detached = true
	_, err = private.Create(patient(t), process)
	require.ErrorIs(t, err, bus.ErrRefused)
	require.ErrorContains(t, err, "start a head with `troupe up`")
	child := open(t, roles.Config{Bus: bustest.Open(t, bus.Config{InProcess: srv}), Private: true})
	_, err = child.Create(patient(t), process)
	require.ErrorContains(t, err, "start a head with `troupe up`")
	require.Empty(t, rolesOf(t, own))
	require.Zero(t, probe.living())
}

func TestLocalEndsBeforeItsDrivers(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	probe := newWorkerProbe()
	local := roles.NewLocal(bustest.Open(t, bus.Config{InProcess: srv}), []*actors.Class{probe.class()})
	rt := open(t, roles.Config{Bus: bustest.Open(t, bus.Config{InProcess: srv}), Local: local})
	c := create(t, rt, roles.Spec{Name: "actors", Class: "actor", World: 2})
	own := create(t, rt, roles.Spec{Name: "own", Class: "actor", World: 2, OwnConnections: true})
	f, err := c.ExecuteAllAsync(patient(t), "hold")
	require.NoError(t, err)
	await(t, probe.started, 2)
	require.NoError(t, local.Close(timeout(t, 0)))
	require.Zero(t, probe.living())
	require.Error(t, f.Wait(patient(t)))
	eventually(t, "the roles end with their workers", func() bool { return len(rolesOf(t, rt)) == 0 })
	_, err = own.Call(patient(t), "rank")
	require.ErrorIs(t, err, bus.ErrNotFound)
	_, err = rt.Create(patient(t), roles.Spec{Name: "late", Class: "actor", World: 1})
	require.ErrorIs(t, err, bus.ErrClosed)
	require.ErrorContains(t, err, "the workers' process is closing")
	require.NoError(t, local.Close(patient(t)))
}

// A frozen driver loses its lease, and its owned role is destroyed by the process of the workers.
func TestOwnedRolesEndWithTheLease(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	line := bustest.NewFaults(srv)
	probe := newWorkerProbe()
	local := newLocal(t, bustest.Open(t, bus.Config{InProcess: srv}), probe.class())
	hung := bustest.Open(t, bus.Config{InProcess: line, OnError: func(error) {}})
	driver, err := roles.Open(t.Context(), roles.Config{Bus: hung, Local: local, Lease: time.Second, Name: "the hung one"})
	require.NoError(t, err)
	owned := create(t, driver, roles.Spec{Name: "owned", Class: "actor", World: 3})
	create(t, driver, roles.Spec{Name: "kept", Class: "actor", World: 2, Detached: true})
	line.Freeze()
	eventually(t, "its role ends", func() bool { return probe.living() == 2 })
	require.Equal(t, 0, probe.stopped()[2], "rank 0 last")
	rt := open(t, roles.Config{Bus: bustest.Open(t, bus.Config{InProcess: srv})})
	eventually(t, "and its name is free", func() bool { return len(rolesOf(t, rt)) == 1 })
	totals, err := roles.CallEach[int](patient(t), attach(t, rt, "kept"), "add", 1)
	require.NoError(t, err, "a detached role stays, and can be called")
	require.Equal(t, []int{1, 1}, totals)

	line.Thaw()
	eventually(t, "the driver that is back knows", func() bool {
		_, err := owned.Call(timeout(t, time.Second), "rank")
		return err != nil && bus.CodeOf(err) == bus.CodeNotFound
	})
	eventually(t, "and has a lease again", func() bool {
		c, err := driver.Create(patient(t), roles.Spec{Name: "owned", Class: "actor", World: 1})
		return err == nil && c.Destroy(patient(t)) == nil
	})
	require.NoError(t, driver.Close(patient(t)))
}

// The name of a dead driver's role can be taken over after its workers have ended.
func TestANameIsTakenOver(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	line := bustest.NewFaults(srv)
	probe := newWorkerProbe()
	// This Local belongs to a frozen runtime, which would destroy roles of dead drivers.
	hung := bustest.Open(t, bus.Config{InProcess: line, OnError: func(error) {}})
	driver, err := roles.Open(t.Context(), roles.Config{Bus: hung, Classes: []*actors.Class{probe.class()}, Lease: time.Second, Name: "the hung one"})
	require.NoError(t, err)
	create(t, driver, roles.Spec{Name: "actors", Class: "actor", World: 2})
	line.Freeze()
	successor := newWorkerProbe()
	rt := open(t, roles.Config{Bus: bustest.Open(t, bus.Config{InProcess: srv}), Classes: []*actors.Class{successor.class()}, LostAfter: 2 * time.Second})
	var taken *registry.TakenError
	_, err = rt.Create(patient(t), roles.Spec{Name: "actors", Class: "actor", World: 1})
	require.ErrorAs(t, err, &taken)
	require.Equal(t, "the hung one", taken.Record.By)
	eventually(t, "the name can be had", func() bool {
		_, err := rt.Create(patient(t), roles.Spec{Name: "actors", Class: "actor", World: 1})
		return err == nil
	})
	line.Thaw()
	require.NoError(t, driver.Close(patient(t)))
	require.Equal(t, 1, successor.living(), "the old driver's end does not touch the new role")
	require.Equal(t, 1, attach(t, rt, "actors").WorldSize())
}

// Replace destroys the role of the name, of this driver or another. The end of the old role does not touch the new one.
func TestARoleIsReplaced(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	first, second := newWorkerProbe(), newWorkerProbe()
	driver := open(t, roles.Config{
		Bus: bustest.Open(t, bus.Config{InProcess: srv}), Classes: []*actors.Class{first.class()},
	})
	other := open(t, roles.Config{
		Bus: bustest.Open(t, bus.Config{InProcess: srv}), Classes: []*actors.Class{second.class()},
		CLI: roles.CommandLine{Env: "TROUPE_TOKEN_FILE=/t", Flags: "--url nats://h:1"},
	})
	old := create(t, driver, roles.Spec{Name: "actors", Class: "actor", World: 2})
	spec := roles.Spec{Name: "actors", Class: "actor", World: 3}
	_, err := other.Create(patient(t), spec)
	require.ErrorContains(t, err, "`TROUPE_TOKEN_FILE=/t troupe destroy actors --namespace default --url nats://h:1`")
	spec.Replace = true
	for range 2 { // the second time it is the driver's own
		create(t, other, spec)
		require.Equal(t, 3, second.living())
	}
	require.Equal(t, 0, first.living(), "the workers of the replaced role have ended")
	eventually(t, "calls to the old role fail", func() bool {
		_, err := old.ExecuteAllAsync(patient(t), "rank")
		return errors.Is(err, bus.ErrNotFound)
	})
	require.NoError(t, old.Destroy(patient(t)))
	require.NoError(t, driver.Close(patient(t)))
	require.Equal(t, 3, attach(t, other, "actors").WorldSize())
}

// This must not happen: an outage longer than a lease ends a role, because its driver could not renew the lease.
func TestOutageEndsNoRole(t *testing.T) {
	t.Parallel()
	const lease = 5 * time.Second
	srv := bustest.StartServer(t, bustest.Options{})
	probe := newWorkerProbe()
	quiet := bus.Config{InProcess: srv, OnError: func(error) {}}
	rt := open(t, roles.Config{BusConfig: quiet, Classes: []*actors.Class{probe.class()}, Lease: lease})
	other := open(t, roles.Config{BusConfig: quiet, Lease: lease})
	c := create(t, rt, roles.Spec{Name: "actors", Class: "actor", World: 2})
	seen := attach(t, other, "actors")
	f, err := c.ExecuteAllAsync(patient(t), "hold")
	require.NoError(t, err)
	await(t, probe.started, 2)
	srv.Stop()
	time.Sleep(lease + 500*time.Millisecond) // the leases are over before the server is back
	srv.Restart()
	close(probe.gate)
	ranks, err := dispatch.AwaitEach[int](patient(t), f)
	require.NoError(t, err, "a call during the outage")
	require.Equal(t, []int{0, 1}, ranks)
	time.Sleep(lease + time.Second) // an expired lease would have counted by now
	_, err = seen.ExecuteAll(patient(t), "rank")
	require.NoError(t, err)
	require.Equal(t, registry.RoleReady, rolesOf(t, other)["actors"].State)
	create(t, rt, roles.Spec{Name: "more", Class: "actor", World: 1})
}

func TestServerRestartsInTheMiddle(t *testing.T) {
	t.Parallel()
	for _, own := range []bool{false, true} {
		srv := bustest.StartServer(t, bustest.Options{Listen: own})
		cfg := bus.Config{InProcess: srv, OnError: func(error) {}}
		if own {
			cfg = bus.Config{URLs: []string{srv.URL()}, OnError: func(error) {}}
		}
		probe := newWorkerProbe()
		rt := open(t, roles.Config{BusConfig: cfg, Classes: []*actors.Class{probe.class()}})
		c := create(t, rt, roles.Spec{Name: "actors", Class: "actor", World: 4, OwnConnections: own})
		running, err := c.ExecuteAllAsync(patient(t), "hold")
		require.NoError(t, err)
		await(t, probe.started, 4)
		srv.Restart()
		queued, err := c.ExecuteAllAsync(patient(t), "add", 1)
		require.NoError(t, err)
		close(probe.gate)
		ranks, err := dispatch.AwaitEach[int](patient(t), running)
		require.NoError(t, err)
		assert.Equal(t, []int{0, 1, 2, 3}, ranks)
		totals, err := dispatch.AwaitEach[int](patient(t), queued)
		require.NoError(t, err)
		assert.Equal(t, []int{1, 1, 1, 1}, totals, "each call ran once")
		assert.Equal(t, registry.RoleReady, rolesOf(t, rt)["actors"].State)
		require.NoError(t, c.Destroy(patient(t)))
	}
}

// This must not happen: two namespaces see each other's roles.
func TestNamespaces(t *testing.T) {
	t.Parallel()
	b := bustest.Open(t)
	a, z := newWorkerProbe(), newWorkerProbe()
	one := open(t, roles.Config{Bus: b, Namespace: "one", Classes: []*actors.Class{a.class()}})
	two := open(t, roles.Config{Bus: b, Namespace: "two", Classes: []*actors.Class{z.class()}})
	first := create(t, one, roles.Spec{Name: "actors", Class: "actor", World: 2})
	create(t, two, roles.Spec{Name: "actors", Class: "actor", World: 3})
	require.Len(t, rolesOf(t, one), 1)
	require.NoError(t, first.Destroy(patient(t)))
	require.Equal(t, 3, z.living())
	_, err := attach(t, two, "actors").Call(context.Background(), "rank")
	require.NoError(t, err)
}
