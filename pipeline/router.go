package pipeline

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
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
	// Args and Named are for methods that take several arguments, instead of Arg.
	Args  []any
	Named map[string]any
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
	running   map[string]*routed // by id; those that wait too
	lost      []lostRank         // ranks that were gone; they are back when their role has restarted them
	suspended bool
	changedCh chan struct{} // closed and replaced when a rank has let go of a request
	served    uint64
}

type waitingRequest struct {
	key     string
	grantCh chan *hand // holds one
}

// lostRank is a rank that was gone, and when that was noticed.
type lostRank struct {
	roles.Worker
	at  time.Time
	gen uint32
}

type routed struct {
	rank   *roles.Worker // nil: it waits for one
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
		if !r.has(w) {
			r.add(w)
		}
	}
	r.serve()
	return nil
}

// add gives a rank its place, under the lock.
func (r *Router) add(w roles.Worker) {
	h := r.hands.add(fmt.Sprintf("%s[%d]", w.Cluster().Name(), w.Rank()), r.cfg.Credits)
	h.gen = genOf(w)
	r.ranks[h] = w
}

// has says whether a rank has its place, and is not about to leave it.
func (r *Router) has(w roles.Worker) bool {
	for h, o := range r.ranks {
		if o == w && !h.draining {
			return true
		}
	}
	return false
}

// Leave takes ranks out, all of the cluster's if none is named: they get nothing more, and it waits until they have
// answered what they have.
func (r *Router) Leave(ctx context.Context, c *roles.Cluster, ranks ...int) error {
	named := func(w roles.Worker) bool {
		return w.Cluster() == c && (len(ranks) == 0 || slices.Contains(ranks, w.Rank()))
	}
	r.mu.Lock()
	r.lost = slices.DeleteFunc(r.lost, func(l lostRank) bool { return named(l.Worker) })
	var leaving []*hand
	for h, w := range r.ranks {
		if named(w) {
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
func (r *Router) Call(ctx context.Context, q Request) (wire.Raw, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if err := r.enter(q.ID, cancel); err != nil {
		return nil, err
	}
	defer r.exit(q.ID)
	for {
		h, err := r.acquire(ctx, q)
		if err != nil {
			return nil, orAborted(ctx, err)
		}
		body, err := r.send(ctx, q, h)
		if err == nil || !q.Again || !goneFor(err) || ctx.Err() != nil {
			return body, orAborted(ctx, err)
		}
	}
}

// orAborted says that the request was aborted, if that is why it failed.
func orAborted(ctx context.Context, err error) error {
	if err != nil && errors.Is(context.Cause(ctx), ErrAborted) {
		return ErrAborted
	}
	return err
}

// enter makes a request known by its id, and exit ends that.
func (r *Router) enter(id string, cancel context.CancelCauseFunc) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if id == "" {
		return nil
	}
	if r.running[id] != nil {
		return bus.Errorf(bus.CodeExists, "there is a request %q; give each an id of its own", id)
	}
	r.running[id] = &routed{cancel: cancel}
	return nil
}

func (r *Router) exit(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.running, id)
}

// acquire waits for a rank.
func (r *Router) acquire(ctx context.Context, q Request) (*hand, error) {
	r.mu.Lock()
	w := &waitingRequest{key: q.Key, grantCh: make(chan *hand, 1)}
	r.waiting = append(r.waiting, w)
	r.takeBack()
	if len(r.waiting) > r.cfg.Waiting {
		r.waiting = slices.DeleteFunc(r.waiting, func(o *waitingRequest) bool { return o == w })
		r.mu.Unlock()
		return nil, bus.Errorf(bus.CodeBusy, "%d requests wait for a rank that has room; try again later", r.cfg.Waiting)
	}
	r.mu.Unlock()
	ticker := time.NewTicker(backEvery)
	defer ticker.Stop()
	for {
		select {
		case h := <-w.grantCh:
			return h, nil
		case <-ctx.Done():
			return nil, r.withdraw(ctx, w)
		case <-ticker.C:
			r.mu.Lock()
			r.takeBack()
			r.mu.Unlock()
		}
	}
}

// withdraw ends the wait of a request.
func (r *Router) withdraw(ctx context.Context, w *waitingRequest) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case h := <-w.grantCh: // both at once
		r.release(h)
	default:
		r.waiting = slices.DeleteFunc(r.waiting, func(o *waitingRequest) bool { return o == w })
	}
	return bus.Errorf(bus.CodeOf(ctx.Err()), "no rank had room in time: %w", ctx.Err())
}

// takeBack takes ranks in again that their roles have restarted, and grants them. Under the lock.
func (r *Router) takeBack() {
	r.lost = slices.DeleteFunc(r.lost, func(w lostRank) bool {
		if time.Since(w.at) < backEvery {
			return false // what is known of it may be of before
		}
		c := w.Cluster()
		if policy := c.Record().Policy; policy != roles.RestartRank && policy != roles.RestartRole {
			return true // it does not come back
		}
		beats := c.Health()
		if w.Rank() >= len(beats) || !isBack(beats[w.Rank()], w.gen, w.at) {
			return w.Rank() >= len(beats) // the role has shrunk
		}
		r.add(w.Worker)
		return true
	})
	r.serve()
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
func (r *Router) send(ctx context.Context, q Request, h *hand) (_ wire.Raw, err error) {
	ctx, cancel := context.WithCancel(ctx) // the call ends with it
	defer cancel()
	r.mu.Lock()
	rank := r.ranks[h]
	r.hold(q.ID, &rank)
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.hold(q.ID, nil)
		if _, there := r.ranks[h]; there && err != nil && goneFor(err) {
			r.forget(h)
			r.lost = append(r.lost, lostRank{rank, time.Now(), h.gen})
		}
		r.served++
		r.release(h)
	}()
	args := q.Args
	if args == nil && q.Named == nil {
		args = []any{q.Arg}
	}
	f, err := rank.Go(ctx, dispatch.Call{Method: r.cfg.Method, Args: args, Named: q.Named, NoWait: true}) // another rank may be there
	if err != nil {
		return nil, err
	}
	answers, err := dispatch.AwaitEach[wire.Raw](ctx, f)
	if err != nil {
		return nil, err
	}
	return answers[0], nil
}

// hold notes which rank has a request, under the lock.
func (r *Router) hold(id string, rank *roles.Worker) {
	if q := r.running[id]; q != nil {
		q.rank = rank
	}
}

// Abort ends a request by its id. With an abort method, its Call returns what the rank has so far; without one, or where
// the rank does not answer to it, or while it waits for a rank, ErrAborted.
func (r *Router) Abort(ctx context.Context, id string) error {
	r.mu.Lock()
	q := r.running[id]
	var rank *roles.Worker
	if q != nil {
		rank = q.rank
	}
	r.mu.Unlock()
	if q == nil {
		return bus.Errorf(bus.CodeNotFound, "there is no request %q under way", id)
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

// Scale gives a role of processes so many ranks, all of which are the router's: it grows, or those that go finish what they
// have first.
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
