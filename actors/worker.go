package actors

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
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
	maxWord           = 64
	minErrorRoom      = 1 << 10         // what an error may always take
	lastGrace         = 2 * time.Second // for cancelled calls to notice, and for objects to close
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

// check refuses a worker that nobody could call.
func (s WorkerSpec) check(namespace string) error {
	errs := []error{s.Address.Check()}
	bad := func(format string, args ...any) { errs = append(errs, bus.Errorf(bus.CodeInvalid, format, args...)) }
	if s.Address.Namespace != namespace {
		bad("worker of %s: its namespace is %q, the host's %q", s.Address.Role, s.Address.Namespace, namespace)
	}
	if s.Rank < 0 || s.Rank >= s.World {
		bad("worker of %s: rank %d is not in a world of %d", s.Address.Role, s.Rank, s.World)
	}
	if s.QueueLimit < 0 {
		bad("worker of %s: QueueLimit %d must not be negative", s.Address.Role, s.QueueLimit)
	}
	for _, slice := range s.Slices {
		errs = append(errs, slice.check())
	}
	return errors.Join(errs...)
}

// Slice is one data-parallel slice of one mesh.
type Slice struct {
	Mesh string `msgpack:"mesh"`
	N    int    `msgpack:"n"`
}

func (s Slice) check() error {
	if s.N < 0 {
		return bus.Errorf(bus.CodeInvalid, "slice %d of mesh %q: the number must not be negative", s.N, s.Mesh)
	}
	return bus.CheckName("mesh", s.Mesh)
}

// Worker plays one rank of a role. Calls reach it from its host; it is safe for concurrent use.
type Worker struct {
	spec  WorkerSpec
	host  *Host
	class *Class

	doneCh  chan struct{} // closed when the worker is over
	idleCh  chan struct{} // holds one; a call has ended, or a large answer is gone, since the worker is stopping
	hurryCh chan struct{} // closed when somebody who waits for its end has lost patience
	hurry   sync.Once
	ending  sync.Once

	mu        sync.Mutex // guards what follows
	state     State
	since     time.Time
	err       error
	cause     error // why its calls are cancelled; nil while it lives
	objects   map[string]Handler
	classes   map[string]*Class // of the objects
	env       map[string]string
	queues    map[Lane]*queue
	sessions  map[string]*session
	streams   map[streamID]*stream
	kept      callList // answered and not acknowledged
	keptBytes int
	unfetched int64
	active    []*call   // that run, in no order
	lastPurge time.Time // zero: nobody has been forgotten yet
	bindings  map[methodID]*binding
	buffers   [][]byte // for answers, to be used again

	// What was used last is most often used next.
	lastSession *session
	lastBinding *binding

	// While arrive runs:
	lend  bool      // the first call that may start is left to it,
	lent  job       // here
	spare *delivery // memory for the call that arrives; nil: it has been used
	alone bool      // nobody else uses that

	forgotten []*call // whose memory may be used again
}

const (
	maxBuffers  = 16      // of one worker
	newBuffer   = 256     // holds a short answer
	largeBuffer = 4 << 10 // a larger one is not kept
	maxSpare    = 4       // calls whose memory is to be used again; one at a time is, unless they overlap
)

func newWorker(h *Host, spec WorkerSpec, class *Class) *Worker {
	w := &Worker{
		spec: spec, host: h, class: class, state: Created, since: time.Now(),
		objects: map[string]Handler{}, classes: map[string]*Class{}, env: map[string]string{},
		queues: map[Lane]*queue{}, sessions: map[string]*session{}, streams: map[streamID]*stream{}, bindings: map[methodID]*binding{},
		doneCh: make(chan struct{}), idleCh: make(chan struct{}, 1), hurryCh: make(chan struct{}),
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
	return w.becomeLocked(to, err)
}

func (w *Worker) becomeLocked(to State, err error) bool {
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
	if class, err = tableOf(class, obj); err != nil {
		return errors.Join(err, closeObject(ctx, name, obj))
	}
	if !w.put(name, obj, class) {
		return errors.Join(bus.Errorf(bus.CodeRefused, "the worker ended while object %q was made", name), closeObject(ctx, name, obj))
	}
	return nil
}

// put gives the worker an object; false: it has closed its objects already.
func (w *Worker) put(name string, obj Handler, class *Class) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.objects == nil {
		return false
	}
	w.objects[name], w.classes[name] = obj, class
	if name == "" {
		w.class = class
	}
	return true
}

// tableOf is the class with the methods that the object says it has.
func tableOf(class *Class, obj Handler) (*Class, error) {
	t, ok := obj.(Tabled)
	if !ok {
		return class, nil
	}
	own := *class
	own.Methods, own.Open = t.Table()
	return &own, own.check()
}

func constructSafely(ctx context.Context, class *Class, s Setup) (obj Handler, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = panicError(p)
		}
	}()
	obj, err = class.New(ctx, s)
	switch {
	case err != nil:
		return nil, wireError(err)
	case obj == nil:
		return nil, bus.Errorf(bus.CodeInternal, "class %s: New returned neither an object nor an error", class.Name)
	}
	return obj, nil
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
// With lend set, one call that may start at once is left to the caller to run. With alone set, the delivery is for no
// other worker.
func (w *Worker) arrive(d *delivery, body []byte, now time.Time, lend, alone bool) (fetch []*call, lent job) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lend, w.alone, w.spare = lend, alone, nil
	if d.first.worker == nil {
		w.spare = d
	}
	fetch = w.take(&d.frame.Header, body, now)
	lent, w.lend, w.lent, w.spare = w.lent, false, job{}, nil
	return fetch, lent
}

// newCall is memory for a call: that of the delivery it came with, if no other rank's call has it. Whoever fetches its
// body keeps the call for as long as that takes, so such a one is not used again.
func (w *Worker) newCall(h *bus.Header) *call {
	d := w.spare
	if d == nil || h != &d.frame.Header {
		return new(call)
	}
	w.spare = nil
	if w.alone && h.Ref.Owner == "" {
		d.first.delivery = d
	}
	return &d.first
}

// nextDelivery is memory for the next message: that of a call that is forgotten, or new. Whatever was forgotten in an
// earlier turn of the lock is referred to by nobody.
func (w *Worker) nextDelivery() *delivery {
	w.mu.Lock()
	defer w.mu.Unlock()
	last := len(w.forgotten) - 1
	if last < 0 {
		return new(delivery)
	}
	d := w.forgotten[last].delivery
	w.forgotten[last] = nil
	w.forgotten = w.forgotten[:last]
	*d = delivery{}
	return d
}

func (w *Worker) take(h *bus.Header, body []byte, now time.Time) (fetch []*call) {
	s := w.sessionOf(h, now)
	s.acknowledge(h.Acked, w.forget, w.giveUp)
	st := w.streamOf(s, h, now)
	prev := h.PrevFor(w.spec.Rank)
	switch st.Take(h.Order, prev) {
	case bus.HoldIt:
		if st.Hold(h.Order, prev, &arrival{header: h, body: body, at: now}) {
			w.reportGap(streamOf(h), st)
		}
		return nil
	case bus.PastIt:
		s.pass(h.Seq)
	}
	if c := w.admit(s, h, body, now); c != nil && !c.bodyHere {
		fetch = append(fetch, c)
	}
	return append(fetch, w.admitReleased(st)...)
}

// admitReleased admits the calls whose turn has come because an earlier one was taken or skipped.
func (w *Worker) admitReleased(st *stream) (fetch []*call) {
	for a, ok := st.Release(); ok; a, ok = st.Release() {
		if c := w.admit(w.sessionOf(a.header, a.at), a.header, a.body, a.at); c != nil && !c.bodyHere {
			fetch = append(fetch, c)
		}
	}
	return fetch
}

// sessionOf returns what is remembered of the caller. It may have been known before and forgotten: then nobody knows
// what became of the calls it sent before that.
func (w *Worker) sessionOf(h *bus.Header, now time.Time) *session {
	if s := w.lastSession; s != nil && s.id == h.Session {
		s.lastSeen = now
		return s
	}
	s := w.sessions[h.Session]
	if s == nil {
		if len(w.sessions) >= maxSessions {
			w.purgeLocked(now)
		}
		s = &session{id: h.Session, inbox: w.host.ep.Inbox(h.Session), calls: map[uint64]*call{}, blankUntil: w.lastPurge}
		w.sessions[h.Session] = s
	}
	s.lastSeen, w.lastSession = now, s
	return s
}

// streamOf returns the stream in which a call of the session has its place.
func (w *Worker) streamOf(s *session, h *bus.Header, now time.Time) *stream {
	if h.Stream != "" {
		return w.streamNamed(streamOf(h), now)
	}
	if s.stream == nil {
		s.stream = w.streamNamed(streamOf(h), now)
	}
	s.stream.lastSeen = now
	return s.stream
}

func (w *Worker) streamNamed(id streamID, now time.Time) *stream {
	st := w.streams[id]
	if st == nil {
		if id.sequencer {
			w.dropHeld()
		}
		st = &stream{}
		w.streams[id] = st
	}
	st.lastSeen = now
	return st
}

// dropHeld gives up what waits for a sequencer that has been replaced: its callers ask, and send it to the new one.
func (w *Worker) dropHeld() {
	for id, st := range w.streams {
		if id.sequencer {
			st.Drop()
		}
	}
}

// admit queues a call whose turn has come, or answers it at once if it is a repeat or cannot be taken.
func (w *Worker) admit(s *session, h *bus.Header, body []byte, now time.Time) *call {
	if known, over := s.find(h, now); known != nil || over {
		if known != nil && known.phase == answered {
			w.host.ep.Repeat(s.inbox, &known.reply)
		} else if over && h.Age > 0 {
			w.sayUnknown(h)
		}
		return nil
	}
	c := w.newCall(h)
	c.worker, c.session, c.header, c.body = w, s, h, body
	c.arrived, c.bodyHere = instantOf(now), h.Ref.Owner == ""
	if h.Timeout > 0 {
		c.deadline = c.arrived + instant(h.Timeout)
	}
	s.calls[h.Seq] = c
	if err := w.enqueue(c); err != nil {
		c.bodyHere = true
		w.answerLocked(c, nil, err, now)
	}
	return c
}

func (w *Worker) enqueue(c *call) error {
	b, err := w.bindingOf(c.header)
	if err != nil {
		return err
	}
	q := b.queue
	switch {
	case w.cause != nil:
		return w.cause
	case w.state != Ready && (w.state != Stopping || q.lane != Control): // control is taken to the end
		return bus.Errorf(bus.CodeRefused, "the worker is %s and takes no calls", w.state)
	}
	if n := q.waiting.len(); n >= w.spec.QueueLimit {
		return bus.Errorf(bus.CodeBusy, "lane %q is full: %d calls wait in it; try again later", q.lane.Name, n)
	}
	c.binding = b
	q.waiting.push(c)
	w.kick(q, c.arrived)
	return nil
}

// kick starts what may start. w.mu is held.
func (w *Worker) kick(q *queue, now instant) {
	for c := w.nextLocked(q, now); c != nil; c = w.nextLocked(q, now) {
		j := job{worker: w, queue: q, call: c}
		if w.lends(q, c) {
			w.lent = j
			continue
		}
		w.host.runners.start(j)
	}
}

func (w *Worker) nextLocked(q *queue, now instant) *call {
	if w.cause != nil || w.unfetched > maxUnfetched && q.lane != Control {
		return nil
	}
	c := q.next()
	if c != nil {
		c.phase, c.started, c.buf = running, now, w.buffer()
		c.ctx = &callContext{worker: w, call: c, deadline: c.deadline}
		c.slot = len(w.active)
		w.active = append(w.active, c)
		w.host.running.Add(1)
	}
	return c
}

// inactive takes a call that has ended out of the active ones.
func (w *Worker) inactive(c *call) {
	last := len(w.active) - 1
	moved := w.active[last]
	w.active[c.slot], moved.slot = moved, c.slot
	w.active[last] = nil
	w.active = w.active[:last]
	c.binding.queue.running--
	w.host.running.Add(-1)
}

// buffer is an empty one for an answer, with room for its envelope.
func (w *Worker) buffer() []byte {
	if last := len(w.buffers) - 1; last >= 0 {
		b := w.buffers[last]
		w.buffers = w.buffers[:last]
		return b
	}
	return make([]byte, bus.ReplyRoom, newBuffer)
}

// reuse takes back a buffer that nobody refers to any more.
func (w *Worker) reuse(b []byte) {
	if cap(b) >= newBuffer && cap(b) <= largeBuffer && len(w.buffers) < maxBuffers {
		w.buffers = append(w.buffers, b[:bus.ReplyRoom])
	}
}

// run executes calls of one lane until none may start.
func (w *Worker) run(q *queue, c *call) {
	defer func() {
		if c != nil { // the method has ended this goroutine, with runtime.Goexit
			c.panicked = true
			if c = w.finish(q, c, nil, bus.Errorf(bus.CodePanic, "the method ended its goroutine")); c != nil {
				w.host.runners.start(job{worker: w, queue: q, call: c})
			}
		}
	}()
	for c != nil {
		if s := c.binding.starter; s != nil {
			c = w.begin(s, q, c)
			continue
		}
		body, err := w.execute(c)
		c = w.finish(q, c, body, err)
	}
}

func (w *Worker) execute(c *call) ([]byte, error) {
	c.ctx.begin()
	defer c.ctx.end()
	if err := w.mayRun(c); err != nil {
		return nil, err
	}
	return w.invoke(c.ctx, c)
}

// mayRun is why a call whose turn has come is not run after all. Whatever ends a call ends its context.
func (w *Worker) mayRun(c *call) error {
	if c.bodyErr != nil {
		return bus.Errorf(bus.CodeRefused, "the argument did not arrive: %w", c.bodyErr)
	}
	if c.ctx.Err() == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case c.dropped:
		return bus.ErrCancelled
	case w.cause != nil:
		return w.cause
	}
	return bus.Errorf(bus.CodeTimedOut, "the deadline passed while the call waited in lane %q", c.binding.queue.lane.Name)
}

// invoke calls the method. A panic is that call's error and goes no further; so is one of the error's own methods, which
// is why the error is made ready for the wire here.
func (w *Worker) invoke(ctx context.Context, c *call) (body []byte, err error) {
	defer func() {
		if p := recover(); p != nil {
			c.panicked = true
			body, err = nil, panicError(p)
		}
	}()
	if body, err = c.method(ctx); err != nil {
		return nil, wireError(err)
	}
	return body, nil
}

// method runs the call's method. The result is in c.buf already, or is returned.
func (c *call) method(ctx context.Context) (body []byte, err error) {
	if c.binding.bound == nil {
		return c.binding.handle(ctx, c.body)
	}
	out, err := c.binding.bound(ctx, c.body, c.buf)
	if err == nil {
		c.buf = out
	}
	return nil, err
}

// wireError is a method's error as it will travel. One that comes from another call says so in its message, because the
// caller will put this call in its place.
func wireError(err error) *bus.Error {
	e := bus.AsError(err)
	if direct, ok := err.(*bus.Error); ok && direct.Role != "" {
		e.Message = direct.Error()
	}
	if e.Code == "" {
		e.Code = bus.CodeApplication
	}
	if e.Details == nil {
		e.Details = map[string]string{"type": fmt.Sprintf("%T", err)}
	}
	return e
}

// finish answers the call and takes the next one of its lane.
func (w *Worker) finish(q *queue, c *call, body []byte, err error) *call {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	w.inactive(c)
	w.answerLocked(c, body, err, now)
	c.noteShort(instantOf(now))
	if c.panicked && w.spec.PanicFails {
		w.failLocked(err)
	}
	w.signalIdle()
	return w.nextLocked(q, instantOf(now))
}

// noteShort counts the short calls of a method in a row.
func (c *call) noteShort(now instant) {
	if now.sub(c.started) > fastCall {
		c.binding.short = 0
	} else if c.binding.short < fastCalls {
		c.binding.short++
	}
}

// signalIdle wakes whoever waits for the worker to become idle.
func (w *Worker) signalIdle() {
	if w.state == Ready {
		return
	}
	select {
	case w.idleCh <- struct{}{}:
	default:
	}
}

// answerLocked sends the answer, unless the caller gave up, and keeps it until the caller acknowledges it. A good
// answer is in c.buf, or is body.
func (w *Worker) answerLocked(c *call, body []byte, err error, now time.Time) {
	buf := c.buf
	c.body, c.buf = nil, nil
	if c.dropped {
		c.phase = forgotten
		c.session.leave(c)
		w.reuse(buf)
		return
	}
	if buf == nil { // it never ran
		buf = w.buffer()
	}
	h := bus.Header{Rank: w.spec.Rank, Gen: w.spec.Gen}
	if c.started != 0 {
		h.Queued, h.Ran = c.started.sub(c.arrived), instantOf(now).sub(c.started)
	}
	c.session.lastSeen = now
	if w.cause != nil && bus.CodeOf(err) == bus.CodeCancelled { // the worker's end is why
		err = w.cause
	}
	if err != nil {
		h.Code, body = w.encodeError(err, max(int(c.header.Inline), minErrorRoom))
		buf = buf[:bus.ReplyRoom]
	} else if !c.header.Collected(w.spec.Rank) {
		buf, body = buf[:bus.ReplyRoom], nil
	}
	var onDone func()
	if n := int64(len(buf) - bus.ReplyRoom + len(body)); err == nil && n > int64(c.header.Inline) {
		w.unfetched += n
		onDone = func() { w.fetched(n) }
	}
	c.reply = w.host.ep.Reply(c.session.inbox, c.header, &h, buf, body, w.host.running.Load() > 0, onDone)
	c.phase = answered
	w.keep(c)
}

// sayable is an error that a frame can carry.
func (w *Worker) sayable(err error) *bus.Error {
	e := bus.AsError(err)
	out := &bus.Error{
		Code: bus.Code(cut(string(e.Code), maxWord)), AppCode: bus.Code(cut(string(e.AppCode), maxWord)), Rank: -1, Node: w.host.cfg.Node,
		Message: cut(e.Message, maxMessage), Stack: cut(e.Stack, maxStack),
	}
	for k, v := range e.Details {
		if out.Details == nil {
			out.Details = map[string]string{}
		}
		out.Details[cut(k, maxWord)] = cut(v, maxMessage)
	}
	return out
}

// encodeError says an error in the room the caller has made for the answer: as much of it as fits.
func (w *Worker) encodeError(err error, room int) (bus.Code, []byte) {
	e := w.sayable(err)
	body, encErr := bus.Marshal(e)
	if encErr != nil || len(body) > room { // an error can always be said
		short := bus.Error{Code: e.Code, AppCode: e.AppCode, Rank: -1, Node: cut(e.Node, room/8), Message: cut(e.Message, room/2), Stack: cut(e.Stack, room/8)}
		body, _ = bus.Marshal(&short)
	}
	return e.Code, body
}

// fetched notes that a large answer is no longer held, which may let lanes go on.
func (w *Worker) fetched(n int64) {
	bus.Go(func() { // may be called from inside Reply, with the lock held
		w.mu.Lock()
		defer w.mu.Unlock()
		w.unfetched -= n
		w.signalIdle()
		now := instantOf(time.Now())
		for _, q := range w.queues {
			w.kick(q, now)
		}
	})
}

// keep bounds the answers that are kept: the oldest go first, and are remembered only as having run.
func (w *Worker) keep(c *call) {
	w.kept.push(c)
	w.keptBytes += c.reply.Size()
	for w.kept.n > maxKept || w.keptBytes > maxKeptBytes && w.kept.n > 1 {
		old := w.kept.oldest
		w.forget(old)
		old.session.leave(old)
	}
}

// forget lets go of a call's answer.
func (w *Worker) forget(c *call) {
	if c.phase != answered {
		return
	}
	w.kept.remove(c)
	w.keptBytes -= c.reply.Size()
	w.reuse(w.host.ep.ForgetReply(&c.reply))
	c.phase = forgotten
	if c.delivery != nil && len(w.forgotten) < maxSpare {
		w.forgotten = append(w.forgotten, c)
	}
}

// bodyArrived gives a queued call its body, or the reason why there is none.
func (w *Worker) bodyArrived(c *call, body []byte, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if c.phase != queued { // cancelled or refused in the meantime
		return
	}
	c.body, c.bodyErr, c.bodyHere = body, err, true
	if c.binding != nil {
		w.kick(c.binding.queue, instantOf(time.Now()))
	}
}

// asked answers a caller that misses an answer.
func (w *Worker) asked(h *bus.Header, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	answer := bus.Header{Seq: h.Seq, Rank: w.spec.Rank, Gen: w.spec.Gen, State: bus.StateNever}
	s := w.sessions[h.Session]
	if s == nil {
		s = &session{blankUntil: w.lastPurge}
	}
	s.lastSeen = now
	c, over := s.find(h, now)
	switch {
	case c == nil:
		if a := w.heldCall(h); a != nil {
			answer.State, answer.Queued = bus.StateQueued, now.Sub(a.at)
		} else if over {
			answer.State = bus.StateUnknown
		}
	case c.phase == answered:
		w.host.ep.Repeat(s.inbox, &c.reply)
		return
	case c.phase == running:
		answer.State, answer.Ran = bus.StateRunning, instantOf(now).sub(c.started)
	case c.phase == queued:
		answer.State, answer.Queued = bus.StateQueued, instantOf(now).sub(c.arrived)
	default:
		answer.State = bus.StateUnknown
	}
	w.tell(h.Session, &bus.Frame{Kind: bus.KindStatus, Header: answer})
}

// heldCall finds a call that waits for an earlier one.
func (w *Worker) heldCall(h *bus.Header) *arrival {
	for _, st := range w.streams {
		for a := range st.Held {
			if a.header.Session == h.Session && a.header.Seq == h.Seq {
				return a
			}
		}
	}
	return nil
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
	if c := s.calls[h.Seq]; c != nil {
		w.giveUp(c)
	} else {
		s.pass(h.Seq)
	}
}

// giveUp ends a call that nobody waits for, if it has not ended.
func (w *Worker) giveUp(c *call) {
	switch c.phase {
	case queued:
		c.dropped, c.phase, c.body = true, forgotten, nil
		c.session.leave(c)
		q := c.binding.queue
		q.waiting.remove(func(other *call) bool { return other == c })
		w.kick(q, instantOf(time.Now()))
	case running:
		c.dropped = true
		c.ctx.cancel(context.Canceled)
	case answered: // nobody will fetch it
		w.forget(c)
		c.session.leave(c)
	}
}

// skip is the word of whoever orders the calls that up to that place nothing more comes than what was just sent again.
// If some of that was lost, the word counts for nothing: the gap is reported once more.
func (w *Worker) skip(h *bus.Header) (fetch []*call) {
	w.mu.Lock()
	defer w.mu.Unlock()
	st := w.streams[streamOf(h)]
	if st == nil {
		return nil
	}
	st.Skip(h.Order, h.Prev)
	return w.admitReleased(st)
}

// reportGap asks whoever orders the calls for what is missing, and again until it has come.
func (w *Worker) reportGap(id streamID, st *stream) {
	after, upTo, open := st.Gap()
	if !open || time.Since(st.askedAt) < missingEvery/2 {
		return
	}
	st.askedAt = time.Now()
	h := bus.Header{Stream: id.session, Object: w.spec.Address.Prefix(), Rank: w.spec.Rank, Gen: w.spec.Gen, Prev: after, Order: upTo}
	w.tell(id.session, &bus.Frame{Kind: bus.KindMissing, Header: h})
	time.AfterFunc(missingEvery, bus.Guard(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if !w.state.Over() && w.streams[id] == st {
			w.reportGap(id, st)
		}
	}))
}

// purge forgets callers that have been silent for long and have nothing under way.
func (w *Worker) purge(now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.purgeLocked(now)
}

// purgeLocked also makes room when there are too many callers: those that have been silent longest go.
func (w *Worker) purgeLocked(now time.Time) {
	var silent []string
	for id, s := range w.sessions {
		if !s.busy() {
			silent = append(silent, id)
		}
	}
	slices.SortFunc(silent, func(a, b string) int { return w.sessions[a].lastSeen.Compare(w.sessions[b].lastSeen) })
	tooMany := 0
	if len(w.sessions) >= maxSessions {
		tooMany = len(w.sessions) - maxSessions*3/4
	}
	for i, id := range silent {
		if s := w.sessions[id]; i < tooMany || now.Sub(s.lastSeen) >= sessionTTL {
			w.forgetAll(s)
			delete(w.sessions, id)
			delete(w.streams, streamID{session: id})
			w.lastPurge, w.lastSession = now, nil
		}
	}
	for _, st := range w.streams {
		if now.Sub(st.lastSeen) >= sessionTTL { // a sequencer that is gone: what it was to send will not come
			st.Drop()
		}
	}
}

func (w *Worker) forgetAll(s *session) {
	for _, c := range s.calls {
		w.forget(c)
	}
}

// Stop ends the worker in order: no new calls but control, what runs may finish and what it answers may be fetched
// within ctx, then it is cancelled, and at last the objects are closed. Past ctx that takes a moment more, never longer
// than twice lastGrace. Its error names the calls that would not end. It may be called more than once; the first ctx to
// end counts for all.
func (w *Worker) Stop(ctx context.Context) error {
	w.beginStop()
	w.awaitIdle(ctx, w.hurryCh, true)
	if ctx.Err() != nil {
		w.hurry.Do(func() { close(w.hurryCh) })
	}
	w.end(Stopped, nil)
	_, err := w.State()
	return err
}

// beginStop refuses what waits and what comes. It does nothing in a worker that is ending already.
func (w *Worker) beginStop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.becomeLocked(Stopping, nil) {
		w.refuseWaiting(bus.Errorf(bus.CodeRefused, "the worker is stopping"))
	}
}

// failLocked ends the worker at once: no more calls start, those that wait or run fail, and everybody is told why.
func (w *Worker) failLocked(err error) {
	if !w.becomeLocked(Failed, err) {
		return
	}
	w.cancelRunning(err)
	bus.Go(func() {
		w.host.beat(w.spec.Address, []*Worker{w})
		w.end(Failed, err)
	})
}

// end is the last step of both ways out, taken once; whoever comes later waits for it.
func (w *Worker) end(as State, why error) {
	w.ending.Do(func() {
		if why == nil {
			why = bus.Errorf(bus.CodeCancelled, "the worker is stopping")
		}
		w.mu.Lock()
		w.cancelRunning(why)
		w.mu.Unlock()
		grace, stop := context.WithTimeout(context.Background(), lastGrace)
		w.awaitIdle(grace, nil, false)
		stop()
		err := w.closeObjects()
		if left := w.runningMethods(); len(left) > 0 {
			err = errors.Join(err, bus.Errorf(bus.CodeTimedOut, "still running in %s[%d] although cancelled: %s", w.spec.Address.Role, w.spec.Rank, strings.Join(left, ", ")))
		}
		w.bury(as, err)
		w.host.remove(w)
		close(w.doneCh)
	})
}

// bury takes the last step of the lifecycle and lets go of everything that is remembered.
func (w *Worker) bury(as State, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.becomeLocked(as, nil)
	if w.err == nil {
		w.err = err
	}
	for _, s := range w.sessions {
		w.forgetAll(s)
	}
}

// cancelRunning ends the context of every call, and lets no other begin: those that wait are refused. w.mu is held.
func (w *Worker) cancelRunning(cause error) {
	if w.cause == nil {
		w.cause = bus.Errorf(bus.CodeWorkerLost, "the worker has ended: %w", cause)
	}
	for _, c := range w.active {
		c.ctx.cancel(context.Canceled)
	}
	w.refuseWaiting(w.cause)
}

// refuseWaiting answers what waits with err. w.mu is held.
func (w *Worker) refuseWaiting(err error) {
	now := time.Now()
	for _, q := range w.queues {
		for q.waiting.len() > 0 {
			w.answerLocked(q.waiting.pop(), nil, err, now)
		}
	}
}

// awaitIdle waits until nothing runs, nor with fetched set a large answer is left to fetch, or until ctx ends or hurryCh
// is closed.
func (w *Worker) awaitIdle(ctx context.Context, hurryCh <-chan struct{}, fetched bool) {
	for !w.idle(fetched) {
		select {
		case <-w.idleCh:
		case <-ctx.Done():
			return
		case <-hurryCh:
			return
		case <-w.doneCh:
			return
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.signalIdle() // somebody else may wait as well
}

func (w *Worker) idle(fetched bool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.active) == 0 && (!fetched || w.unfetched == 0)
}

// runningMethods names what runs.
func (w *Worker) runningMethods() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var names []string
	for _, c := range w.active {
		names = append(names, c.header.Method)
	}
	slices.Sort(names)
	return names
}

// closeObjects closes every object, the worker's own last, and waits for them no longer than lastGrace.
func (w *Worker) closeObjects() error {
	w.mu.Lock()
	objects := w.objects
	w.objects = nil
	w.mu.Unlock()
	ctx, stop := context.WithTimeout(context.Background(), lastGrace)
	errCh := make(chan error, 1)
	bus.Go(func() {
		defer stop()
		var err error
		for _, name := range slices.Backward(slices.Sorted(maps.Keys(objects))) {
			err = errors.Join(err, closeObject(ctx, name, objects[name]))
		}
		errCh <- err
	})
	select {
	case err := <-errCh:
		return err
	case <-time.After(lastGrace):
		return bus.Errorf(bus.CodeTimedOut, "Close of class %s has not returned in %s[%d]", w.class.Name, w.spec.Address.Role, w.spec.Rank)
	}
}

// closeObject closes an object that wants to be told. A panic is its error.
func closeObject(ctx context.Context, name string, obj Handler) (err error) {
	c, ok := obj.(Closer)
	if !ok {
		return nil
	}
	defer func() {
		if p := recover(); p != nil {
			err = panicError(p)
		}
	}()
	if err := c.Close(ctx); err != nil {
		return fmt.Errorf("close object %q: %w", name, err)
	}
	return nil
}
