package roles

import (
	"context"

	"troupe/actors"
	"troupe/bus"
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

// Portable lets a cluster and a worker be given to a call as they are.
func (c *Cluster) Portable() any { return c.Handle() }
func (w Worker) Portable() any   { return w.Handle() }

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
}

func init() {
	bus.RegisterExt(bus.ExtHandle, packHandle, unpackHandle)
}

func packHandle(h Handle) (wireHandle, error) {
	r := h.Record
	return wireHandle{
		Namespace: r.Namespace, Role: r.Name, Incarnation: r.Incarnation, Class: r.Class, World: r.World, Mesh: r.Mesh,
		Ordered: r.Ordered, Open: r.Open, Methods: r.Methods, Rank: h.Rank,
	}, nil
}

func unpackHandle(w wireHandle) (Handle, error) {
	h := Handle{Rank: w.Rank, Record: Record{
		Namespace: w.Namespace, Name: w.Role, Incarnation: w.Incarnation, Class: w.Class, World: w.World, Mesh: w.Mesh,
		Ordered: w.Ordered, Open: w.Open, Methods: w.Methods, State: RoleReady,
	}}
	if err := h.Record.Address().Check(); err != nil {
		return Handle{}, err
	}
	if w.World < 1 || w.Mesh.World() != w.World || w.Rank < -1 || w.Rank >= w.World {
		return Handle{}, bus.Errorf(bus.CodeMalformed, "a handle of role %s with world %d, mesh %s and rank %d", w.Role, w.World, w.Mesh, w.Rank)
	}
	return h, nil
}

// Open makes the handle usable from inside a method: ctx is the method's own. The cluster is let go of when its worker
// ends.
func (h Handle) Open(ctx context.Context) (*Cluster, error) {
	rt, err := FromContext(ctx)
	if err != nil {
		return nil, err
	}
	return rt.Open(h)
}

// Open makes a handle usable by this driver.
func (rt *Runtime) Open(h Handle) (*Cluster, error) {
	if h.Record.Namespace != rt.cfg.Namespace {
		return nil, bus.Errorf(bus.CodeRefused, "role %s lives in namespace %q, this driver in %q", h.Record.Name, h.Record.Namespace, rt.cfg.Namespace)
	}
	return rt.newCluster(h.Record, 0, Spec{}.withDefaults())
}

// OpenWorker makes the handle of a worker usable from inside a method.
func (h Handle) OpenWorker(ctx context.Context) (Worker, error) {
	c, err := h.Open(ctx)
	if err != nil {
		return Worker{}, err
	}
	return c.Worker(h.Rank)
}
