package roles_test

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/dispatch"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles"
	"troupe/roles/registry"
)

// restartable is a role whose lost workers are replaced, after a pause for the test to observe.
func restartable(name string, world int, policy roles.Policy, pause time.Duration) roles.Spec {
	spec := workerSpec(name, world, placement.Wholes(1))
	spec.Process.Policy, spec.Process.Backoff, spec.Process.MaxBackoff = policy, pause, pause
	return spec
}

// kill kills the worker of a rank and returns when the cluster knows.
func kill(t *testing.T, c *roles.Cluster, rank int) {
	t.Helper()
	pids, err := roles.CallEach[int](patient(t), c, "pid")
	require.NoError(t, err)
	f := waiting(t, c, c.WorldSize())
	require.NoError(t, syscall.Kill(pids[rank], syscall.SIGKILL))
	err = f.Wait(patient(t))
	require.ErrorIs(t, err, bus.ErrWorkerLost, "pending calls fail at once")
	require.Contains(t, err.Error(), "SIGKILL")
}

// After a loss every call waits for the restart, in the driver, in another driver and in a worker; NoWait fails at
// once; and the registry says that the role is restarting.
func TestCallsWaitForARestart(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	c := create(t, rt, restartable("infer", 3, roles.RestartRank, 4*time.Second))
	router := create(t, rt, workerSpec("router", 1, 0))
	other := attach(t, tr.driver(t, roles.Config{}), "infer")
	ask := func() ([]any, error) {
		v, err := router.Call(patient(t), "ask", c.Handle())
		if err != nil {
			return nil, err
		}
		return v.([]any), nil
	}
	_, err := ask()
	require.NoError(t, err)
	_, err = c.Call(patient(t), "add", 5)
	require.NoError(t, err)
	require.NoError(t, c.WaitReady(patient(t)))

	kill(t, c, 1)
	begun := time.Now()
	require.Eventually(t, func() bool {
		_, err = c.Go(patient(t), dispatch.Call{Method: "pid", NoWait: true})
		return err != nil && strings.Contains(err.Error(), "rank 1 is restarting (1 of 5)")
	}, 2*time.Minute, time.Millisecond)
	require.ErrorIs(t, err, bus.ErrWorkerLost)
	require.Contains(t, err.Error(), "SIGKILL")
	rec := rolesOf(t, rt)["infer"]
	require.Equal(t, registry.RoleRestarting, rec.State)
	require.Equal(t, []int{1}, rec.Restart.Ranks)
	w, err := c.Worker(2)
	require.NoError(t, err)
	_, err = w.Call(patient(t), "add", 0)
	require.NoError(t, err)
	require.Equal(t, registry.RoleRestarting, rolesOf(t, rt)["infer"].State, "other ranks take calls meanwhile")

	require.Eventually(t, func() bool { // a call that is sent before the process knows of the loss fails with it
		ranks, err := router.Call(patient(t), "restarting_ranks", c.Handle())
		return err == nil && len(ranks.([]any)) > 0 && len(other.Restarting()) > 0
	}, 2*time.Minute, time.Millisecond)
	asked := make(chan error, 1)
	go func() { _, err := ask(); asked <- err }()
	attached := make(chan error, 1)
	go func() { _, err := other.Call(patient(t), "add", 0); attached <- err }()
	var order []*dispatch.Future
	for range 20 {
		f, err := c.Go(patient(t), dispatch.Call{Method: "add", Args: []any{1}, Timeout: 30 * time.Second})
		require.NoError(t, err)
		order = append(order, f)
	}
	short, err := c.Go(patient(t), dispatch.Call{Method: "pid", Timeout: 50 * time.Millisecond})
	require.NoError(t, err)
	require.ErrorIs(t, short.Wait(patient(t)), bus.ErrTimedOut, "its own timeout applies")
	for i, f := range order {
		totals, err := dispatch.AwaitEach[int](patient(t), f)
		require.NoError(t, err)
		require.Equal(t, []int{5 + i + 1, i + 1, 5 + i + 1}, totals, "each once and in order")
	}
	require.Greater(t, time.Since(begun), time.Second)
	require.NoError(t, <-asked)
	require.NoError(t, <-attached)
	require.NoError(t, c.WaitReady(patient(t)))
	require.NoError(t, other.WaitReady(patient(t)))
	rec = rolesOf(t, rt)["infer"]
	require.Equal(t, registry.RoleReady, rec.State)
	require.Nil(t, rec.Restart)
	require.Empty(t, rec.Replaced)
}

// Calls that wait for a restart that fails get its error.
func TestCallsWaitForARestartThatFails(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	spec := restartable("infer", 2, roles.RestartRank, 500*time.Millisecond)
	spec.Process.Dir = t.TempDir()
	c := create(t, rt, spec)
	other := attach(t, tr.driver(t, roles.Config{}), "infer")
	kill(t, c, 1)
	require.NoError(t, syscall.Rmdir(spec.Process.Dir))
	for _, holder := range []*roles.Cluster{c, other} {
		_, err := holder.Call(patient(t), "pid")
		require.ErrorIs(t, err, bus.ErrWorkerLost)
		require.ErrorContains(t, err, "could not be restarted")
		require.ErrorContains(t, holder.WaitReady(patient(t)), spec.Process.Dir)
	}
}

// Replayed calls reach a restarted worker before it is ready.
func TestReplayOnARestartedWorker(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	c := create(t, rt, restartable("infer", 2, roles.RestartRank, 10*time.Millisecond))
	other := attach(t, tr.driver(t, roles.Config{}), "infer")
	large := strings.Repeat("weights-", 200<<10)
	for _, try := range []struct {
		by   *roles.Cluster
		args []string
	}{{c, []string{"first", "second"}}, {other, []string{"elsewhere"}}, {c, []string{large}}, {c, []string{"smaller again"}}} {
		for _, arg := range try.args {
			_, err := try.by.Call(patient(t), "initialize", arg)
			require.NoError(t, err)
		}
		last := try.args[len(try.args)-1]
		if try.by == other {
			time.Sleep(100 * time.Millisecond) // until it is in the registry: the other driver's future says nothing of it
		}
		kill(t, c, 1)
		said, err := roles.CallEach[string](patient(t), c, "initialized")
		require.NoError(t, err)
		require.Equal(t, fmt.Sprintf("1 %.8s %d", last, len(last)), said[1])
		if try.by == c && len(last) > 1<<20 {
			break // there are three restarts
		}
	}
	_, err := other.Call(patient(t), "initialize", large)
	require.ErrorIs(t, err, bus.ErrInvalid)
	require.ErrorContains(t, err, "call it from the driver that created role infer")
}

// drain does what `troupe drain` does.
func (tr *testHead) drain(t *testing.T, node, why string) {
	t.Helper()
	client, err := placement.NewClient(tr.bus, "")
	require.NoError(t, err)
	defer client.Close()
	_, err = client.Cordon(patient(t), placement.Cordon{Node: node, Why: why, By: "an operator"})
	require.NoError(t, err)
	agents := nodes.NewClient(tr.bus)
	all, err := agents.Workers(patient(t), node)
	require.NoError(t, err)
	var ids []nodes.WorkerID
	for _, w := range all {
		if w.Exit == nil {
			ids = append(ids, w.ID)
		}
	}
	_, err = agents.Evict(patient(t), node, ids, 10*time.Second, "node "+node+" is drained by an operator: "+why)
	require.NoError(t, err)
}

// Workers of a drained node are moved to other nodes, by the policy of their role.
func TestDrainMovesWorkers(t *testing.T) {
	t.Parallel()
	for _, policy := range []roles.Policy{roles.RestartRank, roles.RestartRole} {
		t.Run(string(policy), func(t *testing.T) {
			t.Parallel()
			tr := startHead(t, false)
			rt := tr.driver(t, roles.Config{})
			spec := restartable("infer", 4, policy, 10*time.Millisecond)
			spec.Process.Needs.Strategy = placement.Spread
			c := create(t, rt, spec)
			other := attach(t, tr.driver(t, roles.Config{}), "infer")
			before, err := roles.CallEach[int](patient(t), c, "pid")
			require.NoError(t, err)
			var moved []int
			for rank, placed := range c.Record().Placements {
				if placed.Node == "n-0" {
					moved = append(moved, rank)
				}
			}
			require.Len(t, moved, 2)
			tr.drain(t, "n-0", "a new fan")
			for _, holder := range []*roles.Cluster{c, other} {
				eventually(t, "all of it is on the other node", func() bool {
					pids, err := roles.CallEach[int](patient(t), holder, "pid")
					if err != nil {
						t.Log(err)
						return false
					}
					for _, rank := range moved {
						if pids[rank] == before[rank] {
							return false
						}
					}
					return true
				})
			}
			eventually(t, "it is ready", func() bool { return rolesOf(t, rt)["infer"].State == registry.RoleReady })
			rec := rolesOf(t, rt)["infer"]
			require.Zero(t, rec.Restarts, "a drain does not count as a restart")
			for _, placed := range rec.Placements {
				require.Equal(t, "n-1", placed.Node)
			}
			require.NoError(t, c.Destroy(patient(t)))
			require.Empty(t, tr.reservations(t))
		})
	}
}

// Workers of a drained node that cannot be moved fail their role, with the operator's reason as the cause.
func TestDrainFailsARoleWithTheReason(t *testing.T) {
	t.Parallel()
	tries := map[string]func(*roles.Spec){
		"policy":  func(s *roles.Spec) { s.Process.Policy = roles.FailRole },
		"no room": func(s *roles.Spec) { s.World, s.Process.PlaceTimeout = 8, 300*time.Millisecond },
		"mapping": func(s *roles.Spec) {
			s.World, s.Process.Needs = 4, placement.Request{Mapping: &placement.Mapping{Devices: []int{0, 1, 4, 5}}}
		},
	}
	for name, change := range tries {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tr := startHead(t, false)
			rt := tr.driver(t, roles.Config{})
			spec := restartable("infer", 2, roles.RestartRank, 10*time.Millisecond)
			change(&spec)
			c := create(t, rt, spec)
			f := waiting(t, c, c.WorldSize())
			tr.drain(t, "n-0", "a new fan")
			err := f.Wait(patient(t))
			require.ErrorIs(t, err, bus.ErrWorkerLost)
			eventually(t, "the role fails", func() bool { return rolesOf(t, rt)["infer"].State == registry.RoleFailed })
			require.Contains(t, rolesOf(t, rt)["infer"].Cause, "node n-0 is drained by an operator: a new fan")
			_, err = c.Call(patient(t), "pid")
			require.ErrorContains(t, err, "node n-0 is drained by an operator: a new fan")
			eventually(t, "and holds nothing", func() bool { return len(tr.reservations(t)) == 0 })
		})
	}
}

// A detached role of processes outlives its driver until it is destroyed.
func TestDetachedRolesOutliveTheirDriver(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*testing.T, *process){
		"normal exit": func(t *testing.T, e *process) { require.NoError(t, e.stdin.Close()) },
		"Ctrl-C":      func(t *testing.T, e *process) { require.NoError(t, e.cmd.Process.Signal(syscall.SIGINT)) },
		"SIGKILL":     func(t *testing.T, e *process) { require.NoError(t, e.cmd.Process.Kill()) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tr := startHead(t, false)
			rest := tr.driver(t, roles.Config{Lease: time.Second})
			driver := start(t, "detach", tr.server.URL())
			line, err := driver.stdout.ReadString('\n')
			require.NoError(t, err, line)
			kept := attach(t, rest, "kept")
			before, err := roles.CallEach[int](patient(t), kept, "pid")
			require.NoError(t, err)
			end(t, driver)
			_ = driver.cmd.Wait() // by a signal it ends with an error
			eventually(t, "its lease is over", func() bool { return !rest.Alive(patient(t), rolesOf(t, rest)["kept"].Owner) })
			after, err := roles.CallEach[int](patient(t), kept, "pid")
			require.NoError(t, err)
			require.Equal(t, before, after)
			require.NoError(t, kept.Destroy(patient(t)))
			gone(t, before...)
			require.Empty(t, tr.reservations(t))
		})
	}
}

// The head restarts the workers of a detached role without a driver.
func TestTheHeadRestartsADetachedRole(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	head := tr.driver(t, roles.Config{Name: "the head"})
	driver, err := roles.Open(t.Context(), roles.Config{BusConfig: bus.Config{InProcess: tr.server}, Lease: time.Second})
	require.NoError(t, err)
	spec := restartable("infer", 2, roles.RestartRank, 10*time.Millisecond)
	spec.Detached, spec.Process.Env = true, map[string]string{"SECRET": "of the role"}
	c := create(t, driver, spec)
	_, err = c.Call(patient(t), "initialize", "the model")
	require.NoError(t, err)
	require.NoError(t, driver.Close(patient(t)))
	require.NoError(t, head.MonitorRoles(patient(t)))
	require.NoError(t, head.MonitorRoles(patient(t)), "a repeated call is no error")

	c = attach(t, tr.driver(t, roles.Config{}), "infer")
	for range 2 {
		kill(t, c, 1)
		said, err := roles.CallEach[string](patient(t), c, "initialized")
		require.NoError(t, err, "the call waits for the head's restart")
		require.Equal(t, "1 the mode 9", said[1])
	}
	envs, err := roles.CallEach[map[string]string](patient(t), c, "env", []string{"SECRET", "RANK"})
	require.NoError(t, err)
	require.Equal(t, map[string]string{"SECRET": "of the role", "RANK": "1"}, envs[1])
	rec := rolesOf(t, head)["infer"]
	require.Equal(t, 2, rec.Restarts)
	require.NoError(t, c.Destroy(patient(t)))
	require.Empty(t, tr.reservations(t))
}

// A call whose arguments only its driver has cannot be replayed by the head: the role fails with that cause.
func TestTheHeadCannotReplayLargeArguments(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	head := tr.driver(t, roles.Config{Name: "the head"})
	driver, err := roles.Open(t.Context(), roles.Config{BusConfig: bus.Config{InProcess: tr.server}, Lease: time.Second})
	require.NoError(t, err)
	spec := restartable("infer", 1, roles.RestartRank, 10*time.Millisecond)
	spec.Detached = true
	c := create(t, driver, spec)
	_, err = c.Call(patient(t), "initialize", strings.Repeat("weights-", 100<<10))
	require.NoError(t, err)
	require.NoError(t, driver.Close(patient(t)))
	require.NoError(t, head.MonitorRoles(patient(t)))
	kill(t, attach(t, tr.driver(t, roles.Config{}), "infer"), 0)
	eventually(t, "the role fails", func() bool { return rolesOf(t, head)["infer"].State == registry.RoleFailed })
	require.Contains(t, rolesOf(t, head)["infer"].Cause, "initialize cannot be replayed: its arguments (800 KiB) are in the driver that made the call")
	eventually(t, "and holds nothing", func() bool { return len(tr.reservations(t)) == 0 })
}

// The head restarts the workers of a disconnected driver once; the driver continues with the new workers.
func TestTheHeadRestartsForADriverThatIsCutOff(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	head := tr.driver(t, roles.Config{Name: "the head"})
	line := bustest.NewFaults(tr.server)
	b := bustest.Open(t, bus.Config{InProcess: line, OnError: func(error) {}})
	driver := open(t, roles.Config{Bus: b, Lease: 15 * time.Second})
	c := create(t, driver, restartable("infer", 3, roles.RestartRole, 10*time.Millisecond))
	require.NoError(t, head.MonitorRoles(patient(t)))
	other := attach(t, tr.driver(t, roles.Config{}), "infer")
	before, err := roles.CallEach[int](patient(t), other, "pid")
	require.NoError(t, err)

	line.Freeze()
	require.NoError(t, syscall.Kill(before[1], syscall.SIGKILL))
	eventually(t, "the head has restarted it", func() bool {
		rec := rolesOf(t, head)["infer"]
		return rec.State == registry.RoleReady && rec.Restarts == 1
	})
	after, err := roles.CallEach[int](patient(t), other, "pid")
	require.NoError(t, err)
	gone(t, before...)
	line.Thaw()
	eventually(t, "the driver calls the new workers", func() bool {
		pids, err := roles.CallEach[int](timeout(t, 5*time.Second), c, "pid")
		return err == nil && pids[0] == after[0] && pids[1] == after[1] && pids[2] == after[2]
	})
	require.Equal(t, 1, rolesOf(t, head)["infer"].Restarts, "once")
	kill(t, c, 2)
	_, err = c.Call(patient(t), "pid")
	require.NoError(t, err, "the driver restarts the next loss")
	require.Equal(t, 2, rolesOf(t, head)["infer"].Restarts)
}

// A restart whose process dies is taken over by another process.
func TestARestartIsTakenOver(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	head := tr.driver(t, roles.Config{Name: "the head"})
	line := bustest.NewFaults(tr.server)
	b := bustest.Open(t, bus.Config{InProcess: line, OnError: func(error) {}})
	driver := open(t, roles.Config{Bus: b, Lease: 2 * time.Second})
	spec := restartable("infer", 2, roles.RestartRank, 2*time.Second)
	spec.Detached = true
	c := create(t, driver, spec)
	other := attach(t, tr.driver(t, roles.Config{}), "infer")
	require.NoError(t, head.MonitorRoles(patient(t)))
	kill(t, c, 1)
	eventually(t, "the driver restarts it", func() bool { return rolesOf(t, head)["infer"].State == registry.RoleRestarting })
	line.Freeze() // before it has launched anything
	_, err := other.Call(patient(t), "pid")
	require.NoError(t, err)
	rec := rolesOf(t, head)["infer"]
	require.Equal(t, uint32(2), rec.Placements[1].Gen)
	require.Equal(t, 1, rec.Restarts)
	line.Thaw()
	eventually(t, "the driver goes on with the new worker", func() bool {
		_, err := c.Call(timeout(t, 5*time.Second), "pid")
		return err == nil
	})
	require.Equal(t, rec.Placements, rolesOf(t, head)["infer"].Placements, "no second restart")
	require.NoError(t, c.Destroy(patient(t)))
}

// The workers of a role that failed while their node was unreachable are killed when it is back, and their devices
// released.
func TestAFailedRoleEndsWhenItsNodeIsBack(t *testing.T) {
	t.Parallel()
	tr := startHead(t, true, agentLease+"=1m")
	rt := tr.driver(t, roles.Config{LostAfter: 2 * time.Second})
	c := create(t, rt, workerSpec("train", 2, placement.Wholes(1)))
	pids, err := roles.CallEach[int](patient(t), c, "pid")
	require.NoError(t, err)
	all := append([]int{tr.agent}, pids...)
	for _, pid := range all {
		bustest.Freeze(t, pid)
		t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGCONT) })
	}
	eventually(t, "the role fails", func() bool { return rolesOf(t, rt)["train"].State == registry.RoleFailed })
	select { // the first attempts to end its workers go unanswered
	case <-time.After(5 * time.Second):
	case <-t.Context().Done():
	}
	for i := range all { // its agent last: it may end them at once
		require.NoError(t, syscall.Kill(all[len(all)-1-i], syscall.SIGCONT))
	}
	gone(t, pids...)
	eventually(t, "nothing is held", func() bool { return len(tr.reservations(t)) == 0 })
	require.Equal(t, registry.RoleFailed, rolesOf(t, rt)["train"].State, "the cause stays readable")
	require.NoError(t, c.Destroy(patient(t)))
}
