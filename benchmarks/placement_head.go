package benchmarks

import (
	"context"
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
	h.group.Go(func() { _ = service.Run(run) }) // after a failure nothing is granted, and the measurement fails
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
		h.group.Go(func() { _ = r.Run(run) }) // after a failure, ready fails
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

// dial is a client with its own connection.
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
