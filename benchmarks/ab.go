package benchmarks

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/dispatch"
	"troupe/internal/ab"
	"troupe/roles"
)

// ABConfig is what AB measures.
type ABConfig struct {
	Program       string        // the troupe program, which runs each measurement as a process of its own
	Optimisations []string      // zero: all of internal/ab
	Rounds        int           // zero: 7
	Each          time.Duration // of one measurement; zero: 2 s
}

// ABResult is one optimisation on one row: the medians of all rounds with and without it. Less is better.
type ABResult struct {
	Optimisation string  `json:"optimisation"`
	Row          string  `json:"row"`
	Unit         string  `json:"unit"`
	Rounds       int     `json:"rounds"`
	On           float64 `json:"on"`
	Off          float64 `json:"off"`
	Gain         float64 `json:"gain_percent"` // how much more it costs without
}

// The rows.
const (
	RowCall     = "call_1_1"     // a call of one worker until its answer, as a multiple of nc.Request
	RowFanout   = "fanout_64"    // a call of 64 workers on one connection until all answers are in, as a multiple of bare NATS
	RowInFlight = "in_flight"    // 1,000 calls of one worker in flight: CPU time of server, driver and worker, µs a call
	RowBodies   = "bodies_64mib" // an argument and an answer of 64 MiB through a head: CPU time of the head, ms a call
)

var abRows = map[string][]string{
	ab.BatchWrites: {RowCall, RowInFlight},
	ab.QuickValues: {RowCall, RowFanout, RowInFlight},
	ab.HeapBallast: {RowBodies},
	ab.Recorder:    {RowCall, RowFanout, RowInFlight},
	ab.Traffic:     {RowCall, RowFanout, RowInFlight},
}

// ABValue is one measurement of a row.
type ABValue struct {
	Value float64 `json:"value"`
	Unit  string  `json:"unit"`
}

// AB measures every optimisation switched on and off, in turns, and calls each with the results.
func AB(ctx context.Context, cfg ABConfig, each func(ABResult) error) error {
	if cfg.Rounds == 0 {
		cfg.Rounds = 7
	}
	if cfg.Optimisations == nil {
		cfg.Optimisations = ab.Names
	}
	for _, name := range cfg.Optimisations {
		if abRows[name] == nil {
			return fmt.Errorf("no optimisation %q; there are %v", name, ab.Names)
		}
		for _, row := range abRows[name] {
			r, err := abOne(ctx, cfg, name, row)
			if err == nil {
				err = each(r)
			}
			if err != nil {
				return fmt.Errorf("%s of %s: %w", row, name, err)
			}
		}
	}
	return nil
}

func abOne(ctx context.Context, cfg ABConfig, name, row string) (ABResult, error) {
	r := ABResult{Optimisation: name, Row: row, Rounds: cfg.Rounds}
	values := map[string][]float64{}
	for round := range cfg.Rounds {
		order := []string{"", name}
		if round%2 == 1 {
			slices.Reverse(order)
		}
		for _, off := range order {
			v, err := abProcess(ctx, cfg, off, row)
			if err != nil {
				return r, err
			}
			values[off], r.Unit = append(values[off], v.Value), v.Unit
		}
	}
	r.On, r.Off = median(values[""]), median(values[name])
	r.Gain = 100 * (r.Off/r.On - 1)
	return r, nil
}

// abProcess measures a row in a process of its own, with one optimisation switched off.
func abProcess(ctx context.Context, cfg ABConfig, off, row string) (v ABValue, err error) {
	cmd := exec.CommandContext(ctx, cfg.Program, "bench", "ab-row", row, "--each", cfg.Each.String())
	cmd.Env = append(os.Environ(), "TROUPE_AB_OFF="+off)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return v, fmt.Errorf("%w: %s", err, errs.String())
	}
	return v, json.Unmarshal(out, &v)
}

func median(values []float64) float64 {
	slices.Sort(values)
	return (values[(len(values)-1)/2] + values[len(values)/2]) / 2
}

// ABRow measures one row in this process, and in head processes of program.
func ABRow(ctx context.Context, program, row string, d time.Duration) (ABValue, error) {
	if d == 0 {
		d = 2 * time.Second
	}
	switch row {
	case RowCall:
		r, err := fanoutOne(ctx, FanoutConfig{Each: d}, 1, 64, Own)
		return ABValue{r.RatioP50, "× nc.Request"}, err
	case RowFanout:
		r, err := fanoutOne(ctx, FanoutConfig{Each: d}, 64, 64, Shared)
		return ABValue{r.RatioP50, "× bare NATS"}, err
	case RowInFlight:
		v, err := inFlight(ctx, d)
		return ABValue{v, "µs of CPU"}, err
	case RowBodies:
		v, err := largeBodies(ctx, program, d)
		return ABValue{v, "ms of CPU"}, err
	}
	return ABValue{}, fmt.Errorf("no row %q", row)
}

// inFlight is the CPU time of a call, in µs, while 1,000 are in flight. CPU time, unlike the time of the clock, does not depend on
// other processes on the machine.
func inFlight(ctx context.Context, d time.Duration) (_ float64, err error) {
	server, err := bus.Open(ctx, bus.Config{Server: bus.ServerConfig{Listen: "127.0.0.1:0"}})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	cluster, stop, err := echoCluster(ctx, bus.Config{URLs: []string{server.URL()}}, 1, Own)
	if err != nil {
		return 0, err
	}
	defer stop()
	const width = 1000
	window := make([]*dispatch.Future, width)
	arg := bytes.Repeat([]byte{7}, 64)
	n, began := 0, cpuTime(os.Getpid())
	for end := time.Now().Add(d); time.Now().Before(end) || n%width != 0; n++ {
		if f := window[n%width]; f != nil {
			if err := f.Wait(ctx); err != nil {
				return 0, err
			}
		}
		if window[n%width], err = cluster.Go(ctx, dispatch.Call{Method: "echo", Args: []any{arg}}); err != nil {
			return 0, err
		}
	}
	for _, f := range window {
		if err := f.Wait(ctx); err != nil {
			return 0, err
		}
	}
	return float64((cpuTime(os.Getpid()) - began).Microseconds()) / float64(n), nil
}

// largeBodies is the CPU time of a head, in ms, for a call with 64 MiB each way.
func largeBodies(ctx context.Context, program string, d time.Duration) (_ float64, err error) {
	dir, err := os.MkdirTemp("", "troupe-bench-")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	head, err := StartHead(ctx, program, filepath.Join(dir, "head"), "none", dir)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, head.Stop()) }()
	cluster, stop, err := echoCluster(ctx, head.BusConfig(), 1, Own)
	if err != nil {
		return 0, err
	}
	defer stop()
	arg := bytes.Repeat([]byte{7}, 64<<20)
	var n int
	var began time.Duration
	for end := time.Now().Add(d); time.Now().Before(end) || n < 8; n++ {
		if n == warmBodies {
			began = cpuTime(head.PID())
		}
		if _, err := roles.CallEach[[]byte](ctx, cluster, "echo", arg); err != nil {
			return 0, err
		}
	}
	return float64((cpuTime(head.PID()) - began).Microseconds()) / 1000 / float64(n-warmBodies), nil
}

const warmBodies = 3 // calls until the head has its ballast

// cpuTime is the CPU time of a process so far; zero if it cannot be read.
func cpuTime(pid int) time.Duration {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	var ticks int64
	for _, field := range strings.Fields(rest)[11:13] { // user and system time, in hundredths of a second
		n, _ := strconv.ParseInt(field, 10, 64)
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
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
