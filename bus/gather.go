package bus

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"
)

// Call is one invocation over a role, as the bus sees it: parts, each published once, and the ranks that must answer.
type Call struct {
	To      Address
	Method  string
	Object  string
	Control bool // on the control subjects: never behind work, and without order
	Ordered bool // the role has a sequencer, and the call passes it
	World   int  // the role's world size
	Parts   []Part

	CollectSome bool    // only the answers of Collect carry a body
	Collect     RankSet // when CollectSome
	Gens        map[int]uint32
	Meta        []byte
	Trace       string

	FailFast bool // the first failure ends the call, and the others are cancelled
	Need     int  // so many good answers end the call, and the others are cancelled; 0: all of them

	// Timeout ends the call, if the context does not end it first. Zero: the context alone.
	Timeout time.Duration
	// AskAfter is when ranks that have not answered are first asked about the call. Zero: 0.8 s.
	AskAfter time.Duration
	// ArrivedFunc is told when something has arrived, and OverFunc once, when the call is over: also when Scatter itself
	// ends it with an error. They are called from any goroutine and must not block.
	ArrivedFunc func(*Gather)
	OverFunc    func(*Gather)
	// GoneAfter is how long the server may say that nobody listens before a rank counts as lost. Zero: 3 s, in which a
	// worker that has lost its connection is back.
	GoneAfter time.Duration
}

// Part is what some ranks get, published once on a subject they all hear.
type Part struct {
	Scope  Scope
	Ranks  []int  // who it is for, rising
	Some   bool   // others hear the subject too
	Body   []byte // must not be changed until the call is over
	NoData bool   // called with the metadata alone
}

// Scope is one of the subjects of a role.
type Scope struct {
	Mesh string // a data-parallel slice of this mesh, if set
	N    int    // its number, or the rank
	All  bool   // the whole role
}

// Everyone is the whole role, OneRank a rank, DPSlice a data-parallel slice of a mesh.
func Everyone() Scope                  { return Scope{All: true} }
func OneRank(rank int) Scope           { return Scope{N: rank} }
func DPSlice(mesh string, n int) Scope { return Scope{Mesh: mesh, N: n} }

func (s Scope) subject(to Address, control bool) string {
	switch {
	case s.All && control:
		return to.Control()
	case s.All:
		return to.All()
	case s.Mesh != "":
		return to.Slice(s.Mesh, s.N)
	case control:
		return to.ControlRank(s.N)
	}
	return to.Rank(s.N)
}

// Answer is what one rank said. Body is nil for a mere acknowledgement; it belongs to the caller.
type Answer struct {
	Rank   int
	Gen    uint32
	Body   []byte
	Err    error
	Queued time.Duration // how long the call waited at the worker
	Ran    time.Duration // how long it ran there
}

// Progress is what is known of one rank's part in a call that is under way.
type Progress struct {
	Rank     int
	Answered bool
	State    State         // as the worker last said when asked
	For      time.Duration // how long it had been queued or running then
}

// Gather is one call under way: the ranks that must answer and what they have said. It is over when every rank has
// answered or is known dead, or as soon as the call's rule says so. It is safe for concurrent use.
type Gather struct {
	ep     *Endpoint
	call   Call
	target *target
	seq    uint64
	inline uint32
	sentAt time.Time
	stop   func() // unhooks the context
	place  place  // in the order of the role's calls
	refs   []Ref  // of parts whose body is held; zero where it travels inline
	oneRef [1]Ref // most calls have one part

	mu       sync.Mutex // guards what follows
	deadline time.Time
	slots    []slot
	bySlot   map[int]int // rank → slot, nil when ranks are first, first+1, …
	left     int         // slots without an answer
	sent     bool        // it has its place and was published; before that nobody can know of it
	good     int
	arrived  []int32 // slots in order of arrival
	taken    int     // how many of arrived were handed out by Next
	over     bool
	nextAsk  time.Time
	askDelay time.Duration

	arrivedCh chan struct{} // holds one; something arrived
	doneCh    chan struct{} // closed when over
}

// slot is one rank's place in a call. There are as many as ranks, so what most of them never need is apart.
type slot struct {
	answer   Answer
	rare     *rareSlot // nil until needed
	part     int32
	answered bool
	state    State
}

// rareSlot is about an answer that is large or late.
type rareSlot struct {
	fetching  Ref
	stateFor  time.Duration
	resentAt  time.Time
	noneSince time.Time // since when the server has said, each time, that nobody listens
	noneLast  time.Time // and when it did so last
}

func (s *slot) more() *rareSlot {
	if s.rare == nil {
		s.rare = &rareSlot{}
	}
	return s.rare
}

// fetching is the body that is being pulled for the rank; the zero Ref: none is.
func (s *slot) fetching() Ref {
	if s.rare == nil {
		return Ref{}
	}
	return s.rare.fetching
}

const (
	firstAsk  = 800 * time.Millisecond
	maxAsk    = 10 * time.Second
	goneAfter = 3 * time.Second // nobody listens for so long: the role has ended
)

// Scatter publishes the call's parts and returns at once; answers are gathered in the background. The call is over, and
// its workers are told, when ctx ends.
func (e *Endpoint) Scatter(ctx context.Context, c Call) (*Gather, error) {
	if err := ctx.Err(); err != nil {
		return nil, &Error{Code: CodeOf(err), Message: "the deadline passed or the caller gave up before the call was sent", Role: c.To.Role, Rank: -1, Method: c.Method, cause: err}
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
	g.target = e.target(c.To)
	g.holdLarge()
	if err := e.register(g); err != nil {
		g.letGo()
		cancel()
		return nil, err
	}
	if err := g.target.publish(g); err != nil && CodeOf(err) != CodeUnavailable { // unreachable: sent when it is back
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

// follow ends the call when ctx ends, and lets go of ctx when the call is over.
func (g *Gather) follow(ctx context.Context, cancel context.CancelFunc) {
	unhook := context.AfterFunc(ctx, func() { defer Recover(); g.abort(g.contextError(ctx)) })
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
	words := "the caller gave up"
	if CodeOf(ctx.Err()) == CodeTimedOut {
		words = "no answer within the deadline"
	}
	if !g.ep.bus.nc.IsConnected() {
		words += "; the server cannot be reached at the moment"
	}
	c := &g.call
	return &Error{Code: CodeOf(ctx.Err()), Message: words, Role: c.To.Role, Rank: -1, Method: c.Method, cause: context.Cause(ctx)}
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
		return nil, Errorf(CodeInvalid, "a call of %s on %s addresses no rank", c.Method, c.To.Role)
	}
	if c.Need > n {
		return nil, Errorf(CodeInvalid, "a call of %s on %s needs %d good answers of %d ranks", c.Method, c.To.Role, c.Need, n)
	}
	g := &Gather{
		ep: e, call: c, slots: make([]slot, n), arrived: make([]int32, 0, n), left: n, sentAt: time.Now(),
		askDelay: firstAsk, arrivedCh: make(chan struct{}, 1), doneCh: make(chan struct{}),
	}
	if c.AskAfter > 0 {
		g.askDelay = c.AskAfter
	}
	g.nextAsk = g.sentAt.Add(g.askDelay)
	i, rising := 0, true
	first := c.Parts[0].Ranks
	for p := range c.Parts {
		for _, rank := range c.Parts[p].Ranks {
			if rank < 0 || rank >= c.World {
				return nil, Errorf(CodeInvalid, "a call of %s on %s addresses rank %d of a world of %d", c.Method, c.To.Role, rank, c.World)
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
			return nil, Errorf(CodeInvalid, "a call of %s on %s addresses a rank twice", c.Method, c.To.Role)
		}
	}
	return g, nil
}

// slotOf returns the slot of a rank, or nil if nothing is expected of it.
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

// holdLarge keeps the bodies that do not travel in their frames, until every rank has them.
func (g *Gather) holdLarge() {
	g.refs = g.oneRef[:]
	if len(g.call.Parts) > 1 {
		g.refs = make([]Ref, len(g.call.Parts))
	}
	payload := int(g.ep.bus.nc.MaxPayload()) - maxEnvelope
	limit := min(maxInline, payload)
	if g.call.Ordered { // all frames of the call travel to the sequencer in one message
		limit = min(limit, payload/2/len(g.call.Parts))
	}
	for i := range g.call.Parts {
		p := &g.call.Parts[i]
		if len(p.Body) == 0 || g.target.inlineRoom(len(p.Body), limit) {
			continue
		}
		subject := ""
		if len(p.Ranks) > 1 {
			subject = p.Scope.subject(g.call.To, false)
		}
		g.refs[i] = g.ep.Hold(p.Body, Ranks(p.Ranks...), subject, nil)
	}
}

// letGo gives back what the call's arguments took.
func (g *Gather) letGo() {
	for i, ref := range g.refs {
		if ref.Owner != "" {
			g.ep.Drop(ref)
		} else {
			g.target.inlineDone(len(g.call.Parts[i].Body))
		}
	}
}

// frame makes the frame of one part as it would be sent now.
func (g *Gather) frame(part int) Frame {
	p, c := &g.call.Parts[part], &g.call
	g.ep.mu.Lock()
	acked := g.ep.acked
	g.ep.mu.Unlock()
	f := Frame{Kind: KindCall, Header: Header{
		Session: g.ep.session, Seq: g.seq, Acked: acked, Method: c.Method, Object: c.Object,
		Caller: g.ep.caller, Trace: c.Trace, Meta: c.Meta, NoData: p.NoData, Inline: g.inline,
		CollectSome: c.CollectSome, Collect: c.Collect, Gens: c.Gens, Ref: g.refs[part],
		Order: g.place.order, Prev: g.place.prev, Prevs: g.place.prevs,
	}}
	if p.Some {
		f.Header.Some, f.Header.Ranks = true, Ranks(p.Ranks...)
	}
	if !g.deadline.IsZero() {
		f.Header.Timeout = max(time.Until(g.deadline), time.Microsecond)
	}
	if g.refs[part].Owner == "" {
		f.Body = p.Body
	}
	return f
}

// answer takes in one rank's answer, and reports whether the call is over. A repeat is ignored, as is the word of an
// earlier generation.
func (g *Gather) answer(f *Frame) (over bool) {
	h := &f.Header
	g.mu.Lock()
	s, i := g.slotOf(h.Rank)
	if g.over || s == nil || s.answered || h.Gen != g.genOf(h.Rank) {
		fetching := s != nil && !s.answered && s.fetching() == h.Ref
		over = g.over
		g.mu.Unlock()
		if h.Ref.Owner != "" && !fetching {
			g.ep.release(h.Ref, RankSet{})
		}
		return over
	}
	s.answer.Gen, s.answer.Queued, s.answer.Ran = h.Gen, h.Queued, h.Ran
	switch {
	case h.Ref.Owner != "":
		known := s.fetching() == h.Ref
		s.more().fetching = h.Ref
		g.mu.Unlock()
		if !known {
			g.fetch(i, h.Ref, h.Code)
		}
	case h.Code != "":
		g.mu.Unlock()
		g.deliver(i, h.Code, f.Body)
	default:
		var body []byte
		if len(f.Body) > 0 {
			body = f.Body
		}
		done := g.settleLocked(i, body, nil)
		g.settled(done)
		return done.over
	}
	return false
}

// genOf is the generation of a rank that the caller believes in.
func (g *Gather) genOf(rank int) uint32 {
	if len(g.call.Gens) == 0 {
		return 0
	}
	return g.call.Gens[rank]
}

// fetch pulls the body of an answer.
func (g *Gather) fetch(i int, ref Ref, code Code) {
	g.ep.Fetch(ref, RankSet{}, func(body []byte, err error) {
		if err != nil {
			g.settle(i, nil, err)
			return
		}
		g.deliver(i, code, body)
	})
	g.mu.Lock()
	over := g.over
	g.mu.Unlock()
	if over { // while we began
		g.ep.receipts.abandon(ref, ErrCancelled)
	}
}

// deliver settles a slot with an answer that is all here.
func (g *Gather) deliver(i int, code Code, body []byte) {
	if code != "" {
		g.settle(i, nil, g.remoteError(g.slots[i].answer.Rank, code, body))
		return
	}
	g.settle(i, body, nil)
}

// remoteError reads the error a worker sent, and fills in what the caller knows better.
func (g *Gather) remoteError(rank int, code Code, body []byte) error {
	e := &Error{}
	if err := Unmarshal(body, e); err != nil {
		e.Message = "the worker's error could not be read: " + err.Error()
	}
	e.Code, e.Role, e.Rank, e.Method = code, g.call.To.Role, rank, g.call.Method
	return e
}

// settle gives a slot its answer, once, and ends the call if that was the last or the rule says so.
func (g *Gather) settle(i int, body []byte, err error) {
	g.mu.Lock()
	if g.slots[i].answered || g.over {
		g.mu.Unlock()
		return
	}
	g.settled(g.settleLocked(i, body, err))
}

// settlement is what is to be done, without the lock, after a slot has got its answer.
type settlement struct {
	slot  int
	err   error
	over  bool
	cause error
}

// settleLocked gives a slot that has none its answer. settled must follow, and unlocks.
func (g *Gather) settleLocked(i int, body []byte, err error) settlement {
	s := &g.slots[i]
	s.answered, s.answer.Body = true, body
	s.answer.Err = g.placed(s.answer.Rank, err)
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
		out.cause = Errorf(CodeCancelled, "%d of %d good answers were enough", g.call.Need, len(g.slots))
	case g.call.Need > 0 && len(g.slots)-failed < g.call.Need:
		out.cause = s.answer.Err
	default:
		out.over = false
	}
	return out
}

// settled unlocks the gather and does what follows from an answer.
func (g *Gather) settled(done settlement) {
	s := &g.slots[done.slot]
	ref, fetching, rank := g.refs[s.part], s.fetching(), s.answer.Rank
	g.mu.Unlock()
	if ref.Owner != "" {
		g.ep.unneeded(ref, rank)
	}
	if fetching.Owner != "" && done.err != nil { // settled by something else: the body is no longer needed
		g.ep.receipts.abandon(fetching, done.err)
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

// placed says where an error happened, if it does not say so itself.
func (g *Gather) placed(rank int, err error) error {
	if err == nil {
		return nil
	}
	e := AsError(err)
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

// Cancel ends the call; the workers are told, and ranks without an answer get ErrCancelled.
func (g *Gather) Cancel() {
	g.finish(Errorf(CodeCancelled, "the caller cancelled the call"))
}

// finish ends the call once. With a cause there may be ranks without an answer: they get it, and their workers are
// told to stop. The first failure is the cause; the siblings say so.
func (g *Gather) finish(cause error) {
	g.mu.Lock()
	if g.over {
		g.mu.Unlock()
		return
	}
	g.over = true
	var unanswered RankSet
	var fetching []Ref
	for i := 0; i < len(g.slots) && g.left > 0; i++ {
		s := &g.slots[i]
		if s.answered {
			continue
		}
		unanswered.Add(s.answer.Rank)
		if ref := s.fetching(); ref.Owner != "" {
			fetching = append(fetching, ref)
		}
		s.answered, s.answer.Err = true, g.siblingError(s.answer.Rank, cause)
		g.arrived = append(g.arrived, int32(i))
	}
	g.left = 0
	stop := g.stop
	g.mu.Unlock()
	g.ep.unregister(g)
	if stop != nil {
		stop()
	}
	for _, ref := range fetching {
		g.ep.receipts.abandon(ref, cause)
	}
	g.letGo()
	if unanswered.Len() > 0 {
		g.tellCancelled(unanswered)
	}
	close(g.doneCh)
	g.signal()
	if g.call.OverFunc != nil {
		g.call.OverFunc(g)
	}
}

// siblingError is what a rank without an answer gets: the cause itself if it is nobody's in particular, otherwise
// "cancelled because of rank 3".
func (g *Gather) siblingError(rank int, cause error) error {
	e := AsError(cause)
	if e.Role != "" && e.Rank >= 0 {
		c := Errorf(CodeCancelled, "cancelled because of rank %d: %s", e.Rank, e.Message)
		c.cause = cause
		e = c
	}
	e.Role, e.Rank, e.Method = g.call.To.Role, rank, g.call.Method
	return e
}

// lastWord is a frame to the workers of a call that is over.
type lastWord struct {
	subject string
	frame   Frame
}

// tellCancelled tells the workers that nobody waits for them. If the word is lost, in an outage for instance, it is said
// again after the reconnect; and the next call says as much.
func (g *Gather) tellCancelled(ranks RankSet) {
	f := Frame{Kind: KindCancel, Header: Header{Session: g.ep.session, Seq: g.seq}}
	subject, _ := g.control(ranks, &f)
	_ = g.ep.send(subject, &f)
	g.ep.mu.Lock()
	defer g.ep.mu.Unlock()
	if len(g.ep.cancels) == maxCancels {
		g.ep.cancels = slices.Delete(g.ep.cancels, 0, maxCancels/2)
	}
	g.ep.cancels = append(g.ep.cancels, lastWord{subject, f})
}

// cancelAgain is when the cancels are said again after a reconnect.
var cancelAgain = []time.Duration{0, 2 * time.Second, 10 * time.Second}

// repeatCancels is called by the sweep alone.
func (e *Endpoint) repeatCancels(now time.Time, connected, anew bool) {
	e.mu.Lock()
	if anew && len(e.cancels) > 0 {
		e.cancelsAt = e.cancelsAt[:0]
		for _, after := range cancelAgain {
			e.cancelsAt = append(e.cancelsAt, now.Add(after))
		}
	}
	if !connected || len(e.cancelsAt) == 0 || now.Before(e.cancelsAt[0]) {
		e.mu.Unlock()
		return
	}
	cancels := slices.Clone(e.cancels)
	if e.cancelsAt = e.cancelsAt[1:]; len(e.cancelsAt) == 0 {
		e.cancels = nil
	}
	e.mu.Unlock()
	for i := range cancels {
		_ = e.send(cancels[i].subject, &cancels[i].frame) // and again; and the next call says as much
	}
}

// control is the one subject for a control frame to some ranks, and the part that nobody has heard if nobody is there.
func (g *Gather) control(ranks RankSet, f *Frame) (subject string, part int) {
	list := ranks.List()
	if len(list) == 1 {
		s, _ := g.slotOf(list[0])
		return g.call.To.ControlRank(list[0]), int(s.part)
	}
	if len(list) < g.call.World {
		f.Header.Some, f.Header.Ranks = true, ranks
	}
	return g.call.To.Control(), g.everyPart()
}

// everyPart stands for all parts in a reply subject.
func (g *Gather) everyPart() int { return len(g.call.Parts) }

// ask inquires about the ranks that have not answered, now and then, and at once when all is set.
func (g *Gather) ask(now time.Time, all bool) {
	g.mu.Lock()
	if g.over || !g.sent || !all && now.Before(g.nextAsk) {
		g.mu.Unlock()
		return
	}
	if !all {
		g.askDelay = min(2*g.askDelay, maxAsk)
	}
	g.nextAsk = now.Add(g.askDelay)
	var ranks RankSet
	for i := range g.slots {
		if s := &g.slots[i]; !s.answered && s.fetching().Owner == "" {
			ranks.Add(s.answer.Rank)
		}
	}
	g.mu.Unlock()
	if ranks.Len() > 0 {
		h := Header{Session: g.ep.session, Seq: g.seq, Age: time.Since(g.sentAt)}
		f := Frame{Kind: KindAsk, Header: h}
		subject, part := g.control(ranks, &f)
		_ = g.ep.sendFrom(subject, appendReplyCall(g.ep.callPrefix, g.seq, part), &f) // the next one follows
	}
}

// status takes in what a worker says when asked. A call it never saw is sent again, under its id.
func (g *Gather) status(f *Frame) {
	g.mu.Lock()
	s, i := g.slotOf(f.Header.Rank)
	if g.over || s == nil || s.answered || f.Header.Gen != g.genOf(f.Header.Rank) {
		g.mu.Unlock()
		return
	}
	rare := s.more()
	rare.noneLast = time.Time{}
	s.state, rare.stateFor = f.Header.State, max(f.Header.Queued, f.Header.Ran)
	resend := f.Header.State == StateNever && time.Since(rare.resentAt) > sweepEvery
	if resend {
		rare.resentAt = time.Now()
	}
	g.mu.Unlock()
	switch {
	case f.Header.State == StateUnknown:
		g.settle(i, nil, Errorf(CodeOutcomeUnknown, "the worker no longer has the answer; the call may have run and will not be run again"))
	case resend:
		g.target.resend(g, f.Header.Rank)
	}
}

// nobodyListens is the server's word that a part reached nobody. That may pass, so the ranks are asked again soon;
// when it lasts, they are gone.
func (g *Gather) nobodyListens(part int) {
	now := time.Now()
	limit := cmp.Or(g.call.GoneAfter, goneAfter)
	pause := min(firstAsk/2, limit/4)
	var gone []int
	g.mu.Lock()
	for i := range g.slots {
		s := &g.slots[i]
		if s.answered || int(s.part) != part && part != g.everyPart() || s.fetching().Owner != "" {
			continue
		}
		rare := s.more()
		if now.Sub(rare.noneLast) > max(limit/2, 2*sweepEvery+pause) { // asked in between, and somebody was there
			rare.noneSince = now
		}
		rare.noneLast = now
		if now.Sub(rare.noneSince) > limit {
			gone = append(gone, i)
		}
	}
	g.askDelay, g.nextAsk = 2*pause, now.Add(pause)
	g.mu.Unlock()
	for _, i := range gone {
		g.settle(i, nil, Errorf(CodeWorkerLost, "nobody has listened at %s for %s: the role has ended or its workers are gone", g.call.To.Prefix(), limit))
	}
}

func (g *Gather) lost(rank int, gen uint32, why error) {
	g.mu.Lock()
	s, i := g.slotOf(rank)
	mine := s != nil && g.genOf(rank) <= gen
	g.mu.Unlock()
	if mine {
		g.settle(i, nil, why)
	}
}

// expects reports whether the rank has not answered yet.
func (g *Gather) expects(rank int) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	s, _ := g.slotOf(rank)
	return s != nil && !s.answered && !g.over
}

// Done is closed when the call is over.
func (g *Gather) Done() <-chan struct{} { return g.doneCh }

// Answers returns every rank's answer, in the order of the parts. It must be called after Done is closed.
func (g *Gather) Answers() []Answer {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := make([]Answer, len(g.slots))
	for i := range g.slots {
		out[i] = g.slots[i].answer
	}
	return out
}

// Answer returns one rank's answer, the zero Answer if nothing was asked of it. It must be called after Done is closed:
// answers do not change any more, and are read without a lock.
func (g *Gather) Answer(rank int) Answer {
	if s, _ := g.slotOf(rank); s != nil {
		return s.answer
	}
	return Answer{}
}

// Arrived returns every rank's answer, in the order of arrival; those that never came are last. It must be called after
// Done is closed.
func (g *Gather) Arrived() []Answer {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := make([]Answer, len(g.arrived))
	for i, slot := range g.arrived {
		out[i] = g.slots[slot].answer
	}
	return out
}

// ArrivedSince returns the answers that have arrived after the first n, in order of arrival. It may be called at any time.
func (g *Gather) ArrivedSince(n int) []Answer {
	g.mu.Lock()
	defer g.mu.Unlock()
	var out []Answer
	for _, slot := range g.arrived[min(n, len(g.arrived)):] {
		out = append(out, g.slots[slot].answer)
	}
	return out
}

// AllGood reports whether every rank has answered without an error.
func (g *Gather) AllGood() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.good == len(g.slots)
}

// Next returns the next answer in order of arrival; ok is false when all have been returned. One goroutine may call it.
func (g *Gather) Next(ctx context.Context) (a Answer, ok bool, err error) {
	for {
		g.mu.Lock()
		if g.taken < len(g.arrived) {
			a = g.slots[g.arrived[g.taken]].answer
			g.taken++
			g.mu.Unlock()
			return a, true, nil
		}
		over := g.over
		g.mu.Unlock()
		if over {
			return Answer{}, false, nil
		}
		select {
		case <-g.arrivedCh:
		case <-g.doneCh:
		case <-ctx.Done():
			return Answer{}, false, g.contextError(ctx)
		}
	}
}

// Progress says where each rank stands.
func (g *Gather) Progress() []Progress {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := make([]Progress, len(g.slots))
	for i := range g.slots {
		s := &g.slots[i]
		out[i] = Progress{Rank: s.answer.Rank, Answered: s.answered, State: s.state}
		if s.rare != nil {
			out[i].For = s.rare.stateFor
		}
	}
	return out
}
