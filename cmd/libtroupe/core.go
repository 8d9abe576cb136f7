package main

/*
#include <stdlib.h>
*/
import "C"

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"runtime"
	"sync"
	"sync/atomic"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/roles"
)

// version is set when the library is built.
var (
	version  = "dev"
	cVersion = C.CString(version)
)

// core is all there is in one process: sessions, clusters, calls, the worker, and the queue in which all of them speak.
type core struct {
	queue    *queue
	memory   *memory
	incoming *incoming
	outbox   outbox
	log      *slog.Logger
	side     atomic.Pointer[queue]     // see side.go; nil until it is asked for
	broken   atomic.Pointer[bus.Error] // why nothing works any more; see breakdown.go

	mu       sync.Mutex // guards what follows
	last     uint64     // the last number that was given
	runtimes map[uint64]*roles.Runtime
	clusters map[uint64]*cluster
	calls    map[uint64]func() // by token, of calls and requests under way: how to give them up
	worker   *worker           // if this process is one
	// reservations by id, of those that were made and not given back
	reservations map[string]*roles.Reservation
	pipelines    map[uint64]*pipe
	routers      map[uint64]*router
	servants     map[string]*servant // what drivers serve, by the name of its class
}

// cluster is a role as the other side holds it.
type cluster struct {
	*roles.Cluster
	mu    sync.Mutex
	plans []*dispatch.Plan // by number
}

var start = sync.OnceValues(newCore)

func theCore() (*core, error) { return start() }

const (
	// mostProcs is how many threads of Go run at once: the work of this library is short, and on a machine with two hundred cores
	// the search for it would cost more than the work.
	mostProcs = 4
	// ballast is never touched and takes no memory, but has the collector wait until there is as much garbage.
	ballastSize = 16 << 20
)

var ballast []byte

func newCore() (*core, error) {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(min(runtime.GOMAXPROCS(0), mostProcs))
	}
	ballast = make([]byte, ballastSize)
	fd, wake, err := newWake()
	if err != nil {
		return nil, errors.New("no descriptor to announce completions with: " + err.Error())
	}
	c := &core{
		queue: &queue{fd: fd, wake: wake}, memory: shared, incoming: newIncoming(shared),
		log:      slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
		runtimes: map[uint64]*roles.Runtime{}, clusters: map[uint64]*cluster{}, calls: map[uint64]func(){},
		reservations: map[string]*roles.Reservation{}, pipelines: map[uint64]*pipe{},
		routers: map[uint64]*router{}, servants: map[string]*servant{},
	}
	bus.OnPanic(c.breakDown)
	return c, nil
}

func (c *core) number() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last++
	return c.last
}

func (c *core) runtime(id uint64) (*roles.Runtime, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if rt := c.runtimes[id]; rt != nil {
		return rt, nil
	}
	return nil, bus.Errorf(bus.CodeClosed, "this session is closed; call troupe.init() again")
}

func (c *core) cluster(id uint64) (*cluster, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if cl := c.clusters[id]; cl != nil {
		return cl, nil
	}
	return nil, bus.Errorf(bus.CodeClosed, "this cluster is closed")
}

// begin notes how something under way is given up, and end that it is over.
func (c *core) begin(token uint64, giveUp func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls[token] = giveUp
}

func (c *core) end(token uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.calls, token)
}

// cancel gives up what has this token, in the background: it may have to say so on the bus.
func (c *core) cancel(token uint64) {
	c.mu.Lock()
	giveUp := c.calls[token]
	c.mu.Unlock()
	if giveUp != nil && c.sound() == nil {
		spawn(giveUp, func(err error) { c.log.Error("libtroupe: cancel", "error", err) })
	}
}

// ask answers a request in the background.
func (c *core) ask(token uint64, request []byte) {
	ctx, cancel := context.WithCancel(context.Background())
	c.begin(token, cancel)
	finish := func(result any, err error) {
		cancel()
		c.end(token)
		c.queue.push(resultOf(token, result, err))
	}
	spawn(func() { finish(c.answer(ctx, request)) }, func(err error) { finish(nil, bus.Errorf(bus.CodeInternal, "%w", err)) })
}

func resultOf(token uint64, result any, err error) completion {
	out := completion{kind: kindResult, flags: flagLast, token: token}
	if err == nil {
		out.body, err = wire.Marshal(result)
	}
	if err != nil {
		out.flags |= flagFailed
		out.body = encodeError(err)
	}
	return out
}

// encodeError says an error as the wire does.
func encodeError(err error) []byte {
	var call *dispatch.CallError
	if errors.As(err, &call) {
		err = call.Cause
	}
	e := bus.AsError(err)
	body, encErr := wire.Marshal(e)
	if encErr != nil {
		body, _ = wire.Marshal(&bus.Error{Code: e.Code, Rank: -1, Message: "an error whose text cannot be sent"})
	}
	return body
}
