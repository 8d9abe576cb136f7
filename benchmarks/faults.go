package benchmarks

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"troupe/bus"
	"troupe/dispatch"
	"troupe/placement"
	"troupe/roles"
)

// FaultsConfig configures Faults.
type FaultsConfig struct {
	Program string // the troupe program, which is head, agent and worker
	Kills   int    // workers to kill; zero: 25
	Each    int    // repetitions of each other fault; zero: 3
	Workers int    // to create and destroy; zero: 64
	Log     func(string, ...any)
}

// FaultResult is the result of one kind of fault.
type FaultResult struct {
	Fault            string   `json:"fault"`
	N                int      `json:"n"`
	P50              *float64 `json:"p50_ms,omitempty"`
	P99              *float64 `json:"p99_ms,omitempty"`
	MB               *float64 `json:"mb,omitempty"`
	CallsLost        *int     `json:"calls_lost,omitempty"`
	ReservationsLost *int     `json:"reservations_lost,omitempty"`
}

// Faults injects every fault into real processes, and measures the time until the caller has its error or calls succeed again.
func Faults(ctx context.Context, cfg FaultsConfig, each func(FaultResult) error) (err error) {
	if cfg.Kills == 0 {
		cfg.Kills = 25
	}
	if cfg.Each == 0 {
		cfg.Each = 3
	}
	if cfg.Workers == 0 {
		cfg.Workers = 64
	}
	if cfg.Log == nil {
		cfg.Log = func(string, ...any) {}
	}
	f := &faults{FaultsConfig: cfg, each: each}
	defer func() { err = errors.Join(err, f.close()) }()
	steps := []struct {
		name string
		do   func(context.Context) error
	}{
		{"up_ready", f.upReady}, {"head_idle and agent_idle", f.idle}, {"create and destroy", f.createDestroy},
		{"worker_sigkill", f.workerKills}, {"agent_sigkill", f.agentKills}, {"host_frozen", f.frozen},
		{"node_partitioned", f.partitions}, {"head_restart", f.headRestarts},
	}
	for _, s := range steps {
		cfg.Log("%s", s.name)
		if err := s.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return nil
}

// faults is one run of the benchmark.
type faults struct {
	FaultsConfig
	each func(FaultResult) error
	dir  string
	head *Head
	rt   *roles.Runtime
}

func (f *faults) close() error {
	var errs []error
	if f.rt != nil {
		errs = append(errs, f.rt.Close(context.Background()))
	}
	if f.head != nil {
		errs = append(errs, f.head.Stop())
	}
	if f.dir != "" {
		errs = append(errs, os.RemoveAll(f.dir))
	}
	return errors.Join(errs...)
}

// times reports the quantiles of a fault.
func (f *faults) times(fault string, all []time.Duration, change func(*FaultResult)) error {
	slices.Sort(all)
	r := FaultResult{Fault: fault, N: len(all), P50: milliseconds(all, 0.5), P99: milliseconds(all, 0.99)}
	if change != nil {
		change(&r)
	}
	return f.each(r)
}

// milliseconds is a quantile of sorted times.
func milliseconds(sorted []time.Duration, q float64) *float64 {
	ms := quantile(sorted, q) / 1000
	return &ms
}

// upReady starts a new head each time; the last one is used for the other faults.
func (f *faults) upReady(ctx context.Context) (err error) {
	if f.dir, err = os.MkdirTemp("", "troupe-bench-"); err != nil {
		return err
	}
	var all []time.Duration
	for i := range f.Each {
		if f.head != nil {
			if err := f.head.Stop(); err != nil {
				return err
			}
		}
		begun := time.Now()
		if f.head, err = StartHead(ctx, f.Program, filepath.Join(f.dir, fmt.Sprint("head", i)), "sim:1x8", f.dir); err != nil {
			return err
		}
		all = append(all, time.Since(begun))
	}
	if f.rt, err = f.drive(ctx); err != nil {
		return err
	}
	return f.times("up_ready", all, nil)
}

func (f *faults) drive(ctx context.Context) (*roles.Runtime, error) {
	cfg := f.head.BusConfig()
	cfg.Logger = slog.New(slog.DiscardHandler) // the faults are intended
	return roles.Open(ctx, roles.Config{BusConfig: cfg, Name: "bench", Namespace: "bench"})
}

// idle reports the memory of an idle head and agent.
func (f *faults) idle(ctx context.Context) error {
	if err := pause(ctx, 3*time.Second); err != nil {
		return err
	}
	agents, err := f.head.Agents()
	if err != nil || len(agents) == 0 {
		return errors.Join(fmt.Errorf("%d agents of the head", len(agents)), err)
	}
	for fault, pid := range map[string]int{"head_idle": f.head.PID(), "agent_idle": agents[0]} {
		mb, err := residentMB(pid)
		if err != nil {
			return err
		}
		if err := f.each(FaultResult{Fault: fault, N: 1, MB: &mb}); err != nil {
			return err
		}
	}
	return nil
}

// spec is a role of processes on a node.
func (f *faults) spec(name, node string, world int, devices int) roles.Spec {
	needs := placement.Request{Bundles: []placement.Bundle{{Node: node, Devices: placement.Wholes(devices)}}}
	return roles.Spec{Name: name, Class: "text", World: world, Process: &roles.Process{Command: []string{f.Program}, Needs: needs}}
}

// createDestroy measures many workers from their creation to the first answered call, and from destruction to their end.
func (f *faults) createDestroy(ctx context.Context) error {
	var made, ended []time.Duration
	for range f.Each {
		begun := time.Now()
		c, err := f.rt.Create(ctx, f.spec("many", f.head.Node(), f.Workers, 0))
		if err != nil {
			return err
		}
		pids, err := roles.CallEach[int](ctx, c, "pid")
		if err != nil {
			return err
		}
		made = append(made, time.Since(begun))
		begun = time.Now()
		if err := c.Destroy(ctx); err != nil {
			return err
		}
		if left, err := f.rt.Leftovers(ctx); err != nil || !left.Empty() {
			return errors.Join(fmt.Errorf("after the end: %s", left), err)
		}
		for _, pid := range pids {
			if syscall.Kill(pid, 0) == nil {
				return fmt.Errorf("worker process %d has outlived its role", pid)
			}
		}
		ended = append(ended, time.Since(begun))
	}
	if err := f.times(fmt.Sprint("create_", f.Workers), made, nil); err != nil {
		return err
	}
	return f.times(fmt.Sprint("destroy_", f.Workers), ended, nil)
}

// workerKills kills the workers of a role one by one during calls.
func (f *faults) workerKills(ctx context.Context) error {
	spec := f.spec("killed", f.head.Node(), 4, 1)
	spec.Process.Policy, spec.Process.Restarts = roles.RestartRank, f.Kills+1
	spec.Process.Backoff, spec.Process.MaxBackoff = time.Millisecond, 10*time.Millisecond // the workers are healthy
	c, err := f.rt.Create(ctx, spec)
	if err != nil {
		return err
	}
	var all []time.Duration
	for i := range f.Kills {
		pids, err := retry(ctx, func() ([]int, error) { return roles.CallEach[int](ctx, c, "pid") })
		if err != nil {
			return err
		}
		took, err := f.lost(ctx, c, func() error { return syscall.Kill(pids[i%len(pids)], syscall.SIGKILL) })
		if err != nil {
			return err
		}
		all = append(all, took)
	}
	if err := c.Destroy(ctx); err != nil {
		return err
	}
	return f.times("worker_sigkill", all, nil)
}

// lost is the time from a fault until a call of all ranks fails with ErrWorkerLost.
func (f *faults) lost(ctx context.Context, c *roles.Cluster, fault func() error) (time.Duration, error) {
	future, err := c.ExecuteAllAsync(ctx, "wait", "1m")
	if err != nil {
		return 0, err
	}
	if err := running(ctx, c); err != nil {
		return 0, err
	}
	begun := time.Now()
	if err := fault(); err != nil {
		return 0, err
	}
	err = future.Wait(ctx)
	took := time.Since(begun)
	if !errors.Is(err, bus.ErrWorkerLost) {
		return 0, fmt.Errorf("the call ended with %v, and not because its worker was lost", err)
	}
	return took, nil
}

// running waits until every rank runs a call.
func running(ctx context.Context, c *roles.Cluster) error {
	_, err := retry(ctx, func() (struct{}, error) {
		infos, err := c.Info(ctx)
		for _, info := range infos {
			if len(info.Calls) == 0 {
				return struct{}{}, errors.New("a rank does not run the call")
			}
		}
		return struct{}{}, err
	})
	return err
}

// retry calls do until it succeeds, for half a minute.
func retry[T any](ctx context.Context, do func() (T, error)) (T, error) {
	for begun := time.Now(); ; {
		v, err := do()
		if err == nil || time.Since(begun) > 30*time.Second {
			return v, err
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return v, err
		}
	}
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// onAnotherHost measures a fault of a second agent and its workers until the role fails.
func (f *faults) onAnotherHost(ctx context.Context, fault string, do func(agent int, workers []int) error) error {
	var all []time.Duration
	for i := range f.Each {
		took, err := f.oneHost(ctx, fmt.Sprint(fault, "-", i), do)
		if err != nil {
			return err
		}
		all = append(all, took)
	}
	return f.times(fault, all, nil)
}

func (f *faults) oneHost(ctx context.Context, name string, do func(agent int, workers []int) error) (took time.Duration, err error) {
	agent, err := f.head.Join(ctx, name, "sim:1x4")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, agent.Kill()) }()
	c, err := retry(ctx, func() (*roles.Cluster, error) { return f.rt.Create(ctx, f.spec(name, name, 4, 1)) })
	if err != nil {
		return 0, err
	}
	pids, err := roles.CallEach[int](ctx, c, "pid")
	if err != nil {
		return 0, err
	}
	if err := pause(ctx, 6*time.Second); err != nil { // the driver judges silence only after it has listened for so long
		return 0, err
	}
	took, err = f.lost(ctx, c, func() error { return do(agent.PID(), pids) })
	for _, pid := range append(pids, agent.PID()) {
		_ = syscall.Kill(pid, syscall.SIGKILL) // ends frozen processes
	}
	return took, errors.Join(err, c.Destroy(ctx))
}

func (f *faults) agentKills(ctx context.Context) error {
	return f.onAnotherHost(ctx, "agent_sigkill", func(agent int, workers []int) error {
		err := syscall.Kill(agent, syscall.SIGKILL)
		for _, pid := range workers {
			_ = syscall.Kill(pid, syscall.SIGKILL) // fails if it has ended with its agent
		}
		return err
	})
}

func (f *faults) frozen(ctx context.Context) error {
	return f.onAnotherHost(ctx, "host_frozen", func(agent int, workers []int) error {
		errs := []error{syscall.Kill(agent, syscall.SIGSTOP)}
		for _, pid := range workers {
			errs = append(errs, syscall.Kill(pid, syscall.SIGSTOP))
		}
		return errors.Join(errs...)
	})
}

// headRestarts kills the head while a call runs and starts it again. The call and the next one must succeed.
func (f *faults) headRestarts(ctx context.Context) error {
	c, err := f.rt.Create(ctx, f.spec("kept", f.head.Node(), 4, 1))
	if err != nil {
		return err
	}
	var all []time.Duration
	calls, reservations := 0, 0
	for range f.Each {
		before, err := f.reservations(ctx)
		if err != nil {
			return err
		}
		running, err := c.Go(ctx, dispatch.Call{Method: "wait", Args: []any{"2s"}, Ranks: []int{0, 1}})
		if err != nil {
			return err
		}
		begun := time.Now()
		if err := f.head.Restart(ctx); err != nil {
			return err
		}
		w, err := c.Worker(3)
		if err == nil {
			_, err = retry(ctx, func() (any, error) { return w.Call(ctx, "pid") })
		}
		if err != nil {
			return err
		}
		all = append(all, time.Since(begun))
		if err := running.Wait(ctx); err != nil {
			f.Log("a call was lost: %v", err)
			calls++
		}
		after, err := retry(ctx, func() ([]string, error) { return f.reservations(ctx) })
		if err != nil {
			return err
		}
		for _, id := range before {
			if !slices.Contains(after, id) {
				reservations++
			}
		}
	}
	if err := c.Destroy(ctx); err != nil {
		return err
	}
	return f.times("head_restart", all, func(r *FaultResult) { r.CallsLost, r.ReservationsLost = &calls, &reservations })
}

func (f *faults) reservations(ctx context.Context) ([]string, error) {
	b, err := bus.Open(ctx, f.head.BusConfig())
	if err != nil {
		return nil, err
	}
	defer func() { _ = b.Close() }() // fails only if the server is gone
	client, err := placement.NewClient(b, "bench")
	if err != nil {
		return nil, err
	}
	defer client.Close()
	list, err := client.List(ctx)
	ids := []string{}
	for _, r := range list.Records {
		if r.State == placement.StateGranted {
			ids = append(ids, r.ID)
		}
	}
	return ids, err
}
