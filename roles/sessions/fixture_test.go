package sessions_test

import (
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles"
	"troupe/roles/sessions"
)

// slowConstructor is long enough for a service to end meanwhile.
const slowConstructor = 1500 * time.Millisecond

// limit is for what happens at once on a machine without load.
const limit = 60 * time.Second

func TestMain(m *testing.M) {
	roles.Main(processClass())
	bustest.Main(m)
}

// process stands in for the Python process of an actor or of tasks: this program runs as one.
type process struct {
	made   []any
	making atomic.Value // as the Python process answers: no, running, yes
}

func newProcess(context.Context, actors.Setup) (*process, error) {
	p := &process{}
	p.making.Store("no")
	return p, nil
}

func processClass() *actors.Class {
	k := actors.NewClass("ray", newProcess)
	actors.Method(k, "construct", (*process).construct)
	actors.Method(k, "made", func(p *process, _ context.Context, _ actors.None) ([]any, error) { return p.made, nil })
	actors.Method(k, "constructed", (*process).constructed, actors.MethodOptions{Lane: actors.Concurrent(10)})
	actors.Method(k, "owns", func(*process, context.Context, actors.None) (bool, error) { return false, nil })
	actors.Method(k, "exit", func(_ *process, _ context.Context, gentle bool) (actors.None, error) {
		os.Exit(0)
		return actors.None{}, nil
	})
	return k.Class
}

func (p *process) constructed(context.Context, actors.None) ([]any, error) {
	return []any{p.making.Load(), os.Getpid()}, nil
}

// construct keeps its arguments; the class "fails" has a constructor that raises.
func (p *process) construct(_ context.Context, args actors.Args) ([]any, error) {
	var class string
	if err := wire.Unmarshal(args.Positional[0], &class); err != nil {
		return nil, err
	}
	p.making.Store("running")
	if class == "slow" {
		time.Sleep(slowConstructor)
	}
	p.made = []any{class, os.Getpid()}
	p.making.Store("yes")
	if class == "fails" {
		return []any{"error", []any{"frame of the exception"}}, nil
	}
	return []any{"ok", os.Getpid()}, nil
}

// head is a head in this process: a server, the placement service, an agent with nodes of two CPUs, and the service under test.
type head struct {
	t      *testing.T
	server *bustest.Server
	bus    *bus.Bus
	desk   *placement.Desk
}

func startHead(t *testing.T) *head {
	t.Helper()
	h := &head{t: t, server: bustest.StartServer(t, bustest.Options{Listen: true})}
	h.bus = bustest.Open(t, bus.Config{InProcess: h.server})
	require.NoError(t, nodes.CreateEventStream(t.Context(), h.bus, 0))
	service, err := placement.NewService(placement.Config{Bus: h.bus})
	require.NoError(t, err)
	h.desk = service.Desk()
	h.run(service.Run)
	inventories, err := gpu.Open(gpu.Config{Spec: "sim:1x2", Name: "n"})
	require.NoError(t, err)
	readyCh := make(chan struct{})
	agent, err := nodes.NewAgent(nodes.AgentConfig{
		Bus: h.bus, Dir: t.TempDir(), Access: nodes.Access{URLs: []string{h.server.URL()}}, ReadyFunc: func() { close(readyCh) }, Grace: time.Second,
		Nodes: []nodes.Config{{Name: "n", Inventory: inventories[0], CPUs: 2, Resources: map[string]int64{"NPU": 3000}}},
	})
	require.NoError(t, err)
	h.run(agent.Run)
	<-readyCh
	return h
}

func (h *head) run(run func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	doneCh := make(chan error, 1)
	go func() { doneCh <- run(ctx) }()
	h.t.Cleanup(func() {
		cancel()
		require.NoError(h.t, <-doneCh)
	})
}

// serve runs the service until stop is called, or the test ends.
func (h *head) serve() (stop func()) { return h.serveWith(sessions.Config{}) }

func (h *head) serveWith(cfg sessions.Config) (stop func()) {
	cfg.Bus, cfg.Desk = h.bus, h.desk
	stop, err := sessions.Serve(context.Background(), cfg)
	require.NoError(h.t, err)
	stop = sync.OnceFunc(stop)
	h.t.Cleanup(stop)
	return stop
}

// driver is a process that asks the service, under the name of a role that it serves.
type driver struct {
	t       *testing.T
	rt      *roles.Runtime
	name    string
	job     string
	control *roles.Cluster
	number  int
}

func (h *head) driver(name string) *driver {
	class := actors.NewClass("driver", newProcess)
	actors.Method(class, "nothing", func(*process, context.Context, actors.None) (actors.None, error) { return actors.None{}, nil })
	rt, err := roles.Open(h.t.Context(), roles.Config{BusConfig: bus.Config{InProcess: h.server}, Namespace: "ray", Name: name, Classes: []*actors.Class{class.Class}, Lease: 2 * time.Second})
	require.NoError(h.t, err)
	d := &driver{t: h.t, rt: rt, name: name}
	h.t.Cleanup(d.close)
	_, err = rt.Create(h.t.Context(), roles.Spec{Name: name, Class: "driver", World: 1})
	require.NoError(h.t, err)
	d.find()
	told := d.ask("register_job", map[string]any{
		"process": name, "session": rt.Session(), "namespace": "ns-" + name, "dir": h.t.TempDir(), "executable": os.Args[0], "env": map[string]string{}, "visible_devices": nil,
		"troupe_ray": "", "sys_path": []string{}, "python": "3", "package": "", "address": "", "node_ip": "127.0.0.1", "output": "none",
	}).(map[string]any)
	d.job = told["job_id"].(string)
	require.Equal(h.t, "n", told["node"])
	return d
}

func (d *driver) close() {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	_ = d.rt.Close(ctx) // the head may be gone
}

// find reaches the current service, whose requests are counted from zero on.
func (d *driver) find() {
	ctx, cancel := context.WithTimeout(d.t.Context(), limit)
	defer cancel()
	control, err := sessions.Find(ctx, d.rt)
	require.NoError(d.t, err)
	d.control, d.number = control, 0
}

// begin makes a request and does not wait.
func (d *driver) begin(method string, args ...any) *dispatch.Future {
	f := d.beginAs(d.number, method, args...)
	d.number++
	return f
}

func (d *driver) beginAs(number int, method string, args ...any) *dispatch.Future {
	f, err := d.control.Go(d.t.Context(), dispatch.Call{Method: "ask", Args: append([]any{d.name, number, method}, args...), Ranks: []int{0}})
	require.NoError(d.t, err)
	return f
}

func (d *driver) await(f *dispatch.Future) any {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(d.t.Context(), limit)
	defer cancel()
	answers, err := dispatch.AwaitEach[any](ctx, f)
	require.NoError(d.t, err)
	return answers[0]
}

func (d *driver) ask(method string, args ...any) any {
	d.t.Helper()
	return d.await(d.begin(method, args...))
}

// spec is an actor; change makes it another.
func (d *driver) spec(name, class string, change func(map[string]any)) map[string]any {
	spec := map[string]any{
		"job": d.job, "name": nil, "namespace": "space", "detached": false, "get_if_exists": false, "demand": map[string]float64{}, "strategy": nil, "captures": nil,
		"env": map[string]any{}, "class_name": class, "kind": "sync", "groups": map[string]int{}, "owner": d.name, "construct": []any{class}, "handle": []any{class}, "restarts": 0,
	}
	if name != "" {
		spec["name"] = name
	}
	if change != nil {
		change(spec)
	}
	return spec
}

func (d *driver) create(id, name string, change func(map[string]any)) any {
	return d.ask("create_actor", id, d.spec(name, "made", change), d.name)
}

func (d *driver) info(id string) map[string]any { return d.ask("actor_info", id).(map[string]any) }

// pid is the process of an actor, as it says itself.
func (d *driver) pid(role string) string {
	ctx, cancel := context.WithTimeout(d.t.Context(), limit)
	defer cancel()
	cl, err := d.rt.Attach(ctx, role)
	require.NoError(d.t, err)
	made, err := roles.CallEach[[]any](ctx, cl, "made")
	require.NoError(d.t, err)
	return fmt.Sprint(made[0][1])
}

// constructing is what the process of a role says of its constructor, and its pid; empty: it does not run.
func (d *driver) constructing(role string) (making, pid string) {
	ctx, cancel := context.WithTimeout(d.t.Context(), limit)
	defer cancel()
	cl, err := d.rt.Attach(ctx, role)
	if err != nil {
		return "", ""
	}
	said, err := roles.CallEach[[]any](ctx, cl, "constructed")
	require.NoError(d.t, err)
	return fmt.Sprint(said[0][0]), fmt.Sprint(said[0][1])
}

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	require.Eventually(t, holds, limit, 20*time.Millisecond, what)
}
