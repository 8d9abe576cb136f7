package benchmarks

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"troupe/gpu"
	"troupe/nodes/protocol"
	"troupe/placement"
	"troupe/placement/planner"
)

// PlacementConfig configures Placement: pairs of reserve and release by concurrent clients.
type PlacementConfig struct {
	Nodes   []int         // simulated, of eight devices; zero: 64 and 1,024
	Bundles []int         // of one device, in a gang; zero: 1, 8 and 64
	Clients []int         // each with a connection of its own; zero: 1 and 8
	Each    time.Duration // for one combination; zero: 2.5 s
	Dir     string        // of the stores, whose disk determines the cost of a sync; zero: a temporary folder
	NoLoss  bool          // do not measure the loss of a node, which takes two leases
}

// PlacementResult is one result. Fields that do not apply are zero and omitted.
type PlacementResult struct {
	Nodes      int     `json:"nodes"`
	Bundles    int     `json:"bundles,omitempty"`
	Clients    int     `json:"clients,omitempty"`
	SyncAlways bool    `json:"sync_always"`
	Pairs      int     `json:"pairs,omitempty"`
	PairsPerS  float64 `json:"pairs_per_s,omitempty"`
	P50        float64 `json:"p50_us,omitempty"`
	P99        float64 `json:"p99_us,omitempty"`
	PlanMS     float64 `json:"plan_ms,omitempty"`
	LostMS     float64 `json:"lost_ms,omitempty"`  // from the death of a node to the mark on its reservation
	FreedMS    float64 `json:"freed_ms,omitempty"` // to its end
	LeaseS     float64 `json:"lease_s,omitempty"`  // of that node
}

const (
	devicesPerNode = 8
	largeGang      = 1024
	largeNodes     = 4096
)

func (c PlacementConfig) withDefaults() PlacementConfig {
	if len(c.Nodes) == 0 {
		c.Nodes = []int{64, 1024}
	}
	if len(c.Bundles) == 0 {
		c.Bundles = []int{1, 8, 64}
	}
	if len(c.Clients) == 0 {
		c.Clients = []int{1, 8}
	}
	if c.Each == 0 {
		c.Each = 2500 * time.Millisecond
	}
	return c
}

// Placement calls each with every result. Service and server share a process, as in a head; clients connect by TCP on loopback, as
// drivers do.
func Placement(ctx context.Context, cfg PlacementConfig, each func(PlacementResult) error) error {
	cfg = cfg.withDefaults()
	if cfg.Dir == "" {
		dir, err := os.MkdirTemp("", "troupe-bench-")
		if err != nil {
			return err
		}
		defer func() { _ = os.RemoveAll(dir) }() // a temporary folder
		cfg.Dir = dir
	}
	if err := planLarge(each); err != nil {
		return err
	}
	loss := make(chan PlacementResult, 1)
	lossErr := make(chan error, 1)
	if !cfg.NoLoss {
		go func() { // mostly idle, so it does not disturb the others
			r, err := nodeLoss(ctx, cfg)
			loss <- r
			lossErr <- err
		}()
	}
	for _, sync := range []bool{false, true} {
		for _, n := range cfg.Nodes {
			if err := placementOn(ctx, cfg, n, sync, each); err != nil {
				return fmt.Errorf("%d nodes, sync_always %v: %w", n, sync, err)
			}
		}
	}
	if cfg.NoLoss {
		return nil
	}
	r, err := <-loss, <-lossErr
	if err != nil {
		return fmt.Errorf("the loss of a node: %w", err)
	}
	return each(r)
}

// planLarge is the shortest of a few plans; the others were preempted.
func planLarge(each func(PlacementResult) error) error {
	reports, err := simReports(largeNodes, devicesPerNode)
	if err != nil {
		return err
	}
	book, err := planner.New(planner.Snapshot{Now: time.Now(), Nodes: placement.NodesFromReports(reports)})
	if err != nil {
		return err
	}
	request := placement.Request{ID: "large", Bundles: placement.Repeat(largeGang, placement.Bundle{Devices: placement.Wholes(devicesPerNode)})}
	best := time.Duration(0)
	for range 10 {
		began := time.Now()
		plan, err := book.Plan(request)
		took := time.Since(began)
		if err != nil || len(plan.Workers) != largeGang {
			return fmt.Errorf("%d workers of %d: %w", len(plan.Workers), largeGang, errors.Join(err, plan.Err()))
		}
		if best == 0 || took < best {
			best = took
		}
	}
	return each(PlacementResult{Nodes: largeNodes, Bundles: largeGang, PlanMS: float64(best.Microseconds()) / 1000})
}

// simReports are the reports of simulated nodes.
func simReports(n, devices int) ([]protocol.Report, error) {
	reports := make([]protocol.Report, n)
	for i, sim := range gpu.NewSims(gpu.SimSpec{Nodes: n, Devices: devices}, "bench") {
		found, err := sim.Devices(context.Background())
		if err != nil {
			return nil, err
		}
		reports[i] = protocol.Report{Node: fmt.Sprintf("sim-%d", i), CPUs: 64, Memory: 512 * gpu.GiB, Devices: found}
	}
	return reports, nil
}

// placementOn measures every gang and number of clients on one server.
func placementOn(ctx context.Context, cfg PlacementConfig, n int, sync bool, each func(PlacementResult) error) error {
	h, err := newPlacementHead(ctx, cfg.Dir, n, sync, 15*time.Second)
	if err != nil {
		return err
	}
	defer h.close()
	for _, bundles := range cfg.Bundles {
		for _, clients := range cfg.Clients {
			times, took, err := h.measure(ctx, bundles, clients, cfg.Each)
			if err != nil {
				return fmt.Errorf("%d bundles, %d clients: %w", bundles, clients, err)
			}
			r := PlacementResult{
				Nodes: n, Bundles: bundles, Clients: clients, SyncAlways: sync, Pairs: len(times),
				PairsPerS: float64(len(times)) / took.Seconds(), P50: quantile(times, 0.5), P99: quantile(times, 0.99),
			}
			if err := each(r); err != nil {
				return err
			}
		}
	}
	return nil
}

// measure runs the clients for a while, and checks that nothing stays reserved.
func (h *placementHead) measure(ctx context.Context, bundles, clients int, d time.Duration) (times []time.Duration, took time.Duration, err error) {
	var mu sync.Mutex // guards times and err while the clients run
	var group sync.WaitGroup
	startCh := make(chan struct{})
	for i := range clients {
		b, c, err := h.dial(ctx, fmt.Sprintf("bench-client-%d", i))
		if err != nil {
			return nil, 0, err
		}
		defer func() { _ = b.Close() }() // fails only if the server is gone
		defer c.Close()
		p := pairs{c, bundles}
		if _, err := p.until(ctx, func(n int) bool { return n == 20 }); err != nil { // warm-up
			return nil, 0, err
		}
		group.Go(func() {
			<-startCh
			began := time.Now()
			own, failed := p.until(ctx, func(int) bool { return time.Since(began) >= d })
			mu.Lock()
			defer mu.Unlock()
			times, err = append(times, own...), errors.Join(err, failed)
		})
	}
	began := time.Now()
	close(startCh)
	group.Wait()
	took = time.Since(began)
	return times, took, errors.Join(err, h.empty(ctx))
}

// empty fails if anything is reserved or waits.
func (h *placementHead) empty(ctx context.Context) error {
	list, err := h.operator.List(ctx)
	if err == nil && len(list.Records)+len(list.Waiting) > 0 {
		err = fmt.Errorf("%d reservations and %d requests are left", len(list.Records), len(list.Waiting))
	}
	return err
}

// pairs is a client that reserves and releases gangs of a number of bundles.
type pairs struct {
	client  *placement.Client
	bundles int
}

// until makes pairs until enough, and returns their durations.
func (p pairs) until(ctx context.Context, over func(done int) bool) ([]time.Duration, error) {
	request := placement.Request{Holder: "bench", Bundles: placement.Repeat(p.bundles, placement.Bundle{Devices: placement.Whole})}
	times := make([]time.Duration, 0, 1<<14)
	for !over(len(times)) {
		began := time.Now()
		r, err := p.client.Reserve(ctx, request)
		if err == nil && len(r.Workers) != p.bundles {
			err = fmt.Errorf("%d workers of %d", len(r.Workers), p.bundles)
		}
		if err == nil {
			err = p.client.Release(ctx, r.ID, r.Token)
		}
		if err != nil {
			return nil, err
		}
		times = append(times, time.Since(began))
	}
	return times, nil
}
