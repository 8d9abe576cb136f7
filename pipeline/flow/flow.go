package flow

import (
	"iter"
	"slices"
	"strconv"
	"time"

	"troupe/bus"
	"troupe/pipeline/spec"
)

// Flow decides which task a worker gets, what is committed and what is dropped. It does no I/O and reads no clock: the
// engine sets Now, reports events by calling methods, and carries out the effects that TakeEffects returns. One
// goroutine owns a Flow and everything reachable from it.
type Flow struct {
	streams      []*StreamState
	Stages       []*StageState
	Version      spec.Version
	Now          time.Time
	sampled      time.Time // last update of the rates
	window       memoryWindow
	maxBody      int
	LargeBodyMin int // bodies of at least this many bytes go to a body stream; 0: none

	sources          map[string]*producerState
	queue            fifo[*change] // changes to commit, in order
	queued           int           // messages in queue
	queuedBytes      int64
	pendingBodyBytes int64  // bytes of large bodies that are not stored yet
	CommitNumber     uint64 // number of the last commit that was built
	scanNumber       uint64 // number of the current scan of queue, see commitFilter
	nextTask         uint64
	stopped          bool // no new tasks
	IntakeClosed     bool // no new puts
	finalEnqueued    bool // the last checkpoint of this engine is in the queue
	taken            map[uint64]*takenItems
	isolated         *isolatedRetry // work that has to run while no other function runs; nil: none
	DeadBodies       *BodyStream    // bodies of dead letters
	Resolved         *ResolvedLetters
	renumberedUpTo   uint64                      // see LetterCheckpoint
	retired          map[string]StreamCheckpoint // streams of the first checkpoint, declared or not

	Effects
	spare Effects // slices of the last TakeEffects, for reuse
}

// Effects is what the engine has to do.
type Effects struct {
	Starts  []*Task        // give these tasks to their workers
	Cancels []Cancellation // cancel these tasks
	Bodies  []*PendingBody // store these bodies
	Reads   []ReadRequest  // read these items from the log
	Replies []Reply        // answer these requests
}

// TakeEffects returns the effects since the last call. They are valid until the next call.
func (f *Flow) TakeEffects() Effects {
	clear(f.spare.Starts)
	clear(f.spare.Bodies)
	clear(f.spare.Replies)
	out := f.Effects
	f.Effects = Effects{f.spare.Starts[:0], f.spare.Cancels[:0], f.spare.Bodies[:0], f.spare.Reads[:0], f.spare.Replies[:0]}
	f.spare = out
	return out
}

// Lanes iterates over the lanes of all streams.
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

// HasQueued reports whether changes wait for a commit.
func (f *Flow) HasQueued() bool { return f.queue.len() > 0 }

func (f *Flow) Backlog() (messages int, bytes int64) { return f.queued, f.queuedBytes }

// WasAccepted reports whether a put of this producer is committed or queued.
func (f *Flow) WasAccepted(name string, seq uint64) bool {
	src := f.sources[name]
	return src != nil && seq <= src.accepted
}

// RestoreSource sets the last committed put of a producer, as read from the log.
func (f *Flow) RestoreSource(name string, seq uint64) {
	f.sources[name] = &producerState{accepted: seq, stored: seq, used: f.Now}
}

// CheckSize rejects an item that could never be stored in the stream; size is the length of its body.
func (f *Flow) CheckSize(s *StreamState, it *spec.Item, size int) error {
	return s.checkSize(it, size, f.maxBody)
}

// producerState is the last accepted and the last committed put of a producer.
type producerState struct {
	accepted, stored uint64
	used             time.Time
}

// change is a set of writes that are committed together or not at all.
type change struct {
	done           []*Entry // completed items
	puts           []*Entry // new items
	dead           []*DeadLetter
	retried        []*Entry         // items whose retry state is written
	starts         []*Task          // tasks to start once the change is committed
	resolved       []ResolvedLetter // dead letters that were retried or dropped
	freedBodies    []uint64         // sequences of their bodies
	renumberedUpTo uint64           // dead letters without an ordinal up to this sequence have been rewritten with one
	closed         *ClosedGroup
	advance        spec.Version
	source         string
	seq            uint64
	tokens         []any // answered when the change is committed
	pendingBodies  int   // bodies to be stored before the commit
	ordered        bool  // it completes items of an ordered stage
	afterAll       bool  // it is committed after every change that was queued before it
}

// ClosedGroup is a group that was handed over before all of its items arrived: items that arrive later are late.
type ClosedGroup struct {
	Stage, Group string
	Missing      int
	Remember     time.Duration
}

// ResolvedLetter is a dead letter that was retried or dropped.
type ResolvedLetter struct {
	Subject string
	ordinal uint64
}

type (
	Cancellation struct {
		Task  *Task
		Abort bool // the task may return a partial result
	}
	ReadRequest struct {
		Lane     *Lane
		From, To uint64
		AfterSeq uint64     // read after this sequence of the log
		MaxBytes int64      // stop when this many bytes were read
		Done     OrdinalSet // ordinals to skip
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

// exemptCycle removes the streams of a cycle from the streams that block its stages: stages that wait for each other
// would never run.
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

// enqueue adds a change to the queue. Its completed items stop counting against the bounds of their streams.
func (f *Flow) enqueue(c *change) {
	for _, e := range c.done {
		e.Lane.stream.uncount(&e.Item)
	}
	for _, e := range c.puts {
		e.BodyRef = f.storeSeparately(c, e.Body, e.Lane.Bodies)
	}
	for _, d := range c.dead {
		if d.BodyRef == nil { // a rewritten dead letter keeps its stored body
			d.BodyRef = f.storeSeparately(c, d.Body, f.DeadBodies)
		}
	}
	f.queue.push(c)
	f.queued += c.messages()
	f.queuedBytes += c.size()
}

// storeSeparately has a large body stored before the change that refers to it is committed; nil: the body is small.
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

// messages is the number of messages the change needs in the log.
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

// BodiesStored is called when large bodies are stored.
func (f *Flow) BodiesStored(bodies []*PendingBody) {
	for _, b := range bodies {
		b.change.pendingBodies--
		f.pendingBodyBytes -= int64(len(b.Data))
		b.change, b.Data = nil, nil
	}
}

// Put accepts, queues or rejects items.
func (f *Flow) Put(p *Put) {
	if err := p.Stream.check(p.Items, f.maxBody); err != nil {
		f.Replies = append(f.Replies, Reply{p.Token, err})
		return
	}
	if f.isRepeat(p) {
		return
	}
	if f.IntakeClosed {
		f.Replies = append(f.Replies, Reply{p.Token, bus.Errorf(bus.CodeClosed, "the pipeline accepts no items: it is being drained or shut down")})
		return
	}
	for i := range p.Items {
		p.bytes += Weight(&p.Items[i])
	}
	if p.Stream.waiting.len() > 0 || !f.admit(p) {
		f.enqueuePut(p)
	}
}

// isRepeat reports whether the put was accepted before, and then answers it, at once or when the first one is
// committed.
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
		f.enqueue(&change{tokens: []any{p.Token}, afterAll: true}) // the first one is ahead of this change in the queue
	}
	return true
}

// joinWaiting finds the same put in the queue of its stream; the last request gets the answer.
func (f *Flow) joinWaiting(p *Put) bool {
	for _, w := range p.Stream.waiting.all() {
		if w.Source == p.Source && w.Seq == p.Seq {
			w.Token = p.Token
			return true
		}
	}
	return false
}

// maxWaiting bounds the puts that wait for room in a stream.
const maxWaiting = 4096

func (f *Flow) enqueuePut(p *Put) {
	s := p.Stream
	switch {
	case s.spec.Full == spec.Refuse:
		f.Replies = append(f.Replies, Reply{p.Token, bus.Errorf(bus.CodeBusy, "stream %s is full: %d of %d items, %d of %d bytes", s.spec.Name, s.items, s.spec.Items, s.bytes, s.spec.Bytes)})
	case s.waiting.len() >= maxWaiting:
		f.Replies = append(f.Replies, Reply{p.Token, bus.Errorf(bus.CodeBusy, "stream %s is full, and %d puts wait for room", s.spec.Name, maxWaiting)})
	default:
		s.waiting.push(p)
	}
}

// admit accepts a put if the stream has room, or room can be made.
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

// newEntry makes the item an entry that counts against the bounds of the stream. It gets its ordinal when it is
// committed.
func (f *Flow) newEntry(to *StreamState, it spec.Item) *Entry {
	it.Stored, it.Stream, it.Attempt, it.Stale = f.Now, to.spec.Name, 0, false
	it.Priority = min(it.Priority, to.spec.Priorities-1)
	to.count(&it)
	return &Entry{Item: it, Lane: to.lanes[it.Priority]}
}

// dropOldest drops the oldest items that are not running until the new ones fit.
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

// WithdrawPut removes puts that still wait for room.
func (f *Flow) WithdrawPut(token any) {
	for _, s := range f.streams {
		s.waiting.remove(func(p *Put) bool { return p.Token == token })
	}
}

// Schedule admits waiting puts, starts tasks, and requests reads of items that now fit into memory.
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

// expire drops items that exceed the age bound of the stream.
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

// maxQueued bounds the messages that wait for a commit: beyond it no task is started, because the log is slower than
// the handlers.
const maxQueued = 8192

// maxPendingBodyBytes is the same bound for large bodies.
const maxPendingBodyBytes = 64 << 20

// canStart reports whether the stage may start a task now.
func (f *Flow) canStart(s *StageState) bool {
	return f.mayStart(s) && s.Workers.freeSlots() > 0 && s.exclusiveWork() == nil
}

// mayStart is canStart without the check for a free worker.
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
		w, slots := s.nextPinned()
		if w == nil {
			if w = f.nextWork(s); w == nil {
				return
			}
			taken := false
			if slots, taken = s.chooseWorker(w); taken {
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
			slots.isolated = w
			f.startIsolated(s)
			continue
		}
		f.start(s, w, slots)
	}
}

// nextWork returns the next work of the stage: requeued work first, then new items.
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

// nextEntry takes the next item from the stage's input streams: highest priority first, then the oldest.
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

// accept brings an item into the stage. It returns work that is complete now, or nil.
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
		why := Failure{At: f.Now, Code: bus.CodeRefused, Error: "it has passed this stage " + strconv.Itoa(e.Rounds) + " times (rounds)"}
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

func (f *Flow) start(s *StageState, w *Work, slots *WorkerSlots) {
	f.nextTask++
	t := &Task{Work: w, ID: f.nextTask, Stage: s, Worker: slots, started: f.Now, version: f.Version}
	for _, e := range w.Entries {
		e.Attempt = len(w.failures) + w.losses + 1
	}
	slots.Running++
	s.running[t.ID] = t
	for _, out := range s.blockingOutputs {
		out.reservedOutputs++
	}
	if s.mayHaveCrashedEngine(w) {
		f.enqueue(&change{starts: []*Task{t}})
		return
	}
	f.Starts = append(f.Starts, t)
}

// NextWake is when Schedule has to be called without an event; zero: not for now.
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

// Idle reports whether nothing is running, waiting or queued.
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

// RunningTasks is the number of tasks that workers have.
func (f *Flow) RunningTasks() int {
	n := 0
	for _, s := range f.Stages {
		n += len(s.running)
	}
	return n
}
