package benchmarks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"troupe/bus"
	"troupe/placement"
	"troupe/roles"
)

// ScaleConfig configures Scale.
type ScaleConfig struct {
	Program string        // the troupe program, which is head, agents and workers
	Nodes   []int         // numbers of agents, each a process; zero: 1, 8 and 32
	Ranks   []int         // numbers of workers, each a process; zero: 8, 64 and 256
	Rounds  int           // roles of each size; zero: 3
	Settle  time.Duration // from the last agent's start until the head counts as idle
	Idle    time.Duration // how long it is observed then; zero: ten seconds
	Log     func(string, ...any)
}

// ScaleResult is one number of nodes with one number of ranks; without ranks, the nodes alone. Times of roles are medians.
type ScaleResult struct {
	Nodes   int      `json:"nodes"`
	Ranks   int      `json:"ranks"`
	Join    *float64 `json:"join_ms,omitempty"` // from the start of the first agent until the head grants devices of all
	IdleCPU *float64 `json:"idle_cpu_percent,omitempty"`
	HeadMB  *float64 `json:"head_mb,omitempty"` // memory of the head
	Create  *float64 `json:"create_ms,omitempty"`
	Call    *float64 `json:"call_ms,omitempty"` // of all ranks, until all answers are there
	End     *float64 `json:"end_ms,omitempty"`
}

const (
	scaleCalls = 20
	scaleJoins = 32  // agents that are started at once
	scaleKinds = 256 // nodes that a request can name
)

func (cfg ScaleConfig) withDefaults() ScaleConfig {
	if len(cfg.Nodes) == 0 {
		cfg.Nodes = []int{1, 8, 32}
	}
	if len(cfg.Ranks) == 0 {
		cfg.Ranks = []int{8, 64, 256}
	}
	if cfg.Rounds == 0 {
		cfg.Rounds = 3
	}
	if cfg.Idle == 0 {
		cfg.Idle = 10 * time.Second
	}
	if cfg.Log == nil {
		cfg.Log = func(string, ...any) {}
	}
	return cfg
}

// Scale measures what nodes and ranks cost: a head with each number of nodes, and roles of each number of ranks spread over them.
func Scale(ctx context.Context, cfg ScaleConfig, each func(ScaleResult) error) error {
	cfg = cfg.withDefaults()
	for _, n := range cfg.Nodes {
		if err := scaleNodes(ctx, cfg, n, each); err != nil {
			return fmt.Errorf("%d nodes: %w", n, err)
		}
	}
	return nil
}

// scaleNodes measures one number of nodes.
func scaleNodes(ctx context.Context, cfg ScaleConfig, n int, each func(ScaleResult) error) (err error) {
	dir, err := os.MkdirTemp("", "troupe-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	head, err := StartHead(ctx, cfg.Program, filepath.Join(dir, "head"), "none", dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, head.Stop()) }()
	cfg.Log("%d nodes join", n)
	begun := time.Now()
	agents, err := joinMany(ctx, head, n)
	defer func() {
		for _, a := range agents {
			_ = a.Kill() // it has no workers
		}
	}()
	if err != nil {
		return err
	}
	if err := awaitNodes(ctx, head, n+1); err != nil { // the head's own is one more
		return err
	}
	joined := milli(time.Since(begun))
	if err := pause(ctx, cfg.Settle); err != nil {
		return err
	}
	cpu, err := cpuPercent(ctx, head.PID(), cfg.Idle)
	if err != nil {
		return err
	}
	mb, err := residentMB(head.PID())
	if err != nil {
		return err
	}
	if err := each(ScaleResult{Nodes: n, Join: &joined, IdleCPU: &cpu, HeadMB: &mb}); err != nil {
		return err
	}
	access := head.BusConfig()
	access.Logger = slog.New(slog.DiscardHandler)
	rt, err := roles.Open(ctx, roles.Config{BusConfig: access, Name: "bench", Namespace: "bench"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rt.Close(context.WithoutCancel(ctx))) }()
	for _, ranks := range cfg.Ranks {
		cfg.Log("%d ranks on %d nodes", ranks, n)
		r, err := scaleRanks(ctx, cfg, rt, n, ranks)
		if err != nil {
			return fmt.Errorf("%d ranks: %w", ranks, err)
		}
		mb, err := residentMB(head.PID())
		if err != nil {
			return err
		}
		r.HeadMB = &mb
		if err := each(r); err != nil {
			return err
		}
	}
	return nil
}

func scaleNode(i int) string { return fmt.Sprintf("node-%d", i) }

// joinMany starts the agents of n nodes of eight devices, some at a time.
func joinMany(ctx context.Context, head *Head, n int) (agents []*process, err error) {
	var mu sync.Mutex // guards agents and err
	var group sync.WaitGroup
	slots := make(chan struct{}, scaleJoins)
	for i := range n {
		slots <- struct{}{}
		group.Go(func() {
			defer func() { <-slots }()
			a, failed := head.Join(ctx, scaleNode(i), "sim:1x8")
			mu.Lock()
			defer mu.Unlock()
			if failed != nil {
				err = errors.Join(err, failed)
				return
			}
			agents = append(agents, a)
		})
	}
	group.Wait()
	return agents, err
}

// awaitNodes waits until the head has that many nodes alive.
func awaitNodes(ctx context.Context, head *Head, n int) error {
	b, err := bus.Open(ctx, head.BusConfig())
	if err != nil {
		return err
	}
	defer func() { _ = b.Close() }() // fails only if the server is gone
	client, err := placement.NewClient(b, "")
	if err != nil {
		return err
	}
	defer client.Close()
	for {
		all, err := client.Nodes(ctx)
		if err != nil {
			return err
		}
		alive := 0
		for _, node := range all {
			if node.State == placement.NodeReady {
				alive++
			}
		}
		if alive >= n {
			return nil
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

// scaleRanks creates, calls and ends roles of a size.
func scaleRanks(ctx context.Context, cfg ScaleConfig, rt *roles.Runtime, n, ranks int) (ScaleResult, error) {
	var made, called, ended []time.Duration
	var needs placement.Request
	on := min(n, scaleKinds)
	for rank := range ranks {
		needs.Bundles = append(needs.Bundles, placement.Bundle{Node: scaleNode(rank * on / ranks * n / on)})
	}
	for range cfg.Rounds {
		begun := time.Now()
		c, err := rt.Create(ctx, roles.Spec{
			Name: "scale", Class: echoClass, World: ranks, StartTimeout: 5 * time.Minute,
			Process: &roles.Process{Command: []string{cfg.Program}, Needs: needs},
		})
		if err != nil {
			return ScaleResult{}, err
		}
		made = append(made, time.Since(begun))
		call := echoCall(c, ranks, []byte("x"))
		for range scaleCalls {
			begun := time.Now()
			if err := call(ctx); err != nil {
				return ScaleResult{}, errors.Join(err, c.Destroy(ctx))
			}
			called = append(called, time.Since(begun))
		}
		begun = time.Now()
		if err := c.Destroy(ctx); err != nil {
			return ScaleResult{}, err
		}
		ended = append(ended, time.Since(begun))
	}
	return ScaleResult{Nodes: n, Ranks: ranks, Create: milliseconds(made, 0.5), Call: milliseconds(called, 0.5), End: milliseconds(ended, 0.5)}, nil
}

func milli(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// cpuPercent is how much of a core a process uses.
func cpuPercent(ctx context.Context, pid int, during time.Duration) (float64, error) {
	before, err := cpuTicks(pid)
	if err != nil {
		return 0, err
	}
	begun := time.Now()
	if err := pause(ctx, during); err != nil {
		return 0, err
	}
	after, err := cpuTicks(pid)
	const perSecond = 100 // USER_HZ of Linux
	return float64(after-before) / perSecond / time.Since(begun).Seconds() * 100, err
}

// cpuTicks is the processor time of a process.
func cpuTicks(pid int) (int64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	if len(fields) < 13 {
		return 0, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	user, err := strconv.ParseInt(fields[11], 10, 64)
	system, failed := strconv.ParseInt(fields[12], 10, 64)
	return user + system, errors.Join(err, failed)
}

// ScaleSlope is how much a figure grows with each rank, at the largest number of nodes, or with each node.
type ScaleSlope struct {
	Figure string  `json:"figure"`
	Slope  float64 `json:"slope"`
	Each   string  `json:"each"` // rank or node
}

// ScaleSlopes are those of all figures of which there are results at two points or more, by least squares.
func ScaleSlopes(all []ScaleResult) (out []ScaleSlope) {
	most := 0
	for _, r := range all {
		most = max(most, r.Nodes)
	}
	fit := func(figure, each string, x func(ScaleResult) int, keep func(ScaleResult) bool, y func(ScaleResult) *float64) {
		var xs, ys []float64
		for _, r := range all {
			if v := y(r); v != nil && keep(r) {
				xs, ys = append(xs, float64(x(r))), append(ys, *v)
			}
		}
		if slope, ok := leastSquares(xs, ys); ok {
			out = append(out, ScaleSlope{figure, slope, each})
		}
	}
	ranks, nodes := func(r ScaleResult) int { return r.Ranks }, func(r ScaleResult) int { return r.Nodes }
	onMost := func(r ScaleResult) bool { return r.Ranks > 0 && r.Nodes == most }
	alone := func(r ScaleResult) bool { return r.Ranks == 0 }
	fit("create_ms", "rank", ranks, onMost, func(r ScaleResult) *float64 { return r.Create })
	fit("call_ms", "rank", ranks, onMost, func(r ScaleResult) *float64 { return r.Call })
	fit("end_ms", "rank", ranks, onMost, func(r ScaleResult) *float64 { return r.End })
	fit("head_mb", "rank", ranks, onMost, func(r ScaleResult) *float64 { return r.HeadMB })
	fit("join_ms", "node", nodes, alone, func(r ScaleResult) *float64 { return r.Join })
	fit("idle_cpu_percent", "node", nodes, alone, func(r ScaleResult) *float64 { return r.IdleCPU })
	fit("head_mb", "node", nodes, alone, func(r ScaleResult) *float64 { return r.HeadMB })
	return out
}

// leastSquares is the slope of the line through points; false: they have one x.
func leastSquares(xs, ys []float64) (slope float64, ok bool) {
	if len(xs) < 2 || slices.Min(xs) == slices.Max(xs) {
		return 0, false
	}
	n, sx, sy, sxx, sxy := float64(len(xs)), 0.0, 0.0, 0.0, 0.0
	for i, x := range xs {
		sx, sy, sxx, sxy = sx+x, sy+ys[i], sxx+x*x, sxy+x*ys[i]
	}
	return (n*sxy - sx*sy) / (n*sxx - sx*sx), true
}
