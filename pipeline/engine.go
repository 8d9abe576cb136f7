package pipeline

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"troupe/bus"
)

// Pipeline is a pipeline that runs in this process. It is safe for concurrent use.
type Pipeline struct {
	cfg     Config
	spec    Spec
	at      bus.Pipeline
	journal *journal // written to by the writer, read by the readers
	inbox   *inbox
	sub     *nats.Subscription

	ctx      context.Context // of everything in the background
	cancel   context.CancelCauseFunc
	group    sync.WaitGroup
	doneCh   chan struct{} // closed when the loop has ended
	commitCh chan *commit
	full     atomic.Pointer[bus.Error] // the store is, and a commit waits for it: no more is taken in; the writer's to set
	written  uint64                    // the writer's: where the log ends
	loadCh   chan load

	// The loop owns what follows.
	flow     *flow
	workers  map[*hand]worker
	bodies   map[*shelf]*bodyWriter
	inFlight int      // commits
	closing  bool     // it is to end when nothing is in hand and all is stored
	waiters  []waiter // for a state of affairs
	rates    map[string]*rate
	began    time.Time
	sampled  time.Time
	dead     int // letters in the log
	report   report

	garbage *garbage // for the purge loop

	pulls pulls
	loans loans

	err error // why it ended; set before doneCh is closed
}

// waiter waits until the flow is as it wants.
type waiter struct {
	until func(p *Pipeline) bool
	ch    chan struct{}
}

// Open starts a pipeline, or goes on with it where it was.
func Open(ctx context.Context, cfg Config, spec Spec) (*Pipeline, error) {
	cfg = cfg.withDefaults()
	if err := errors.Join(cfg.validate(), spec.Check()); err != nil {
		return nil, err
	}
	p := &Pipeline{
		cfg: cfg, spec: spec.withDefaults(), at: bus.Pipeline{Namespace: cfg.Namespace, Name: spec.Name}, inbox: newInbox(),
		doneCh: make(chan struct{}), commitCh: make(chan *commit, maxFlights), loadCh: make(chan load, 256),
		workers: map[*hand]worker{}, bodies: map[*shelf]*bodyWriter{}, rates: map[string]*rate{}, garbage: newGarbage(), began: time.Now(),
		pulls: pulls{under: map[string]*pull{}, roomCh: map[string]chan struct{}{}}, loans: loans{byID: map[uint64]*lending{}},
	}
	if err := p.alone(ctx); err != nil {
		return nil, err
	}
	p.ctx, p.cancel = context.WithCancelCause(context.Background())
	if err := p.open(ctx); err != nil {
		p.cancel(err)
		p.group.Wait()
		return nil, err
	}
	return p, nil
}

// alone refuses to take a pipeline away from a process that runs it.
func (p *Pipeline) alone(ctx context.Context) error {
	if p.cfg.TakeOver {
		return nil
	}
	st, err := (&Client{b: p.cfg.Bus, at: p.at}).Status(ctx)
	if err == nil {
		return bus.Errorf(bus.CodeExists, "pipeline %s runs already, in %s; stop it there, or take it over", p.at.Name, st.By)
	}
	return nil
}

func (p *Pipeline) open(ctx context.Context) (err error) {
	var rec *record
	var last uint64
	if p.journal, rec, last, err = openJournal(ctx, p.cfg.Bus, p.at, p.spec, p.cfg.By); err != nil {
		return err
	}
	p.flow = newFlow(p.spec, rec)
	p.flow.apart = bodyApart
	p.flow.now = time.Now()
	if err := errors.Join(p.recallTries(ctx), p.recallEndings(ctx, rec)); err != nil {
		return err
	}
	if err := p.makeRoom(ctx, rec); err != nil {
		return err
	}
	p.flow.crashed(rec)
	p.written = last
	at := last + 1
	if err := p.commitNow(ctx); err != nil { // from here on the engine before us is refused
		return err
	}
	if err := p.recallLetters(ctx); err != nil {
		return err
	}
	for _, s := range p.flow.streams {
		for _, l := range s.lanes {
			body, err := p.journal.lastBody(ctx, l.shelf)
			if err != nil {
				return err
			}
			l.marks.push(mark{l.head, at, body})
		}
	}
	if err := p.recall(ctx); err != nil {
		return err
	}
	p.letGo(nil)
	if err := p.staff(); err != nil {
		return err
	}
	if err := p.listen(); err != nil {
		return err
	}
	p.group.Go(bus.Guard(p.writeLoop))
	p.group.Go(bus.Guard(p.readLoop))
	p.group.Go(bus.Guard(p.purgeLoop))
	bus.Go(p.loop)
	return nil
}

// commitNow stores what waits, and a record in any case, before the loops begin.
func (p *Pipeline) commitNow(ctx context.Context) error {
	for {
		c := p.flow.build()
		first, end, err := p.journal.take(ctx, c, p.written)
		if err != nil {
			return err
		}
		p.flow.landed(c, first)
		if p.written = end; p.flow.queue.len() == 0 {
			return nil
		}
	}
}

// loop applies events, decides, and carries out. It ends with the pipeline.
func (p *Pipeline) loop() {
	defer close(p.doneCh)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		p.flow.now = time.Now()
		for _, e := range p.inbox.take() {
			e.apply(p)
		}
		p.flow.pump()
		p.carryOut()
		p.sample()
		p.tellDead(false)
		if p.over() {
			p.tellDead(true)
			return
		}
		wait := time.Second // and at least that often, for the rates
		if at := p.flow.next(); !at.IsZero() {
			wait = min(wait, max(time.Until(at), time.Millisecond))
		}
		timer.Reset(wait)
		select {
		case <-p.inbox.wakeCh:
		case <-timer.C:
		case <-p.ctx.Done():
			p.err = context.Cause(p.ctx)
			p.abandon()
			return
		}
	}
}

// over says whether the loop may end: it is closing, and all that was done is stored.
func (p *Pipeline) over() bool {
	left := p.waiters[:0]
	for _, w := range p.waiters {
		if w.until(p) {
			close(w.ch)
			continue
		}
		left = append(left, w)
	}
	p.waiters = left
	if !p.closing || p.flow.inHand() > 0 || p.flow.queue.len() > 0 || p.inFlight > 0 {
		return false
	}
	if p.flow.final {
		return true
	}
	p.flow.final = true // and the log says so
	p.flow.enqueue(&change{})
	p.inbox.push(eventFunc(func(*Pipeline) {}))
	return false
}

// abandon tells everybody who waits that nothing will come.
func (p *Pipeline) abandon() {
	why := bus.Errorf(bus.CodeClosed, "pipeline %s has ended: %w", p.at.Name, p.err)
	for _, e := range p.inbox.take() {
		if put, ok := e.(*putEvent); ok {
			put.reply(why)
		}
	}
	p.flow.refuse()
	p.carryOut()
	for p.flow.queue.len() > 0 {
		c, _ := p.flow.queue.pop()
		for _, token := range c.tokens {
			token.(replier).reply(why)
		}
	}
}

// replier is who waits for an answer. It must not block.
type replier interface{ reply(err error) }

// carryOut does what the flow decided.
func (p *Pipeline) carryOut() {
	f := p.flow
	for _, t := range f.starts {
		p.workers[t.hand].start(t)
	}
	for _, c := range f.cancels {
		if w := p.workers[c.task.hand]; w != nil {
			w.cancel(c.task, c.abort)
		}
	}
	for _, l := range f.loads {
		p.loadCh <- l // a lane has one under way, and there are fewer lanes than places
	}
	for _, a := range f.answers {
		if a.token != nil {
			a.token.(replier).reply(a.err)
		}
	}
	clear(f.starts)
	clear(f.answers)
	f.starts, f.cancels, f.loads, f.answers = f.starts[:0], f.cancels[:0], f.loads[:0], f.answers[:0]
	if len(f.bodies) > 0 {
		p.storeBodies(f.bodies)
		f.bodies = f.bodies[:0]
	}
	for f.buildable() && p.mayCommit() {
		p.inFlight++
		p.commitCh <- f.build()
	}
}

// maxFlights is how many commits may be on their way. While one is, only a good load is worth another.
const (
	maxFlights   = 3
	goodMessages = 256
	goodBytes    = 1 << 20
)

func (p *Pipeline) mayCommit() bool {
	return p.inFlight == 0 || p.inFlight < maxFlights && (p.flow.queued >= goodMessages || p.flow.queuedBytes >= goodBytes)
}

type landing struct {
	commit *commit
	first  uint64
}

func (l *landing) apply(p *Pipeline) {
	p.inFlight--
	p.flow.landed(l.commit, l.first)
	p.dead += len(l.commit.dead)
	p.noteDead(l.commit.dead)
	p.letGo(l.commit)
}

// readLoop reads what lies in the log and has room in memory now.
func (p *Pipeline) readLoop() {
	for {
		select {
		case <-p.ctx.Done():
			return
		case want := <-p.loadCh:
			got, ok := p.readAll(want)
			if !ok {
				return
			}
			p.inbox.push(eventFunc(func(*Pipeline) {
				if want.lane.arrived(got) {
					p.letGo(nil)
				}
			}))
		}
	}
}

// readAll tries until it has read, or the pipeline ends.
func (p *Pipeline) readAll(want load) (got loaded, ok bool) {
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		ctx, cancel := context.WithTimeout(p.ctx, 5*attemptLimit)
		got, err := p.journal.read(ctx, want)
		cancel()
		if err == nil {
			return got, true
		}
		if wait(p.ctx, pause) != nil {
			return loaded{}, false
		}
	}
}

// do runs f in the loop and waits until it has run.
func (p *Pipeline) do(ctx context.Context, f func(p *Pipeline)) error {
	ranCh := make(chan struct{})
	p.inbox.push(eventFunc(func(p *Pipeline) { f(p); close(ranCh) }))
	select {
	case <-ranCh:
		return nil
	case <-p.doneCh:
		return p.ended()
	case <-ctx.Done():
		return bus.Errorf(bus.CodeOf(ctx.Err()), "pipeline %s: %w", p.at.Name, ctx.Err())
	}
}

// await waits until the flow is as until says. It is asked after each turn of the loop.
func (p *Pipeline) await(ctx context.Context, until func(p *Pipeline) bool) error {
	w := waiter{until: until, ch: make(chan struct{})}
	if err := p.do(ctx, func(p *Pipeline) { p.waiters = append(p.waiters, w) }); err != nil {
		return err
	}
	select {
	case <-w.ch:
		return nil
	case <-p.doneCh:
		return p.ended()
	case <-ctx.Done():
		return bus.Errorf(bus.CodeOf(ctx.Err()), "pipeline %s: %w", p.at.Name, ctx.Err())
	}
}

func (p *Pipeline) ended() error {
	<-p.doneCh
	if p.err != nil {
		return bus.Errorf(bus.CodeOf(p.err), "pipeline %s has ended: %w", p.at.Name, p.err)
	}
	return bus.Errorf(bus.CodeClosed, "pipeline %s is closed", p.at.Name)
}

// Done is closed when the pipeline has ended; Err then says why, nil if it was closed.
func (p *Pipeline) Done() <-chan struct{} { return p.doneCh }

// Err is why the pipeline ended: ErrFenced when another process has taken it over.
func (p *Pipeline) Err() error {
	select {
	case <-p.doneCh:
		return p.err
	default:
		return nil
	}
}

// Drain takes nothing more in and waits until everything that is in the pipeline has gone through: what is left lies in
// its sinks and in the dead letters.
func (p *Pipeline) Drain(ctx context.Context) error {
	if err := p.do(ctx, func(p *Pipeline) { p.flow.closed = true; p.flow.refuse() }); err != nil {
		return err
	}
	return p.await(ctx, func(p *Pipeline) bool { return p.flow.idle() && p.inFlight == 0 })
}

// Close hands nothing more out, lets handlers finish within the grace, and stores what they did. What they did not finish
// is back in its stream, and the next Open goes on with it. It may be called more than once.
func (p *Pipeline) Close(ctx context.Context) error {
	ctx, cancel := detached(ctx, p.cfg.Grace+lastActs)
	defer cancel()
	err := p.do(ctx, func(p *Pipeline) { p.flow.stop(); p.closing = true })
	if err == nil {
		p.finishUp(ctx)
	}
	p.cancel(context.Canceled)
	<-p.doneCh
	if p.sub != nil {
		_ = p.sub.Unsubscribe() // fails only on a closed connection
	}
	p.group.Wait()
	if p.err != nil && !errors.Is(p.err, context.Canceled) {
		return p.err
	}
	return nil
}

// finishUp waits for handlers, then takes back what they still have, and waits until all is stored.
func (p *Pipeline) finishUp(ctx context.Context) {
	select {
	case <-p.doneCh:
		return
	case <-time.After(p.cfg.Grace):
	}
	_ = p.do(ctx, func(p *Pipeline) { // an end in between is what is wanted
		for _, s := range p.flow.stages {
			for _, h := range slices.Clone(s.hands.all) {
				p.flow.part(s, h, returned, 0, nil)
			}
		}
	})
	select {
	case <-p.doneCh:
	case <-ctx.Done():
	}
}

// Spec is the pipeline as it was declared, with what was left out filled in.
func (p *Pipeline) Spec() Spec { return p.spec }
