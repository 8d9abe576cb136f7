package roles_test

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles"
)

// The worker processes of these tests run this program: TestMain calls roles.Main with this class.
type testWorker struct {
	setup actors.Setup
	total int
	model string
	inits int
}

// Initialize stores its argument; it is replayed.
func (p *testWorker) Initialize(_ context.Context, model string) (actors.None, error) {
	if model == fmt.Sprintf("exits on rank %d", p.setup.Rank) {
		os.Exit(5)
	}
	if model == fmt.Sprintf("fails on rank %d", p.setup.Rank) {
		return actors.None{}, errTired
	}
	p.model = model
	p.inits++
	return actors.None{}, nil
}

// Initialized is the number of calls of Initialize, and the beginning of the last argument.
func (p *testWorker) Initialized(context.Context, actors.None) (string, error) {
	return fmt.Sprintf("%d %.8s %d", p.inits, p.model, len(p.model)), nil
}

// Ask calls another role from inside a worker.
func (p *testWorker) Ask(ctx context.Context, h roles.Handle) ([]any, error) {
	c, err := h.Open(ctx)
	if err != nil {
		return nil, err
	}
	return c.ExecuteAll(ctx, "add", 0)
}

// RestartingRanks is the ranks of another role that this worker knows to be restarting.
func (p *testWorker) RestartingRanks(ctx context.Context, h roles.Handle) ([]int, error) {
	c, err := h.Open(ctx)
	if err != nil {
		return nil, err
	}
	return c.Restarting(), nil
}

type testWorkerConfig struct {
	Fails []int
	Exits []int  // ranks whose constructor ends the process with code 7
	Hangs string // constructors write a file of this name and do not return
}

func testWorkerClass() *actors.Class {
	k := actors.NewClass("testWorker", newTestWorker)
	actors.Method(k, "pid", func(*testWorker, context.Context, actors.None) (int, error) { return os.Getpid(), nil })
	actors.Method(k, "env", (*testWorker).Env)
	actors.Method(k, "add", (*testWorker).Add)
	actors.Method(k, "grow", (*testWorker).Grow, actors.MethodOptions{Mode: "RANK_ZERO"})
	actors.Method(k, "files", (*testWorker).Files)
	actors.Method(k, "double", (*testWorker).Double, actors.MethodOptions{Mode: "DP_MP_COMPUTE"})
	actors.Method(k, "say", (*testWorker).Say)
	actors.Method(k, "wait", (*testWorker).Wait)
	actors.Method(k, "exit", (*testWorker).Exit)
	actors.Method(k, "restarting_ranks", (*testWorker).RestartingRanks)
	actors.Method(k, "initialize", (*testWorker).Initialize, actors.MethodOptions{Replay: true})
	actors.Method(k, "initialized", (*testWorker).Initialized)
	actors.Method(k, "ask", (*testWorker).Ask, actors.MethodOptions{Mode: "RANK_ZERO"})
	return k.Class
}

func newTestWorker(_ context.Context, s actors.Setup) (*testWorker, error) {
	var cfg testWorkerConfig
	if err := s.DecodeConfig(&cfg); err != nil {
		return nil, err
	}
	for _, rank := range cfg.Fails {
		if rank == s.Rank {
			return nil, errTired
		}
	}
	for _, rank := range cfg.Exits {
		if rank == s.Rank {
			fmt.Fprintln(os.Stderr, "no more room here")
			fmt.Println("loading the model")
			os.Exit(7)
		}
	}
	if cfg.Hangs != "" {
		if err := os.WriteFile(fmt.Sprintf("%s.%d", cfg.Hangs, s.Rank), nil, 0o600); err != nil {
			return nil, err
		}
		select {}
	}
	return &testWorker{setup: s}, nil
}

func (p *testWorker) Env(_ context.Context, names []string) (map[string]string, error) {
	out := map[string]string{}
	for _, name := range names {
		if v, ok := os.LookupEnv(name); ok {
			out[name] = v
		}
	}
	return out, nil
}

// Files is the names in the working folder.
func (p *testWorker) Files(context.Context, actors.None) ([]string, error) {
	entries, err := os.ReadDir(".")
	names := []string{}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, err
}

// growRequest is a role that a worker creates.
type growRequest struct {
	Name        string
	Devices     placement.Share
	EndsWithRun bool
	Below       string // the role that its rank 0 creates in turn; empty: none
}

// Grow creates a role of two processes and returns their pids, and those of the role below.
func (p *testWorker) Grow(ctx context.Context, r growRequest) ([]int, error) {
	rt, err := roles.FromContext(ctx)
	if err != nil {
		return nil, err
	}
	spec := workerSpec(r.Name, 2, r.Devices)
	spec.EndsWithRun = r.EndsWithRun
	c, err := rt.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	pids, err := roles.CallEach[int](ctx, c, "pid")
	if err != nil || r.Below == "" {
		return pids, err
	}
	below, err := roles.Call[[]int](ctx, c, "grow", growRequest{Name: r.Below})
	return append(pids, below...), err
}

func (p *testWorker) Add(_ context.Context, n int) (int, error) {
	p.total += n
	return p.total, nil
}

func (p *testWorker) Double(_ context.Context, rows []int) ([]int, error) {
	for i := range rows {
		rows[i] *= 2
	}
	return rows, nil
}

func (p *testWorker) Say(_ context.Context, text string) (actors.None, error) {
	fmt.Println(text)
	return actors.None{}, nil
}

// Wait creates a file of that name, and blocks until it is cancelled.
func (p *testWorker) Wait(ctx context.Context, file string) (actors.None, error) {
	if err := os.WriteFile(fmt.Sprintf("%s.%d", file, p.setup.Rank), nil, 0o600); err != nil {
		return actors.None{}, err
	}
	<-ctx.Done()
	return actors.None{}, ctx.Err()
}

// Exit exits the process of one rank.
func (p *testWorker) Exit(_ context.Context, rank int) (actors.None, error) {
	if rank == p.setup.Rank {
		fmt.Println("that is enough")
		os.Exit(3)
	}
	return actors.None{}, nil
}

// testHead is a head in this process: a server, the placement service and an agent, optionally as another process.
type testHead struct {
	server *bustest.Server
	bus    *bus.Bus
	dir    string
	agent  int // its pid, if it is a process

	stopPlacement func() // of the running placement service
}

const (
	agentEnv = "TROUPE_TEST_AGENT" // run folder, if this program is to be an agent
	agentURL = "TROUPE_TEST_AGENT_URL"

	agentLease = "TROUPE_TEST_AGENT_LEASE" // how long its nodes may be silent; unset: 2 s
)

// startHead has nodes "n-0" and "n-1" with four simulated devices each.
func startHead(t *testing.T, ownProcess bool, agentVars ...string) *testHead {
	t.Helper()
	tr := &testHead{server: bustest.StartServer(t, bustest.Options{Listen: true}), dir: t.TempDir()}
	tr.bus = bustest.Open(t, bus.Config{InProcess: tr.server})
	require.NoError(t, nodes.CreateEventStream(t.Context(), tr.bus, 0))
	tr.startPlacement(t)
	if ownProcess {
		tr.spawnAgent(t, agentVars...)
	} else {
		readyCh := make(chan struct{})
		agent, err := nodes.NewAgent(agentConfig(t.Context(), tr.bus, tr.dir, []string{tr.server.URL()}, func() { close(readyCh) }))
		require.NoError(t, err)
		tr.run(t, agent.Run)
		<-readyCh
	}
	tr.awaitNodes(t)
	return tr
}

// awaitNodes returns when both nodes can be granted, so that the first is preferred.
func (tr *testHead) awaitNodes(t *testing.T) {
	client, err := placement.NewClient(tr.bus, "")
	require.NoError(t, err)
	defer client.Close()
	eventually(t, "the nodes are there", func() bool {
		all, err := client.Nodes(patient(t))
		return err == nil && len(all) == 2 && all[0].State == placement.NodeReady && all[1].State == placement.NodeReady
	})
}

func (tr *testHead) startPlacement(t *testing.T) {
	service, err := placement.NewService(placement.Config{Bus: tr.bus, Lead: 20 * time.Second, NodeLease: 2 * time.Second, NodeSilence: time.Second})
	require.NoError(t, err)
	tr.stopPlacement = tr.run(t, service.Run)
}

// run runs a part until stop is called, or until the end of the test.
func (tr *testHead) run(t *testing.T, run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	doneCh := make(chan error, 1)
	go func() { doneCh <- run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-doneCh)
	})
	t.Cleanup(stop)
	return stop
}

func agentConfig(_ context.Context, b *bus.Bus, dir string, urls []string, ready func()) nodes.AgentConfig {
	cfg := nodes.AgentConfig{Bus: b, Dir: dir, Access: nodes.Access{URLs: urls}, ReadyFunc: ready, Grace: time.Second}
	inventories, err := gpu.Open(gpu.Config{Spec: "sim:2x4", Name: "n"})
	if err != nil {
		panic(err)
	}
	lease, err := time.ParseDuration(cmp.Or(os.Getenv(agentLease), "2s"))
	if err != nil {
		panic(err)
	}
	cfg.Grace = lease / 2
	for i, inventory := range inventories {
		cfg.Nodes = append(cfg.Nodes, nodes.Config{Name: fmt.Sprintf("n-%d", i), Inventory: inventory, Lease: lease, Beat: 200 * time.Millisecond})
	}
	return cfg
}

// agentIfAsked runs this process as an agent.
func agentIfAsked() {
	dir := os.Getenv(agentEnv)
	if dir == "" {
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	b, err := bus.Open(ctx, bus.Config{URLs: []string{os.Getenv(agentURL)}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		panic(err)
	}
	cfg := agentConfig(ctx, b, dir, []string{os.Getenv(agentURL)}, func() { fmt.Println("ready") })
	cfg.OwnProcess = true
	agent, err := nodes.NewAgent(cfg)
	if err == nil {
		err = agent.Run(ctx)
	}
	if err != nil {
		panic(err)
	}
	_ = b.Close()
	os.Exit(0)
}

func (tr *testHead) spawnAgent(t *testing.T, env ...string) {
	cmd, stdout := spawnWith(t, append(env, agentEnv+"="+tr.dir, agentURL+"="+tr.server.URL())...)
	line, err := stdout.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ready", strings.TrimSpace(line))
	tr.agent = cmd.Process.Pid
	t.Cleanup(func() { _ = cmd.Process.Signal(syscall.SIGTERM) })
}

// driver is a driver of the head.
func (tr *testHead) driver(t *testing.T, cfg roles.Config) *roles.Runtime {
	cfg.BusConfig = bus.Config{InProcess: tr.server}
	if cfg.Lease == 0 {
		cfg.Lease = 2 * time.Second
	}
	return open(t, cfg)
}

// workerSpec is the spec of a role of processes.
func workerSpec(name string, world int, devices placement.Share) roles.Spec {
	p := &roles.Process{Command: roles.Self(), Backoff: 10 * time.Millisecond}
	if devices > 0 {
		p.Needs.Bundles = []placement.Bundle{{Devices: devices}}
	}
	return roles.Spec{Name: name, Class: "testWorker", World: world, Process: p, StopGrace: time.Second, StartTimeout: 30 * time.Second}
}

// reservations is the current reservations.
func (tr *testHead) reservations(t *testing.T) []string {
	client, err := placement.NewClient(tr.bus, "")
	require.NoError(t, err)
	defer client.Close()
	list, err := client.List(patient(t))
	require.NoError(t, err)
	ids := []string{}
	for _, r := range list.Records {
		ids = append(ids, r.Holder)
	}
	return ids
}

// gone waits until a process has exited.
func gone(t *testing.T, pids ...int) {
	t.Helper()
	for _, pid := range pids {
		eventually(t, fmt.Sprintf("process %d is gone", pid), func() bool { return syscall.Kill(pid, 0) != nil })
	}
}

// safeBuffer is a buffer that may be read while it is written.
type safeBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *safeBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}
