// Package router distributes requests over the ranks of roles: by credits, with keys that stick to their rank, with abort by
// id, and with ranks that join, leave, die and come back at any time.
package router

import (
	"context"
	"errors"
	"slices"
	"sync"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/roles"
)

// Config is the configuration of a router.
type Config struct {
	// Method is the method to call. AbortMethod is called on the rank, in the control lane, with the id of an aborted
	// request; the method then returns a partial result. Zero: an aborted request is cancelled and has no result.
	Method      string
	AbortMethod string
	// Credits is how many requests one rank has at once. Zero: one.
	Credits int
	// Waiting is how many requests may wait for a rank; beyond it a request fails with bus.ErrBusy. Zero: 1,024.
	Waiting int
	// Sticky sends requests of one key to the same rank while that is available.
	Sticky bool
}

// Request is one call through a router.
type Request struct {
	// ID identifies the request for Abort. Zero: it cannot be aborted.
	ID  string
	Key string
	Arg any
	// Args and Named are for methods that take several arguments, instead of Arg.
	Args  []any
	Named map[string]any
	// RetryOnLoss sends the request to another rank when its rank dies. Zero: the call fails, because it may have had
	// an effect.
	RetryOnLoss bool
}

// ErrAborted is the error of an aborted request that has no partial result.
var ErrAborted = bus.Errorf(bus.CodeCancelled, "the request was aborted")

// Router distributes requests over the ranks of roles: each goes to the least loaded rank, or to the one that its key
// is pinned to. Ranks join and leave at any time. It is safe for concurrent use.
type Router struct {
	cfg Config

	mu        sync.Mutex // guards the following fields
	ranks     pool
	waiting   []*waitingRequest
	running   map[string]*activeRequest           // by id, waiting ones included
	lost      map[roles.Worker]context.CancelFunc // lost ranks, which rejoin when their role has restarted them
	suspended bool
	changedCh chan struct{} // closed and replaced when a rank has finished a request
	served    uint64
}

type waitingRequest struct {
	key     string
	grantCh chan *slots // capacity one
}

type activeRequest struct {
	rank   *roles.Worker // nil: waiting for a rank
	cancel context.CancelCauseFunc
}

// New returns a router without ranks; requests wait until ranks join.
func New(cfg Config) (*Router, error) {
	if cfg.Method == "" {
		return nil, bus.Errorf(bus.CodeInvalid, "router.Config: Method is not set; name the method to call")
	}
	if cfg.Credits < 0 || cfg.Waiting < 0 {
		return nil, bus.Errorf(bus.CodeInvalid, "router.Config: Credits %d and Waiting %d must not be negative", cfg.Credits, cfg.Waiting)
	}
	if cfg.Credits == 0 {
		cfg.Credits = 1
	}
	if cfg.Waiting == 0 {
		cfg.Waiting = 1024
	}
	return &Router{cfg: cfg, lost: map[roles.Worker]context.CancelFunc{}, running: map[string]*activeRequest{}, changedCh: make(chan struct{})}, nil
}

// Join adds ranks of a cluster, all of them if none is given.
func (r *Router) Join(c *roles.Cluster, ranks ...int) error {
	if len(ranks) == 0 {
		for rank := range c.WorldSize() {
			ranks = append(ranks, rank)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rank := range ranks {
		w, err := c.Worker(rank)
		if err != nil {
			return err
		}
		r.add(w)
	}
	r.assign()
	return nil
}

// add adds a rank that is not there yet. The caller holds the lock.
func (r *Router) add(w roles.Worker) {
	if stop := r.lost[w]; stop != nil {
		stop()
		delete(r.lost, w)
	}
	if !r.ranks.has(w) {
		r.ranks.add(w, r.cfg.Credits)
	}
}

// Leave removes ranks of a cluster, all of them if none is given. They get no more requests, and it waits until they
// have answered the ones they have.
func (r *Router) Leave(ctx context.Context, c *roles.Cluster, ranks ...int) error {
	named := func(w roles.Worker) bool {
		return w.Cluster() == c && (len(ranks) == 0 || slices.Contains(ranks, w.Rank()))
	}
	r.mu.Lock()
	for w, stop := range r.lost {
		if named(w) {
			stop()
			delete(r.lost, w)
		}
	}
	var leaving []*slots
	for _, s := range r.ranks.all {
		if named(s.rank) {
			s.draining = true
			r.ranks.unpin(s)
			leaving = append(leaving, s)
		}
	}
	r.assign()
	r.mu.Unlock()
	for {
		r.mu.Lock()
		busy := slices.ContainsFunc(leaving, func(s *slots) bool { return s.running > 0 })
		changedCh := r.changedCh
		if !busy {
			for _, s := range leaving {
				r.ranks.remove(s)
			}
		}
		r.mu.Unlock()
		if !busy {
			return nil
		}
		select {
		case <-changedCh:
		case <-ctx.Done():
			return bus.Errorf(bus.CodeOf(ctx.Err()), "leaving ranks still have requests: %w", ctx.Err())
		}
	}
}

// Suspend sends no more requests to ranks; they wait for Resume.
func (r *Router) Suspend() { r.setSuspended(true) }

// Resume sends requests again.
func (r *Router) Resume() { r.setSuspended(false) }

func (r *Router) setSuspended(yes bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.suspended = yes
	r.assign()
}

// Call sends the request to a rank and returns its answer.
func (r *Router) Call(ctx context.Context, q Request) (wire.Raw, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if err := r.register(q.ID, cancel); err != nil {
		return nil, err
	}
	defer r.unregister(q.ID)
	for {
		s, err := r.acquire(ctx, q)
		if err != nil {
			return nil, orAborted(ctx, err)
		}
		body, err := r.send(ctx, q, s)
		if err == nil || !q.RetryOnLoss || !roles.IsWorkerLost(err) || ctx.Err() != nil {
			return body, orAborted(ctx, err)
		}
	}
}

// orAborted replaces the error of an aborted request by ErrAborted.
func orAborted(ctx context.Context, err error) error {
	if err != nil && errors.Is(context.Cause(ctx), ErrAborted) {
		return ErrAborted
	}
	return err
}

// register makes a request known by its id.
func (r *Router) register(id string, cancel context.CancelCauseFunc) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if id == "" {
		return nil
	}
	if r.running[id] != nil {
		return bus.Errorf(bus.CodeExists, "request %q is already running; give each request its own id", id)
	}
	r.running[id] = &activeRequest{cancel: cancel}
	return nil
}

func (r *Router) unregister(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.running, id)
}

// acquire waits for a rank with a free slot.
func (r *Router) acquire(ctx context.Context, q Request) (*slots, error) {
	r.mu.Lock()
	w := &waitingRequest{key: q.Key, grantCh: make(chan *slots, 1)}
	r.waiting = append(r.waiting, w)
	r.assign()
	if len(r.waiting) > r.cfg.Waiting {
		r.waiting = slices.DeleteFunc(r.waiting, func(o *waitingRequest) bool { return o == w })
		r.mu.Unlock()
		return nil, bus.Errorf(bus.CodeBusy, "%d requests wait for a rank with a free slot; try again later", r.cfg.Waiting)
	}
	r.mu.Unlock()
	select {
	case s := <-w.grantCh:
		return s, nil
	case <-ctx.Done():
		return nil, r.withdraw(ctx, w)
	}
}

// withdraw ends the wait of a request.
func (r *Router) withdraw(ctx context.Context, w *waitingRequest) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case s := <-w.grantCh: // granted at the same moment
		r.release(s)
	default:
		r.waiting = slices.DeleteFunc(r.waiting, func(o *waitingRequest) bool { return o == w })
	}
	return bus.Errorf(bus.CodeOf(ctx.Err()), "no rank had a free slot in time: %w", ctx.Err())
}

// awaitRestart removes a lost rank and adds it again when its role has restarted it. The caller holds the lock.
func (r *Router) awaitRestart(s *slots) {
	r.ranks.remove(s)
	ctx, cancel := context.WithCancel(context.Background()) // ends with the role too
	r.lost[s.rank] = cancel
	bus.Go(func() {
		defer cancel()
		err := s.rank.AwaitRestart(ctx, s.generation)
		r.mu.Lock()
		defer r.mu.Unlock()
		if ctx.Err() != nil {
			return // the rank has joined again, or left
		}
		delete(r.lost, s.rank)
		if err == nil {
			r.add(s.rank)
			r.assign()
		}
	})
}

// assign gives ranks to waiting requests, in order; a request whose pinned rank is busy does not block the next. The
// caller holds the lock.
func (r *Router) assign() {
	if r.suspended {
		return
	}
	r.waiting = slices.DeleteFunc(r.waiting, func(w *waitingRequest) bool {
		s := r.pick(w.key)
		if s == nil {
			return false
		}
		s.running++
		w.grantCh <- s
		return true
	})
}

func (r *Router) pick(key string) *slots {
	if !r.cfg.Sticky || key == "" {
		return r.ranks.leastLoaded()
	}
	if s := r.ranks.pinned(key); s != nil {
		if s.free() <= 0 {
			return nil
		}
		return s
	}
	s := r.ranks.leastLoaded()
	if s != nil {
		r.ranks.pin(key, s)
	}
	return s
}

// release frees a slot. The caller holds the lock.
func (r *Router) release(s *slots) {
	s.running--
	close(r.changedCh)
	r.changedCh = make(chan struct{})
	r.assign()
}

// send makes the call and frees the slot. A lost rank is removed.
func (r *Router) send(ctx context.Context, q Request, s *slots) (_ wire.Raw, err error) {
	ctx, cancel := context.WithCancel(ctx) // ends the call
	defer cancel()
	r.mu.Lock()
	r.setRank(q.ID, &s.rank)
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.setRank(q.ID, nil)
		if err != nil && roles.IsWorkerLost(err) && r.ranks.contains(s) {
			r.awaitRestart(s)
		}
		r.served++
		r.release(s)
	}()
	args := q.Args
	if args == nil && q.Named == nil {
		args = []any{q.Arg}
	}
	f, err := s.rank.Go(ctx, dispatch.Call{Method: r.cfg.Method, Args: args, Named: q.Named, NoWait: true}) // NoWait: another rank may be available
	if err != nil {
		return nil, err
	}
	answers, err := dispatch.AwaitEach[wire.Raw](ctx, f)
	if err != nil {
		return nil, err
	}
	return answers[0], nil
}

// setRank notes which rank has a request. The caller holds the lock.
func (r *Router) setRank(id string, rank *roles.Worker) {
	if q := r.running[id]; q != nil {
		q.rank = rank
	}
}

// Abort aborts a request by its id. With an abort method, its Call returns the partial result; without one, or if the
// rank does not answer, or if the request is waiting for a rank, its Call returns ErrAborted.
func (r *Router) Abort(ctx context.Context, id string) error {
	r.mu.Lock()
	q := r.running[id]
	var rank *roles.Worker
	if q != nil {
		rank = q.rank
	}
	r.mu.Unlock()
	if q == nil {
		return bus.Errorf(bus.CodeNotFound, "there is no running request %q", id)
	}
	if r.cfg.AbortMethod == "" || rank == nil {
		q.cancel(ErrAborted)
		return nil
	}
	f, err := rank.Go(ctx, dispatch.Call{Method: r.cfg.AbortMethod, Args: []any{id}, Control: true})
	if err == nil {
		err = f.Wait(ctx)
	}
	if err != nil {
		q.cancel(ErrAborted)
	}
	return err
}

// Scale grows or shrinks a role of processes; ranks that are removed finish their requests first.
func (r *Router) Scale(ctx context.Context, c *roles.Cluster, workers int) error {
	have := c.WorldSize()
	if workers < 1 {
		return bus.Errorf(bus.CodeInvalid, "role %s: %d workers; suspend the router instead", c.Name(), workers)
	}
	if workers > have {
		if err := c.Grow(ctx, workers-have); err != nil {
			return err
		}
	}
	var ranks []int
	for rank := min(have, workers); rank < max(have, workers); rank++ {
		ranks = append(ranks, rank)
	}
	switch {
	case workers == have:
		return nil
	case workers > have:
		return r.Join(c, ranks...)
	}
	if err := r.Leave(ctx, c, ranks...); err != nil {
		return err
	}
	return c.Shrink(ctx, have-workers)
}

// Status is the state of a router.
type Status struct {
	Ranks     int    `json:"ranks"`
	Credits   int    `json:"credits"`
	InFlight  int    `json:"in_flight"`
	Waiting   int    `json:"waiting"`
	Served    uint64 `json:"served"`
	Suspended bool   `json:"suspended,omitempty"`
}

// Status is the state of the router.
func (r *Router) Status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	st := Status{Ranks: len(r.ranks.all), Waiting: len(r.waiting), Served: r.served, Suspended: r.suspended}
	for _, s := range r.ranks.all {
		st.Credits += s.credits
		st.InFlight += s.running
	}
	return st
}
