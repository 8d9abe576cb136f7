package main

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/roles/router"
)

// openRouter is a router with the context of its calls.
type openRouter struct {
	*router.Router
	ctx    context.Context // ends when the router is closed
	cancel context.CancelFunc
}

// routerRequest is the fields of router ops.
type routerRequest struct {
	ID      uint64   `msgpack:"id"`
	Timeout *float64 `msgpack:"timeout"` // seconds; nil: none

	Method  string `msgpack:"method"`
	Abort   string `msgpack:"abort"`
	Credits int    `msgpack:"credits"`
	Waiting int    `msgpack:"waiting"`
	Sticky  bool   `msgpack:"sticky"`
	// Clusters are the clusters whose ranks it starts with.
	Clusters []uint64 `msgpack:"clusters"`

	Request string `msgpack:"request"` // name of the request
	Key     string `msgpack:"key"`
	Body    []byte `msgpack:"body"` // the body of a call: [positional, named]
	Again   bool   `msgpack:"again"`
	Scope   []byte `msgpack:"scope"` // where it is made; see scopeOf

	Verb    string `msgpack:"verb"`
	Cluster uint64 `msgpack:"cluster"`
	Ranks   []int  `msgpack:"ranks"`
	Workers int    `msgpack:"workers"`
}

func (c *core) routerOpen(_ context.Context, r *request) (any, error) {
	q := r.Router
	made, err := router.New(router.Config{Method: q.Method, AbortMethod: q.Abort, Credits: q.Credits, Waiting: q.Waiting, Sticky: q.Sticky})
	if err != nil {
		return nil, err
	}
	for _, id := range q.Clusters {
		cl, err := c.cluster(id)
		if err == nil {
			err = made.Join(cl.Cluster)
		}
		if err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	id := c.number()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.routers[id] = &openRouter{made, ctx, cancel}
	return id, nil
}

func (c *core) router(id uint64) (*openRouter, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r := c.routers[id]; r != nil {
		return r, nil
	}
	return nil, bus.Errorf(bus.CodeClosed, "this router is closed")
}

// until bounds ctx by the router's end and the timeout.
func (r *openRouter) until(ctx context.Context, timeout *float64) (context.Context, context.CancelFunc) {
	ctx, cancel := within(ctx, timeout)
	stop := context.AfterFunc(r.ctx, bus.Guard(cancel))
	return ctx, func() { stop(); cancel() }
}

// arguments splits the body of a call, [positional, named], into encoded arguments.
func arguments(body []byte) (args []any, named map[string]any, err error) {
	var halves []wire.Raw
	if err := wire.Unmarshal(body, &halves); err != nil || len(halves) != 2 {
		return nil, nil, bus.Errorf(bus.CodeMalformed, "the body of a call must be [positional, named]")
	}
	var positional []wire.Raw
	var byName map[string]wire.Raw
	if err := errors.Join(wire.Unmarshal(halves[0], &positional), wire.Unmarshal(halves[1], &byName)); err != nil {
		return nil, nil, err
	}
	args = []any{}
	for _, arg := range positional {
		args = append(args, arg)
	}
	for name, arg := range byName {
		if named == nil {
			named = map[string]any{}
		}
		named[name] = arg
	}
	return args, named, nil
}

func (c *core) routerCall(ctx context.Context, r *request) (any, error) {
	to, err := c.router(r.Router.ID)
	if err != nil {
		return nil, err
	}
	q := router.Request{ID: r.Router.Request, Key: r.Router.Key, RetryOnLoss: r.Router.Again}
	if q.Args, q.Named, err = arguments(r.Router.Body); err != nil {
		return nil, err
	}
	timeout, own := r.Router.Timeout, time.Duration(0)
	if timeout != nil {
		own = seconds(*timeout)
	}
	limits, err := c.nested(r.Router.Scope, own)
	if err != nil {
		return nil, err
	}
	if limits.outer != "" {
		left := limits.timeout.Seconds()
		timeout = &left
	}
	ctx, cancel := to.until(c.scopeOf(ctx, r.Router.Scope), timeout)
	defer cancel()
	defer context.AfterFunc(limits.ctx, bus.Guard(cancel))()
	answer, err := to.Call(ctx, q)
	err = limits.explain(err)
	if err != nil && to.ctx.Err() != nil {
		return nil, bus.Errorf(bus.CodeClosed, "the router was closed")
	}
	return []byte(answer), err
}

func (c *core) routerVerb(ctx context.Context, r *request) (any, error) {
	to, err := c.router(r.Router.ID)
	if err != nil {
		return nil, err
	}
	ctx, cancel := to.until(ctx, r.Router.Timeout)
	defer cancel()
	switch q := r.Router; q.Verb {
	case "suspend":
		to.Suspend()
		return nil, nil
	case "resume":
		to.Resume()
		return nil, nil
	case "abort":
		return nil, to.Abort(ctx, q.Request)
	case "stats":
		text, err := json.Marshal(to.Status())
		return string(text), err
	case "join", "leave", "scale":
		return nil, c.resizeRouter(ctx, to, q)
	}
	return nil, bus.Errorf(bus.CodeInvalid, "a router has no verb %q", r.Router.Verb)
}

func (c *core) resizeRouter(ctx context.Context, to *openRouter, q routerRequest) error {
	cl, err := c.cluster(q.Cluster)
	if err != nil {
		return err
	}
	switch q.Verb {
	case "join":
		return to.Join(cl.Cluster, q.Ranks...)
	case "leave":
		return to.Leave(ctx, cl.Cluster, q.Ranks...)
	}
	return to.Scale(ctx, cl.Cluster, q.Workers)
}

// routerClose cancels queued and running requests. The ranks belong to the role and continue.
func (c *core) routerClose(_ context.Context, r *request) (any, error) {
	to, err := c.router(r.Router.ID)
	if err != nil {
		return nil, nil // closing twice is not an error
	}
	c.mu.Lock()
	delete(c.routers, r.Router.ID)
	c.mu.Unlock()
	to.cancel()
	return nil, nil
}
