package main

import (
	"context"
	"os"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/roles"
)

// exitAfter is how long a process whose worker has ended may go on. It cannot be told anything if its interpreter is stuck
// in foreign code, and nobody waits for it.
const exitAfter = 5 * time.Second

// What the other side is asked to do for its worker, beside calls: names that no method can have.
const (
	verbMake      = "@make"      // body: {class, object, config}; answer: table
	verbConfigure = "@configure" // body: the configuration
	verbSetEnv    = "@set_env"   // body: a map of strings
	verbClose     = "@close"     // the object is closed; no call of it runs any more
)

// worker is the one this process plays.
type worker struct {
	core   *core
	player *roles.WorkerProcess
}

// makeRequest asks for an object.
type makeRequest struct {
	Class  string   `msgpack:"class"`
	Config wire.Raw `msgpack:"config"`
}

// table is what an object says of itself.
type table struct {
	Methods []actors.MethodInfo `msgpack:"methods"`
	Open    bool                `msgpack:"open"`
	// Cancels: the object wants to be told when a call is cancelled; else it asks (troupe_cancelled).
	Cancels bool `msgpack:"cancels"`
	// Side says which calls are for the thread that reads the side queue.
	Side sideKind `msgpack:"side"`
}

// class is any class of the other side's: what it is, is found out when it is made.
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

// className is a class's name where it may be the path of one.
func className(path string) string {
	name := []byte(path)
	for i, b := range name {
		if b == '.' || b == ':' {
			name[i] = '_'
		}
	}
	return string(name[max(0, len(name)-64):])
}

// object is an object of the other side's.
type object struct {
	core  *core
	name  string
	table table
}

var (
	_ actors.Starter    = (*object)(nil)
	_ actors.Keeper     = (*object)(nil)
	_ actors.Tabled     = (*object)(nil)
	_ actors.Closer     = (*object)(nil)
	_ actors.Configurer = (*object)(nil)
	_ actors.EnvSetter  = (*object)(nil)
)

func (o *object) Table() ([]actors.MethodInfo, bool) { return o.table.Methods, o.table.Open }

// Memory is where large arguments are put, and results come from.
func (o *object) Memory() bus.Memory { return o.core.memory }

// Begin hands the call to the other side, which answers it.
func (o *object) Begin(ctx context.Context, method string, body []byte, done func([]byte, error)) {
	o.begin(ctx, o.isSide(method), callMeta(ctx, method, o.name), body, done)
}

func (o *object) begin(ctx context.Context, side bool, meta, body []byte, done func([]byte, error)) {
	push := o.core.queue.push
	if side {
		push = o.core.pushSide
	}
	t := &taken{ctx: ctx, done: done, owns: true}
	token := o.core.incoming.add(t)
	if o.table.Cancels {
		t.stop = context.AfterFunc(ctx, func() {
			defer bus.Recover()
			push(completion{kind: kindCancel, token: token, rank: -1})
		})
	}
	push(completion{kind: kindCall, token: token, rank: -1, meta: meta, body: body})
}

func (o *object) Handle(ctx context.Context, method string, body []byte) ([]byte, error) {
	return o.wait(ctx, method, body)
}

// wait asks the other side for something and waits for it. It goes on waiting when ctx ends: what the other side is doing
// it has not finished.
func (o *object) wait(ctx context.Context, what string, body []byte) ([]byte, error) {
	type answer struct {
		body []byte
		err  error
	}
	ch := make(chan answer, 1)
	token := o.core.incoming.add(&taken{ctx: ctx, done: func(body []byte, err error) { ch <- answer{body, err} }})
	o.core.queue.push(completion{kind: kindCall, token: token, rank: -1, meta: callMeta(ctx, what, o.name), body: body})
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
	<-w.player.Done()
	out := completion{kind: kindStopped, flags: flagLast, rank: -1}
	if state, err := w.player.Worker().State(); state == actors.Failed && err != nil {
		out.flags |= flagFailed
		out.body = encodeError(err)
	}
	w.core.memory.shared.closeUnused()
	w.core.queue.push(out)
	time.Sleep(exitAfter)
	os.Exit(1)
}
