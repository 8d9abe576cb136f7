package main

import (
	"context"
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

// ofRouter is of requests about a router.
type ofRouter struct {
	ID uint64 `msgpack:"id"`
}

func (q ofRouter) find(c *core) (*openRouter, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r := c.routers[q.ID]; r != nil {
		return r, nil
	}
	return nil, bus.Errorf(bus.CodeClosed, "this router is closed")
}

type (
	routerRequest     struct{ ofRouter }
	routerOpenRequest struct {
		ofProcess
		Method   string   `msgpack:"method"`
		Abort    string   `msgpack:"abort"`
		Credits  int      `msgpack:"credits"`
		Waiting  int      `msgpack:"waiting"`
		Sticky   bool     `msgpack:"sticky"`
		Clusters []uint64 `msgpack:"clusters"` // clusters whose ranks it starts with
	}
	routerCallRequest struct {
		ofRouter
		Request string   `msgpack:"request"` // name of the request
		Key     string   `msgpack:"key"`
		Body    []byte   `msgpack:"body"` // the body of a call: [positional, named]
		Again   bool     `msgpack:"again"`
		Scope   []byte   `msgpack:"scope"`             // where it is made: a callScope
		Limit   *float64 `msgpack:"timeout,omitempty"` // seconds
	}
	routerAbortRequest struct {
		ofRouter
		Request string `msgpack:"request"`
	}
	routerRanksRequest struct {
		ofRouter
		within
		Cluster uint64 `msgpack:"cluster"`
		Ranks   []int  `msgpack:"ranks"` // empty: all
	}
	routerScaleRequest struct {
		ofRouter
		within
		Cluster uint64 `msgpack:"cluster"`
		Workers int    `msgpack:"workers"`
	}
)

func (c *core) routerOpen(_ context.Context, _ *core, q routerOpenRequest) (uint64, error) {
	made, err := router.New(router.Config{Method: q.Method, AbortMethod: q.Abort, Credits: q.Credits, Waiting: q.Waiting, Sticky: q.Sticky})
	if err != nil {
		return 0, err
	}
	for _, id := range q.Clusters {
		cl, err := c.cluster(id)
		if err == nil {
			err = made.Join(cl.Cluster)
		}
		if err != nil {
			return 0, err
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	id := c.number()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.routers[id] = &openRouter{made, ctx, cancel}
	return id, nil
}

// until bounds ctx by the router's end and the timeout.
func (r *openRouter) until(ctx context.Context, timeout *float64) (context.Context, context.CancelFunc) {
	ctx, cancel := within{timeout}.bound(ctx)
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

func (c *core) routerCall(ctx context.Context, to *openRouter, r routerCallRequest) (body []byte, err error) {
	q := router.Request{ID: r.Request, Key: r.Key, RetryOnLoss: r.Again}
	if q.Args, q.Named, err = arguments(r.Body); err != nil {
		return nil, err
	}
	timeout, own := r.Limit, time.Duration(0)
	if timeout != nil {
		own = seconds(*timeout)
	}
	limits, err := c.nested(r.Scope, own)
	if err != nil {
		return nil, err
	}
	if limits.outer != "" {
		left := limits.timeout.Seconds()
		timeout = &left
	}
	ctx, cancel := to.until(c.scopeOf(ctx, r.Scope), timeout)
	defer cancel()
	defer context.AfterFunc(limits.ctx, bus.Guard(cancel))()
	answer, err := to.Call(ctx, q)
	err = limits.explain(err)
	if err != nil && to.ctx.Err() != nil {
		return nil, bus.Errorf(bus.CodeClosed, "the router was closed")
	}
	return []byte(answer), err
}

func (c *core) routerSuspend(_ context.Context, to *openRouter, _ routerRequest) error {
	to.Suspend()
	return nil
}

func (c *core) routerResume(_ context.Context, to *openRouter, _ routerRequest) error {
	to.Resume()
	return nil
}

func (c *core) routerAbort(ctx context.Context, to *openRouter, r routerAbortRequest) error {
	ctx, cancel := to.until(ctx, nil)
	defer cancel()
	return to.Abort(ctx, r.Request)
}

func (c *core) routerStats(_ context.Context, to *openRouter, _ routerRequest) (string, error) {
	return jsonText(to.Status())
}

func (c *core) routerJoin(_ context.Context, to *openRouter, r routerRanksRequest) error {
	cl, err := c.cluster(r.Cluster)
	if err != nil {
		return err
	}
	return to.Join(cl.Cluster, r.Ranks...)
}

func (c *core) routerLeave(ctx context.Context, to *openRouter, r routerRanksRequest) error {
	cl, err := c.cluster(r.Cluster)
	if err != nil {
		return err
	}
	ctx, cancel := to.until(ctx, r.Timeout)
	defer cancel()
	return to.Leave(ctx, cl.Cluster, r.Ranks...)
}

func (c *core) routerScale(ctx context.Context, to *openRouter, r routerScaleRequest) error {
	cl, err := c.cluster(r.Cluster)
	if err != nil {
		return err
	}
	ctx, cancel := to.until(ctx, r.Timeout)
	defer cancel()
	return to.Scale(ctx, cl.Cluster, r.Workers)
}

// routerClose cancels queued and running requests. The ranks belong to the role and continue.
func (c *core) routerClose(_ context.Context, _ *core, r closeRequest) error {
	c.mu.Lock()
	to := c.routers[r.ID]
	delete(c.routers, r.ID)
	c.mu.Unlock()
	if to != nil {
		to.cancel()
	}
	return nil
}
