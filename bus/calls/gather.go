package calls

import (
	"context"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// Gather is one pending call: the ranks that must answer and their answers. It is over when every rank has answered or
// is known dead, or as soon as the call's rule says so. It is safe for concurrent use.
type Gather struct {
	ep        *Endpoint
	call      Call
	sender    *roleSender
	seq       uint64
	inline    uint32
	only      bool // no other call was pending when it was registered
	sentAt    time.Time
	recording *recording // nil: the flight recorder leaves it out
	stop      func()     // detaches the context
	place     callOrder  // among the calls on the role
	// locations of those bodies, by part; nil: none is shared
	locations []wire.Location
	refs      []wire.BodyRef  // of parts whose body is pulled; zero if it travels inline
	oneRef    [1]wire.BodyRef // most calls have one part

	mu       sync.Mutex // guards what follows
	deadline time.Time
	slots    []slot
	bySlot   map[int]int // rank → slot, nil when ranks are first, first+1, …
	left     int         // slots without an answer
	sent     bool        // it has its position and was published; before that no worker knows of it
	deferred bool        // Send has not been called
	good     int
	arrived  []int32 // slots in order of arrival
	taken    int     // how many of arrived Next has returned
	over     bool
	nextAsk  time.Time
	askDelay time.Duration

	arrivedCh chan struct{} // holds one; an answer arrived
	doneCh    chan struct{} // closed when over
}

// slot is the state of one rank in a call. Fields that most ranks never need are in rareSlot.
type slot struct {
	answer   Answer
	rare     *rareSlot // nil until needed
	part     int32
	answered bool
	state    wire.State
}

// rareSlot is the state of a large or late answer.
type rareSlot struct {
	fetching  wire.BodyRef
	stateFor  time.Duration
	resentAt  time.Time
	noneSince time.Time // start of the time without a subscriber
	noneLast  time.Time // of the last "no responders"
}

func (s *slot) more() *rareSlot {
	if s.rare == nil {
		s.rare = &rareSlot{}
	}
	return s.rare
}

// fetching is the body that is being pulled for the rank; the zero Ref: none.
func (s *slot) fetching() wire.BodyRef {
	if s.rare == nil {
		return wire.BodyRef{}
	}
	return s.rare.fetching
}

// With several servers, one that ends takes messages with it while the link of the caller lives: the caller asks after 200, 400 and 800 ms.
const (
	firstAsk = 800 * time.Millisecond
	maxAsk   = 10 * time.Second
)

// Scatter publishes the call's parts and returns at once; answers are collected in the background. When ctx ends, the
// call is over and its workers are told. Send publishes a call that is Deferred.
func (e *Endpoint) Scatter(ctx context.Context, c Call) (*Gather, error) {
	if err := ctx.Err(); err != nil {
		e := &bus.Error{Code: bus.CodeOf(err), Message: "the deadline passed or the caller gave up before the call was sent", Role: c.To.Role, Rank: -1, Method: c.Method}
		return nil, e.WithCause(err)
	}
	g, err := newGather(e, c)
	if err != nil {
		return nil, err
	}
	cancel := context.CancelFunc(func() {})
	if c.Timeout > 0 {
		ctx, cancel = context.WithTimeout(ctx, c.Timeout)
	}
	g.deadline, _ = ctx.Deadline()
	g.recording = newRecording(ctx, &g.call)
	g.sender = e.senderOf(c.To)
	g.offerLarge()
	if err := e.register(g); err != nil {
		g.releaseArgs()
		cancel()
		return nil, err
	}
	if c.Deferred {
		g.follow(ctx, cancel)
		return g, nil
	}
	if err := g.sender.publish(g); err != nil && bus.CodeOf(err) != bus.CodeUnavailable { // unavailable: resent after the reconnect
		g.abort(err)
		cancel()
		return nil, err
	}
	g.mu.Lock()
	g.sent = true
	g.mu.Unlock()
	if ctx.Done() == nil {
		cancel()
		return g, nil
	}
	g.follow(ctx, cancel)
	return g, nil
}

// Send publishes a deferred call, to the current generations of its ranks. It does nothing if the call is over or was
// sent. A loss between the choice of the generations and the return of Send must be reported again by the caller: see
// Lost.
func (g *Gather) Send(gens map[int]uint32) {
	g.mu.Lock()
	if g.over || !g.deferred || g.sent {
		g.mu.Unlock()
		return
	}
	g.call.Gens, g.sentAt = gens, time.Now()
	g.nextAsk = g.sentAt.Add(g.askDelay)
	g.mu.Unlock()
	if err := g.sender.publish(g); err != nil && bus.CodeOf(err) != bus.CodeUnavailable { // unavailable: resent after the reconnect
		g.abort(err)
		return
	}
	g.mu.Lock()
	g.deferred, g.sent = false, true
	over := g.over
	g.mu.Unlock()
	if over { // while it was published: its workers do not know
		g.tellCancelled(wire.Ranks(g.ranks()...), bus.CodeCancelled)
	}
}

// Fail ends the call with err for every rank that has not answered.
func (g *Gather) Fail(err error) { g.finish(err) }

// follow ends the call when ctx ends, and detaches from ctx when the call is over.
func (g *Gather) follow(ctx context.Context, cancel context.CancelFunc) {
	unhook := context.AfterFunc(ctx, func() { defer bus.Recover(); g.abort(g.contextError(ctx)) })
	stop := func() { unhook(); cancel() }
	g.mu.Lock()
	over := g.over
	g.stop = stop
	g.mu.Unlock()
	if over {
		stop()
	}
}

func (g *Gather) contextError(ctx context.Context) error {
	words := "the caller cancelled the call"
	if bus.CodeOf(ctx.Err()) == bus.CodeTimedOut {
		words = "no answer within the deadline"
	}
	if !g.ep.Bus().Connected() {
		words += "; the server is unreachable"
	}
	c := &g.call
	e := &bus.Error{Code: bus.CodeOf(ctx.Err()), Message: words, Role: c.To.Role, Rank: -1, Method: c.Method}
	return e.WithCause(context.Cause(ctx))
}

func newGather(e *Endpoint, c Call) (*Gather, error) {
	if err := c.To.Check(); err != nil {
		return nil, err
	}
	n := 0
	for _, p := range c.Parts {
		n += len(p.Ranks)
	}
	if n == 0 {
		return nil, bus.Errorf(bus.CodeInvalid, "a call of %s on %s addresses no rank", c.Method, c.To.Role)
	}
	if c.Need > n {
		return nil, bus.Errorf(bus.CodeInvalid, "a call of %s on %s needs %d good answers of %d ranks", c.Method, c.To.Role, c.Need, n)
	}
	g := &Gather{
		ep: e, call: c, slots: make([]slot, n), arrived: make([]int32, 0, n), left: n, sentAt: time.Now(),
		deferred: c.Deferred, askDelay: firstAsk, arrivedCh: make(chan struct{}, 1), doneCh: make(chan struct{}),
	}
	switch {
	case c.AskAfter > 0:
		g.askDelay = c.AskAfter
	case e.Bus().Several():
		g.askDelay = firstAsk / 4
	}
	g.nextAsk = g.sentAt.Add(g.askDelay)
	i, rising := 0, true
	first := c.Parts[0].Ranks
	for p := range c.Parts {
		for _, rank := range c.Parts[p].Ranks {
			if rank < 0 || rank >= c.World {
				return nil, bus.Errorf(bus.CodeInvalid, "a call of %s on %s addresses rank %d of a world of %d", c.Method, c.To.Role, rank, c.World)
			}
			g.slots[i].part, g.slots[i].answer.Rank = int32(p), rank
			rising = rising && rank == first[0]+i
			i++
		}
	}
	if !rising {
		g.bySlot = make(map[int]int, n)
		for i := range g.slots {
			g.bySlot[g.slots[i].answer.Rank] = i
		}
		if len(g.bySlot) != n {
			return nil, bus.Errorf(bus.CodeInvalid, "a call of %s on %s addresses a rank twice", c.Method, c.To.Role)
		}
	}
	return g, nil
}

// slotOf returns the slot of a rank, or nil if the call did not address it.
func (g *Gather) slotOf(rank int) (*slot, int) {
	i, ok := rank-g.slots[0].answer.Rank, true
	if g.bySlot != nil {
		i, ok = g.bySlot[rank]
	}
	if !ok || i < 0 || i >= len(g.slots) {
		return nil, 0
	}
	return &g.slots[i], i
}

// offerLarge offers the bodies that do not travel in their frames, until every rank has them.
func (g *Gather) offerLarge() {
	g.refs = g.oneRef[:]
	if len(g.call.Parts) > 1 {
		g.refs = make([]wire.BodyRef, len(g.call.Parts))
	}
	payload := g.ep.Bus().MaxPayload() - bus.MaxEnvelope
	limit := min(values.MaxInline, payload)
	if g.call.Ordered { // all frames of the call travel to the sequencer in one message
		limit = min(limit, payload/2/len(g.call.Parts))
	}
	for i := range g.call.Parts {
		p := &g.call.Parts[i]
		if len(p.Body) == 0 || g.sender.inlineRoom(len(p.Body), limit) {
			continue
		}
		subject := ""
		if len(p.Ranks) > 1 {
			subject = p.Scope.subject(g.call.To, false)
		}
		if at := values.Locate(g.call.Memory, p.Body); !at.IsZero() { // before the offer: the body may be freed at any time after it
			if g.locations == nil {
				g.locations = make([]wire.Location, len(g.call.Parts))
			}
			g.locations[i] = at
		}
		g.refs[i] = g.ep.values.Offer(p.Body, wire.Ranks(p.Ranks...), subject, p.doneFunc())
		if g.locations != nil {
			g.ep.values.Place(g.refs[i], g.locations[i])
		}
	}
}

// doneFunc is called when the body of a part is not read any more.
func (p *Part) doneFunc() func() {
	if len(p.Body) > values.MaxInline {
		return p.DoneFunc
	}
	return nil
}

// releaseArgs ends the uploads of the call's arguments and releases their inline bytes.
func (g *Gather) releaseArgs() {
	for i, ref := range g.refs {
		if ref.Owner != "" {
			g.ep.values.Withdraw(ref)
		} else {
			g.sender.inlineDone(len(g.call.Parts[i].Body))
		}
	}
}

// frame returns the frame of one part with the current values.
func (g *Gather) frame(part int) wire.Frame {
	p, c := &g.call.Parts[part], &g.call
	g.ep.mu.Lock()
	acked := g.ep.acked
	g.ep.mu.Unlock()
	f := wire.Frame{Kind: wire.KindCall, Header: wire.Header{
		Session: g.ep.Session(), Seq: g.seq, Acked: acked, Method: c.Method, Object: c.Object,
		Caller: g.ep.caller, Trace: c.Trace, Meta: c.Meta, NoData: p.NoData, Inline: g.inline,
		CollectSome: c.CollectSome, Collect: c.Collect, Gens: c.Gens, Ref: g.refs[part], Keep: c.Keep, Arguments: c.Arguments, OnDevice: c.OnDevice,
		Order: g.place.order, Prev: g.place.prev, Prevs: g.place.prevs,
	}}
	if p.Some {
		f.Header.Some, f.Header.Ranks = true, wire.Ranks(p.Ranks...)
	}
	if !g.deadline.IsZero() {
		f.Header.Timeout = max(time.Until(g.deadline), time.Microsecond)
	}
	if g.locations != nil {
		f.Header.Location = g.locations[part]
	}
	switch {
	case g.refs[part].Owner == "":
		f.Body = p.Body
	case len(p.Ranks) > 1:
		f.Header.ForHost = wire.ForAll
	}
	return f
}

// answer handles one rank's answer, and reports whether the call is over. It ignores repeats and answers of an earlier
// generation.
func (g *Gather) answer(f *wire.Frame) (over bool) {
	h := &f.Header
	g.mu.Lock()
	s, i := g.slotOf(h.Rank)
	if g.over || s == nil || s.answered || h.Gen != g.genOf(h.Rank) {
		fetching := s != nil && !s.answered && s.fetching() == h.Ref
		over = g.over
		g.mu.Unlock()
		if !fetching {
			g.ep.refuse(h)
		}
		return over
	}
	s.answer.Gen, s.answer.Queued, s.answer.Ran = h.Gen, h.Queued, h.Ran
	switch {
	case h.Ref.Owner != "" && h.Keep:
		s.answer.refs = &answerReferences{kept: g.ep.References().Adopt(h, g.call.To, g.call.Memory)}
		done := g.settleLocked(i, nil, nil)
		g.settled(done)
		return done.over
	case h.Ref.Owner != "":
		known := s.fetching() == h.Ref
		s.more().fetching = h.Ref
		g.mu.Unlock()
		if !known {
			g.fetch(i, h)
		}
	case h.Code != "":
		g.mu.Unlock()
		g.deliver(i, h.Code, f.Body)
	default:
		var body []byte
		if len(f.Body) > 0 {
			body = f.Body
		}
		g.takeReferences(s, h.References)
		done := g.settleLocked(i, body, nil)
		g.settled(done)
		return done.over
	}
	return false
}

// takeReferences retains the references inside an answer and tells the worker, which has kept them until now. g.mu is held.
func (g *Gather) takeReferences(s *slot, refs []wire.Reference) {
	if len(refs) == 0 || !g.call.Counted {
		return
	}
	s.answer.refs = &answerReferences{inside: refs}
	g.ep.References().Retain(refs...)
	f := wire.Frame{Kind: wire.KindTaken, Header: wire.Header{Session: g.ep.Session(), Seq: g.seq}}
	_ = g.ep.Send(g.call.To.ControlRank(s.answer.Rank), &f) // the next acknowledgement has the same effect
}

// genOf is the expected generation of a rank.
func (g *Gather) genOf(rank int) uint32 {
	if len(g.call.Gens) == 0 {
		return 0
	}
	return g.call.Gens[rank]
}

// fetch pulls the body of an answer.
func (g *Gather) fetch(i int, h *wire.Header) {
	ref, at, code, refs := h.Ref, h.Location, h.Code, h.References
	memory := g.call.Memory
	if code != "" { // errors are decoded here
		memory = nil
	}
	g.ep.values.Fetch(ref, at, values.Receiver{Memory: memory, Alone: true}, func(body []byte, err error) {
		if err != nil {
			g.settle(i, nil, err)
			return
		}
		g.mu.Lock()
		if s := &g.slots[i]; !s.answered && !g.over && code == "" {
			g.takeReferences(s, refs)
		}
		g.mu.Unlock()
		g.deliver(i, code, body)
	})
	g.mu.Lock()
	over := g.over
	g.mu.Unlock()
	if over { // during Fetch
		g.ep.values.Abandon(ref, bus.ErrCancelled)
	}
}

// deliver settles a slot with a complete answer.
func (g *Gather) deliver(i int, code bus.Code, body []byte) {
	if code != "" {
		g.settle(i, nil, g.remoteError(g.slots[i].answer.Rank, code, body))
		return
	}
	g.settle(i, body, nil)
}

// remoteError decodes the error of a worker, and sets the fields that the caller knows.
func (g *Gather) remoteError(rank int, code bus.Code, body []byte) error {
	e := &bus.Error{}
	if err := wire.UnmarshalRecord(body, e); err != nil {
		e.Message = "the worker's error cannot be decoded: " + err.Error()
	}
	e.Code, e.Role, e.Rank, e.Method = code, g.call.To.Role, rank, g.call.Method
	return e
}

// settle stores the answer of a slot, once, and ends the call if it was the last or the rule says so.
func (g *Gather) settle(i int, body []byte, err error) {
	g.mu.Lock()
	if g.slots[i].answered || g.over {
		g.mu.Unlock()
		values.FreeBody(g.call.Memory, body)
		return
	}
	g.settled(g.settleLocked(i, body, err))
}

// settlement is the work to do without the lock after a slot has its answer.
type settlement struct {
	slot  int
	err   error
	over  bool
	cause error
}

// settleLocked stores the answer of a slot that has none. settled must follow, and unlocks.
func (g *Gather) settleLocked(i int, body []byte, err error) settlement {
	s := &g.slots[i]
	s.answered, s.answer.Body = true, body
	s.answer.Err = g.withRank(s.answer.Rank, err)
	g.left--
	if err == nil {
		g.good++
	}
	g.arrived = append(g.arrived, int32(i))
	out := settlement{slot: i, err: err, over: true}
	failed := len(g.slots) - g.left - g.good
	switch {
	case g.left == 0:
	case g.call.FailFast && err != nil:
		out.cause = s.answer.Err
	case g.call.Need > 0 && g.good >= g.call.Need:
		out.cause = bus.Errorf(bus.CodeCancelled, "%d of %d good answers were enough", g.call.Need, len(g.slots))
	case g.call.Need > 0 && len(g.slots)-failed < g.call.Need:
		out.cause = s.answer.Err
	default:
		out.over = false
	}
	return out
}

// settled unlocks the gather and does the work that follows from an answer.
func (g *Gather) settled(done settlement) {
	s := &g.slots[done.slot]
	ref, fetching, rank, last := g.refs[s.part], s.fetching(), s.answer.Rank, g.left == 0
	g.mu.Unlock()
	g.recordPart(rank, done.err, last)
	if ref.Owner != "" {
		g.ep.values.Unneeded(ref, rank)
	}
	if fetching.Owner != "" && done.err != nil { // settled by another event: the body is not needed
		g.ep.values.Abandon(fetching, done.err)
	}
	if done.over {
		g.finish(done.cause)
		return
	}
	g.signal()
	if g.call.ArrivedFunc != nil {
		g.call.ArrivedFunc(g)
	}
}

// withRank adds role, rank and method to an error, if it has none.
func (g *Gather) withRank(rank int, err error) error {
	if err == nil {
		return nil
	}
	e := bus.AsError(err)
	if e.Role == "" || e.Rank < 0 {
		e.Role, e.Rank, e.Method = g.call.To.Role, rank, g.call.Method
	}
	return e
}

func (g *Gather) signal() {
	select {
	case g.arrivedCh <- struct{}{}:
	default:
	}
}

// abort ends the call with err for every rank that has not answered, and tells the workers.
func (g *Gather) abort(err error) { g.finish(err) }

// Cancel ends the call: the workers are told, and ranks without an answer get ErrCancelled.
func (g *Gather) Cancel() {
	g.finish(bus.Errorf(bus.CodeCancelled, "the caller cancelled the call"))
}

// finish ends the call once. Ranks without an answer get the cause, and their workers are told to stop. The first
// failure is the cause; the errors of the other ranks name it.
func (g *Gather) finish(cause error) {
	g.mu.Lock()
	if g.over {
		g.mu.Unlock()
		return
	}
	g.over = true
	var unanswered wire.RankSet
	var fetching []wire.BodyRef
	var untaken []wire.Reference
	var why bus.Code
	for i := 0; i < len(g.slots) && g.left > 0; i++ {
		s := &g.slots[i]
		if s.answered {
			continue
		}
		unanswered.Add(s.answer.Rank)
		if ref := s.fetching(); ref.Owner != "" {
			fetching = append(fetching, ref)
		}
		untaken = append(untaken, s.answer.References()...)
		s.answered, s.answer.Err, s.answer.refs = true, g.siblingError(s.answer.Rank, cause), nil
		why = bus.CodeOf(s.answer.Err)
		g.arrived = append(g.arrived, int32(i))
	}
	g.left = 0
	stop, deferred, good := g.stop, g.deferred, g.good
	g.mu.Unlock()
	g.ep.unregister(g)
	g.recordOver(unanswered, good)
	if stop != nil {
		stop()
	}
	for _, ref := range fetching {
		g.ep.values.Abandon(ref, cause)
	}
	g.ep.References().Release(untaken...)
	g.releaseArgs()
	if unanswered.Len() > 0 && !deferred { // no worker knows of a deferred call
		g.tellCancelled(unanswered, why)
	}
	if g.call.EndingFunc != nil {
		g.call.EndingFunc(g)
	}
	close(g.doneCh)
	g.signal()
	if g.call.OverFunc != nil {
		g.call.OverFunc(g)
	}
}

// siblingError is the error of a rank without an answer: the cause itself if it has no rank, otherwise "cancelled
// because of rank 3".
func (g *Gather) siblingError(rank int, cause error) error {
	e := bus.AsError(cause)
	if e.Role != "" && e.Rank >= 0 {
		e = bus.Errorf(bus.CodeCancelled, "cancelled because of rank %d: %s", e.Rank, e.Message).WithCause(cause)
	}
	e.Role, e.Rank, e.Method = g.call.To.Role, rank, g.call.Method
	return e
}
