package main

import (
	"context"
	"os"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/roles"
)

// exitAfter is how long a process continues after its worker has ended: Python may be stuck in foreign code.
const exitAfter = 5 * time.Second

// Requests to Python about its worker, beside calls; no method can have these names.
const (
	verbMake      = "@make"      // body: {class, object, config}; answer: table
	verbConfigure = "@configure" // body: the configuration
	verbSetEnv    = "@set_env"   // body: a map of strings
	verbClose     = "@close"     // the object is closed; none of its calls runs any more
)

// worker is the worker of this process.
type worker struct {
	core    *core
	process *roles.WorkerProcess
}

// makeRequest creates an object.
type makeRequest struct {
	Class  string   `msgpack:"class"`
	Config wire.Raw `msgpack:"config"`
}

// table describes an object.
type table struct {
	Methods []actors.MethodInfo `msgpack:"methods"`
	Open    bool                `msgpack:"open"`
	// DeviceTensors: arguments may be tensors that stay on their device.
	DeviceTensors bool `msgpack:"device_tensors"`
	// Cancels: cancellations are sent to the object; else it polls troupe_cancelled.
	Cancels bool `msgpack:"cancels"`
	// Inherits: calls that a method makes have its deadline, and are cancelled with it.
	Inherits bool `msgpack:"inherits"`
	// Side says which calls are for the thread that reads the side queue.
	Side sideKind `msgpack:"side"`
}

// class returns a Python class; its methods are known when an object exists.
func (c *core) class(name string) (*actors.Class, error) {
	return &actors.Class{Name: className(name), Open: true, New: func(ctx context.Context, s actors.Setup) (actors.Handler, error) {
		obj := &object{core: c, name: s.Object}
		request, err := wire.Marshal(makeRequest{Class: name, Config: s.Config})
		if err != nil {
			return nil, err
		}
		answer, err := obj.wait(ctx, verbMake, request)
		if err != nil {
			return nil, err
		}
		return obj, wire.Unmarshal(answer, &obj.table)
	}}, nil
}

// className makes a class name from the path of a Python class.
func className(path string) string {
	name := []byte(path)
	for i, b := range name {
		if b == '.' || b == ':' {
			name[i] = '_'
		}
	}
	return string(name[max(0, len(name)-64):])
}

// object is a Python object.
type object struct {
	core  *core
	name  string
	table table
	// references is where the uses of Python are counted; nil: at the endpoint of the worker's host.
	references *values.References
}

var (
	_ actors.AsyncHandler   = (*object)(nil)
	_ actors.MemoryProvider = (*object)(nil)
	_ actors.MethodProvider = (*object)(nil)
	_ actors.ArgumentTaker  = (*object)(nil)
	_ actors.Closer         = (*object)(nil)
	_ actors.Configurer     = (*object)(nil)
	_ actors.EnvSetter      = (*object)(nil)
)

func (o *object) Table() actors.Table {
	return actors.Table{Methods: o.table.Methods, Open: o.table.Open, DeviceTensors: o.table.DeviceTensors}
}

// Memory holds large arguments and results.
func (o *object) Memory() values.Memory { return o.core.memory }

// Begin passes the call to Python.
func (o *object) Begin(ctx context.Context, method string, body []byte, done func([]byte, error)) {
	o.begin(ctx, o.isSide(method), metaOf(ctx, method, o.name), body, done)
}

func (o *object) begin(ctx context.Context, side bool, meta, body []byte, done func([]byte, error)) {
	push := o.core.queue.push
	if side {
		push = o.core.pushSide
	}
	t := &openCall{ctx: ctx, done: done, owns: true, cancels: o.table.Cancels, inherits: o.table.Inherits}
	token := o.core.incoming.add(t)
	if o.table.Cancels {
		t.stop = context.AfterFunc(ctx, func() {
			defer bus.Recover()
			push(completion{kind: kindCancel, token: token, rank: -1})
		})
	}
	var all []completion
	for _, a := range actors.TakeArguments(ctx, o.references) {
		refs := append([]wire.Reference{a.Reference}, a.References...)
		all = append(all, completion{kind: kindValue, token: token, rank: -1, meta: wire.AppendReferences(nil, refs), body: a.Body})
	}
	push(append(all, completion{kind: kindCall, token: token, rank: -1, meta: meta, body: body})...)
}

// TakesArguments: the values of references are passed to Python as they are.
func (o *object) TakesArguments() bool { return true }

func (o *object) Handle(ctx context.Context, method string, body []byte) ([]byte, error) {
	return o.wait(ctx, method, body)
}

// wait sends a request to Python and waits for its answer, also after ctx has ended, because Python is still busy with
// it.
func (o *object) wait(ctx context.Context, what string, body []byte) ([]byte, error) {
	type answer struct {
		body []byte
		err  error
	}
	ch := make(chan answer, 1)
	token := o.core.incoming.add(&openCall{ctx: ctx, done: func(body []byte, err error) { ch <- answer{body, err} }})
	o.core.queue.push(completion{kind: kindCall, token: token, rank: -1, meta: metaOf(ctx, what, o.name), body: body})
	a := <-ch
	return a.body, a.err
}

func (o *object) Close(ctx context.Context) error {
	_, err := o.wait(ctx, verbClose, nil)
	return err
}

func (o *object) Configure(ctx context.Context, config wire.Raw) error {
	_, err := o.wait(ctx, verbConfigure, config)
	return err
}

func (o *object) SetEnv(ctx context.Context, env map[string]string) error {
	body, err := wire.Marshal(env)
	if err == nil {
		_, err = o.wait(ctx, verbSetEnv, body)
	}
	return err
}

// follow reports the worker's end, and ends the process if it does not end itself.
func (w *worker) follow() {
	<-w.process.Done()
	out := completion{kind: kindStopped, flags: flagLast, rank: -1}
	if state, err := w.process.Worker().State(); state == actors.Failed && err != nil {
		out.flags |= flagFailed
		out.body = encodeError(err)
	}
	w.core.memory.shared.closeUnused()
	w.core.queue.push(out)
	time.Sleep(exitAfter)
	os.Exit(1)
}
