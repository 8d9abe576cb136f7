package main

import (
	"context"
	"errors"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/roles"
)

// serveGrace is how long a call of what a driver serves may go on when the driver ends. Whoever called is told.
const serveGrace = time.Second

// metaMade marks a call that comes from a worker which this driver started.
const metaMade = 8

// serveRequest is an object of a driver's that others may call.
type serveRequest struct {
	Class string `msgpack:"class"`
	// Object is what the calls of this object are marked with, so that the other side finds it.
	Object string `msgpack:"object"`
	Table  table  `msgpack:"table"`
}

// servant is an object that a driver serves: a worker of a role of one, in the driver's own process. It is closed by
// nobody: the object is the driver's.
type servant struct {
	object *object
	rt     *roles.Runtime
}

var (
	_ actors.Starter = (*servant)(nil)
	_ actors.Keeper  = (*servant)(nil)
	_ actors.Tabled  = (*servant)(nil)
)

func (s *servant) Table() ([]actors.MethodInfo, bool) { return s.object.Table() }

func (s *servant) Memory() bus.Memory { return s.object.Memory() }

// Begin hands the call to the other side, and says whether it comes from one of its own workers.
func (s *servant) Begin(ctx context.Context, method string, body []byte, done func([]byte, error)) {
	meta := callMeta(ctx, method, s.object.name)
	if info, ok := actors.Current(ctx); ok && s.rt.StartedWorker(info.Session) {
		meta[0] |= metaMade
	}
	s.object.begin(ctx, s.object.isSide(method), meta, body, done)
}

func (s *servant) Handle(ctx context.Context, method string, body []byte) ([]byte, error) {
	return s.object.wait(ctx, method, body)
}

// driverRole is the name of the role in which a driver serves what has no name of its own.
func driverRole(session string) string { return "driver-" + session }

// serve makes an object of this process one that others may call, under a name or as the driver's own.
func (c *core) serve(ctx context.Context, r *request) (any, error) {
	rt, err := c.runtime(r.Runtime)
	if err != nil {
		return nil, err
	}
	name := r.Name
	if name == "" {
		name = driverRole(rt.Session())
	}
	s := &servant{rt: rt, object: &object{core: c, name: r.Serve.Object, table: r.Serve.Table}}
	class := className(r.Serve.Class + "-" + r.Serve.Object)
	c.mu.Lock()
	c.servants[class] = s
	c.mu.Unlock()
	cl, err := rt.Create(ctx, roles.Spec{Name: name, Class: class, World: 1, StopGrace: serveGrace})
	c.mu.Lock()
	delete(c.servants, class) // it is the worker's now, or nobody's
	c.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return c.addCluster(cl)
}

// servantClass is the class of what is about to be served.
func (c *core) servantClass(name string) (*actors.Class, error) {
	c.mu.Lock()
	s := c.servants[name]
	c.mu.Unlock()
	if s == nil {
		return nil, bus.Errorf(bus.CodeNotFound, "no class %q in this program", name)
	}
	return &actors.Class{
		Name: name, Methods: s.object.table.Methods, Open: s.object.table.Open,
		New: func(context.Context, actors.Setup) (actors.Handler, error) { return s, nil },
	}, nil
}

// driver finds what the driver with that session serves.
func (c *core) driver(ctx context.Context, r *request) (any, error) {
	rt, err := c.runtime(r.Runtime)
	if err != nil {
		return nil, err
	}
	h, err := rt.Find(ctx, driverRole(r.Name))
	if errors.Is(err, bus.ErrNotFound) {
		return nil, bus.Errorf(bus.CodeNotFound, "the driver %s serves nothing that could be called, or is gone; it serves an object with troupe.serve(object)", r.Name)
	}
	return h, err
}
