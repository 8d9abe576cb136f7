package actors

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"troupe/bus"
)

const (
	defaultQueueLimit = 10_000
	maxUnfetched      = 512 << 20 // bytes of large answers nobody has fetched yet; beyond it no new call starts
	maxStack          = 8 << 10
	maxMessage        = 16 << 10
)

// WorkerSpec says which worker to start.
type WorkerSpec struct {
	Address bus.Address
	Class   string
	Rank    int
	World   int
	Gen     uint32
	Config  bus.Raw
	Slices  []Slice // the data-parallel slices it belongs to
	Ordered bool    // the role has a sequencer; rank 0 runs it
	// QueueLimit is how many calls may wait in one lane; the next one is refused as busy. Zero: 10,000.
	QueueLimit int
	// PanicFails ends the worker when a method panics. Zero: the call fails and the worker lives on.
	PanicFails bool
}

// Slice is one data-parallel slice of one mesh.
type Slice struct {
	Mesh string `msgpack:"mesh"`
	N    int    `msgpack:"n"`
}

// Worker plays one rank of a role. Calls reach it from its host; it is safe for concurrent use.
type Worker struct {
	spec  WorkerSpec
	host  *Host
	class *Class

	doneCh chan struct{} // closed when the worker is over
	idleCh chan struct{} // holds one; a call has ended

	mu        sync.Mutex // guards what follows
	state     State
	since     time.Time
	err       error
	cause     error // why its calls are cancelled; nil while it lives
	objects   map[string]Handler
	classes   map[string]*Class // of the objects
	env       map[string]string
	queues    map[string]*queue
	sessions  map[string]*session
	streams   map[string]*stream
	kept      fifo[*call] // answered, oldest first
	keptBytes int
	unfetched int64
	inFlight  int
	lastPurge time.Time
	lend      bool // while arrive runs: the first call that may start is left to it,
	lent      job  // here
}

func newWorker(h *Host, spec WorkerSpec, class *Class) *Worker {
	w := &Worker{
		spec: spec, host: h, class: class, state: Created, since: time.Now(),
		objects: map[string]Handler{}, classes: map[string]*Class{}, env: map[string]string{},
		queues: map[string]*queue{}, sessions: map[string]*session{}, streams: map[string]*stream{},
		doneCh: make(chan struct{}), idleCh: make(chan struct{}, 1), lastPurge: time.Now(),
	}
	if w.spec.QueueLimit == 0 {
		w.spec.QueueLimit = defaultQueueLimit
	}
	return w
}

// Rank is the worker's number.
func (w *Worker) Rank() int { return w.spec.Rank }

// Done is closed when the worker is stopped or failed.
func (w *Worker) Done() <-chan struct{} { return w.doneCh }

// State is where the worker is in its life, and why it failed if it did.
func (w *Worker) State() (State, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state, w.err
}

// become takes one step of the lifecycle; it reports false where the diagram has none.
func (w *Worker) become(to State, err error) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.state.next(to) != nil {
		return false
	}
	w.state, w.since = to, time.Now()
	if err != nil {
		w.err = err
	}
	return true
}

// construct makes the worker's own object. A panic in the constructor is its error.
func (w *Worker) construct(ctx context.Context) error {
	if !w.become(Initialising, nil) {
		return bus.Errorf(bus.CodeRefused, "worker %s[%d] was stopped before it began", w.spec.Address.Role, w.spec.Rank)
	}
	if err := w.create(ctx, "", w.class, w.spec.Config); err != nil {
		return err
	}
	if !w.become(Ready, nil) {
		return bus.Errorf(bus.CodeRefused, "worker %s[%d] was stopped while it began", w.spec.Address.Role, w.spec.Rank)
	}
	return nil
}

// create makes a named object of a class in this worker.
func (w *Worker) create(ctx context.Context, name string, class *Class, config bus.Raw) error {
	w.mu.Lock()
	_, taken := w.objects[name]
	w.mu.Unlock()
	if taken {
		return bus.Errorf(bus.CodeExists, "object %q exists already in %s[%d]", name, w.spec.Address.Role, w.spec.Rank)
	}
	setup := Setup{Role: w.spec.Address, Rank: w.spec.Rank, World: w.spec.World, Gen: w.spec.Gen, Node: w.host.cfg.Node, Object: name, Config: config, Host: w.host}
	obj, err := constructSafely(ctx, class, setup)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.objects[name], w.classes[name] = obj, class
	return nil
}

func constructSafely(ctx context.Context, class *Class, s Setup) (obj Handler, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = panicError(p)
		}
	}()
	return class.New(ctx, s)
}

func panicError(p any) *bus.Error {
	e := bus.Errorf(bus.CodePanic, "panic: %v", p)
	e.Stack = cut(string(debug.Stack()), maxStack)
	return e
}

// cut makes s fit for an error on the wire: bounded, and text.
func cut(s string, n int) string {
	if len(s) <= n {
		return strings.ToValidUTF8(s, "\uFFFD")
	}
	return strings.ToValidUTF8(s[:n], "") + "… (cut)"
}

// arrive takes a call from the wire, and whatever calls were waiting for it. It returns those whose body must be
// fetched. A repeat of a call is answered from memory and never run again.
// With lend set, one call that may start at once is left to the caller to run.
func (w *Worker) arrive(h *bus.Header, body []byte, now time.Time, lend bool) (fetch []*call, lent job) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lend = lend
	fetch = w.take(h, body, now)
	lent, w.lend, w.lent = w.lent, false, job{}
	return fetch, lent
}

func (w *Worker) take(h *bus.Header, body []byte, now time.Time) (fetch []*call) {
	s := w.sessionOf(h, now)
	if s == nil {
		w.sayUnknown(h)
		return nil
	}
	s.acknowledge(h.Acked, w.forget)
	st := w.streamOf(h)
	prev := h.PrevFor(w.spec.Rank)
	if st.take(h.Order, prev) == holdIt {
		if st.hold(&arrival{header: h, body: body, prev: prev}) {
			w.reportGap(h.OrderedBy(), st)
		}
		return nil
	}
	if c := w.admit(h, body, now); c != nil && !c.bodyHere {
		fetch = append(fetch, c)
	}
	return append(fetch, w.admitReleased(st, now)...)
}

// admitReleased admits the calls whose turn has come because an earlier one was taken or skipped.
func (w *Worker) admitReleased(st *stream, now time.Time) (fetch []*call) {
	for a := st.release(); a != nil; a = st.release() {
		st.take(a.header.Order, a.prev)
		if c := w.admit(a.header, a.body, now); c != nil && !c.bodyHere {
			fetch = append(fetch, c)
		}
	}
	return fetch
}

// sessionOf returns what is remembered of the caller, or nil if that was purged after the call was first sent: then
// nobody knows whether it ran.
func (w *Worker) sessionOf(h *bus.Header, now time.Time) *session {
	s := w.sessions[h.Session]
	if s == nil {
		if h.Age > 0 && now.Add(-h.Age).Before(w.lastPurge) && w.lastPurge != w.since {
			return nil
		}
		s = &session{inbox: w.host.ep.Inbox(h.Session), calls: map[uint64]*call{}}
		w.sessions[h.Session] = s
	}
	s.lastSeen = now
	return s
}

func (w *Worker) streamOf(h *bus.Header) *stream {
	by := h.OrderedBy()
	st := w.streams[by]
	if st == nil {
		st = &stream{}
		w.streams[by] = st
	}
	return st
}

// admit queues a call whose turn has come, or answers it at once if it is a repeat or cannot be taken.
func (w *Worker) admit(h *bus.Header, body []byte, now time.Time) *call {
	s := w.sessions[h.Session]
	if known, over := s.find(h.Seq); known != nil || over {
		if known != nil && known.phase == answered {
			w.host.ep.Repeat(&known.reply)
		} else if over && h.Age > 0 {
			w.sayUnknown(h)
		}
		return nil
	}
	c := &call{worker: w, session: s, header: h, body: body, arrived: now, bodyHere: h.Ref.Owner == ""}
	if h.Timeout > 0 {
		c.deadline = now.Add(h.Timeout)
	}
	s.calls[h.Seq] = c
	s.bound()
	if err := w.enqueue(c); err != nil {
		c.bodyHere = true
		w.answerLocked(c, nil, err)
	}
	return c
}

func (w *Worker) enqueue(c *call) error {
	if w.state != Ready {
		return bus.Errorf(bus.CodeRefused, "the worker is %s and takes no calls", w.state)
	}
	info, err := w.lookup(c.header)
	if err != nil {
		return err
	}
	q := w.queues[info.Lane.Name]
	if q == nil {
		q = &queue{lane: info.Lane}
		w.queues[info.Lane.Name] = q
	}
	if n := q.waiting.len(); n >= w.spec.QueueLimit {
		return bus.Errorf(bus.CodeBusy, "lane %q is full: %d calls wait in it; try again later", q.lane.Name, n)
	}
	c.queue = q
	q.waiting.push(c)
	w.kick(q)
	return nil
}

func (w *Worker) lookup(h *bus.Header) (MethodInfo, error) {
	if info, ok := verbInfo(h.Method); ok {
		return info, nil
	}
	class := w.classes[h.Object]
	if class == nil {
		return MethodInfo{}, bus.Errorf(bus.CodeNotFound, "no object %q in this worker; make it with the create verb", h.Object)
	}
	return class.method(h.Method)
}

// kick starts what may start. w.mu is held.
func (w *Worker) kick(q *queue) {
	for c := w.nextLocked(q); c != nil; c = w.nextLocked(q) {
		j := job{worker: w, queue: q, call: c}
		if w.lend && w.lent.call == nil && q.lane.Limit == 1 { // one of many that may run at once must not hold up the next
			w.lent = j
			continue
		}
		w.host.runners.start(j)
	}
}

func (w *Worker) nextLocked(q *queue) *call {
	if w.unfetched > maxUnfetched && q.lane.Name != Control.Name {
		return nil
	}
	c := q.next()
	if c != nil {
		c.phase, c.started = running, time.Now()
		w.inFlight++
		w.host.running.Add(1)
	}
	return c
}

// run executes calls of one lane until none may start.
func (w *Worker) run(q *queue, c *call) {
	for c != nil {
		body, err := w.execute(c)
		c = w.finish(q, c, body, err)
	}
}

func (w *Worker) execute(c *call) ([]byte, error) {
	if c.bodyErr != nil {
		return nil, bus.Errorf(bus.CodeRefused, "the argument did not arrive: %w", c.bodyErr)
	}
	c.ctx.begin(c)
	defer c.ctx.cancel(context.Canceled)
	w.mu.Lock()
	dropped, over := c.dropped, w.cause
	w.mu.Unlock()
	if dropped {
		return nil, bus.ErrCancelled
	}
	if over != nil {
		return nil, over
	}
	if c.ctx.Err() != nil {
		return nil, bus.Errorf(bus.CodeTimedOut, "the deadline passed while the call waited in lane %q", c.queue.lane.Name)
	}
	return w.invoke(&c.ctx, c)
}

// invoke calls the method. A panic is that call's error and goes no further.
func (w *Worker) invoke(ctx context.Context, c *call) (body []byte, err error) {
	defer func() {
		if p := recover(); p != nil {
			body, err = nil, panicError(p)
		}
	}()
	if verb, ok := verbs[c.header.Method]; ok {
		return verb.do(w, ctx, c.body)
	}
	w.mu.Lock()
	obj := w.objects[c.header.Object]
	w.mu.Unlock()
	return obj.Handle(ctx, c.header.Method, c.body)
}

// finish answers the call and takes the next one of its lane.
func (w *Worker) finish(q *queue, c *call, body []byte, err error) *call {
	w.mu.Lock()
	w.inFlight--
	w.host.running.Add(-1)
	q.running--
	w.answerLocked(c, body, err)
	next := w.nextLocked(q)
	w.mu.Unlock()
	select {
	case w.idleCh <- struct{}{}:
	default:
	}
	if w.spec.PanicFails && bus.CodeOf(err) == bus.CodePanic {
		w.fail(err)
	}
	return next
}

// answerLocked sends the answer, unless the caller gave up, and keeps it until the caller acknowledges it.
func (w *Worker) answerLocked(c *call, body []byte, err error) {
	c.body = nil
	if c.dropped {
		c.phase = forgotten
		return
	}
	h := bus.Header{Rank: w.spec.Rank, Gen: w.spec.Gen}
	if !c.started.IsZero() {
		h.Queued, h.Ran = c.started.Sub(c.arrived), time.Since(c.started)
	}
	if err != nil {
		h.Code, body = w.encodeError(err)
	} else if !c.header.Collected(w.spec.Rank) {
		body = nil
	}
	var onDone func()
	if n := int64(len(body)); n > int64(c.header.Inline) {
		w.unfetched += n
		onDone = func() { w.fetched(n) }
	}
	c.reply = w.host.ep.Reply(c.session.inbox, c.header, h, body, w.host.running.Load() > 0, onDone)
	c.phase = answered
	w.keep(c)
}

func (w *Worker) encodeError(err error) (bus.Code, []byte) {
	e := bus.AsError(err)
	e.Node = w.host.cfg.Node
	e.Message, e.Stack = cut(e.Message, maxMessage), cut(e.Stack, maxStack)
	if e.Details == nil {
		e.Details = map[string]string{"type": fmt.Sprintf("%T", err)}
	}
	body, encErr := bus.Marshal(e)
	if encErr != nil { // an error can always be said
		body, _ = bus.Marshal(&bus.Error{Code: e.Code, Message: e.Message})
	}
	return e.Code, body
}

// fetched notes that a large answer is no longer held, which may let lanes go on.
func (w *Worker) fetched(n int64) {
	go func() { // may be called from inside Reply, with the lock held
		w.mu.Lock()
		defer w.mu.Unlock()
		w.unfetched -= n
		for _, q := range w.queues {
			w.kick(q)
		}
	}()
}

// keep bounds the answers that are kept: the oldest go first, and are remembered only as having run.
func (w *Worker) keep(c *call) {
	for w.kept.len() > 0 && w.kept.first().phase == forgotten { // acknowledged since
		w.kept.pop()
	}
	w.kept.push(c)
	w.keptBytes += c.reply.Size()
	for w.kept.len() > maxKept || w.keptBytes > maxKeptBytes && w.kept.len() > 1 {
		w.forget(w.kept.pop())
	}
}

// forget lets go of a call's answer.
func (w *Worker) forget(c *call) {
	if c.phase == answered {
		w.keptBytes -= c.reply.Size()
		w.host.ep.ForgetReply(&c.reply)
		c.reply, c.phase = bus.Reply{}, forgotten
	}
}

// bodyArrived gives a queued call its body, or the reason why there is none.
func (w *Worker) bodyArrived(c *call, body []byte, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	c.body, c.bodyErr, c.bodyHere = body, err, true
	if c.queue != nil {
		w.kick(c.queue)
	}
}

// asked answers a caller that misses an answer.
func (w *Worker) asked(h *bus.Header, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	answer := bus.Header{Seq: h.Seq, Rank: w.spec.Rank, Gen: w.spec.Gen, State: bus.StateNever}
	s := w.sessions[h.Session]
	if s == nil {
		if h.Age > 0 && now.Add(-h.Age).Before(w.lastPurge) {
			answer.State = bus.StateUnknown
		}
	} else {
		c, over := s.find(h.Seq)
		switch {
		case c != nil && c.phase == answered:
			w.host.ep.Repeat(&c.reply)
			return
		case c != nil && c.phase == running:
			answer.State, answer.Ran = bus.StateRunning, now.Sub(c.started)
		case c != nil && c.phase == queued, w.isHeld(h):
			answer.State = bus.StateQueued
			if c != nil {
				answer.Queued = now.Sub(c.arrived)
			}
		case c != nil, over:
			answer.State = bus.StateUnknown
		}
	}
	w.tell(h.Session, &bus.Frame{Kind: bus.KindStatus, Header: answer})
}

// isHeld reports whether the call waits for an earlier one.
func (w *Worker) isHeld(h *bus.Header) bool {
	for _, st := range w.streams {
		for _, a := range st.held {
			if a.header.Session == h.Session && a.header.Seq == h.Seq {
				return true
			}
		}
	}
	return false
}

func (w *Worker) sayUnknown(h *bus.Header) {
	w.tell(h.Session, &bus.Frame{Kind: bus.KindStatus, Header: bus.Header{Seq: h.Seq, Rank: w.spec.Rank, Gen: w.spec.Gen, State: bus.StateUnknown}})
}

func (w *Worker) tell(session string, f *bus.Frame) {
	_ = w.host.ep.Tell(session, f) // the caller asks again if it is lost
}

// cancelCall is the caller's word that it gave up. A call that waits is taken out, one that runs is told through its
// context, one that has not arrived will not be run.
func (w *Worker) cancelCall(h *bus.Header, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.sessionOf(h, now)
	if s == nil {
		return
	}
	c, over := s.find(h.Seq)
	switch {
	case over:
	case c == nil:
		s.calls[h.Seq] = &call{worker: w, session: s, header: h, phase: forgotten, bodyHere: true}
	case c.phase == queued:
		c.dropped, c.phase, c.body = true, forgotten, nil
		if c.queue != nil {
			c.queue.waiting.remove(func(q *call) bool { return q == c })
			w.kick(c.queue)
		}
	case c.phase == running:
		c.dropped = true
		c.ctx.cancel(context.Canceled)
	}
}

// skip is the word of whoever orders the calls that nothing more comes up to that place.
func (w *Worker) skip(h *bus.Header, now time.Time) (fetch []*call) {
	w.mu.Lock()
	defer w.mu.Unlock()
	st := w.streams[h.OrderedBy()]
	if st == nil {
		return nil
	}
	st.last = max(st.last, h.Order)
	return w.admitReleased(st, now)
}

// reportGap asks whoever orders the calls for what is missing, and again until it has come.
func (w *Worker) reportGap(by string, st *stream) {
	after, upTo, open := st.gap()
	if !open || time.Since(st.askedAt) < missingEvery/2 {
		return
	}
	st.askedAt = time.Now()
	h := bus.Header{Stream: by, Object: w.spec.Address.Prefix(), Rank: w.spec.Rank, Gen: w.spec.Gen, Prev: after, Order: upTo}
	w.tell(by, &bus.Frame{Kind: bus.KindMissing, Header: h})
	time.AfterFunc(missingEvery, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if !w.state.Over() && w.streams[by] == st {
			w.reportGap(by, st)
		}
	})
}

// purge forgets callers that have been silent for long and have nothing under way.
func (w *Worker) purge(now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, s := range w.sessions {
		if now.Sub(s.lastSeen) < sessionTTL && len(w.sessions) <= maxSessions {
			continue
		}
		busy := false
		for _, c := range s.calls {
			busy = busy || c.phase == queued || c.phase == running
		}
		if busy {
			continue
		}
		for _, c := range s.calls {
			w.forget(c)
		}
		delete(w.sessions, id)
		delete(w.streams, id)
		w.lastPurge = now
	}
}

// Stop ends the worker in order: no new calls, what runs may finish within ctx, then it is cancelled, and at last the
// object is closed. Its error names the calls that would not end. It may be called more than once.
func (w *Worker) Stop(ctx context.Context) error {
	if !w.become(Stopping, nil) {
		select { // somebody else is at it
		case <-w.doneCh:
		case <-ctx.Done():
		}
		_, err := w.State()
		return err
	}
	w.refuseWaiting(bus.Errorf(bus.CodeRefused, "the worker is stopping"))
	w.awaitIdle(ctx)
	return w.end(Stopped, nil)
}

// fail ends the worker at once: its calls fail, its siblings are told by the next beat, which is sent now.
func (w *Worker) fail(err error) {
	if w.become(Failed, err) {
		go w.end(Failed, err)
	}
}

// end is the last step of both ways out.
func (w *Worker) end(as State, why error) error {
	cause := why
	if cause == nil {
		cause = bus.Errorf(bus.CodeCancelled, "the worker is stopping")
	}
	w.cancelRunning(cause)
	w.refuseWaiting(bus.Errorf(bus.CodeWorkerLost, "the worker has ended: %w", cause))
	grace, stop := context.WithTimeout(context.Background(), 2*time.Second)
	defer stop()
	w.awaitIdle(grace)
	err := w.closeObjects(grace)
	if left := w.runningMethods(); len(left) > 0 {
		err = errors.Join(err, bus.Errorf(bus.CodeTimedOut, "still running in %s[%d] although cancelled: %s", w.spec.Address.Role, w.spec.Rank, strings.Join(left, ", ")))
	}
	w.become(as, nil)
	w.host.remove(w)
	close(w.doneCh)
	w.mu.Lock()
	for _, s := range w.sessions {
		for _, c := range s.calls {
			w.forget(c)
		}
	}
	if w.err == nil {
		w.err = err
	}
	w.mu.Unlock()
	return err
}

// cancelRunning ends the context of every call, and of those that are just beginning.
func (w *Worker) cancelRunning(cause error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cause = bus.Errorf(bus.CodeWorkerLost, "the worker has ended: %w", cause)
	for _, s := range w.sessions {
		for _, c := range s.calls {
			if c.phase == running {
				c.ctx.cancel(context.Canceled)
			}
		}
	}
}

func (w *Worker) refuseWaiting(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, q := range w.queues {
		for q.waiting.len() > 0 {
			w.answerLocked(q.waiting.pop(), nil, err)
		}
	}
}

// awaitIdle waits until nothing but the control call that asked for it runs, or ctx ends.
func (w *Worker) awaitIdle(ctx context.Context) {
	for len(w.runningMethods()) > 0 {
		select {
		case <-w.idleCh:
		case <-ctx.Done():
			return
		}
	}
}

// runningMethods names what runs, verbs excepted: the stop verb must not wait for itself.
func (w *Worker) runningMethods() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var names []string
	for _, s := range w.sessions {
		for _, c := range s.calls {
			if _, verb := verbs[c.header.Method]; c.phase == running && !verb {
				names = append(names, c.header.Method)
			}
		}
	}
	return names
}

func (w *Worker) closeObjects(ctx context.Context) (err error) {
	w.mu.Lock()
	objects := w.objects
	w.objects = map[string]Handler{}
	w.mu.Unlock()
	defer func() {
		if p := recover(); p != nil {
			err = errors.Join(err, panicError(p))
		}
	}()
	for _, obj := range objects {
		if c, ok := obj.(Closer); ok {
			err = errors.Join(err, c.Close(ctx))
		}
	}
	return err
}
