package pipeline

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"troupe/bus"
	"troupe/dispatch"
	"troupe/roles"
)

// RouterConfig is how a router spreads requests.
type RouterConfig struct {
	// Method is what is called. AbortMethod is called on the rank, in the control lane, with the id of a request that is
	// aborted; the method then answers with what it has. Zero: an aborted request is cancelled, and has no result.
	Method      string
	AbortMethod string
	// Credits is how many requests one rank may have at once. Zero: one.
	Credits int
	// Waiting is how many requests may wait for a rank; beyond, a request is bus.ErrBusy. Zero: 1,024.
	Waiting int
	// Sticky gives requests of one key to the same rank while it is there.
	Sticky bool
}

// Request is one call through a router.
type Request struct {
	// ID names the request for Abort. Zero: it cannot be aborted by name.
	ID  string
	Key string
	Arg any
	// Again sends the request to another rank when the one that had it dies. Zero: that is the error, for a request
	// that may have had its effect.
	Again bool
}

// Router spreads requests over the ranks of roles: each goes to the least loaded, or to the one that has its key. Ranks
// join and leave while it runs. It is safe for concurrent use.
type Router struct {
	cfg RouterConfig

	mu        sync.Mutex // guards what follows
	hands     hands
	ranks     map[*hand]roles.Worker
	waiting   []*waitingRequest
	running   map[string]*routed // by id
	suspended bool
	changedCh chan struct{} // closed and replaced when a rank has let go of a request
	served    uint64
}

type waitingRequest struct {
	key     string
	grantCh chan *hand // holds one
}

type routed struct {
	hand   *hand
	rank   roles.Worker
	cancel context.CancelCauseFunc
}

// NewRouter makes a router without ranks; requests wait until some join.
func NewRouter(cfg RouterConfig) (*Router, error) {
	if cfg.Method == "" {
		return nil, bus.Errorf(bus.CodeInvalid, "pipeline.RouterConfig: Method is not set; name what is to be called")
	}
	if cfg.Credits < 0 || cfg.Waiting < 0 {
		return nil, bus.Errorf(bus.CodeInvalid, "pipeline.RouterConfig: Credits %d and Waiting %d must not be negative", cfg.Credits, cfg.Waiting)
	}
	if cfg.Credits == 0 {
		cfg.Credits = 1
	}
	if cfg.Waiting == 0 {
		cfg.Waiting = 1024
	}
	return &Router{cfg: cfg, ranks: map[*hand]roles.Worker{}, running: map[string]*routed{}, changedCh: make(chan struct{})}, nil
}

// Join adds ranks of a cluster, all of them if none is named.
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
		r.ranks[r.hands.add(fmt.Sprintf("%s[%d]", c.Name(), rank), r.cfg.Credits)] = w
	}
	r.serve()
	return nil
}

// Leave takes ranks out, all of the cluster's if none is named: they get nothing more, and it waits until they have
// answered what they have.
func (r *Router) Leave(ctx context.Context, c *roles.Cluster, ranks ...int) error {
	r.mu.Lock()
	var leaving []*hand
	for h, w := range r.ranks {
		if w.Cluster() == c && (len(ranks) == 0 || slices.Contains(ranks, w.Rank())) {
			h.draining = true
			r.hands.unstick(h)
			leaving = append(leaving, h)
		}
	}
	r.serve()
	r.mu.Unlock()
	for {
		r.mu.Lock()
		busy := slices.ContainsFunc(leaving, func(h *hand) bool { return h.running > 0 })
		changedCh := r.changedCh
		if !busy {
			for _, h := range leaving {
				r.forget(h)
			}
		}
		r.mu.Unlock()
		if !busy {
			return nil
		}
		select {
		case <-changedCh:
		case <-ctx.Done():
			return bus.Errorf(bus.CodeOf(ctx.Err()), "ranks that leave still have requests: %w", ctx.Err())
		}
	}
}

// forget takes a rank out, under the lock.
func (r *Router) forget(h *hand) {
	r.hands.remove(h)
	delete(r.ranks, h)
}

// Suspend hands out no more requests; those that come wait. Resume goes on.
func (r *Router) Suspend() { r.setSuspended(true) }

// Resume hands out requests again.
func (r *Router) Resume() { r.setSuspended(false) }

func (r *Router) setSuspended(yes bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.suspended = yes
	r.serve()
}

// Call sends the request to a rank and gives its answer.
func (r *Router) Call(ctx context.Context, q Request) (bus.Raw, error) {
	for {
		h, err := r.acquire(ctx, q)
		if err != nil {
			return nil, err
		}
		body, err := r.send(ctx, q, h)
		if err == nil || !q.Again || !goneFor(err) || ctx.Err() != nil {
			return body, err
		}
	}
}

// acquire waits for a rank.
func (r *Router) acquire(ctx context.Context, q Request) (*hand, error) {
	r.mu.Lock()
	w := &waitingRequest{key: q.Key, grantCh: make(chan *hand, 1)}
	r.waiting = append(r.waiting, w)
	r.serve()
	if len(r.waiting) > r.cfg.Waiting {
		r.waiting = slices.DeleteFunc(r.waiting, func(o *waitingRequest) bool { return o == w })
		r.mu.Unlock()
		return nil, bus.Errorf(bus.CodeBusy, "%d requests wait for a rank that has room; try again later", r.cfg.Waiting)
	}
	r.mu.Unlock()
	select {
	case h := <-w.grantCh:
		return h, nil
	case <-ctx.Done():
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case h := <-w.grantCh: // both at once
		r.release(h)
	default:
		r.waiting = slices.DeleteFunc(r.waiting, func(o *waitingRequest) bool { return o == w })
	}
	return nil, bus.Errorf(bus.CodeOf(ctx.Err()), "no rank had room in time: %w", ctx.Err())
}

// serve grants ranks to those who wait, in order; one whose rank is busy lets the next pass. Under the lock.
func (r *Router) serve() {
	if r.suspended {
		return
	}
	r.waiting = slices.DeleteFunc(r.waiting, func(w *waitingRequest) bool {
		h := r.pick(w.key)
		if h == nil {
			return false
		}
		h.running++
		w.grantCh <- h
		return true
	})
}

func (r *Router) pick(key string) *hand {
	if !r.cfg.Sticky || key == "" {
		return r.hands.least()
	}
	h := r.hands.stuck(key)
	if h == nil {
		if h = r.hands.least(); h != nil {
			r.hands.stick(key, h)
		}
		return h
	}
	if h.free() <= 0 {
		return nil
	}
	return h
}

// release gives a rank's credit back, under the lock.
func (r *Router) release(h *hand) {
	h.running--
	close(r.changedCh)
	r.changedCh = make(chan struct{})
	r.serve()
}

// send makes the call, and gives the credit back. A rank that is gone is taken out.
func (r *Router) send(ctx context.Context, q Request, h *hand) (_ bus.Raw, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r.mu.Lock()
	rank := r.ranks[h]
	if q.ID != "" {
		r.running[q.ID] = &routed{hand: h, rank: rank, cancel: cancel}
	}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.running, q.ID)
		if err != nil && goneFor(err) {
			r.forget(h)
		}
		r.served++
		r.release(h)
	}()
	f, err := rank.Go(ctx, dispatch.Call{Method: r.cfg.Method, Args: []any{q.Arg}})
	if err != nil {
		return nil, err
	}
	answers, err := dispatch.AwaitEach[bus.Raw](ctx, f)
	if err != nil {
		if errors.Is(context.Cause(ctx), ErrAborted) {
			return nil, ErrAborted
		}
		return nil, err
	}
	return answers[0], nil
}

// Abort ends a request by its id. With an abort method, its Call returns what the rank has so far; without one, or where
// the rank does not answer to it, ErrAborted.
func (r *Router) Abort(ctx context.Context, id string) error {
	r.mu.Lock()
	q := r.running[id]
	r.mu.Unlock()
	if q == nil {
		return bus.Errorf(bus.CodeNotFound, "no rank has a request %q", id)
	}
	if r.cfg.AbortMethod == "" {
		q.cancel(ErrAborted)
		return nil
	}
	f, err := q.rank.Go(ctx, dispatch.Call{Method: r.cfg.AbortMethod, Args: []any{id}, Control: true})
	if err == nil {
		err = f.Wait(ctx)
	}
	if err != nil {
		q.cancel(ErrAborted)
	}
	return err
}

// RouterStatus is how a router is.
type RouterStatus struct {
	Ranks     int    `json:"ranks"`
	Credits   int    `json:"credits"`
	InFlight  int    `json:"in_flight"`
	Waiting   int    `json:"waiting"`
	Served    uint64 `json:"served"`
	Suspended bool   `json:"suspended,omitempty"`
}

// Status is how the router is now.
func (r *Router) Status() RouterStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	st := RouterStatus{Ranks: len(r.hands.all), Waiting: len(r.waiting), Served: r.served, Suspended: r.suspended}
	for _, h := range r.hands.all {
		st.Credits += h.credits
		st.InFlight += h.running
	}
	return st
}
