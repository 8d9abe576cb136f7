package pipeline

import (
	"slices"
	"strconv"
	"time"

	"troupe/bus"
)

// flow decides: what is handed to whom, what is stored, what is dropped. It is values alone: time comes in with each
// event, what is to be done goes out as effects, and one goroutine owns it. The loop around it (engine.go) carries the
// effects out and comes back with events.
type flow struct {
	streams []*stream
	stages  []*stage
	version Version
	now     time.Time
	window  window
	maxBody int
	apart   int // bodies of so many bytes are stored apart from their items; 0: none

	sources     map[string]*source
	queue       fifo[*change] // what waits to be committed, in order
	queued      int           // messages in it
	queuedBytes int64
	heavy       int64  // bytes of bodies that are stored apart and wait
	number      uint64 // of the last commit that was built
	scan        uint64 // of the queue
	nextTask    uint64
	stopped     bool // nothing is handed out any more
	closed      bool // and nothing taken in
	final       bool // the record is the last of this engine
	taken       map[uint64]*taking
	alone       *loner // nil: nobody
	dead        *shelf // of the bodies of dead letters
	endings     *endings
	moved       uint64                  // see lettersRecord
	retired     map[string]streamRecord // of the record that it began with

	starts  []*task        // effects: hand these out,
	cancels []cancellation // take these back,
	bodies  []*stash       // store these apart,
	loads   []load         // read these,
	answers []answer       // and tell who waits
}

// source is who puts: the last of its puts that was accepted, and the last that is stored.
type source struct {
	accepted, stored uint64
	used             time.Time
}

// change is what is stored together: all of it, or nothing.
type change struct {
	done    []*entry // these are dealt with
	puts    []*entry // these are new
	dead    []*DeadLetter
	tried   []*entry  // something went wrong with these
	starts  []*task   // these are handed out when it is stored
	revived []revival // dead letters that are so no more,
	freed   []uint64  // and where their bodies lay
	moved   uint64    // up to here in the log, letters without a number are among its own now
	closed  *closing
	advance Version
	source  string
	seq     uint64
	tokens  []any // told when it is stored
	pending int   // bodies that are to be stored before it
	ordered bool  // it ends items of an ordered stage
	behind  bool  // it is stored after all that were there before it
}

// closing is a group that was handed over; what comes of it later is late.
type closing struct {
	stage, group string
	left         int
	remember     time.Duration
}

// revival is a dead letter that is retried or dropped.
type revival struct {
	subject string
	ordinal uint64
}

type (
	cancellation struct {
		task  *task
		abort bool // it may hand back what it has
	}
	load struct {
		lane     *lane
		from, to uint64
		after    uint64   // where in the log to begin
		bytes    int64    // so many are enough
		done     ordinals // these are not wanted
	}
	answer struct {
		token any
		err   error
	}
)

func newFlow(spec Spec, rec *record) *flow {
	spec = spec.withDefaults()
	f := &flow{sources: map[string]*source{}, window: defaultWindow, maxBody: MaxBody, taken: map[uint64]*taking{}, dead: &shelf{name: deadShelf, bytes: 64 << 20},
		endings: newEndings(), retired: map[string]streamRecord{}}
	for _, s := range spec.Streams {
		f.streams = append(f.streams, newStream(s))
		f.dead.bytes += s.Bytes
	}
	for _, s := range spec.Stages {
		f.stages = append(f.stages, f.wire(newStage(s)))
	}
	for _, cycle := range spec.cycles() {
		f.unblock(cycle)
	}
	if rec != nil {
		f.restore(rec)
	}
	return f
}

func (f *flow) wire(s *stage) *stage {
	for _, name := range s.spec.In {
		s.in = append(s.in, f.streamOf(name))
	}
	for _, name := range s.spec.Out {
		out := f.streamOf(name)
		s.out = append(s.out, out)
		if out.spec.Full != DropOldest {
			s.blocks = append(s.blocks, out)
		}
	}
	return s
}

// unblock keeps the stages of a cycle from waiting for each other for ever: within it, a full stream holds nobody up.
func (f *flow) unblock(cycle []StageSpec) {
	for _, spec := range cycle {
		s := f.stageOf(spec.Name)
		s.blocks = slices.DeleteFunc(s.blocks, func(out *stream) bool {
			return slices.ContainsFunc(cycle, func(next StageSpec) bool { return slices.Contains(next.In, out.spec.Name) })
		})
	}
}

func (f *flow) streamOf(name string) *stream {
	i := slices.IndexFunc(f.streams, func(s *stream) bool { return s.spec.Name == name })
	if i < 0 {
		return nil
	}
	return f.streams[i]
}

func (f *flow) stageOf(name string) *stage {
	i := slices.IndexFunc(f.stages, func(s *stage) bool { return s.spec.Name == name })
	if i < 0 {
		return nil
	}
	return f.stages[i]
}

// enqueue puts a change in line to be stored. What it deals with no longer counts against the bounds.
func (f *flow) enqueue(c *change) {
	for _, e := range c.done {
		e.lane.stream.uncount(&e.Item)
	}
	for _, e := range c.puts {
		e.stash = f.putApart(c, e.Body, e.lane.shelf)
	}
	for _, d := range c.dead {
		if d.stash == nil { // one that is moved has its body where it was
			d.stash = f.putApart(c, d.Body, f.dead)
		}
	}
	f.queue.push(c)
	f.queued += c.messages()
	f.queuedBytes += c.size()
}

// putApart has a large body stored ahead of the change that names it; nil: it is not large.
func (f *flow) putApart(c *change, body []byte, on *shelf) *stash {
	if f.apart == 0 || len(body) < f.apart {
		return nil
	}
	b := &stash{shelf: on, body: body, waits: c}
	c.pending++
	f.heavy += int64(len(body))
	f.bodies = append(f.bodies, b)
	return b
}

// messages is how many the change needs in the log.
func (c *change) messages() int {
	n := len(c.puts) + len(c.dead) + 2*len(c.revived) + len(c.tried)
	for _, e := range c.done {
		if e.tries != nil {
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
		if n += weight(&e.Item); e.stash != nil {
			n -= int64(len(e.Body))
		}
	}
	for _, d := range c.dead {
		if n += 1024; d.stash == nil {
			n += int64(len(d.Body))
		}
	}
	return n
}

// bodiesStored takes in that bodies are stored apart.
func (f *flow) bodiesStored(bodies []*stash) {
	for _, b := range bodies {
		b.waits.pending--
		f.heavy -= int64(len(b.body))
		b.waits, b.body = nil, nil
	}
}

// put takes items from outside, or has them wait, or refuses them.
func (f *flow) put(p *put) {
	if err := p.stream.check(p.items, f.maxBody); err != nil {
		f.answers = append(f.answers, answer{p.token, err})
		return
	}
	if f.known(p) {
		return
	}
	if f.closed {
		f.answers = append(f.answers, answer{p.token, bus.Errorf(bus.CodeClosed, "the pipeline takes nothing more: it is being drained or shut down")})
		return
	}
	for i := range p.items {
		p.bytes += weight(&p.items[i])
	}
	if p.stream.waiting.len() > 0 || !f.admit(p) {
		f.wait(p)
	}
}

// known answers a repetition: when it is stored, or with what stores it.
func (f *flow) known(p *put) bool {
	src := f.sources[p.source]
	if p.source == "" {
		return false
	}
	if src == nil || p.seq > src.accepted {
		return f.again(p)
	}
	src.used = f.now
	if p.seq <= src.stored {
		f.answers = append(f.answers, answer{p.token, nil})
	} else {
		f.enqueue(&change{tokens: []any{p.token}, behind: true}) // it is in the queue before this one
	}
	return true
}

// again finds a put that is in line already: who asks last is told.
func (f *flow) again(p *put) bool {
	for _, w := range p.stream.waiting.all() {
		if w.source == p.source && w.seq == p.seq {
			w.token = p.token
			return true
		}
	}
	return false
}

// maxWaiting bounds the line before a stream that is full.
const maxWaiting = 4096

func (f *flow) wait(p *put) {
	s := p.stream
	switch {
	case s.spec.Full == Refuse:
		f.answers = append(f.answers, answer{p.token, bus.Errorf(bus.CodeBusy, "stream %s is full: %d of %d items, %d of %d bytes", s.spec.Name, s.items, s.spec.Items, s.bytes, s.spec.Bytes)})
	case s.waiting.len() >= maxWaiting:
		f.answers = append(f.answers, answer{p.token, bus.Errorf(bus.CodeBusy, "stream %s is full, and %d puts wait before it", s.spec.Name, maxWaiting)})
	default:
		s.waiting.push(p)
	}
}

// admit accepts a put if there is room, or can be made.
func (f *flow) admit(p *put) bool {
	c := &change{source: p.source, seq: p.seq}
	if p.token != nil {
		c.tokens = []any{p.token}
	}
	if p.stream.spec.Full == DropOldest {
		f.makeRoom(p.stream, len(p.items), p.bytes, c)
	}
	if !p.stream.fits(len(p.items), p.bytes) && len(c.done) == 0 {
		return false
	}
	for _, it := range p.items {
		if !it.Stamped {
			it.Version, it.Stamped = f.version, true
		}
		c.puts = append(c.puts, f.move(p.stream, it))
	}
	if p.source != "" {
		src := f.sources[p.source]
		if src == nil {
			src = &source{}
			f.sources[p.source] = src
		}
		src.accepted, src.used = max(src.accepted, p.seq), f.now
	}
	f.enqueue(c)
	return true
}

// move makes an item an entry of the stream, which counts it from now on. Its number is given when it is committed.
func (f *flow) move(to *stream, it Item) *entry {
	it.Stored, it.Stream, it.Attempt, it.Stale = f.now, to.spec.Name, 0, false
	it.Priority = min(it.Priority, to.spec.Priorities-1)
	to.count(&it)
	return &entry{Item: it, lane: to.lanes[it.Priority]}
}

// makeRoom drops the oldest items that nobody has in hand.
func (f *flow) makeRoom(s *stream, items int, bytes int64, c *change) {
	var freed int
	var freedBytes int64
	for _, e := range c.done {
		if e.lane.stream == s {
			freed, freedBytes = freed+1, freedBytes+weight(&e.Item)
		}
	}
	for !s.fits(items-freed, bytes-freedBytes) {
		e, ok := s.oldestReady()
		if !ok {
			return
		}
		s.dropped++
		c.done = append(c.done, e)
		freed, freedBytes = freed+1, freedBytes+weight(&e.Item)
	}
}

// withdraw gives up puts that still wait.
func (f *flow) withdraw(token any) {
	for _, s := range f.streams {
		s.waiting.remove(func(p *put) bool { return p.token == token })
	}
}

// pump hands out what can be handed out, and asks for what should be read.
func (f *flow) pump() {
	for _, s := range f.streams {
		for s.waiting.len() > 0 && f.admit(s.waiting.front()) {
			s.waiting.pop()
		}
		f.age(s)
	}
	for _, s := range f.stages {
		s.wake(f.now)
		f.schedule(s)
	}
	for _, s := range f.streams {
		for _, l := range s.lanes {
			if from, to, ok := l.want(f.window); ok {
				l.loading = true
				f.loads = append(f.loads, load{lane: l, from: from, to: to, after: l.lastSeq, bytes: f.window.bytes - l.readyBytes, done: l.done.clone()})
			}
		}
	}
}

// age drops what has been too long in a stream.
func (f *flow) age(s *stream) {
	if s.spec.Age == 0 {
		return
	}
	for _, l := range s.lanes {
		for l.ready.len() > 0 && s.tooOld(&l.ready.front().Item, f.now) {
			e, _ := l.pop()
			s.expired++
			f.enqueue(&change{done: []*entry{e}})
		}
	}
}

// maxQueued stops handing out while so many messages wait to be stored: the log is slower than the handlers.
const maxQueued = 8192

// maxHeavy is the same for bodies that are stored apart.
const maxHeavy = 64 << 20

// open says that the stage may hand something out.
func (f *flow) open(s *stage) bool { return f.mayStart(s) && s.hands.free() > 0 && s.soloist() == nil }

// mayStart is the same without a worker that has room.
func (f *flow) mayStart(s *stage) bool {
	return !s.paused && !f.stopped && f.queued < maxQueued && f.heavy < maxHeavy && s.clear()
}

func (f *flow) schedule(s *stage) {
	if f.alone != nil && s.spec.Func != nil {
		f.runAlone(s)
		return
	}
	f.startSolos(s)
	for f.open(s) {
		w, h := s.fromQueues()
		if w == nil {
			if w = f.nextWork(s); w == nil {
				return
			}
			taken := false
			if h, taken = s.choose(w); taken {
				continue
			}
		}
		if !f.sift(s, w) {
			s.leave(w)
			continue
		}
		if w.losses >= s.spec.Losses {
			f.giveUp(s, w)
			continue
		}
		if s.lastChance(w) {
			f.alone = &loner{stage: s, work: w}
			f.runAlone(s)
			return
		}
		if s.isSuspect(w) {
			h.solo = w
			f.startSolos(s)
			continue
		}
		f.start(s, w, h)
	}
}

// nextWork is the next to hand out: what was put aside, or what comes out of the streams.
func (f *flow) nextWork(s *stage) *work {
	for {
		if w, ok := s.runnable.pop(); ok {
			return w
		}
		if s.held >= maxHeld {
			return nil
		}
		e := f.take1(s)
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
func (f *flow) take1(s *stage) *entry {
	var best *lane
	for _, in := range s.in {
		for p := len(in.lanes) - 1; p >= 0; p-- {
			l := in.lanes[p]
			if l.ready.len() == 0 {
				continue
			}
			if best == nil || p > best.priority || p == best.priority && l.ready.front().Stored.Before(best.ready.front().Stored) {
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
func (f *flow) accept(s *stage, e *entry) *work {
	switch in := e.lane.stream; {
	case e.aborted:
		s.aborted++
		f.enqueue(&change{done: []*entry{e}})
		return nil
	case in.tooOld(&e.Item, f.now):
		in.expired++
		f.enqueue(&change{done: []*entry{e}})
		return nil
	case s.spec.Rounds > 0 && e.Rounds >= s.spec.Rounds:
		s.dead++
		why := Failure{At: f.now, Code: bus.CodeRefused, Error: "it has come through here " + strconv.Itoa(e.Rounds) + " times (rounds)"}
		f.enqueue(&change{done: []*entry{e}, dead: []*DeadLetter{letter(s, e, "rounds", []Failure{why}, f.now)}})
		return nil
	}
	if s.groups == nil {
		w := &work{entries: []*entry{e}, key: e.Key}
		w.resume()
		if !s.admit(w) {
			return nil
		}
		return w
	}
	if s.groups.isLate(e, f.now) {
		f.late(s, e)
		return nil
	}
	if !f.sift(s, &work{entries: []*entry{e}}) {
		return nil
	}
	if g := s.groups.add(e, f.now); g != nil {
		return workOf(g)
	}
	return nil
}

func (f *flow) late(s *stage, e *entry) {
	e.lane.stream.late++
	c := &change{done: []*entry{e}}
	if s.spec.Group.Late != "" {
		c.puts = append(c.puts, f.move(f.streamOf(s.spec.Group.Late), e.Item))
	}
	f.enqueue(c)
}

func (f *flow) start(s *stage, w *work, h *hand) {
	f.nextTask++
	t := &task{work: w, id: f.nextTask, stage: s, hand: h, started: f.now, version: f.version}
	for _, e := range w.entries {
		e.Attempt = len(w.failures) + w.losses + 1
	}
	h.running++
	s.running[t.id] = t
	for _, out := range s.blocks {
		out.reserved++
	}
	if s.suspects(w) {
		f.enqueue(&change{starts: []*task{t}})
		return
	}
	f.starts = append(f.starts, t)
}

// next is when pump has something to do by itself; zero: not for now.
func (f *flow) next() time.Time {
	var t time.Time
	sooner := func(at time.Time) {
		if !at.IsZero() && (t.IsZero() || at.Before(t)) {
			t = at
		}
	}
	for _, s := range f.stages {
		sooner(s.next())
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
func (f *flow) idle() bool {
	if f.queue.len() > 0 {
		return false
	}
	for _, s := range f.streams {
		if !s.spec.Sink && s.items > 0 || s.waiting.len() > 0 {
			return false
		}
	}
	return f.inHand() == 0
}

// inHand is how many tasks workers have.
func (f *flow) inHand() int {
	n := 0
	for _, s := range f.stages {
		n += len(s.running)
	}
	return n
}
