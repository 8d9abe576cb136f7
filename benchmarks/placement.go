package benchmarks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	"troupe/bus"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/placement"
)

// PlacementConfig says what to measure: reserve and release, one after the other, by so many clients at once.
type PlacementConfig struct {
	Nodes   []int         // simulated, of eight devices; zero: 64 and 1,024
	Bundles []int         // of one device, in a gang; zero: 1, 8 and 64
	Clients []int         // each with a connection of its own; zero: 1 and 8
	Each    time.Duration // for one of them; zero: 2.5 s
	Dir     string        // where the stores go, which decides what a sync costs; zero: a temporary folder
	NoLoss  bool          // leaves out the loss of a node, which takes two leases
}

// PlacementResult is one line. What a line is not about is zero and left out.
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

// Placement measures and calls each with the results as they come. Service and server are one process, as in a head;
// clients reach it by TCP on loopback, as drivers would.
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
		go func() { // idle nearly all the time, so it may run beside the others
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

// planLarge is the time of one plan: the best of a few, because the others were interrupted.
func planLarge(each func(PlacementResult) error) error {
	reports, err := simReports(largeNodes, devicesPerNode)
	if err != nil {
		return err
	}
	book, err := placement.NewBook(placement.Snapshot{Now: time.Now(), Nodes: placement.NodesOf(reports)})
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

// simReports is what simulated nodes report of themselves.
func simReports(n, devices int) ([]gpu.Report, error) {
	reports := make([]gpu.Report, n)
	for i, sim := range gpu.NewSims(gpu.SimSpec{Nodes: n, Devices: devices}, "bench") {
		found, err := sim.Devices(context.Background())
		if err != nil {
			return nil, err
		}
		reports[i] = gpu.Report{Node: fmt.Sprintf("sim-%d", i), CPUs: 64, Memory: 512 * gpu.GiB, Devices: found}
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

// placementHead is a server, a service and simulated nodes in this process.
type placementHead struct {
	server   *bus.Bus
	operator *placement.Client
	store    string
	cancel   context.CancelFunc
	group    sync.WaitGroup
}

func newPlacementHead(ctx context.Context, dir string, n int, sync bool, lease time.Duration) (_ *placementHead, err error) {
	store, err := os.MkdirTemp(dir, "store-")
	if err != nil {
		return nil, err
	}
	h := &placementHead{store: store}
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	h.cancel = cancel
	defer func() {
		if err != nil {
			h.close()
		}
	}()
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	h.server, err = bus.Open(ctx, bus.Config{Name: "bench-head", Logger: quiet, Server: bus.ServerConfig{Listen: "127.0.0.1:0", StoreDir: store, SyncAlways: sync}})
	if err != nil {
		return nil, err
	}
	service, err := placement.NewService(placement.Config{Bus: h.server, NodeLease: lease})
	if err != nil {
		return nil, err
	}
	h.group.Go(func() { _ = service.Run(run) }) // if it fails nothing is granted, and the measurement says so
	if err := h.report(ctx, run, h.server, "sim", n, lease); err != nil {
		return nil, err
	}
	if h.operator, err = placement.NewClient(h.server, ""); err != nil {
		return nil, err
	}
	return h, h.ready(ctx, n)
}

// report starts the reporters of n nodes.
func (h *placementHead) report(ctx, run context.Context, b *bus.Bus, name string, n int, lease time.Duration) error {
	for i, sim := range gpu.NewSims(gpu.SimSpec{Nodes: n, Devices: devicesPerNode}, name) {
		there := make(chan struct{})
		r, err := nodes.NewReporter(nodes.Config{
			Bus: b, Name: fmt.Sprintf("%s-%d", name, i), CPUs: 64, Memory: 512 * gpu.GiB, Inventory: sim, Lease: lease,
			Read: 10 * time.Second, RegisteredFunc: func() { close(there) },
		})
		if err != nil {
			return err
		}
		h.group.Go(func() { _ = r.Run(run) }) // a node that is missing is waited for in vain
		select {
		case <-there:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// ready waits until the service knows all nodes.
func (h *placementHead) ready(ctx context.Context, n int) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		list, err := h.operator.Nodes(ctx)
		if err != nil {
			return err
		}
		ready := 0
		for _, node := range list {
			if node.State == placement.NodeReady {
				ready++
			}
		}
		if ready == n {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d of %d nodes are ready: %w", ready, n, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (h *placementHead) close() {
	if h.operator != nil {
		h.operator.Close()
	}
	h.cancel()
	h.group.Wait()
	if h.server != nil {
		_ = h.server.Close()
	}
	_ = os.RemoveAll(h.store) // a temporary store
}

// dial is a client with a connection of its own.
func (h *placementHead) dial(ctx context.Context, name string) (*bus.Bus, *placement.Client, error) {
	b, err := bus.Open(ctx, bus.Config{URLs: []string{h.server.URL()}, Name: name})
	if err != nil {
		return nil, nil, err
	}
	c, err := placement.NewClient(b, "bench")
	if err != nil {
		_ = b.Close()
		return nil, nil, err
	}
	return b, c, nil
}

// measure lets clients reserve and release for a while, and checks that nothing is left.
func (h *placementHead) measure(ctx context.Context, bundles, clients int, d time.Duration) (times []time.Duration, took time.Duration, err error) {
	request := placement.Request{Holder: "bench", Bundles: placement.Repeat(bundles, placement.Bundle{Devices: placement.Whole})}
	pair := func(c *placement.Client) error {
		r, err := c.Reserve(ctx, request)
		if err != nil {
			return err
		}
		if len(r.Workers) != bundles {
			return fmt.Errorf("%d workers of %d", len(r.Workers), bundles)
		}
		return c.Release(ctx, r.ID, r.Token)
	}
	var mu sync.Mutex
	var group sync.WaitGroup
	start := make(chan struct{})
	var began time.Time
	for i := range clients {
		b, c, err := h.dial(ctx, fmt.Sprintf("bench-client-%d", i))
		if err != nil {
			return nil, 0, err
		}
		defer func() { _ = b.Close() }() // nothing is left to say
		defer c.Close()
		for range 20 { // warm
			if err := pair(c); err != nil {
				return nil, 0, err
			}
		}
		group.Go(func() {
			<-start
			own := make([]time.Duration, 0, 1<<14)
			var failed error
			for failed == nil && time.Since(began) < d {
				t := time.Now()
				if failed = pair(c); failed == nil {
					own = append(own, time.Since(t))
				}
			}
			mu.Lock()
			defer mu.Unlock()
			times, err = append(times, own...), errors.Join(err, failed)
		})
	}
	began = time.Now()
	close(start)
	group.Wait()
	took = time.Since(began)
	if err != nil {
		return nil, 0, err
	}
	list, err := h.operator.List(ctx)
	if err == nil && len(list.Records)+len(list.Waiting) > 0 {
		err = fmt.Errorf("%d reservations and %d requests are left", len(list.Records), len(list.Waiting))
	}
	return times, took, err
}

// nodeLoss kills a node, with the lease that we ship, and waits for what that ends.
func nodeLoss(ctx context.Context, cfg PlacementConfig) (PlacementResult, error) {
	const lease = 15 * time.Second
	result := PlacementResult{Nodes: 2, Bundles: 1, LeaseS: lease.Seconds()}
	h, err := newPlacementHead(ctx, cfg.Dir, 1, false, lease)
	if err != nil {
		return result, err
	}
	defer h.close()
	// The node that dies has a connection of its own; without it nothing of what it would say at its end is heard.
	b, err := bus.Open(ctx, bus.Config{URLs: []string{h.server.URL()}, Name: "bench-node", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return result, err
	}
	defer func() { _ = b.Close() }() // it may be closed already
	doomed, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := h.report(ctx, doomed, b, "doomed", 1, lease); err != nil {
		return result, err
	}
	if err := h.ready(ctx, 2); err != nil {
		return result, err
	}
	r, err := h.operator.Reserve(ctx, placement.Request{
		Namespace: "bench", Bundles: []placement.Bundle{{Devices: placement.Whole, Node: "doomed-0"}},
	})
	if err != nil {
		return result, err
	}
	select { // a leader that has just come up judges nobody
	case <-ctx.Done():
		return result, ctx.Err()
	case <-time.After(lease + time.Second):
	}
	began := time.Now()
	_ = b.Close()
	for {
		list, err := h.operator.List(ctx)
		if err != nil {
			return result, err
		}
		since := float64(time.Since(began).Milliseconds())
		switch {
		case len(list.Records) == 0:
			result.FreedMS = since
			return result, nil
		case list.Records[0].State == placement.StateLost && result.LostMS == 0:
			result.LostMS = since
		}
		if since > 60_000 {
			return result, fmt.Errorf("reservation %s is still %s", r.ID, list.Records[0].State)
		}
		select {
		case <-ctx.Done():
			return result, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}
