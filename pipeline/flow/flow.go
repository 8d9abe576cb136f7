package flow

import (
	"iter"
	"slices"
	"strconv"
	"time"

	"troupe/bus"
	"troupe/pipeline/spec"
)

// flow decides: what is handed to whom, what is stored, what is dropped. It is values alone: time comes in with each
// event, what is to be done goes out as effects, and one goroutine owns it. The loop around it (engine.go) carries the
// effects out and comes back with events.
type Flow struct {
	streams      []*StreamState
	Stages       []*StageState
	Version      spec.Version
	Now          time.Time
	sampled      time.Time // when the rates were
	window       memoryWindow
	maxBody      int
	LargeBodyMin int // bodies of so many bytes are stored apart from their items; 0: none

	sources          map[string]*producerState
	queue            fifo[*change] // what waits to be committed, in order
	queued           int           // messages in it
	queuedBytes      int64
	pendingBodyBytes int64  // bytes of bodies that are stored apart and wait
	CommitNumber     uint64 // of the last commit that was built
	scanNumber       uint64 // of the queue
	nextTask         uint64
	stopped          bool // nothing is handed out any more
	IntakeClosed     bool // and nothing taken in
	finalEnqueued    bool // the record is the last of this engine
	taken            map[uint64]*takenItems
	isolated         *isolatedRetry // nil: nobody
	DeadBodies       *BodyStream    // of the bodies of dead letters
	Resolved         *ResolvedLetters
	renumberedUpTo   uint64                      // see lettersRecord
	retired          map[string]StreamCheckpoint // of the record that it began with

	Effects
	spare Effects // what the engine was given last, to be used again
}

// effects is what the engine has to do now.
type Effects struct {
	Starts  []*Task        // hand these out,
	Cancels []Cancellation // take these back,
	Bodies  []*PendingBody // store these apart,
	Reads   []ReadRequest  // read these,
	Replies []Reply        // and tell who waits
}

// takeEffects gives what is to be done since it was called last. It is valid until it is called again.
func (f *Flow) TakeEffects() Effects {
	clear(f.spare.Starts)
	clear(f.spare.Bodies)
	clear(f.spare.Replies)
	out := f.Effects
	f.Effects = Effects{f.spare.Starts[:0], f.spare.Cancels[:0], f.spare.Bodies[:0], f.spare.Reads[:0], f.spare.Replies[:0]}
	f.spare = out
	return out
}

// lanes are all lanes of all streams.
func (f *Flow) Lanes() iter.Seq[*Lane] {
	return func(yield func(*Lane) bool) {
		for _, s := range f.streams {
			for _, l := range s.lanes {
				if !yield(l) {
					return
				}
			}
		}
	}
}

// hasQueued says that something waits to be committed, and backlog how much.
func (f *Flow) HasQueued() bool { return f.queue.len() > 0 }

func (f *Flow) Backlog() (messages int, bytes int64) { return f.queued, f.queuedBytes }

// wasAccepted says that a put of a source is in the pipeline, stored or about to be.
func (f *Flow) WasAccepted(name string, seq uint64) bool {
	src := f.sources[name]
	return src != nil && seq <= src.accepted
}

// restoreSource takes in the last put of a source that the log has.
func (f *Flow) RestoreSource(name string, seq uint64) {
	f.sources[name] = &producerState{accepted: seq, stored: seq, used: f.Now}
}

// checkSize refuses an item that could never be stored in the stream; its body has so many bytes.
func (f *Flow) CheckSize(s *StreamState, it *spec.Item, size int) error {
	return s.checkSize(it, size, f.maxBody)
}

// source is who puts: the last of its puts that was accepted, and the last that is stored.
type producerState struct {
	accepted, stored uint64
	used             time.Time
}

// change is what is stored together: all of it, or nothing.
type change struct {
	done           []*Entry // these are dealt with
	puts           []*Entry // these are new
	dead           []*DeadLetter
	retried        []*Entry         // something went wrong with these
	starts         []*Task          // these are handed out when it is stored
	resolved       []ResolvedLetter // dead letters that are so no more,
	freedBodies    []uint64         // and where their bodies lay
	renumberedUpTo uint64           // up to here in the log, letters without a number are among its own now
	closed         *ClosedGroup
	advance        spec.Version
	source         string
	seq            uint64
	tokens         []any // told when it is stored
	pendingBodies  int   // bodies that are to be stored before it
	ordered        bool  // it ends items of an ordered stage
	afterAll       bool  // it is stored after all that were there before it
}

// closing is a group that was handed over; what comes of it later is late.
type ClosedGroup struct {
	Stage, Group string
	Missing      int
	Remember     time.Duration
}

// revival is a dead letter that is retried or dropped.
type ResolvedLetter struct {
	Subject string
	ordinal uint64
}

type (
	Cancellation struct {
		Task  *Task
		Abort bool // it may hand back what it has
	}
	ReadRequest struct {
		Lane     *Lane
		From, To uint64
		AfterSeq uint64     // where in the log to begin
		MaxBytes int64      // so many are enough
		Done     OrdinalSet // these are not wanted
	}
	Reply struct {
		Token any
		Err   error
	}
)

func New(declared spec.Spec, rec *Checkpoint) *Flow {
	declared = declared.WithDefaults()
	f := &Flow{sources: map[string]*producerState{}, window: defaultWindow, maxBody: spec.MaxBody, taken: map[uint64]*takenItems{}, DeadBodies: &BodyStream{Name: DeadBodiesName, MaxBytes: 64 << 20},
		Resolved: NewResolvedLetters(rec), retired: map[string]StreamCheckpoint{}}
	for _, s := range declared.Streams {
		f.streams = append(f.streams, newStream(s))
		f.DeadBodies.MaxBytes += s.Bytes
	}
	for _, s := range declared.Stages {
		f.Stages = append(f.Stages, f.connect(newStage(s)))
	}
	for _, cycle := range declared.Cycles() {
		f.exemptCycle(cycle)
	}
	if rec != nil {
		f.restore(rec)
	}
	return f
}

func (f *Flow) connect(s *StageState) *StageState {
	for _, name := range s.Spec.In {
		s.inputs = append(s.inputs, f.StreamNamed(name))
	}
	for _, name := range s.Spec.Out {
		out := f.StreamNamed(name)
		s.Outputs = append(s.Outputs, out)
		if out.spec.Full != spec.DropOldest {
			s.blockingOutputs = append(s.blockingOutputs, out)
		}
	}
	return s
}

// unblock keeps the stages of a cycle from waiting for each other for ever: within it, a full stream holds nobody up.
func (f *Flow) exemptCycle(cycle []spec.StageSpec) {
	for _, member := range cycle {
		s := f.StageNamed(member.Name)
		s.blockingOutputs = slices.DeleteFunc(s.blockingOutputs, func(out *StreamState) bool {
			return slices.ContainsFunc(cycle, func(next spec.StageSpec) bool { return slices.Contains(next.In, out.spec.Name) })
		})
	}
}

func (f *Flow) StreamNamed(name string) *StreamState {
	i := slices.IndexFunc(f.streams, func(s *StreamState) bool { return s.spec.Name == name })
	if i < 0 {
		return nil
	}
	return f.streams[i]
}

func (f *Flow) StageNamed(name string) *StageState {
	i := slices.IndexFunc(f.Stages, func(s *StageState) bool { return s.Spec.Name == name })
	if i < 0 {
		return nil
	}
	return f.Stages[i]
}

// enqueue puts a change in line to be stored. What it deals with no longer counts against the bounds.
func (f *Flow) enqueue(c *change) {
	for _, e := range c.done {
		e.Lane.stream.uncount(&e.Item)
	}
	for _, e := range c.puts {
		e.BodyRef = f.storeSeparately(c, e.Body, e.Lane.Bodies)
	}
	for _, d := range c.dead {
		if d.BodyRef == nil { // one that is moved has its body where it was
			d.BodyRef = f.storeSeparately(c, d.Body, f.DeadBodies)
		}
	}
	f.queue.push(c)
	f.queued += c.messages()
	f.queuedBytes += c.size()
}

// putApart has a large body stored ahead of the change that names it; nil: it is not large.
func (f *Flow) storeSeparately(c *change, body []byte, on *BodyStream) *PendingBody {
	if f.LargeBodyMin == 0 || len(body) < f.LargeBodyMin {
		return nil
	}
	b := &PendingBody{Stream: on, Data: body, change: c}
	c.pendingBodies++
	f.pendingBodyBytes += int64(len(body))
	f.Bodies = append(f.Bodies, b)
	return b
}

// messages is how many the change needs in the log.
func (c *change) messages() int {
	n := len(c.puts) + len(c.dead) + 2*len(c.resolved) + len(c.retried)
	for _, e := range c.done {
		if e.Retries != nil {
			n++
		}
	}
	if c.closed != nil {
		n++
	}
	if c.source != "" {
		n++
	}
	return n
}

func (c *change) size() (n int64) {
	for _, e := range c.puts {
		if n += Weight(&e.Item); e.BodyRef != nil {
			n -= int64(len(e.Body))
		}
	}
	for _, d := range c.dead {
		if n += 1024; d.BodyRef == nil {
			n += int64(len(d.Body))
		}
	}
	return n
}

// bodiesStored takes in that bodies are stored apart.
func (f *Flow) BodiesStored(bodies []*PendingBody) {
	for _, b := range bodies {
		b.change.pendingBodies--
		f.pendingBodyBytes -= int64(len(b.Data))
		b.change, b.Data = nil, nil
	}
}

// put takes items from outside, or has them wait, or refuses them.
func (f *Flow) Put(p *Put) {
	if err := p.Stream.check(p.Items, f.maxBody); err != nil {
		f.Replies = append(f.Replies, Reply{p.Token, err})
		return
	}
	if f.isRepeat(p) {
		return
	}
	if f.IntakeClosed {
		f.Replies = append(f.Replies, Reply{p.Token, bus.Errorf(bus.CodeClosed, "the pipeline takes nothing more: it is being drained or shut down")})
		return
	}
	for i := range p.Items {
		p.bytes += Weight(&p.Items[i])
	}
	if p.Stream.waiting.len() > 0 || !f.admit(p) {
		f.enqueuePut(p)
	}
}

// known answers a repetition: when it is stored, or with what stores it.
func (f *Flow) isRepeat(p *Put) bool {
	src := f.sources[p.Source]
	if p.Source == "" {
		return false
	}
	if src == nil || p.Seq > src.accepted {
		return f.joinWaiting(p)
	}
	src.used = f.Now
	if p.Seq <= src.stored {
		f.Replies = append(f.Replies, Reply{p.Token, nil})
	} else {
		f.enqueue(&change{tokens: []any{p.Token}, afterAll: true}) // it is in the queue before this one
	}
	return true
}

// again finds a put that is in line already: who asks last is told.
func (f *Flow) joinWaiting(p *Put) bool {
	for _, w := range p.Stream.waiting.all() {
		if w.Source == p.Source && w.Seq == p.Seq {
			w.Token = p.Token
			return true
		}
	}
	return false
}

// maxWaiting bounds the line before a stream that is full.
const maxWaiting = 4096

func (f *Flow) enqueuePut(p *Put) {
	s := p.Stream
	switch {
	case s.spec.Full == spec.Refuse:
		f.Replies = append(f.Replies, Reply{p.Token, bus.Errorf(bus.CodeBusy, "stream %s is full: %d of %d items, %d of %d bytes", s.spec.Name, s.items, s.spec.Items, s.bytes, s.spec.Bytes)})
	case s.waiting.len() >= maxWaiting:
		f.Replies = append(f.Replies, Reply{p.Token, bus.Errorf(bus.CodeBusy, "stream %s is full, and %d puts wait before it", s.spec.Name, maxWaiting)})
	default:
		s.waiting.push(p)
	}
}

// admit accepts a put if there is room, or can be made.
func (f *Flow) admit(p *Put) bool {
	c := &change{source: p.Source, seq: p.Seq}
	if p.Token != nil {
		c.tokens = []any{p.Token}
	}
	if p.Stream.spec.Full == spec.DropOldest {
		f.dropOldest(p.Stream, len(p.Items), p.bytes, c)
	}
	if !p.Stream.fits(len(p.Items), p.bytes) && len(c.done) == 0 {
		return false
	}
	for _, it := range p.Items {
		if !it.Stamped {
			it.Version, it.Stamped = f.Version, true
		}
		c.puts = append(c.puts, f.newEntry(p.Stream, it))
	}
	if p.Source != "" {
		src := f.sources[p.Source]
		if src == nil {
			src = &producerState{}
			f.sources[p.Source] = src
		}
		src.accepted, src.used = max(src.accepted, p.Seq), f.Now
	}
	f.enqueue(c)
	return true
}

// move makes an item an entry of the stream, which counts it from now on. Its number is given when it is committed.
func (f *Flow) newEntry(to *StreamState, it spec.Item) *Entry {
	it.Stored, it.Stream, it.Attempt, it.Stale = f.Now, to.spec.Name, 0, false
	it.Priority = min(it.Priority, to.spec.Priorities-1)
	to.count(&it)
	return &Entry{Item: it, Lane: to.lanes[it.Priority]}
}

// makeRoom drops the oldest items that nobody has in hand.
func (f *Flow) dropOldest(s *StreamState, items int, bytes int64, c *change) {
	var freed int
	var freedBytes int64
	for _, e := range c.done {
		if e.Lane.stream == s {
			freed, freedBytes = freed+1, freedBytes+Weight(&e.Item)
		}
	}
	for !s.fits(items-freed, bytes-freedBytes) {
		e, ok := s.popOldest()
		if !ok {
			return
		}
		s.dropped++
		c.done = append(c.done, e)
		freed, freedBytes = freed+1, freedBytes+Weight(&e.Item)
	}
}

// withdraw gives up puts that still wait.
func (f *Flow) WithdrawPut(token any) {
	for _, s := range f.streams {
		s.waiting.remove(func(p *Put) bool { return p.Token == token })
	}
}

// pump hands out what can be handed out, and asks for what should be read.
func (f *Flow) Schedule() {
	for _, s := range f.streams {
		for s.waiting.len() > 0 && f.admit(s.waiting.front()) {
			s.waiting.pop()
		}
		f.expire(s)
	}
	for _, s := range f.Stages {
		s.wake(f.Now)
		f.scheduleStage(s)
	}
	for _, s := range f.streams {
		for _, l := range s.lanes {
			if from, to, ok := l.nextRead(f.window); ok {
				l.loading = true
				f.Reads = append(f.Reads, ReadRequest{Lane: l, From: from, To: to, AfterSeq: l.lastSeq, MaxBytes: f.window.bytes - l.readyBytes, Done: l.done.clone()})
			}
		}
	}
}

// age drops what has been too long in a stream.
func (f *Flow) expire(s *StreamState) {
	if s.spec.Age == 0 {
		return
	}
	for _, l := range s.lanes {
		for l.ready.len() > 0 && s.isExpired(&l.ready.front().Item, f.Now) {
			e, _ := l.pop()
			s.expired++
			f.enqueue(&change{done: []*Entry{e}})
		}
	}
}

// maxQueued stops handing out while so many messages wait to be stored: the log is slower than the handlers.
const maxQueued = 8192

// maxHeavy is the same for bodies that are stored apart.
const maxPendingBodyBytes = 64 << 20

// open says that the stage may hand something out.
func (f *Flow) canStart(s *StageState) bool {
	return f.mayStart(s) && s.Workers.freeSlots() > 0 && s.exclusiveWork() == nil
}

// mayStart is the same without a worker that has room.
func (f *Flow) mayStart(s *StageState) bool {
	return !s.paused && !f.stopped && f.queued < maxQueued && f.pendingBodyBytes < maxPendingBodyBytes && s.outputsHaveRoom()
}

func (f *Flow) scheduleStage(s *StageState) {
	if f.isolated != nil && s.Spec.Func != nil {
		f.startExclusive(s)
		return
	}
	f.startIsolated(s)
	for f.canStart(s) {
		w, h := s.nextPinned()
		if w == nil {
			if w = f.nextWork(s); w == nil {
				return
			}
			taken := false
			if h, taken = s.chooseWorker(w); taken {
				continue
			}
		}
		if !f.filterStale(s, w) {
			s.leaveKey(w)
			continue
		}
		if w.losses >= s.Spec.Losses {
			f.giveUp(s, w)
			continue
		}
		if s.needsIsolation(w) {
			f.isolated = &isolatedRetry{stage: s, work: w}
			f.startExclusive(s)
			return
		}
		if s.needsOwnWorker(w) {
			h.isolated = w
			f.startIsolated(s)
			continue
		}
		f.start(s, w, h)
	}
}

// nextWork is the next to hand out: what was put aside, or what comes out of the streams.
func (f *Flow) nextWork(s *StageState) *Work {
	for {
		if w, ok := s.runnable.pop(); ok {
			return w
		}
		if s.parked >= maxParked {
			return nil
		}
		e := f.nextEntry(s)
		if e == nil {
			return nil
		}
		if w := f.accept(s, e); w != nil {
			return w
		}
	}
}

// take1 takes an item out of the stage's streams: of the highest priority, and of several streams of the one whose
// item is the oldest.
func (f *Flow) nextEntry(s *StageState) *Entry {
	var best *Lane
	for _, in := range s.inputs {
		for p := len(in.lanes) - 1; p >= 0; p-- {
			l := in.lanes[p]
			if l.ready.len() == 0 {
				continue
			}
			if best == nil || p > best.Priority || p == best.Priority && l.ready.front().Stored.Before(best.ready.front().Stored) {
				best = l
			}
			break
		}
	}
	if best == nil {
		return nil
	}
	e, _ := best.pop()
	return e
}

// accept brings an item into the stage. It returns work if there is some now.
func (f *Flow) accept(s *StageState, e *Entry) *Work {
	switch in := e.Lane.stream; {
	case e.aborted:
		s.aborted++
		f.enqueue(&change{done: []*Entry{e}})
		return nil
	case in.isExpired(&e.Item, f.Now):
		in.expired++
		f.enqueue(&change{done: []*Entry{e}})
		return nil
	case s.Spec.Rounds > 0 && e.Rounds >= s.Spec.Rounds:
		s.dead++
		why := Failure{At: f.Now, Code: bus.CodeRefused, Error: "it has come through here " + strconv.Itoa(e.Rounds) + " times (rounds)"}
		f.enqueue(&change{done: []*Entry{e}, dead: []*DeadLetter{newDeadLetter(s, e, "rounds", []Failure{why}, f.Now)}})
		return nil
	}
	if s.groups == nil {
		w := &Work{Entries: []*Entry{e}, key: e.Key}
		w.restoreRetries()
		if !s.enterKey(w) {
			return nil
		}
		return w
	}
	if s.groups.isLate(e, f.Now) {
		f.handleLate(s, e)
		return nil
	}
	if !f.filterStale(s, &Work{Entries: []*Entry{e}}) {
		return nil
	}
	if g := s.groups.add(e, f.Now); g != nil {
		return workOf(g)
	}
	return nil
}

func (f *Flow) handleLate(s *StageState, e *Entry) {
	e.Lane.stream.late++
	c := &change{done: []*Entry{e}}
	if s.Spec.Group.Late != "" {
		c.puts = append(c.puts, f.newEntry(f.StreamNamed(s.Spec.Group.Late), e.Item))
	}
	f.enqueue(c)
}

func (f *Flow) start(s *StageState, w *Work, h *WorkerSlots) {
	f.nextTask++
	t := &Task{Work: w, Id: f.nextTask, Stage: s, Worker: h, started: f.Now, version: f.Version}
	for _, e := range w.Entries {
		e.Attempt = len(w.failures) + w.losses + 1
	}
	h.Running++
	s.running[t.Id] = t
	for _, out := range s.blockingOutputs {
		out.reservedOutputs++
	}
	if s.mayHaveCrashedEngine(w) {
		f.enqueue(&change{starts: []*Task{t}})
		return
	}
	f.Starts = append(f.Starts, t)
}

// next is when pump has something to do by itself; zero: not for now.
func (f *Flow) NextWake() time.Time {
	var t time.Time
	sooner := func(at time.Time) {
		if !at.IsZero() && (t.IsZero() || at.Before(t)) {
			t = at
		}
	}
	for _, s := range f.Stages {
		sooner(s.nextWake())
	}
	for _, s := range f.streams {
		for _, l := range s.lanes {
			if s.spec.Age > 0 && l.ready.len() > 0 {
				sooner(l.ready.front().Stored.Add(s.spec.Age + time.Millisecond))
			}
		}
	}
	return t
}

// idle says that nothing is in hand, waits or is to be stored.
func (f *Flow) Idle() bool {
	if f.queue.len() > 0 {
		return false
	}
	for _, s := range f.streams {
		if !s.spec.Sink && s.items > 0 || s.waiting.len() > 0 {
			return false
		}
	}
	return f.RunningTasks() == 0
}

// inHand is how many tasks workers have.
func (f *Flow) RunningTasks() int {
	n := 0
	for _, s := range f.Stages {
		n += len(s.running)
	}
	return n
}
