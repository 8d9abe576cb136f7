package roles

import (
	"context"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/dispatch"
)

// Handle is a cluster or a worker as it travels: a value that a call may carry, and that can be opened on the other
// side. On the wire it is extension type 3.
type Handle struct {
	Record Record
	Rank   int // the worker's; -1: the whole role
}

// Handle is the cluster as it travels.
func (c *Cluster) Handle() Handle { return Handle{Record: c.Record(), Rank: -1} }

// Handle is the worker as it travels.
func (w Worker) Handle() Handle { return Handle{Record: w.cluster.Record(), Rank: w.rank} }

// A cluster and a worker can be given to a call as they are, also inside other values: they travel as their handles, and
// are received as such.
func (c *Cluster) MarshalMsgpack() ([]byte, error) { return wire.Marshal(c.Handle()) }
func (c *Cluster) UnmarshalMsgpack([]byte) error   { return errReceived }
func (w *Worker) MarshalMsgpack() ([]byte, error)  { return wire.Marshal(w.Handle()) }
func (w *Worker) UnmarshalMsgpack([]byte) error    { return errReceived }

var errReceived = bus.Errorf(bus.CodeInvalid, "a cluster or a worker is received as a roles.Handle; take that, and open it")

// wireHandle is what extension type 3 holds.
type wireHandle struct {
	Namespace   string              `msgpack:"namespace"`
	Role        string              `msgpack:"role"`
	Incarnation string              `msgpack:"incarnation"`
	Class       string              `msgpack:"class"`
	World       int                 `msgpack:"world"`
	Mesh        dispatch.Mesh       `msgpack:"mesh"`
	Ordered     bool                `msgpack:"ordered"`
	Open        bool                `msgpack:"open"`
	Methods     []actors.MethodInfo `msgpack:"methods"`
	Rank        int                 `msgpack:"rank"`
	Process     bool                `msgpack:"process,omitempty"`
	Policy      Policy              `msgpack:"policy,omitempty"`
}

func init() {
	wire.RegisterExt(wire.ExtHandle, packHandle, unpackHandle)
}

func packHandle(h Handle) (wireHandle, error) {
	r := h.Record
	return wireHandle{
		Namespace: r.Namespace, Role: r.Name, Incarnation: r.Incarnation, Class: r.Class, World: r.World, Mesh: r.Mesh,
		Ordered: r.Ordered, Open: r.Open, Methods: r.Methods, Rank: h.Rank, Process: r.Process, Policy: r.Policy,
	}, nil
}

func unpackHandle(w wireHandle) (Handle, error) {
	h := Handle{Rank: w.Rank, Record: Record{
		Namespace: w.Namespace, Name: w.Role, Incarnation: w.Incarnation, Class: w.Class, World: w.World, Mesh: w.Mesh,
		Ordered: w.Ordered, Open: w.Open, Methods: w.Methods, State: RoleReady, Process: w.Process, Policy: w.Policy,
	}}
	if err := h.Record.check(); err != nil {
		return Handle{}, err
	}
	if w.Rank < -1 || w.Rank >= w.World {
		return Handle{}, bus.Errorf(bus.CodeMalformed, "a handle of rank %d of role %s, which has %d", w.Rank, w.Role, w.World)
	}
	return h, nil
}

// Open makes the handle usable from inside a method: ctx is the method's own. All the workers of a process that open a
// role share one cluster, so opening it in every call costs nothing; it is let go of when the role ends.
func (h Handle) Open(ctx context.Context) (*Cluster, error) {
	rt, err := FromContext(ctx)
	if err != nil {
		return nil, err
	}
	return rt.Open(h)
}

// Find is the handle of a role, by its name: what Attach gives, for those who open it only when they need it, and share it.
func (rt *Runtime) Find(ctx context.Context, name string) (Handle, error) {
	if err := bus.CheckRoleName(name); err != nil {
		return Handle{}, err
	}
	reg, err := rt.registry(ctx)
	if err != nil {
		return Handle{}, err
	}
	rec, err := reg.get(ctx, name)
	if err == nil && rec.State != RoleReady && rec.State != RoleRestarting {
		err = bus.Errorf(bus.CodeRefused, "role %s is %s, since %s", name, rec.State, rec.Since.Format(time.RFC3339))
	}
	return Handle{Record: rec, Rank: -1}, err
}

// Open makes a handle usable by this driver. Whoever opens the same role shares the one cluster; Close leaves it open.
func (rt *Runtime) Open(h Handle) (*Cluster, error) {
	if h.Record.Namespace != rt.cfg.Namespace {
		return nil, bus.Errorf(bus.CodeRefused, "role %s lives in namespace %q, this driver in %q", h.Record.Name, h.Record.Namespace, rt.cfg.Namespace)
	}
	to := h.Record.Address()
	if c := rt.shared(to); c != nil {
		return c, nil
	}
	c, err := rt.newCluster(h.Record, opened, Spec{}.withDefaults())
	if err != nil {
		return nil, err
	}
	rt.mu.Lock()
	first := rt.opened[to]
	if first == nil {
		rt.opened[to] = c
	}
	rt.mu.Unlock()
	if first != nil { // somebody else was faster
		c.release()
		return first, nil
	}
	return c, nil
}

func (rt *Runtime) shared(to bus.Address) *Cluster {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	return rt.opened[to]
}

// unshare has the next one who opens the role find out anew.
func (rt *Runtime) unshare(c *Cluster) {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	if rt.opened[c.to] == c {
		delete(rt.opened, c.to)
	}
}

// OpenWorker makes the handle of a worker usable from inside a method.
func (h Handle) OpenWorker(ctx context.Context) (Worker, error) {
	c, err := h.Open(ctx)
	if err != nil {
		return Worker{}, err
	}
	return c.Worker(h.Rank)
}
