package weights

import (
	"context"
	"encoding/binary"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/nodes"
	"troupe/weights/plan"
	"troupe/weights/versions"
)

const patience = 2 * time.Minute

// cluster is a server with the service, for processes of one namespace.
type cluster struct {
	t      *testing.T
	server *bustest.Server
	bus    *bus.Bus // of the head
	stop   func()
}

func newCluster(t *testing.T) *cluster {
	c := &cluster{t: t, server: bustest.StartServer(t, bustest.Options{})}
	c.bus = bustest.Open(t, bus.Config{InProcess: c.server})
	c.serve()
	t.Cleanup(func() { c.stop() })
	return c
}

func (c *cluster) serve() {
	c.stop = Serve(context.Background(), Config{Bus: c.bus})
}

// restart ends the service, and starts the next one.
func (c *cluster) restart() {
	c.stop()
	c.serve()
}

// proc is a process: its connection, its session and its weights.
type proc struct {
	*Client
	t       *testing.T
	memory  *bustest.Memory
	store   *values.Store
	session *bus.Session
	bus     *bus.Bus
	w       *Weights
	tensors map[string][]byte
	bound   []Tensor
}

func member(role string, rank, world int) versions.Member {
	return versions.Member{Role: role, Incarnation: role + "-1", Rank: rank, World: world, Host: "h1"}
}

// start starts a process. large: its memory is watched, so that a body that is not freed fails the test.
func (c *cluster) start(m versions.Member) *proc {
	return c.startWith(m, bus.Config{InProcess: c.server})
}

func (c *cluster) startWith(m versions.Member, cfg bus.Config) *proc {
	c.t.Helper()
	p := &proc{t: c.t, memory: bustest.NewMemory(c.t), tensors: map[string][]byte{}}
	p.bus = bustest.Open(c.t, cfg)
	var err error
	p.session, err = p.bus.NewSession("default")
	require.NoError(c.t, err)
	p.store = values.New(p.session)
	require.NoError(c.t, p.session.Start(p.store))
	alloc := func(n int) []byte {
		if n > values.MaxInline {
			return p.memory.Make(n)
		}
		return make([]byte, n)
	}
	p.Client, err = NewClient(ClientConfig{Bus: p.bus, Namespace: "default", Session: p.session.Name(), References: p.store.References(), Memory: p.memory, AllocFunc: alloc, Member: m})
	require.NoError(c.t, err)
	p.w, err = p.Open("policy")
	require.NoError(c.t, err)
	c.t.Cleanup(func() { p.Close(); p.session.Close() })
	return p
}

// kill ends a process without a word. Its agent says so, if it has one.
func (p *proc) kill(agent *bus.Bus) {
	p.bus.Conn().Close()
	if agent == nil {
		return
	}
	m := p.cfg.Member
	e := nodes.Exit{ID: nodes.WorkerID{Namespace: "default", Role: m.Role, Incarnation: m.Incarnation, Rank: m.Rank, Gen: m.Gen}, Signal: "SIGKILL", Code: -1}
	data, err := wire.Marshal(e)
	require.NoError(p.t, err)
	require.NoError(p.t, agent.Publish(e.ID.Address().Exit(), data))
}

// bind binds float32 parts of tensors.
func (p *proc) bind(shape []int64, boxes map[string]plan.Box) {
	p.t.Helper()
	require.NoError(p.t, p.tryBind(shape, boxes))
}

func (p *proc) tryBind(shape []int64, boxes map[string]plan.Box) error {
	p.bound = nil
	for name, box := range boxes {
		data := make([]byte, 4*box.Elements())
		p.tensors[name] = data
		strides := make([]int64, len(shape))
		n := int64(4)
		for k := len(shape) - 1; k >= 0; k-- {
			strides[k] = n
			n *= box.Sizes()[k]
		}
		p.bound = append(p.bound, Tensor{Name: name, DType: "float32", ItemSize: 4, Shape: shape, Box: box, Pointer: unsafe.Pointer(&data[0]), Strides: strides})
	}
	return p.w.Bind(p.ctxOf(), versions.Any, p.bound)
}

func (p *proc) ctxOf() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	p.t.Cleanup(cancel)
	return ctx
}

// content is the value of an element of a version.
func content(step int64, name string, whole int64) uint32 {
	return uint32(step)<<24 ^ uint32(name[0])<<16 ^ uint32(whole)
}

// each calls do with the place of each element in memory and its number in the tensor.
func (p *proc) each(do func(name string, at int, whole int64)) {
	for _, t := range p.bound {
		d := len(t.Shape)
		at := append([]int64(nil), t.Box[:d]...)
		for n := range t.Box.Elements() {
			whole := int64(0)
			for k := range d {
				whole = whole*t.Shape[k] + at[k]
			}
			do(t.Name, int(4*n), whole)
			for k := d - 1; k >= 0; k-- {
				if at[k]++; at[k] < t.Box[k]+t.Box[d+k] {
					break
				}
				at[k] = t.Box[k]
			}
		}
	}
}

// fill makes what is bound that of a step.
func (p *proc) fill(step int64) {
	p.each(func(name string, at int, whole int64) {
		binary.LittleEndian.PutUint32(p.tensors[name][at:], content(step, name, whole))
	})
}

// has fails the test unless every element is that of a step.
func (p *proc) has(step int64) {
	p.t.Helper()
	wrong := 0
	p.each(func(name string, at int, whole int64) {
		if binary.LittleEndian.Uint32(p.tensors[name][at:]) != content(step, name, whole) {
			wrong++
		}
	})
	require.Zero(p.t, wrong, "elements that are not those of step %d", step)
}

func (p *proc) publish(step int64, mode Mode) versions.Version {
	p.t.Helper()
	p.fill(step)
	v, err := p.w.Publish(p.ctxOf(), step, mode, nil)
	require.NoError(p.t, err)
	return v
}

func publishAll(step int64, mode Mode, all ...*proc) (v versions.Version) {
	for _, p := range all {
		v = p.publish(step, mode)
	}
	return v
}

func (p *proc) take(v versions.Version) {
	p.t.Helper()
	got, err := p.w.Stage(p.ctxOf(), v)
	require.NoError(p.t, err)
	require.NoError(p.t, p.w.Commit(p.ctxOf(), got))
	p.has(got.Step)
}

var square = []int64{512, 256} // each half is 256 KiB: buckets are pulled

func rows(rank int64) map[string]plan.Box {
	return map[string]plan.Box{"a": {256 * rank, 0, 256, 256}, "b": {256 * rank, 0, 256, 256}}
}

func columns(rank int64) map[string]plan.Box {
	return map[string]plan.Box{"a": {0, 128 * rank, 512, 128}, "b": {0, 128 * rank, 512, 128}}
}

// four starts two processes that publish rows, and two that take columns.
func (c *cluster) four() (train, infer []*proc) {
	for i := range 2 {
		p := c.start(member("train", i, 2))
		p.bind(square, rows(int64(i)))
		train = append(train, p)
		q := c.start(member("infer", i, 2))
		q.bind(square, columns(int64(i)))
		infer = append(infer, q)
	}
	return train, infer
}

// until waits for a condition.
func until(t *testing.T, why string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not in time: " + why)
		}
	}
}
