package roles

import (
	"context"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/roles/registry"
)

// Handle is a cluster or a worker as a value in a call, which the receiver can open. On the wire it is extension type
// 3.
type Handle struct {
	Record registry.RoleRecord
	Rank   int // of the worker; -1: the whole role
}

// Handle is the cluster as a value.
func (c *Cluster) Handle() Handle { return Handle{Record: c.Record(), Rank: -1} }

// Handle is the worker as a value.
func (w Worker) Handle() Handle { return Handle{Record: w.cluster.Record(), Rank: w.rank} }

// A cluster and a worker can be arguments of a call, also inside other values: they are encoded as handles, and
// received as such.
func (c *Cluster) MarshalMsgpack() ([]byte, error) { return wire.Marshal(c.Handle()) }
func (c *Cluster) UnmarshalMsgpack([]byte) error   { return errReceived }
func (w *Worker) MarshalMsgpack() ([]byte, error)  { return wire.Marshal(w.Handle()) }
func (w *Worker) UnmarshalMsgpack([]byte) error    { return errReceived }

var errReceived = bus.Errorf(bus.CodeInvalid, "a cluster or a worker is received as a roles.Handle: use that type, and open it")

// wireHandle is the content of extension type 3.
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

	DeviceTensors bool `msgpack:"device_tensors,omitempty"`
}

func init() {
	wire.RegisterExt(wire.ExtHandle, packHandle, unpackHandle)
}

func packHandle(h Handle) (wireHandle, error) {
	r := h.Record
	return wireHandle{
		Namespace: r.Namespace, Role: r.Name, Incarnation: r.Incarnation, Class: r.Class, World: r.World, Mesh: r.Mesh,
		Ordered: r.Ordered, Open: r.Open, Methods: r.Methods, Rank: h.Rank, Process: r.Process, Policy: r.Policy,
		DeviceTensors: r.DeviceTensors,
	}, nil
}

func unpackHandle(w wireHandle) (Handle, error) {
	h := Handle{Rank: w.Rank, Record: registry.RoleRecord{
		Namespace: w.Namespace, Name: w.Role, Incarnation: w.Incarnation, Class: w.Class, World: w.World, Mesh: w.Mesh,
		Ordered: w.Ordered, Open: w.Open, Methods: w.Methods, State: registry.RoleReady, Process: w.Process, Policy: w.Policy,
		DeviceTensors: w.DeviceTensors,
	}}
	if err := h.Record.Check(); err != nil {
		return Handle{}, err
	}
	if w.Rank < -1 || w.Rank >= w.World {
		return Handle{}, bus.Errorf(bus.CodeMalformed, "a handle of rank %d of role %s, which has %d workers", w.Rank, w.Role, w.World)
	}
	return h, nil
}

// Open makes the handle usable inside a method; ctx is the method's own. All workers of a process share one cluster per
// role, so that opening it in every call is cheap; it is released when the role ends.
func (h Handle) Open(ctx context.Context) (*Cluster, error) {
	rt, err := FromContext(ctx)
	if err != nil {
		return nil, err
	}
	return rt.Open(h)
}

// Find returns the handle of a role by its name, for Open.
func (rt *Runtime) Find(ctx context.Context, name string) (Handle, error) {
	if err := bus.CheckRoleName(name); err != nil {
		return Handle{}, err
	}
	reg, err := rt.registry(ctx)
	if err != nil {
		return Handle{}, err
	}
	rec, err := reg.Get(ctx, name)
	if err == nil && rec.State != registry.RoleReady && rec.State != registry.RoleRestarting {
		err = bus.Errorf(bus.CodeRefused, "role %s is %s, since %s", name, rec.State, rec.Since.Format(time.RFC3339))
	}
	return Handle{Record: rec, Rank: -1}, err
}

// Open makes a handle usable by this driver. Handles of the same role share one cluster; Close leaves it open. The first one of a
// role of processes reads its record.
func (rt *Runtime) Open(h Handle) (*Cluster, error) {
	if h.Record.Namespace != rt.cfg.Namespace {
		return nil, bus.Errorf(bus.CodeRefused, "role %s is in namespace %q, and this driver in %q", h.Record.Name, h.Record.Namespace, rt.cfg.Namespace)
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
	if first != nil { // another goroutine was faster
		c.ender.release()
		return first, nil
	}
	if h.Record.Process {
		c.performer.reloadRecord() // the role may have been resized since the handle was made; if it has ended, calls say so
	}
	return c, nil
}

func (rt *Runtime) shared(to bus.Address) *Cluster {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	return rt.opened[to]
}

// unshare makes the next Open of the role make a new cluster.
func (rt *Runtime) unshare(c *Cluster) {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	if rt.opened[c.to] == c {
		delete(rt.opened, c.to)
	}
}

// OpenWorker makes the handle of a worker usable inside a method.
func (h Handle) OpenWorker(ctx context.Context) (Worker, error) {
	c, err := h.Open(ctx)
	if err != nil {
		return Worker{}, err
	}
	return c.Worker(h.Rank)
}
