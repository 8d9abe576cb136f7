package placement_test

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/gpu"
	agent "troupe/nodes"
	"troupe/placement"
)

// testCluster is a server with simulated nodes, and the services and clients of a test. All of it ends with the test.
type testCluster struct {
	t     testing.TB
	srv   *bustest.Server
	lease time.Duration // of the nodes
	beat  time.Duration // interval of heartbeats; zero: 50 ms
	sims  []*gpu.Sim
	nodes []*background
}

// background is something that runs until it is stopped.
type background struct {
	name string
	stop func() // waits for the end; may be called again
}

func newTestCluster(t testing.TB, spec string) *testCluster {
	s := &testCluster{t: t, srv: bustest.StartServer(t, bustest.Options{}), lease: 2 * time.Second}
	s.addNodes(spec)
	return s
}

// bus returns a new connection.
func (s *testCluster) bus() *bus.Bus { return s.busAt(bus.Config{InProcess: s.srv}) }

func (s *testCluster) busAt(cfg bus.Config) *bus.Bus {
	s.t.Helper()
	if cfg.OnError == nil {
		cfg.OnError = func(error) {} // these tests lose messages on purpose
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return bustest.Open(s.t, cfg)
}

// run starts a function in the background. An error of it fails the test.
func (s *testCluster) run(name string, run func(context.Context) error) *background {
	ctx, cancel := context.WithCancel(context.Background())
	doneCh := make(chan struct{})
	go func() {
		defer close(doneCh)
		if err := run(ctx); err != nil {
			s.t.Errorf("%s: %v", name, err)
		}
	}()
	a := &background{name: name, stop: sync.OnceFunc(func() { cancel(); <-doneCh })}
	s.t.Cleanup(a.stop)
	return a
}

// addNodes starts a reporter for each node of the spec, one after the other, so that their ranks are in this order.
func (s *testCluster) addNodes(spec string) {
	s.t.Helper()
	b := s.bus()
	parsed, err := gpu.ParseSim(spec)
	require.NoError(s.t, err)
	for _, sim := range gpu.NewSims(parsed, fmt.Sprint(len(s.sims))) {
		s.addNode(b, fmt.Sprintf("n%d", len(s.sims)), sim)
		s.sims = append(s.sims, sim)
	}
}

func (s *testCluster) addNode(b *bus.Bus, name string, sim *gpu.Sim, change ...func(*agent.Config)) *background {
	s.t.Helper()
	readyCh := make(chan struct{})
	cfg := agent.Config{
		Bus: b, Name: name, CPUs: 16, Memory: 64 * gpu.GiB, Inventory: sim, Lease: s.lease, Beat: cmp.Or(s.beat, 50*time.Millisecond),
		Labels: map[string]string{"host": name}, RegisteredFunc: func() { close(readyCh) },
	}
	for _, f := range change {
		f(&cfg)
	}
	r, err := agent.NewReporter(cfg)
	require.NoError(s.t, err)
	a := s.run(name, r.Run)
	s.nodes = append(s.nodes, a)
	<-readyCh
	return a
}

// service starts a service on a new connection.
func (s *testCluster) service(cfg placement.Config) *background {
	s.t.Helper()
	if cfg.Bus == nil {
		cfg.Bus = s.bus()
	}
	cfg.Lead = max(cfg.Lead, 2*time.Second)
	cfg.NodeLease, cfg.NodeSilence, cfg.Unclaimed = s.lease, 500*time.Millisecond, cmp.Or(cfg.Unclaimed, 2*s.lease)
	svc, err := placement.NewService(cfg)
	require.NoError(s.t, err)
	return s.run("service", svc.Run)
}

func (s *testCluster) client(namespace string) *placement.Client {
	return s.clientAt(s.bus(), namespace)
}

func (s *testCluster) clientAt(b *bus.Bus, namespace string) *placement.Client {
	s.t.Helper()
	c, err := placement.NewClient(b, namespace)
	require.NoError(s.t, err)
	s.t.Cleanup(c.Close)
	return c
}

// ready waits until n nodes are ready.
func (s *testCluster) ready(c *placement.Client, n int) {
	s.t.Helper()
	s.eventually(func() bool {
		nodes, err := c.Nodes(s.t.Context())
		ready := 0
		for _, node := range nodes {
			if node.State == placement.NodeReady {
				ready++
			}
		}
		return err == nil && ready == n
	}, "%d nodes are ready", n)
}

// eventually polls a condition on the other side of the bus.
func (s *testCluster) eventually(is func() bool, what string, args ...any) {
	s.t.Helper()
	require.Eventually(s.t, is, 2*time.Minute, 5*time.Millisecond, what, args)
}

func gang(id string, bundles, devices int) placement.Request {
	return placement.Request{ID: id, Holder: "role-" + id, Bundles: placement.Repeat(bundles, placement.Bundle{Devices: placement.Wholes(devices)})}
}

// within returns a context with a timeout.
func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
