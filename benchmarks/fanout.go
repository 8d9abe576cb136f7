package benchmarks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/dispatch"
	"troupe/roles"
)

// FanoutConfig configures Fanout: the time of a ONE_TO_ALL call until all answers are in, for each number of workers, size and
// layout.
type FanoutConfig struct {
	Workers []int
	Bytes   []int         // sizes of the argument and of each answer; empty: 64
	Layouts []string      // empty: Own and Shared
	Each    time.Duration // for one number of workers, size and layout; zero: 3 s
	URL     string        // of a NATS server to use; empty: an embedded one, reached by TCP on loopback
	Program string        // the troupe program, for the layout Processes
	Version string        // of the program, for the results
	// Rate is how many calls begin in a second. A call that begins late because the one before it has not ended counts from
	// when it should have begun, so that a stall is not hidden (coordinated omission). Zero: one call after another.
	Rate float64
}

// FanoutResult is one size and layout.
type FanoutResult struct {
	Workers   int     `json:"workers"`
	Layout    string  `json:"layout"` // Own, Shared or Processes
	Bytes     int     `json:"bytes"`
	Calls     int     `json:"calls"`
	P50       float64 `json:"p50_us"`
	P90       float64 `json:"p90_us"`
	P99       float64 `json:"p99_us"`
	P999      float64 `json:"p999_us"`
	FloorP50  float64 `json:"floor_p50_us"`
	FloorP99  float64 `json:"floor_p99_us"`
	RatioP50  float64 `json:"ratio_p50"`
	Rate      float64 `json:"rate,omitempty"` // calls a second that were begun; 0: one after another
	Transport string  `json:"transport"`

	Version string    `json:"version,omitempty"`
	CPUs    int       `json:"cpus"`
	At      time.Time `json:"at"`
}

// Layouts of the workers.
const (
	Own       = "own"       // goroutines of the driver's process, with a connection each
	Shared    = "shared"    // goroutines of the driver's process, with one connection for all
	Processes = "processes" // a process each, started by a head and its agent; the server is the head's
)

// Fanout measures every number of workers, size and layout and calls each with every result.
func Fanout(ctx context.Context, cfg FanoutConfig, each func(FanoutResult) error) error {
	if len(cfg.Bytes) == 0 {
		cfg.Bytes = []int{64}
	}
	if len(cfg.Layouts) == 0 {
		cfg.Layouts = []string{Own, Shared}
	}
	if cfg.Each == 0 {
		cfg.Each = 3 * time.Second
	}
	for _, size := range cfg.Bytes {
		for _, n := range cfg.Workers {
			for _, layout := range cfg.Layouts {
				r, err := fanoutOne(ctx, cfg, n, size, layout)
				if err != nil {
					return fmt.Errorf("%d workers, %d bytes, layout %s: %w", n, size, layout, err)
				}
				if err := each(r); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// fanoutPair is the same fan-out by Troupe and by bare NATS, on one server.
type fanoutPair struct {
	ours, floor func(context.Context) error
	stops       []func()
}

// stop ends what was started, the last first.
func (p *fanoutPair) stop() {
	for _, stop := range slices.Backward(p.stops) {
		stop()
	}
}

// threadPair has its workers in this process.
func threadPair(ctx context.Context, url string, n int, layout string, arg []byte) (p fanoutPair, err error) {
	if url == "" {
		server, err := bus.Open(ctx, bus.Config{Server: bus.ServerConfig{Listen: "127.0.0.1:0"}})
		if err != nil {
			return p, err
		}
		p.stops = append(p.stops, func() { _ = server.Close() }) // what was measured is known
		url = server.URL()
	}
	ours, stop, err := troupeFanout(ctx, url, n, layout, arg)
	if err != nil {
		return p, err
	}
	p.ours, p.stops = ours, append(p.stops, stop)
	if p.floor, stop, err = floorFanout(url, n, layout, arg); err != nil {
		return p, err
	}
	p.stops = append(p.stops, stop)
	return p, nil
}

func fanoutOne(ctx context.Context, cfg FanoutConfig, n, size int, layout string) (_ FanoutResult, err error) {
	arg := bytes.Repeat([]byte{7}, size)
	var pair fanoutPair
	if layout == Processes {
		pair, err = processPair(ctx, cfg, n, arg)
	} else {
		pair, err = threadPair(ctx, cfg.URL, n, layout, arg)
	}
	defer pair.stop()
	if err != nil {
		return FanoutResult{}, err
	}
	times, floorTimes, err := interleave(ctx, cfg.Each, cfg.Rate, pair.ours, pair.floor)
	if err != nil {
		return FanoutResult{}, err
	}
	r := FanoutResult{
		Workers: n, Layout: layout, Bytes: size, Calls: len(times), Transport: "tcp", Rate: cfg.Rate,
		Version: cfg.Version, CPUs: runtime.NumCPU(), At: time.Now().UTC().Truncate(time.Second),
		P50: quantile(times, 0.5), P90: quantile(times, 0.9), P99: quantile(times, 0.99), P999: quantile(times, 0.999), FloorP50: quantile(floorTimes, 0.5), FloorP99: quantile(floorTimes, 0.99),
	}
	r.RatioP50 = r.P50 / r.FloorP50
	return r, nil
}

// interleave runs both in turns for the duration d, after a warm-up of each. A turn lasts about 20 ms, or ten calls at a fixed
// rate.
func interleave(ctx context.Context, d time.Duration, rate float64, ours, floor func(context.Context) error) (a, b []time.Duration, err error) {
	length, gap := 20*time.Millisecond, time.Duration(0)
	if rate > 0 {
		gap = time.Duration(float64(time.Second) / rate)
		length = max(length, 10*gap)
	}
	turn := func(do func(context.Context) error, out []time.Duration) ([]time.Duration, error) {
		due := time.Now()
		for until := time.Now().Add(length); ; {
			start := time.Now()
			if gap > 0 {
				time.Sleep(time.Until(due))
				start, due = due, due.Add(gap)
			}
			if err := do(ctx); err != nil {
				return out, err
			}
			out = append(out, time.Since(start))
			if gap > 0 && due.After(until) || gap == 0 && time.Now().After(until) {
				return out, nil // at a fixed rate, every call that was due has been made
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
	return echoCall(cluster, n, arg), stop, nil
}

// echoCall calls all workers of a cluster once, and checks their answers.
func echoCall(cluster *roles.Cluster, n int, arg []byte) func(context.Context) error {
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
	}
}

// echoCluster is a role of n workers that answer with their argument, in this process.
func echoCluster(ctx context.Context, cfg bus.Config, n int, layout string) (cluster *roles.Cluster, stop func(), err error) {
	cfg.Name = "bench-workers"
	workers, err := bus.Open(ctx, cfg)
	if err != nil {
		return nil, nil, err
	}
	cfg.Name = "bench-driver"
	local := roles.NewLocal(workers, []*actors.Class{EchoClass()})
	rt, err := roles.Open(ctx, roles.Config{BusConfig: cfg, Namespace: "bench", Local: local})
	if err != nil {
		return nil, nil, errors.Join(err, workers.Close())
	}
	stop = func() {
		_ = rt.Close(ctx)
		_ = local.Close(ctx)
		_ = workers.Close()
	}
	if cluster, err = rt.Create(ctx, roles.Spec{Name: "echo", Class: echoClass, World: n, OwnConnections: layout == Own}); err != nil {
		stop()
		return nil, nil, err
	}
	return cluster, stop, nil
}
