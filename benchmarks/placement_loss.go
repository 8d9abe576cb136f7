package benchmarks

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"troupe/bus"
	"troupe/placement"
)

// nodeLoss kills a node with the default lease, and waits for the end of its reservation.
func nodeLoss(ctx context.Context, cfg PlacementConfig) (PlacementResult, error) {
	const lease = 15 * time.Second
	result := PlacementResult{Nodes: 2, Bundles: 1, LeaseS: lease.Seconds()}
	h, err := newPlacementHead(ctx, cfg.Dir, 1, false, lease)
	if err != nil {
		return result, err
	}
	defer h.close()
	kill, err := h.doomed(ctx, lease)
	if err != nil {
		return result, err
	}
	defer kill()
	if _, err := h.operator.Reserve(ctx, placement.Request{
		Namespace: "bench", Bundles: []placement.Bundle{{Devices: placement.Whole, Node: "doomed-0"}},
	}); err != nil {
		return result, err
	}
	if err := pauseFor(ctx, lease+time.Second); err != nil { // a new leader declares no node lost before a full lease
		return result, err
	}
	kill()
	return result, h.awaitEnd(ctx, &result)
}

// doomed adds a node with its own connection, which is closed first, so that the node cannot report its end.
func (h *placementHead) doomed(ctx context.Context, lease time.Duration) (kill func(), err error) {
	b, err := bus.Open(ctx, bus.Config{URLs: []string{h.server.URL()}, Name: "bench-node", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, err
	}
	run, cancel := context.WithCancel(ctx)
	kill = sync.OnceFunc(func() {
		_ = b.Close() // before the node ends
		cancel()
	})
	if err := errors.Join(h.report(ctx, run, b, "doomed", 1, lease), h.ready(ctx, 2)); err != nil {
		kill()
		return nil, err
	}
	return kill, nil
}

// awaitEnd records when the reservation is marked as lost, and when it has ended.
func (h *placementHead) awaitEnd(ctx context.Context, result *PlacementResult) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	began := time.Now()
	for {
		list, err := h.operator.List(ctx)
		if err != nil {
			return err
		}
		since := float64(time.Since(began).Milliseconds())
		switch {
		case len(list.Records) == 0:
			result.FreedMS = since
			return nil
		case list.Records[0].State == placement.StateLost && result.LostMS == 0:
			result.LostMS = since
		}
		if err := pauseFor(ctx, 20*time.Millisecond); err != nil {
			return fmt.Errorf("reservation %s is still %s: %w", list.Records[0].ID, list.Records[0].State, err)
		}
	}
}

// pauseFor waits, unless ctx ends first.
func pauseFor(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
