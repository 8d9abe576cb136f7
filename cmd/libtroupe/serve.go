package main

import (
	"context"
	"errors"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/values"
	"troupe/roles"
)

// serveGrace is how long running calls of a served object may continue when the driver ends.
const serveGrace = time.Second

// serveRequest is an object of a driver or a worker that other processes may call.
type serveRequest struct {
	ofRuntime
	Name  string `msgpack:"name"` // empty: the driver's own
	Class string `msgpack:"class_name"`
	// Object identifies the object in its calls.
	Object string `msgpack:"object"`
	Table  table  `msgpack:"table"`
}

// servedObject is an object that a driver or a worker serves: the worker of a role of one, in that process. It is never
// closed: the process owns it.
type servedObject struct{ object *object }

var (
	_ actors.AsyncHandler   = (*servedObject)(nil)
	_ actors.MemoryProvider = (*servedObject)(nil)
	_ actors.MethodProvider = (*servedObject)(nil)
	_ actors.ArgumentTaker  = (*servedObject)(nil)
)

func (s *servedObject) Table() actors.Table { return s.object.Table() }

func (s *servedObject) Memory() values.Memory { return s.object.Memory() }

func (s *servedObject) TakesArguments() bool { return s.object.TakesArguments() }

// Begin passes the call to Python.
func (s *servedObject) Begin(ctx context.Context, method string, body []byte, done func([]byte, error)) {
	s.object.Begin(ctx, method, body, done)
}

func (s *servedObject) Handle(ctx context.Context, method string, body []byte) ([]byte, error) {
	return s.object.wait(ctx, method, body)
}

// driverRole is the role of a driver's object without a name.
func driverRole(session string) string { return "driver-" + session }

// serve makes an object of this process callable, under a name or as the driver's own.
func (c *core) serve(ctx context.Context, rt *roles.Runtime, r serveRequest) (clusterInfo, error) {
	name := r.Name
	if name == "" {
		name = driverRole(rt.Session())
	}
	s := &servedObject{object: &object{core: c, name: r.Object, table: r.Table, references: rt.References()}}
	class := className(r.Class + "-" + r.Object)
	c.mu.Lock()
	c.served[class] = s
	c.mu.Unlock()
	cl, err := rt.Create(ctx, roles.Spec{Name: name, Class: class, World: 1, StopGrace: serveGrace})
	c.mu.Lock()
	delete(c.served, class) // the worker has it now
	c.mu.Unlock()
	if err != nil {
		return clusterInfo{}, err
	}
	return c.addCluster(cl)
}

// servedClass is the class of an object that is about to be served.
func (c *core) servedClass(name string) (*actors.Class, error) {
	c.mu.Lock()
	s := c.served[name]
	c.mu.Unlock()
	if s == nil {
		return nil, bus.Errorf(bus.CodeNotFound, "no class %q in this program", name)
	}
	return &actors.Class{
		Name: name, Methods: s.object.table.Methods, Open: s.object.table.Open, DeviceTensors: s.object.table.DeviceTensors,
		New: func(context.Context, actors.Setup) (actors.Handler, error) { return s, nil },
	}, nil
}

// driver finds the object that the driver with that session serves.
func (c *core) driver(ctx context.Context, rt *roles.Runtime, r nameRequest) (roles.Handle, error) {
	h, err := rt.Find(ctx, driverRole(r.Name))
	if errors.Is(err, bus.ErrNotFound) {
		return h, bus.Errorf(bus.CodeNotFound, "the driver %s serves nothing that could be called, or is gone; it serves an object with troupe.serve(object)", r.Name)
	}
	return h, err
}
