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
	"troupe/weights"
)

// version is set when the library is built.
var (
	version  = "dev"
	cVersion = C.CString(version)
)

// core is the state of the library in one process: runtimes, clusters, calls, the worker, and the queue of completions.
type core struct {
	queue    *queue
	memory   *memory
	incoming *incoming
	outbox   outbox
	spans    openSpans
	output   outputPipe
	log      *slog.Logger
	side     atomic.Pointer[queue]     // see side.go; nil until Python asks for it
	lent     atomic.Pointer[queue]     // see lent.go; nil until Python asks for it
	broken   atomic.Pointer[bus.Error] // the panic that made the core unusable; see guard.go

	mu       sync.Mutex // guards what follows
	last     uint64     // the last number given
	runtimes map[uint64]*roles.Runtime
	closing  map[uint64]*roles.Runtime // runtimes whose close has not returned
	clusters map[uint64]*cluster
	calls    map[uint64]func()      // by token: cancels a call or request in flight
	reports  map[uint64]*callReport // by token: calls to whose answers references can be made
	worker   *worker                // nil: this process is not a worker
	// reservations that were not released, by id
	reservations map[string]*roles.Reservation
	pipelines    map[uint64]*pipe
	rollouts     map[uint64]*openRollouts
	routers      map[uint64]*openRouter
	weights      map[uint64]*weights.Client // by runtime
	movers       map[uint64]*deviceMover    // by runtime, for weights
	served       map[string]*servedObject   // objects that drivers serve, by class name
}

// cluster is a cluster with the plans that Python has asked for.
type cluster struct {
	*roles.Cluster
	mu    sync.Mutex
	plans []rolePlan // by number
}

var start = sync.OnceValues(newCore)

func getCore() (*core, error) { return start() }

const (
	// maxProcs bounds GOMAXPROCS: the library's work is short, and with hundreds of cores the scheduler's search for
	// work would cost more than the work.
	maxProcs = 4
	// ballastSize bytes are never touched and take no memory; they delay garbage collection until there is as much
	// garbage.
	ballastSize = 16 << 20
)

var ballast []byte

func newCore() (*core, error) {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(min(runtime.GOMAXPROCS(0), maxProcs))
	}
	ballast = make([]byte, ballastSize)
	fd, wake, err := newWake()
	if err != nil {
		return nil, errors.New("create a descriptor for completions: " + err.Error())
	}
	c := &core{
		queue: &queue{fd: fd, wake: wake}, memory: shared, incoming: newIncoming(shared),
		log:      slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
		runtimes: map[uint64]*roles.Runtime{}, closing: map[uint64]*roles.Runtime{},
		clusters: map[uint64]*cluster{}, calls: map[uint64]func(){}, reports: map[uint64]*callReport{},
		reservations: map[string]*roles.Reservation{}, pipelines: map[uint64]*pipe{}, rollouts: map[uint64]*openRollouts{},
		routers: map[uint64]*openRouter{}, weights: map[uint64]*weights.Client{}, movers: map[uint64]*deviceMover{}, served: map[string]*servedObject{},
	}
	bus.OnPanic(c.corePanicked)
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

// begin registers how to cancel something in flight; end removes it.
func (c *core) begin(token uint64, cancel func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls[token] = cancel
}

func (c *core) end(token uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.calls, token)
}

// cancel cancels the call or request with this token in the background, because it may send messages.
func (c *core) cancel(token uint64) {
	c.mu.Lock()
	cancel := c.calls[token]
	c.mu.Unlock()
	if cancel != nil && c.checkUsable() == nil {
		spawn(cancel, func(err error) { c.log.Error("libtroupe: cancel", "error", err) })
	}
}

// ask executes a request in the background.
func (c *core) ask(token uint64, op string, request []byte) {
	ctx, cancel := context.WithCancel(context.Background())
	c.begin(token, cancel)
	finish := func(result any, err error) {
		cancel()
		c.end(token)
		if d, ok := result.(deathsInfo); ok && d.side {
			c.pushSide(resultOf(token, result, err))
			return
		}
		c.report(token, resultOf(token, result, err))
	}
	spawn(func() { finish(c.answer(ctx, op, request)) }, func(err error) { finish(nil, bus.Errorf(bus.CodeInternal, "%w", err)) })
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

// encodeError encodes an error as the wire does.
func encodeError(err error) []byte {
	var call *dispatch.CallError
	if errors.As(err, &call) {
		err = call.Cause
	}
	e := bus.AsError(err)
	body, encErr := wire.Marshal(e)
	if encErr != nil {
		body, _ = wire.Marshal(&bus.Error{Code: e.Code, Rank: -1, Message: "an error that cannot be encoded"})
	}
	return body
}
