package roles_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/dispatch"
	"troupe/roles"
	"troupe/roles/registry"
)

// The first failure is the cause: every pending call of the role fails with it at once, and the registry has it.
func TestAFailedWorkerFailsTheRole(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	probe := newWorkerProbe()
	rt := open(t, roles.Config{BusConfig: bus.Config{InProcess: srv}, Classes: []*actors.Class{probe.class()}, Name: "the owner"})
	c := create(t, rt, roles.Spec{Name: "actors", Class: "actor", World: 4, PanicFails: true})
	other := open(t, roles.Config{BusConfig: bus.Config{InProcess: srv}, Name: "another"})
	seen := attach(t, other, "actors")

	hold := func(c *roles.Cluster, ranks ...int) *dispatch.Future {
		f, err := c.Go(patient(t), dispatch.Call{Method: "hold", Ranks: ranks})
		require.NoError(t, err)
		return f
	}
	mine, theirs := hold(c, 0, 1), hold(seen, 3)
	await(t, probe.started, 3)
	f, err := c.Go(patient(t), dispatch.Call{Method: "boom", Args: []any{2}, CollectAll: true})
	require.NoError(t, err)

	err = mine.Wait(patient(t))
	assert.ErrorIs(t, err, bus.ErrWorkerLost)
	assert.ErrorContains(t, err, "because of rank 2: the worker failed: panic: boom")
	err = theirs.Wait(patient(t))
	assert.EqualError(t, err, "actors[3] hold on "+node(t)+": the role failed because of rank 2: the worker failed: panic: boom")
	outcomes, err := dispatch.AwaitOutcomes[any](patient(t), f)
	require.NoError(t, err)
	require.ErrorIs(t, outcomes[2].Err, bus.ErrPanic, "the call itself has the panic")
	err = f.Wait(patient(t))
	require.ErrorIs(t, err, bus.ErrPanic)
	var e *bus.Error
	require.ErrorAs(t, err, &e)
	assert.Equal(t, 2, e.Rank)
	assert.Contains(t, e.Stack, "localfixture_test.go")

	_, err = seen.Call(patient(t), "rank")
	assert.ErrorContains(t, err, "actors rank on "+node(t)+": the role failed because of rank 2: the worker failed: panic: boom")
	eventually(t, "the registry says failed", func() bool { return rolesOf(t, other)["actors"].State == registry.RoleFailed })
	assert.Contains(t, rolesOf(t, other)["actors"].Cause, "actors[2] on "+node(t)+": the worker failed: panic: boom")
	eventually(t, "the others are stopped", func() bool { return probe.living() == 0 })

	_, err = rt.Create(patient(t), roles.Spec{Name: "actors", Class: "actor", World: 1})
	assert.ErrorIs(t, err, bus.ErrExists)
	assert.ErrorContains(t, err, "owned by the owner, and failed: actors[2]")
	assert.ErrorContains(t, err, "remove it with `troupe destroy actors --namespace ")
	late := attach(t, other, "actors")
	_, err = late.Call(patient(t), "rank")
	assert.ErrorIs(t, err, bus.ErrWorkerLost)
	assert.ErrorContains(t, err, "role actors failed at 20")
	require.NoError(t, c.Destroy(patient(t)))
	assert.Empty(t, rolesOf(t, other))
	create(t, rt, roles.Spec{Name: "actors", Class: "actor", World: 1})
}

func node(t *testing.T) string {
	name, err := os.Hostname()
	require.NoError(t, err)
	return name
}

// detached is a role that outlives its driver: the workers are not in its process.
func detached(t *testing.T) (*bustest.Server, *workerProbe, *roles.Runtime, *roles.Cluster) {
	srv := bustest.StartServer(t, bustest.Options{})
	probe := newWorkerProbe()
	local := newLocal(t, bustest.Open(t, bus.Config{InProcess: srv}), probe.class())
	driver, err := roles.Open(t.Context(), roles.Config{Bus: bustest.Open(t, bus.Config{InProcess: srv}), Local: local})
	require.NoError(t, err)
	return srv, probe, driver, create(t, driver, roles.Spec{Name: "actors", Class: "actor", World: 3, PanicFails: true, Detached: true})
}

// The failure of a detached role without its driver is handled by an attached driver.
func TestAFailedDetachedRole(t *testing.T) {
	t.Parallel()
	srv, probe, driver, _ := detached(t)
	require.NoError(t, driver.Close(patient(t)))
	require.Equal(t, 3, probe.living())

	rt := open(t, roles.Config{Bus: bustest.Open(t, bus.Config{InProcess: srv})})
	c := attach(t, rt, "actors")
	_, err := c.Call(patient(t), "boom", 1)
	require.ErrorIs(t, err, bus.ErrPanic)
	eventually(t, "the rest is stopped", func() bool { return probe.living() == 0 })
	eventually(t, "the registry says failed", func() bool { return rolesOf(t, rt)["actors"].State == registry.RoleFailed })
	require.NoError(t, c.Destroy(patient(t)))
	require.Empty(t, rolesOf(t, rt))
}

// The failure of a detached role without any driver is handled by the process of its workers.
func TestAFailedDetachedRoleWithoutDrivers(t *testing.T) {
	t.Parallel()
	srv, probe, driver, c := detached(t)
	ep, err := calls.Open(bustest.Open(t, bus.Config{InProcess: srv}), "default") // a caller without a runtime
	require.NoError(t, err)
	group := &dispatch.Group{Endpoint: ep, To: c.Record().Address(), Mesh: c.Record().Mesh, MeshName: "main"}
	require.NoError(t, driver.Close(patient(t)))
	_, err = group.Go(patient(t), dispatch.Call{Method: "boom", Args: []any{1}})
	require.NoError(t, err)
	eventually(t, "the rest is stopped", func() bool { return probe.living() == 0 })
	rt := open(t, roles.Config{Bus: bustest.Open(t, bus.Config{InProcess: srv})})
	eventually(t, "the registry says failed", func() bool { return rolesOf(t, rt)["actors"].State == registry.RoleFailed })
	require.Contains(t, rolesOf(t, rt)["actors"].Cause, "actors[1]")
}

// This must not happen: a call to a silent worker waits forever. The worker is lost after LostAfter.
func TestASilentWorkerIsLost(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	line := bustest.NewFaults(srv)
	probe := newWorkerProbe()
	local := newLocal(t, bustest.Open(t, bus.Config{InProcess: line, OnError: func(error) {}}), probe.class())
	rt := open(t, roles.Config{Bus: bustest.Open(t, bus.Config{InProcess: srv}), Local: local, LostAfter: 2 * time.Second})
	c := create(t, rt, roles.Spec{Name: "actors", Class: "actor", World: 2})
	f, err := c.ExecuteAllAsync(patient(t), "hold")
	require.NoError(t, err)
	await(t, probe.started, 2)
	line.Freeze()
	err = f.Wait(patient(t))
	assert.ErrorIs(t, err, bus.ErrWorkerLost)
	assert.ErrorContains(t, err, "no heartbeat for 2")
	_, err = c.Call(patient(t), "rank")
	assert.ErrorContains(t, err, "the role failed because of rank ")
	line.Thaw()
	eventually(t, "its registry says failed", func() bool { return rolesOf(t, rt)["actors"].State == registry.RoleFailed })
	eventually(t, "its owner stops the rest", func() bool { return probe.living() == 0 })
}

// This must not happen: a driver that attaches after the workers died waits forever for heartbeats.
func TestAttachToARoleWhoseWorkersAreDead(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	line := bustest.NewFaults(srv)
	probe := newWorkerProbe()
	workers := bustest.Open(t, bus.Config{InProcess: line, OnError: func(error) {}})
	local := newLocal(t, workers, probe.class())
	driver := open(t, roles.Config{Bus: bustest.Open(t, bus.Config{InProcess: srv}), Local: local})
	create(t, driver, roles.Spec{Name: "actors", Class: "actor", World: 2, Detached: true})
	line.Freeze()
	defer line.Thaw()
	rt := open(t, roles.Config{Bus: bustest.Open(t, bus.Config{InProcess: srv}), LostAfter: 2 * time.Second})
	c := attach(t, rt, "actors")
	_, err := c.Call(patient(t), "rank")
	require.ErrorIs(t, err, bus.ErrWorkerLost)
	require.ErrorContains(t, err, "no heartbeat for 2")
	begun := time.Now()
	require.NoError(t, c.Destroy(patient(t)), "Destroy frees the name")
	require.Less(t, time.Since(begun), time.Minute)
	require.Empty(t, rolesOf(t, rt))
}

// A role ends as a unit, also when one of its workers is stopped.
func TestAStoppedWorkerEndsTheRole(t *testing.T) {
	t.Parallel()
	probe, rt, c := newRole(t, roles.Spec{World: 3, StopGrace: time.Second})
	f, err := c.Go(patient(t), dispatch.Call{Method: actors.VerbStop, Args: []any{actors.StopRequest{}}, Ranks: []int{1}, Control: true})
	require.NoError(t, err)
	require.NoError(t, f.Wait(patient(t)))
	eventually(t, "all end", func() bool { return probe.living() == 0 && len(rolesOf(t, rt)) == 0 })
	require.Equal(t, []int{1, 2, 0}, probe.stopped())
	_, err = c.Call(patient(t), "rank")
	require.ErrorIs(t, err, bus.ErrNotFound)
	require.NoError(t, c.Destroy(patient(t)))
}

func TestDestroyLetsRunningCallsFinish(t *testing.T) {
	t.Parallel()
	probe, rt, c := newRole(t, roles.Spec{World: 2, StopGrace: 20 * time.Second})
	f, err := c.ExecuteAllAsync(patient(t), "hold")
	require.NoError(t, err)
	await(t, probe.started, 2)
	errCh := make(chan error, 1)
	go func() { errCh <- c.Destroy(patient(t)) }()
	eventually(t, "it is stopping", func() bool { return rolesOf(t, rt)["actors"].State == registry.RoleStopping })
	_, err = c.Call(patient(t), "rank")
	assert.ErrorIs(t, err, bus.ErrNotFound)
	attached := attach(t, rt, "actors")
	_, err = attached.Call(patient(t), "rank")
	assert.ErrorContains(t, err, "role actors has been stopping since 20")
	close(probe.gate)
	ranks, err := dispatch.AwaitEach[int](patient(t), f)
	require.NoError(t, err)
	assert.Equal(t, []int{0, 1}, ranks)
	require.NoError(t, <-errCh)
	assert.Empty(t, probe.ended, "no call was cancelled")

	probe, _, c = newRole(t, roles.Spec{World: 2, StopGrace: 20 * time.Millisecond})
	f, err = c.ExecuteAllAsync(patient(t), "hold")
	require.NoError(t, err)
	await(t, probe.started, 2)
	require.NoError(t, c.Destroy(patient(t)))
	require.Len(t, await(t, probe.ended, 2), 2, "after the grace calls are cancelled")
	require.Error(t, f.Wait(patient(t)))
}

// Several concurrent calls of Destroy succeed, and the role is destroyed once.
func TestConcurrentDestroy(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	probe := newWorkerProbe()
	local := newLocal(t, bustest.Open(t, bus.Config{InProcess: srv}), probe.class())
	rt := open(t, roles.Config{Bus: bustest.Open(t, bus.Config{InProcess: srv}), Local: local})
	other := open(t, roles.Config{Bus: bustest.Open(t, bus.Config{InProcess: srv})})
	for range 10 {
		c := create(t, rt, roles.Spec{Name: "actors", Class: "actor", World: 4})
		seen := attach(t, other, "actors")
		errCh := make(chan error, 6)
		for i := range 6 {
			which := []*roles.Cluster{c, seen}[i%2]
			go func() { errCh <- which.Destroy(patient(t)) }()
		}
		for range 6 {
			require.NoError(t, <-errCh)
		}
		require.Zero(t, probe.living())
		require.Empty(t, rolesOf(t, rt))
	}
	require.Zero(t, rt.Holds())
	require.Zero(t, other.Holds())
}

// This must not happen: a call that is sent while a role fails or ends waits forever.
func TestCallsRaceWithTheEnd(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	probe := newWorkerProbe()
	local := newLocal(t, bustest.Open(t, bus.Config{InProcess: srv}), probe.class())
	rt := open(t, roles.Config{Bus: bustest.Open(t, bus.Config{InProcess: srv}), Local: local})
	for i := range 6 {
		c := create(t, rt, roles.Spec{Name: "actors", Class: "actor", World: 3, PanicFails: true})
		doneCh := make(chan struct{})
		for k := range 4 {
			go func() {
				defer func() { doneCh <- struct{}{} }()
				for {
					f, err := c.Go(context.Background(), dispatch.Call{Method: "rank", Ranks: []int{k % 3}, CollectAll: true})
					if err == nil {
						err = f.Wait(patient(t))
					}
					if err != nil {
						assert.NotErrorIs(t, err, context.DeadlineExceeded)
						return
					}
				}
			}()
		}
		if i%2 == 0 {
			_, err := c.Call(patient(t), "boom", 1)
			require.Error(t, err)
		} else {
			require.NoError(t, c.Destroy(patient(t)))
		}
		for range 4 {
			<-doneCh
		}
		require.NoError(t, c.Destroy(patient(t)))
	}
}
