package roles_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
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

func TestProcesses(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	spec := workerSpec("actor_train", 4, placement.Wholes(1))
	spec.Mesh = dispatch.Mesh{TP: 2}
	spec.Process.Env = map[string]string{"NCCL_DEBUG": "INFO", "ODD": "a=b,c d\n'\"$x", "EMPTY": ""}
	c := create(t, rt, spec)

	pids, err := roles.CallEach[int](patient(t), c, "pid")
	require.NoError(t, err)
	require.Len(t, pids, 4)
	rows, err := roles.Call[[]int](patient(t), c, "double", []int{1, 2, 3, 4, 5})
	require.NoError(t, err)
	require.Equal(t, []int{2, 4, 6, 8, 10}, rows)

	names := []string{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "CLUSTER_NAME", "WORKER_NAME", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "ODD", "EMPTY"}
	envs, err := roles.CallEach[map[string]string](patient(t), c, "env", names)
	require.NoError(t, err)
	host, port, _ := strings.Cut(c.Record().Master, ":")
	require.Equal(t, map[string]string{
		"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "NODE_RANK": "0", "MASTER_ADDR": host, "MASTER_PORT": port,
		"CLUSTER_NAME": "actor_train", "WORKER_NAME": "actor_train-2-G2", "CUDA_VISIBLE_DEVICES": "2",
		"NCCL_DEBUG": "INFO", "ODD": "a=b,c d\n'\"$x", "EMPTY": "",
	}, envs[2])
	require.Equal(t, []string{"actor_train"}, tr.reservations(t))

	other := tr.driver(t, roles.Config{})
	totals, err := roles.CallEach[int](patient(t), attach(t, other, "actor_train"), "add", 2)
	require.NoError(t, err)
	require.Equal(t, []int{2, 2, 2, 2}, totals)

	require.NoError(t, c.Destroy(patient(t)))
	gone(t, pids...)
	require.Empty(t, tr.reservations(t))
	require.Empty(t, rolesOf(t, rt))
}

// A role may have the longest name; its reservation's id is made of a part of it.
func TestLongestRoleName(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	name := strings.Repeat("n", 64)
	c := create(t, tr.driver(t, roles.Config{}), workerSpec(name, 1, placement.Wholes(1)))
	require.Equal(t, []string{name}, tr.reservations(t))
	require.NoError(t, c.Destroy(patient(t)))
	require.Empty(t, tr.reservations(t))
}

func TestAWorkerIsKilled(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	failures := make(chan roles.Failure, 10)
	spec := workerSpec("train", 3, placement.Wholes(1))
	spec.OnFailure = func(f roles.Failure) { failures <- f }
	c := create(t, rt, spec)
	pids, err := roles.CallEach[int](patient(t), c, "pid")
	require.NoError(t, err)
	_, err = c.Call(patient(t), "say", "the last thing I said")
	require.NoError(t, err)
	f := waiting(t, c, 3)

	begun := time.Now()
	require.NoError(t, syscall.Kill(pids[1], syscall.SIGKILL))
	_, err = dispatch.Await[any](patient(t), f)
	t.Logf("known %v after the kill", time.Since(begun))
	require.ErrorIs(t, err, bus.ErrWorkerLost)
	var e *bus.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, 1, e.Rank)
	require.Equal(t, c.Record().Placements[1].Node, e.Node)
	require.Contains(t, e.Error(), "SIGKILL")
	require.Contains(t, e.Error(), "the last thing I said")
	require.Equal(t, "SIGKILL", e.Details["signal"])
	_, err = c.Call(patient(t), "pid")
	require.ErrorContains(t, err, "because of rank 1")
	require.Equal(t, "the role fails", (<-failures).Then)
	gone(t, pids...)
	eventually(t, "the registry knows why", func() bool {
		rec := rolesOf(t, rt)["train"]
		return rec.State == registry.RoleFailed && strings.Contains(rec.Cause, "SIGKILL")
	})
	require.NoError(t, c.Destroy(patient(t)))
	require.Empty(t, tr.reservations(t))
}

// waiting makes every rank wait in a call.
func waiting(t *testing.T, c *roles.Cluster, world int) *dispatch.Future {
	t.Helper()
	file := filepath.Join(t.TempDir(), "waits")
	f, err := c.ExecuteAllAsync(patient(t), "wait", file)
	require.NoError(t, err)
	eventually(t, "all ranks wait", func() bool {
		found, _ := filepath.Glob(file + ".*")
		return len(found) == world
	})
	return f
}

// What Close waits for can be asked, and killed.
func TestCloseSaysWhatItWaitsFor(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	spec := workerSpec("train", 2, 0)
	spec.StopGrace = time.Hour
	c := create(t, rt, spec)
	waiting(t, c, 2)
	eventually(t, "heartbeats tell of the calls", func() bool {
		lines := strings.Join(rt.Unfinished(), "; ")
		return strings.Contains(lines, "train[0] runs wait for ") && strings.Contains(lines, "train[1] runs wait for ")
	})
	doneCh := make(chan error, 1)
	go func() { doneCh <- rt.Close(context.Background()) }()
	eventually(t, "the role is stopping", func() bool {
		return rt.Unfinished() != nil && c.Record().State == registry.RoleStopping
	})
	require.NoError(t, rt.KillUnfinished(patient(t)))
	<-doneCh
	require.Empty(t, rt.Unfinished())
}

func TestAProcessEndsByItself(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	c := create(t, tr.driver(t, roles.Config{}), workerSpec("train", 2, 0))
	_, err := c.Call(patient(t), "exit", 1)
	var e *bus.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, "3", e.Details["exit_code"])
	require.Contains(t, e.Error(), "exited with code 3; last line of output: that is enough")
}

func TestAProcessThatDoesNotStart(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	tries := map[string]struct {
		change func(*roles.Spec)
		want   string
	}{
		"constructor": {func(s *roles.Spec) { s.Config = testWorkerConfig{Fails: []int{1}} }, "tired"},
		"exit":        {func(s *roles.Spec) { s.Config = testWorkerConfig{Exits: []int{1}} }, "exited with code 7; last line on stderr: no more room here"},
		"program":     {func(s *roles.Spec) { s.Process.Command = []string{"/not/there/at-all"} }, "/not/there/at-all"},
		"folder":      {func(s *roles.Spec) { s.Process.Dir = "/not/there" }, "/not/there"},
		"class":       {func(s *roles.Spec) { s.Class = "nobody" }, "nobody"},
		"too large":   {func(s *roles.Spec) { s.Process.Needs.Bundles[0].Devices = placement.Wholes(9) }, "9"},
		"variable":    {func(s *roles.Spec) { s.Process.Env = map[string]string{"RANK": "3"} }, "RANK is set by Troupe"},
		"devices":     {func(s *roles.Spec) { s.Process.Env = map[string]string{"CUDA_VISIBLE_DEVICES": "3"} }, "CUDA_VISIBLE_DEVICES is set by Troupe"},
		"policy":      {func(s *roles.Spec) { s.Process.Policy = "again" }, `Policy "again" is unknown`},
	}
	for name, try := range tries {
		spec := workerSpec("train", 2, placement.Wholes(1))
		try.change(&spec)
		_, err := rt.Create(patient(t), spec)
		require.ErrorContains(t, err, try.want, name)
		require.Empty(t, tr.reservations(t), name)
		require.Empty(t, rolesOf(t, rt), name)
	}
}

func TestRestartARank(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	failures := make(chan roles.Failure, 10)
	spec := workerSpec("infer", 3, placement.Wholes(1))
	spec.Process.Policy, spec.Process.Restarts = roles.RestartRank, 2
	spec.OnFailure = func(f roles.Failure) { failures <- f }
	c := create(t, rt, spec)
	other := attach(t, tr.driver(t, roles.Config{}), "infer")
	_, err := c.Call(patient(t), "add", 5)
	require.NoError(t, err)
	placements := c.Record().Placements
	for n := range 2 {
		_, err = c.Call(patient(t), "exit", 1)
		require.ErrorIs(t, err, bus.ErrWorkerLost)
		require.Contains(t, (<-failures).Then, "the rank is restarted")
		for _, holder := range []*roles.Cluster{c, other} {
			eventually(t, "it takes calls again", func() bool {
				totals, err := roles.CallEach[int](patient(t), holder, "add", 0)
				return err == nil && totals[0] == 5 && totals[1] == 0
			})
		}
		rec := rolesOf(t, rt)["infer"]
		require.Equal(t, uint32(n+1), rec.Placements[1].Gen)
		require.Equal(t, placements[1].UUIDs, rec.Placements[1].UUIDs)
	}
	_, err = c.Call(patient(t), "exit", 2)
	require.Error(t, err)
	eventually(t, "two restarts, and no more", func() bool { return rolesOf(t, rt)["infer"].State == registry.RoleFailed })
	require.Contains(t, rolesOf(t, rt)["infer"].Cause, "after 2 restarts")
}

func TestRestartARole(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	spec := workerSpec("train", 3, placement.Wholes(1))
	spec.Process.Policy = roles.RestartRole
	c := create(t, tr.driver(t, roles.Config{}), spec)
	before, err := roles.CallEach[int](patient(t), c, "pid")
	require.NoError(t, err)
	f := waiting(t, c, 3)
	require.NoError(t, syscall.Kill(before[2], syscall.SIGKILL))
	_, err = dispatch.Await[any](patient(t), f)
	require.ErrorIs(t, err, bus.ErrWorkerLost)
	var after []int
	eventually(t, "all of it runs again", func() bool {
		after, err = roles.CallEach[int](patient(t), c, "pid")
		return err == nil
	})
	for rank := range after {
		require.NotEqual(t, before[rank], after[rank])
	}
	gone(t, before...)
	_, port, err := net.SplitHostPort(c.Record().Master)
	require.NoError(t, err)
	envs, err := roles.CallEach[map[string]string](patient(t), c, "env", []string{"MASTER_PORT"})
	require.NoError(t, err)
	for _, env := range envs {
		require.Equal(t, port, env["MASTER_PORT"])
	}
	require.ErrorIs(t, bind(t, port), syscall.EADDRINUSE, "the port stays leased to the role")
}

func TestIgnoreAWorkersEnd(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	spec := workerSpec("infer", 3, 0)
	spec.Process.Policy = roles.Ignore
	c := create(t, tr.driver(t, roles.Config{}), spec)
	_, err := c.Call(patient(t), "exit", 1)
	require.ErrorIs(t, err, bus.ErrWorkerLost)
	g, err := c.Ranks(0, 2)
	require.NoError(t, err)
	_, err = g.Call(patient(t), "add", 1)
	require.NoError(t, err)
}

func TestKillRanks(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	spec := workerSpec("infer", 3, 0)
	spec.Process.Policy = roles.Ignore
	c := create(t, tr.driver(t, roles.Config{}), spec)
	pids, err := roles.CallEach[int](patient(t), c, "pid")
	require.NoError(t, err)
	require.ErrorIs(t, c.KillRanks(patient(t), 3), bus.ErrInvalid)
	require.NoError(t, c.KillRanks(patient(t), 1))
	gone(t, pids[1])
	g, err := c.Ranks(0, 2)
	require.NoError(t, err)
	_, err = g.Call(patient(t), "add", 1)
	require.NoError(t, err, "the others continue")
	deaths, _, _, err := c.Deaths(patient(t), 0)
	require.NoError(t, err)
	require.Equal(t, 1, deaths[0].Rank)
	require.NoError(t, c.Destroy(patient(t)))
	gone(t, pids...)
}

func TestSharedDevices(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	train := create(t, rt, workerSpec("train", 4, placement.Wholes(1)))
	spec := workerSpec("infer", 1, placement.Wholes(4))
	spec.Process.Over = "train"
	infer := create(t, rt, spec)
	require.Equal(t, []int{0, 1, 2, 3}, infer.Record().Placements[0].Devices)
	require.Equal(t, "infer-0-G0123", infer.Record().Placements[0].Name)
	require.NoError(t, train.Destroy(patient(t)))
	_, err := infer.Call(patient(t), "pid")
	require.NoError(t, err)
}

func TestADriversReservation(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	held, err := rt.Reserve(patient(t), placement.Request{ID: "nodes", Bundles: placement.Repeat(2, placement.Bundle{Devices: placement.Wholes(4)}), Strategy: placement.StrictSpread})
	require.NoError(t, err)
	create2 := func(name string, devices ...int) *roles.Cluster {
		spec := workerSpec(name, 2, 0)
		spec.Process.Needs = placement.Request{Colocate: "nodes", Mapping: &placement.Mapping{Devices: devices}}
		return create(t, rt, spec)
	}
	a, b := create2("a", 0, 1, 4, 5), create2("b", 4, 5, 6, 7)
	require.Equal(t, "n-1", a.Record().Placements[1].Node)
	require.Equal(t, []int{0, 1}, b.Record().Placements[0].Devices)
	_, err = rt.Create(patient(t), func() roles.Spec {
		s := workerSpec("c", 1, placement.Wholes(1))
		s.Process.PlaceTimeout = 300 * time.Millisecond
		return s
	}())
	require.ErrorContains(t, err, "nodes", "the error names what it waits for")
	require.NoError(t, a.Destroy(patient(t)))
	require.NoError(t, b.Destroy(patient(t)))
	require.NoError(t, held.Release(patient(t)))
	require.NoError(t, held.Release(patient(t)))
	require.Empty(t, tr.reservations(t))
}

// The owned roles of a killed driver are destroyed, with processes and reservations; its detached role stays and can be
// called.
func TestDriverOfProcessesIsKilled(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rest := tr.driver(t, roles.Config{Lease: time.Second})
	driver, stdout := spawn(t, "own", tr.server.URL())
	line, err := stdout.ReadString('\n')
	require.NoError(t, err, line)
	owned := attach(t, rest, "owned")
	pids, err := roles.CallEach[int](patient(t), owned, "pid")
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"owned", "kept", "the child"}, tr.reservations(t))
	require.NoError(t, driver.Process.Kill())
	gone(t, pids...)
	eventually(t, "only the detached role's is held", func() bool {
		left := tr.reservations(t)
		return len(left) == 1 && left[0] == "kept"
	})
	kept := attach(t, rest, "kept")
	pid, err := kept.ExecuteRankZero(patient(t), "pid")
	require.NoError(t, err)
	require.NoError(t, kept.Close(patient(t)), "no driver is attached")

	require.NoError(t, syscall.Kill(int(pid.(int64)), syscall.SIGKILL))
	eventually(t, "it is known that it failed, and why", func() bool {
		rec := rolesOf(t, rest)["kept"]
		return rec.State == registry.RoleFailed && strings.Contains(rec.Cause, "SIGKILL")
	})
	require.NoError(t, attach(t, rest, "kept").Destroy(patient(t)))
	require.Empty(t, tr.reservations(t))
}

func TestTheAgentIsKilled(t *testing.T) {
	t.Parallel()
	tr := startHead(t, true)
	c := create(t, tr.driver(t, roles.Config{}), workerSpec("train", 2, placement.Wholes(1)))
	pids, err := roles.CallEach[int](patient(t), c, "pid")
	require.NoError(t, err)
	f := waiting(t, c, 2)
	time.Sleep(6 * time.Second) // so that the driver has listened for long enough to judge
	begun := time.Now()
	require.NoError(t, syscall.Kill(tr.agent, syscall.SIGKILL))
	_, err = dispatch.Await[any](patient(t), f)
	require.ErrorIs(t, err, bus.ErrWorkerLost)
	t.Logf("known %v after the agent was killed: %v", time.Since(begun), err)
	require.Less(t, time.Since(begun), 30*time.Second)
	gone(t, pids...)
}

// This must not happen: a start whose agent was killed lasts for the whole StartTimeout.
func TestTheAgentIsKilledAtTheStart(t *testing.T) {
	t.Parallel()
	tr := startHead(t, true)
	rt := tr.driver(t, roles.Config{})
	spec := workerSpec("train", 2, placement.Wholes(1))
	spec.StartTimeout = time.Minute
	file := filepath.Join(t.TempDir(), "begun")
	spec.Config = testWorkerConfig{Hangs: file}
	errCh := make(chan error, 1)
	go func() {
		_, err := rt.Create(context.Background(), spec)
		errCh <- err
	}()
	eventually(t, "constructors run", func() bool {
		found, _ := filepath.Glob(file + ".*")
		return len(found) == 2
	})
	require.NoError(t, syscall.Kill(tr.agent, syscall.SIGKILL))
	err := <-errCh
	require.ErrorIs(t, err, bus.ErrWorkerLost)
	require.ErrorContains(t, err, "n-")
	require.Empty(t, rolesOf(t, rt))
}

func TestAFrozenWorker(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	c := create(t, tr.driver(t, roles.Config{LostAfter: 2 * time.Second}), workerSpec("train", 2, 0))
	pids, err := roles.CallEach[int](patient(t), c, "pid")
	require.NoError(t, err)
	time.Sleep(2 * time.Second) // so that the driver has listened for long enough to judge
	bustest.Freeze(t, pids[1])
	_, err = c.Call(patient(t), "pid")
	require.ErrorContains(t, err, "no heartbeat for")
	gone(t, pids...)
}

// Unrelated roles start and end concurrently.
func TestManyRolesAtOnce(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	var group sync.WaitGroup
	for _, name := range []string{"a", "b", "c", "d"} {
		group.Go(func() {
			c, err := rt.Create(context.Background(), workerSpec(name, 2, placement.Wholes(1)))
			if err == nil {
				_, err = c.Call(patient(t), "pid")
			}
			if err == nil {
				err = c.Destroy(patient(t))
			}
			if err != nil {
				t.Error(name, err)
			}
		})
	}
	group.Wait()
	require.Empty(t, tr.reservations(t))
}

// Workers are added and removed while the others work, and attached drivers see the new size.
func TestGrowAndShrink(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	spec := workerSpec("infer", 2, placement.Wholes(1))
	spec.Process.PlaceTimeout = 300 * time.Millisecond
	c := create(t, rt, spec)
	other := attach(t, tr.driver(t, roles.Config{}), "infer")
	_, err := c.Call(patient(t), "add", 5)
	require.NoError(t, err)
	for range 2 {
		require.NoError(t, c.Grow(patient(t), 2))
		require.Equal(t, 4, c.DPSize())
		totals, err := roles.CallEach[int](patient(t), c, "add", 1)
		require.NoError(t, err)
		require.Equal(t, []int{1, 1}, totals[2:])
		eventually(t, "others see it", func() bool { return other.WorldSize() == 4 })
		rows, err := roles.Call[[]int](patient(t), other, "double", []int{1, 2, 3, 4})
		require.NoError(t, err)
		require.Equal(t, []int{2, 4, 6, 8}, rows)
		require.Len(t, tr.reservations(t), 2)
		require.Regexp(t, `^infer-3-G\d$`, c.Record().Placements[3].Name) // which device: those of the round before may not have been seen empty yet

		pids, err := roles.CallEach[int](patient(t), c, "pid")
		require.NoError(t, err)
		require.NoError(t, c.Shrink(patient(t), 2))
		gone(t, pids[2:]...)
		require.Len(t, tr.reservations(t), 1)
		eventually(t, "others see that too", func() bool { return other.WorldSize() == 2 })
		totals, err = roles.CallEach[int](patient(t), other, "add", 0)
		require.NoError(t, err)
		require.Len(t, totals, 2)
	}
	require.ErrorContains(t, c.Grow(patient(t), 7), "infer")
	spec.Name, spec.Process = "instances", &roles.Process{Command: roles.Self(), Needs: placement.Request{PerInstance: 1, Bundles: spec.Process.Needs.Bundles}}
	instances := create(t, rt, spec)
	require.Len(t, tr.reservations(t), 3, "one per role and growth")
	require.NoError(t, instances.Shrink(patient(t), 1))
	require.Len(t, tr.reservations(t), 2, "released with its workers")
	require.NoError(t, instances.Destroy(patient(t)))
	require.ErrorContains(t, c.Shrink(patient(t), 2), "destroy it instead")
	totals, err := roles.CallEach[int](patient(t), c, "add", 0)
	require.NoError(t, err)
	require.Equal(t, []int{7, 7}, totals)
	require.NoError(t, other.Grow(patient(t), 1), "the driver that created it does it")
	require.Equal(t, 3, other.WorldSize())
	left, err := rt.Leftovers(patient(t))
	require.NoError(t, err)
	require.Len(t, left.Workers, 3)
	require.NoError(t, c.Destroy(patient(t)))
	left, err = rt.Leftovers(patient(t))
	require.NoError(t, err)
	require.Equal(t, "nothing is left", left.String())
}

// The driver sees the workers' output: complete after a flush, repeated lines merged, up to the last line.
func TestOutputIsShown(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	var out safeBuffer
	spec := workerSpec("train", 3, 0)
	spec.Process.Output = &out
	c := create(t, rt, spec)
	_, err := c.Call(patient(t), "say", "all of us")
	require.NoError(t, err)
	require.NoError(t, rt.FlushOutput(patient(t)))
	require.Regexp(t, `train\[\d\] all of us\ntrain\[[0-2,-]+\] all of us \[and 2 more ranks\]`, out.String())
	_, err = c.Call(patient(t), "exit", 1)
	require.Error(t, err)
	require.NoError(t, c.Destroy(patient(t)))
	require.Contains(t, out.String(), "train[1] that is enough")
	require.ErrorContains(t, c.FlushOutput(patient(t)), "was set when the role was created")
	require.NoError(t, rt.FlushOutput(patient(t)), "no role is left")

	var kinds []string
	require.NoError(t, nodes.ReadEvents(patient(t), tr.bus, nodes.EventQuery{Namespace: "default"}, func(e nodes.Event) error {
		kinds = append(kinds, e.Kind)
		return nil
	}))
	require.Contains(t, kinds, "role_ready")
	require.Contains(t, kinds, "worker_failed")
	require.Equal(t, "role_gone", kinds[len(kinds)-1])
}

// Orphan processes are killed, and no others.
func TestOrphanProcessesAreKilled(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	kept, lost := create(t, rt, workerSpec("kept", 1, 0)), create(t, rt, workerSpec("lost", 2, 0))
	pids, err := roles.CallEach[int](patient(t), lost, "pid")
	require.NoError(t, err)
	soon, late := roles.OrphanProcesses{Bus: tr.bus, Unclaimed: time.Nanosecond}, roles.OrphanProcesses{Bus: tr.bus}
	ended, err := soon.Kill(patient(t))
	require.NoError(t, err)
	require.Empty(t, ended)
	require.NoError(t, rt.Forget(patient(t), lost))
	for range 2 {
		ended, err = late.Kill(patient(t))
		require.NoError(t, err)
		require.Empty(t, ended, "a missing record is no evidence yet")
	}
	ended, err = soon.Kill(patient(t))
	require.NoError(t, err)
	require.Empty(t, ended, "they are seen without a record for the first time")
	ended, err = soon.Kill(patient(t))
	require.NoError(t, err)
	require.Len(t, ended, 2)
	gone(t, pids...)
	_, err = kept.Call(patient(t), "pid")
	require.NoError(t, err)
}

// A node counts as working from its first worker until its last one is gone, with and without devices.
func TestWorkingNodes(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	client, err := placement.NewClient(tr.bus, "")
	require.NoError(t, err)
	t.Cleanup(client.Close)
	working := func() int {
		nodes, err := client.WorkingNodes(patient(t))
		require.NoError(t, err)
		return len(nodes)
	}
	for _, devices := range []int{0, 1} {
		eventually(t, "it is idle", func() bool { return working() == 0 })
		c := create(t, rt, workerSpec("works", 1, placement.Wholes(devices)))
		eventually(t, "it works", func() bool { return working() == 1 })
		require.NoError(t, c.Destroy(patient(t)))
	}
	eventually(t, "it is idle again", func() bool { return working() == 0 })
}

// The workers run in a copy of the driver's folder, also after a restart.
func TestAShippedFolder(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	folder := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(folder, "weights.txt"), []byte("0.5"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(folder, "large.bin"), []byte("no"), 0o600))
	spec := workerSpec("train", 2, placement.Wholes(1))
	spec.Process.Ship, spec.Process.Exclude, spec.Process.Policy = folder, []string{"*.bin"}, roles.RestartRank
	c := create(t, tr.driver(t, roles.Config{}), spec)
	for range 2 {
		var seen [][]string
		eventually(t, "they see it", func() bool {
			var err error
			seen, err = roles.CallEach[[]string](patient(t), c, "files")
			return err == nil
		})
		require.Equal(t, [][]string{{"weights.txt"}, {"weights.txt"}}, seen)
		_, err := c.Call(patient(t), "exit", 1)
		require.Error(t, err)
	}
	spec.Name, spec.Process.Ship = "other", filepath.Join(folder, "none")
	_, err := tr.driver(t, roles.Config{}).Create(patient(t), spec)
	require.ErrorContains(t, err, filepath.Join(folder, "none"))
	require.NoError(t, c.Destroy(patient(t)))
}

// bind binds a port without SO_REUSEADDR.
func bind(t *testing.T, port string) error {
	n, err := strconv.Atoi(port)
	require.NoError(t, err)
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer func() { require.NoError(t, syscall.Close(fd)) }()
	return syscall.Bind(fd, &syscall.SockaddrInet4{Port: n, Addr: [4]byte{127, 0, 0, 1}})
}

// This must not happen: a child process of a worker runs as the same worker.
func TestChildOfAWorkerIsNoWorker(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	c := create(t, tr.driver(t, roles.Config{}), workerSpec("train", 1, placement.Wholes(1)))
	env, err := roles.Call[map[string]string](patient(t), c, "env", []string{nodes.AssignmentEnv, "RANK"})
	require.NoError(t, err)
	require.Equal(t, map[string]string{"RANK": "0"}, env, "the worker's variables are not inherited")
}

// This must not happen: Grow of a role that another driver is destroying leaves workers behind.
func TestGrowDuringDestroy(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	c := create(t, rt, workerSpec("infer", 1, placement.Wholes(1)))
	other := tr.driver(t, roles.Config{})
	require.NoError(t, other.Step(patient(t), c, registry.RoleStopping), "another driver has begun")
	require.ErrorIs(t, c.Grow(patient(t), 1), bus.ErrConflict)
	require.Len(t, tr.reservations(t), 1)
	require.Len(t, rolesOf(t, rt)["infer"].Placements, 1)
	require.NoError(t, c.Destroy(patient(t)))
	require.Empty(t, tr.reservations(t))
}

// stuckWriter blocks until it is released.
type stuckWriter struct{ goCh chan struct{} }

func (w stuckWriter) Write(p []byte) (int, error) {
	<-w.goCh
	return len(p), nil
}

// This must not happen: a blocked Output or OnFailure prevents the end of the role.
func TestBlockedOutputAndCallback(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	goCh := make(chan struct{})
	t.Cleanup(func() { close(goCh) })
	spec := workerSpec("train", 2, 0)
	spec.Process.Output = stuckWriter{goCh}
	spec.OnFailure = func(roles.Failure) { <-goCh }
	c := create(t, rt, spec)
	_, err := c.Call(patient(t), "exit", 1)
	require.ErrorIs(t, err, bus.ErrWorkerLost)
	begun := time.Now()
	require.NoError(t, c.Destroy(patient(t)))
	require.NoError(t, rt.Close(context.Background()))
	require.Less(t, time.Since(begun), time.Minute)
}

// This must not happen: a driver's Destroy fails because the head is down, and the name and devices of the role stay taken for as
// long as the driver lives, although the head is up again.
func TestAnInterruptedDestroyIsFinished(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	spec := workerSpec("infer", 2, placement.Wholes(1))
	c := create(t, rt, spec)
	tr.stopPlacement()
	require.Error(t, c.Destroy(patient(t)), "the reservation cannot be released")
	_, err := rt.Create(patient(t), spec)
	require.ErrorIs(t, err, bus.ErrExists)
	tr.startPlacement(t)
	eventually(t, "the name is free", func() bool {
		again, err := rt.Create(patient(t), spec)
		if err == nil {
			require.NoError(t, again.Destroy(patient(t)))
		}
		return err == nil
	})
}
