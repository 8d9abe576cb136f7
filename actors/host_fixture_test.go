package actors

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// hostFixture is a host on a bus and a driver that calls its workers.
type hostFixture struct {
	t       *testing.T
	host    *Host
	ep      *calls.Endpoint // the driver's
	address bus.Address
	world   int
}

// newHostFixture makes a host with these classes. The end of the test closes it without waiting for running calls.
func newHostFixture(t *testing.T, classes ...*Class) *hostFixture {
	t.Helper()
	return newHostFixtureWith(t, HostConfig{Classes: classes, HeartbeatEvery: 20 * time.Millisecond})
}

func newHostFixtureWith(t *testing.T, cfg HostConfig) *hostFixture {
	t.Helper()
	return newHostFixtureOn(t, bustest.Open(t), cfg)
}

// newSocketFixture makes a host that reaches its server through a socket; other fixtures have the server in their process.
func newSocketFixture(t *testing.T, classes ...*Class) *hostFixture {
	t.Helper()
	server := bustest.Open(t, bus.Config{Server: bus.ServerConfig{Listen: "127.0.0.1:0"}})
	return newHostFixtureOn(t, bustest.Open(t, bus.Config{URLs: []string{server.URL()}}), HostConfig{Classes: classes, HeartbeatEvery: 20 * time.Millisecond})
}

func newHostFixtureOn(t *testing.T, b *bus.Bus, cfg HostConfig) *hostFixture {
	t.Helper()
	address, err := bus.NewAddress("test", "role", "i1")
	require.NoError(t, err)
	st := &hostFixture{t: t, address: address, world: 1, host: addHost(t, b, cfg)}
	st.host.endGrace = 300 * time.Millisecond
	st.ep, err = calls.Open(b, "test")
	require.NoError(t, err)
	return st
}

func addHost(t *testing.T, b *bus.Bus, cfg HostConfig) *Host {
	t.Helper()
	ep, err := calls.Open(b, "test")
	require.NoError(t, err)
	cfg.Node = "here"
	h, err := NewHost(ep, cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_ = h.Close(ctx) // some tests leave methods running
	})
	return h
}

// start starts a worker of the first class.
func (st *hostFixture) start(spec WorkerSpec) *Worker {
	st.t.Helper()
	w, err := st.host.Start(st.t.Context(), st.spec(spec))
	require.NoError(st.t, err)
	return w
}

// spec fills in the fields that most tests do not set.
func (st *hostFixture) spec(spec WorkerSpec) WorkerSpec {
	spec.Address, spec.World = st.address, st.world
	if spec.Class == "" {
		spec.Class = st.host.cfg.Classes[0].Name
	}
	return spec
}

func (st *hostFixture) send(c calls.Call, args ...any) *calls.Gather {
	st.t.Helper()
	var a wire.Args
	for _, v := range args {
		raw, err := wire.Marshal(v)
		require.NoError(st.t, err)
		a.Positional = append(a.Positional, raw)
	}
	c.To, c.World = st.address, st.world
	if c.Parts == nil {
		c.Parts = []calls.Part{{Scope: calls.OneRank(0), Ranks: []int{0}, Body: a.Append(nil, nil)}}
	}
	if c.Timeout == 0 {
		c.Timeout = 30 * time.Second
	}
	g, err := st.ep.Scatter(st.t.Context(), c)
	require.NoError(st.t, err)
	return g
}

// call calls rank 0 and waits for the answer.
func (st *hostFixture) call(method string, args ...any) calls.Answer {
	st.t.Helper()
	g := st.send(calls.Call{Method: method}, args...)
	<-g.Done()
	return g.Answers()[0]
}

// do calls rank 0; the call must succeed.
func (st *hostFixture) do(method string, args ...any) any {
	st.t.Helper()
	a := st.call(method, args...)
	require.NoError(st.t, a.Err)
	var v any
	require.NoError(st.t, wire.Unmarshal(a.Body, &v))
	return v
}

// fails calls rank 0; the call must fail.
func (st *hostFixture) fails(method string, args ...any) *bus.Error {
	st.t.Helper()
	a := st.call(method, args...)
	require.Error(st.t, a.Err)
	return bus.AsError(a.Err)
}

// funcObject is an object whose methods are functions of the test.
type funcObject struct {
	mu      sync.Mutex
	methods map[string]func(ctx context.Context, body []byte) ([]byte, error)
}

// funcClass is a class with these methods. Names that begin with c_ run in a concurrent lane of 64, others in the
// serial one.
func funcClass(methods map[string]func(ctx context.Context, body []byte) ([]byte, error)) *Class {
	c := &Class{Name: "funcs", New: func(context.Context, Setup) (Handler, error) { return &funcObject{methods: methods}, nil }}
	for name := range methods {
		lane := Serial
		if name[:2] == "c_" {
			lane = Concurrent(64)
		}
		c.Methods = append(c.Methods, MethodInfo{Name: name, Lane: lane})
	}
	return c
}

func (p *funcObject) Handle(ctx context.Context, method string, body []byte) ([]byte, error) {
	p.mu.Lock()
	do := p.methods[method]
	p.mu.Unlock()
	return do(ctx, body)
}

type methods = map[string]func(ctx context.Context, body []byte) ([]byte, error)

// blocking is a method that reports its start and waits for its release or cancellation.
type blocking struct {
	beganCh   chan struct{}
	releaseCh chan struct{}
}

func newBlocking() *blocking {
	return &blocking{beganCh: make(chan struct{}, 16), releaseCh: make(chan struct{})}
}

func (b *blocking) method(ctx context.Context, _ []byte) ([]byte, error) {
	b.beganCh <- struct{}{}
	select {
	case <-b.releaseCh:
		return []byte{0xc0}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// ignoreCancel is the method without cancellation.
func (b *blocking) ignoreCancel(context.Context, []byte) ([]byte, error) {
	b.beganCh <- struct{}{}
	<-b.releaseCh
	return []byte{0xc0}, nil
}

func returnNil(context.Context, []byte) ([]byte, error) { return []byte{0xc0}, nil }

func returnError(err error) func(context.Context, []byte) ([]byte, error) {
	return func(context.Context, []byte) ([]byte, error) { return nil, err }
}

func panics(context.Context, []byte) ([]byte, error) { panic(errors.New("the floor gave way")) }

func TestMain(m *testing.M) { bustest.Main(m) }
