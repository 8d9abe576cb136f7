package benchmarks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"troupe/bus"
	"troupe/dispatch"
)

// FanoutConfig configures Fanout: the time of a ONE_TO_ALL call until all answers are in, for each number of workers and both
// layouts of connections.
type FanoutConfig struct {
	Workers []int
	Bytes   int           // of the argument and of each answer; zero: 64
	Each    time.Duration // for one size and layout; zero: 3 s
}

// FanoutResult is one size and layout.
type FanoutResult struct {
	Workers   int     `json:"workers"`
	Layout    string  `json:"layout"` // own: a connection each; shared: one connection for all workers
	Bytes     int     `json:"bytes"`
	Calls     int     `json:"calls"`
	P50       float64 `json:"p50_us"`
	P99       float64 `json:"p99_us"`
	FloorP50  float64 `json:"floor_p50_us"`
	FloorP99  float64 `json:"floor_p99_us"`
	RatioP50  float64 `json:"ratio_p50"`
	Transport string  `json:"transport"`
}

// Layouts of connections.
const (
	Own    = "own"
	Shared = "shared"
)

// Fanout measures every number of workers in both layouts and calls each with every result. The connections to the embedded
// server are TCP on loopback, as those of worker processes.
func Fanout(ctx context.Context, cfg FanoutConfig, each func(FanoutResult) error) error {
	if cfg.Bytes == 0 {
		cfg.Bytes = 64
	}
	if cfg.Each == 0 {
		cfg.Each = 3 * time.Second
	}
	for _, n := range cfg.Workers {
		for _, layout := range []string{Own, Shared} {
			r, err := fanoutOne(ctx, cfg, n, layout)
			if err != nil {
				return fmt.Errorf("%d workers, %s connections: %w", n, layout, err)
			}
			if err := each(r); err != nil {
				return err
			}
		}
	}
	return nil
}

func fanoutOne(ctx context.Context, cfg FanoutConfig, n int, layout string) (_ FanoutResult, err error) {
	server, err := bus.Open(ctx, bus.Config{Server: bus.ServerConfig{Listen: "127.0.0.1:0"}})
	if err != nil {
		return FanoutResult{}, err
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	arg := bytes.Repeat([]byte{7}, cfg.Bytes)
	ours, stopOurs, err := troupeFanout(ctx, server.URL(), n, layout, arg)
	if err != nil {
		return FanoutResult{}, err
	}
	defer stopOurs()
	floor, stopFloor, err := floorFanout(server.URL(), n, layout, arg)
	if err != nil {
		return FanoutResult{}, err
	}
	defer stopFloor()
	times, floorTimes, err := interleave(ctx, cfg.Each, ours, floor)
	if err != nil {
		return FanoutResult{}, err
	}
	r := FanoutResult{
		Workers: n, Layout: layout, Bytes: cfg.Bytes, Calls: len(times), Transport: "tcp",
		P50: quantile(times, 0.5), P99: quantile(times, 0.99), FloorP50: quantile(floorTimes, 0.5), FloorP99: quantile(floorTimes, 0.99),
	}
	r.RatioP50 = r.P50 / r.FloorP50
	return r, nil
}

// interleave runs both in turns of about 20 ms for the duration d, after a warm-up of each.
func interleave(ctx context.Context, d time.Duration, ours, floor func(context.Context) error) (a, b []time.Duration, err error) {
	turn := func(do func(context.Context) error, out []time.Duration) ([]time.Duration, error) {
		for until := time.Now().Add(20 * time.Millisecond); ; {
			start := time.Now()
			if err := do(ctx); err != nil {
				return out, err
			}
			out = append(out, time.Since(start))
			if time.Now().After(until) {
				return out, nil
			}
		}
	}
	for _, warm := range []func(context.Context) error{ours, floor, ours, floor} {
		if _, err := turn(warm, nil); err != nil {
			return nil, nil, err
		}
	}
	for end := time.Now().Add(d); time.Now().Before(end); {
		if a, err = turn(ours, a); err != nil {
			return nil, nil, fmt.Errorf("troupe: %w", err)
		}
		if b, err = turn(floor, b); err != nil {
			return nil, nil, fmt.Errorf("floor: %w", err)
		}
	}
	return a, b, nil
}

// quantile is the smallest time, in microseconds, that at least a share q of the times do not exceed. It sorts them.
func quantile(times []time.Duration, q float64) float64 {
	slices.Sort(times)
	return float64(times[max(int(math.Ceil(q*float64(len(times))))-1, 0)].Nanoseconds()) / 1000
}

type echo struct{}

func (*echo) Echo(_ context.Context, b []byte) ([]byte, error) { return b, nil }

// troupeFanout creates a role of n workers; call is one ONE_TO_ALL call, with its answers decoded and counted.
func troupeFanout(ctx context.Context, url string, n int, layout string, arg []byte) (call func(context.Context) error, stop func(), err error) {
	cluster, stop, err := echoCluster(ctx, bus.Config{URLs: []string{url}}, n, layout)
	if err != nil {
		return nil, nil, err
	}
	return func(ctx context.Context) error {
		f, err := cluster.Go(ctx, dispatch.Call{Method: "echo", Args: []any{arg}, Mode: dispatch.OneToAll})
		if err != nil {
			return err
		}
		answers, err := dispatch.AwaitEach[[]byte](ctx, f)
		if err != nil {
			return err
		}
		if len(answers) != n || !bytes.Equal(answers[n-1], arg) {
			return fmt.Errorf("%d answers of %d, or a wrong one", len(answers), n)
		}
		return nil
	}, stop, nil
}
