package pipeline

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/pipeline/flow"
	"troupe/pipeline/spec"
)

// Pipeline is a pipeline that runs in this process (the engine). It is safe for concurrent use.
type Pipeline struct {
	cfg     Config
	spec    spec.Spec
	at      Address
	journal *journal // the commit writer writes, the readers read
	inbox   *inbox
	sub     *bus.Subscription

	ctx         context.Context // of all background goroutines
	cancel      context.CancelCauseFunc
	group       sync.WaitGroup
	doneCh      chan struct{} // closed when the loop has ended
	commitCh    chan *flow.Commit
	storeFull   atomic.Pointer[bus.Error] // set by the commit writer while a commit waits for a full store: puts are rejected meanwhile
	lastWritten uint64                    // owned by the commit writer: the last sequence of the log
	readCh      chan flow.ReadRequest

	// The loop's goroutine owns the following fields.
	flow            *flow.Flow
	workers         map[*flow.WorkerSlots]worker
	watched         map[stageRole]bool
	bodyWriters     map[*flow.BodyStream]*bodyWriter
	commitsInFlight int
	closing         bool // the loop ends when no task is running and everything is committed
	waiters         []waiter
	began           time.Time
	deadLetters     int // unresolved dead letters in the log
	report          deadLetterReport

	garbage *garbage // owned by the purge loop, filled by the loop

	exchange *values.Exchange // large bodies of other processes' puts and claims
	fetches  bodyFetches
	claims   openClaims
	scalings scalings

	err error // why the engine ended; set before doneCh is closed
}

// waiter is woken when its condition holds after a turn of the loop.
type waiter struct {
	until func(p *Pipeline) bool
	ch    chan struct{}
}

// Open starts a pipeline, or continues it from its log.
func Open(ctx context.Context, cfg Config, declared spec.Spec) (*Pipeline, error) {
	cfg = cfg.withDefaults()
	if err := errors.Join(cfg.validate(), declared.Check(), checkMethods(declared.Stages, cfg.Clusters)); err != nil {
		return nil, err
	}
	p := &Pipeline{
		cfg: cfg, spec: declared.WithDefaults(), at: Address{Namespace: cfg.Namespace, Name: declared.Name}, inbox: newInbox(),
		doneCh: make(chan struct{}), commitCh: make(chan *flow.Commit, maxCommitsInFlight), readCh: make(chan flow.ReadRequest, 256),
		workers: map[*flow.WorkerSlots]worker{}, watched: map[stageRole]bool{}, bodyWriters: map[*flow.BodyStream]*bodyWriter{}, garbage: newGarbage(), began: time.Now(),
		exchange: values.NewExchange(cfg.Bus, cfg.Namespace), fetches: bodyFetches{inFlight: map[string]*bodyFetch{}, roomCh: map[string]chan struct{}{}}, claims: openClaims{byID: map[uint64]*openClaim{}},
	}
	if err := p.refuseSecondEngine(ctx); err != nil {
		return nil, err
	}
	p.ctx, p.cancel = context.WithCancelCause(context.Background())
	if err := p.open(ctx); err != nil {
		p.cancel(err)
		p.unsubscribe()
		p.group.Wait()
		p.exchange.Close()
		return nil, err
	}
	return p, nil
}

// refuseSecondEngine fails if another process runs the pipeline and answers.
func (p *Pipeline) refuseSecondEngine(ctx context.Context) error {
	if p.cfg.TakeOver {
		return nil
	}
	st, err := (&Client{b: p.cfg.Bus, exchange: p.exchange, at: p.at}).Status(ctx)
	if err == nil {
		return bus.Errorf(bus.CodeExists, "pipeline %s is already running, in %s; stop it there, or set TakeOver", p.at.Name, st.By)
	}
	return nil
}

func (p *Pipeline) open(ctx context.Context) (err error) {
	var rec *flow.Checkpoint
	var last uint64
	if p.journal, rec, last, err = openJournal(ctx, p.cfg.Bus, p.at, p.spec, p.cfg.By); err != nil {
		return err
	}
	p.flow = flow.New(p.spec, rec)
	p.flow.LargeBodyMin = largeBodyMin
	p.flow.Now = time.Now()
	if err := errors.Join(p.restoreRetries(ctx), p.restoreResolved(ctx, rec)); err != nil {
		return err
	}
	if err := p.purgeBeforeFirstWrite(ctx, rec); err != nil {
		return err
	}
	p.flow.CountCrash(rec)
	p.lastWritten = last
	at := last + 1
	if err := p.commitSync(ctx); err != nil { // from here on commits of the previous engine are rejected
		return err
	}
	if err := p.restoreDeadLetters(ctx); err != nil {
		return err
	}
	for l := range p.flow.Lanes() {
		body, err := p.journal.lastBodySeq(ctx, l.Bodies)
		if err != nil {
			return err
		}
		l.AddPurgePoint(at, body)
	}
	if err := p.restoreProducersAndGroups(ctx); err != nil {
		return err
	}
	p.collectGarbage(nil)
	if err := p.startWorkers(); err != nil {
		return err
	}
	if err := p.serve(); err != nil {
		return err
	}
	p.group.Go(bus.Guard(p.writeLoop))
	p.group.Go(bus.Guard(p.readLoop))
	p.group.Go(bus.Guard(p.purgeLoop))
	bus.Go(p.loop)
	return nil
}

// commitSync commits everything that is queued, and at least a checkpoint, before the loops are started.
func (p *Pipeline) commitSync(ctx context.Context) error {
	for {
		c := p.flow.BuildCommit()
		first, end, err := p.journal.writeFirst(ctx, c, p.lastWritten)
		if err != nil {
			return err
		}
		p.flow.Committed(c, first)
		if p.lastWritten = end; !p.flow.HasQueued() {
			return nil
		}
	}
}

// loop applies events, lets the flow decide, and applies its effects.
func (p *Pipeline) loop() {
	defer close(p.doneCh)
	defer p.unsubscribe() // an engine that was replaced leaves the requests to its successor
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		p.flow.Now = time.Now()
		for _, e := range p.inbox.take() {
			e.apply(p)
		}
		p.flow.Schedule()
		p.applyEffects()
		p.flow.Sample()
		p.emitDeadLetters(false)
		if p.isFinished() {
			p.emitDeadLetters(true)
			return
		}
		wait := time.Second // at least once a second, for the rates
		if at := p.flow.NextWake(); !at.IsZero() {
			wait = min(wait, max(time.Until(at), time.Millisecond))
		}
		timer.Reset(wait)
		select {
		case <-p.inbox.wakeCh:
		case <-timer.C:
		case <-p.ctx.Done():
			p.err = context.Cause(p.ctx)
			p.failWaiters()
			return
		}
	}
}

// isFinished wakes waiters and reports whether the loop may end: the pipeline is closing and everything is committed.
func (p *Pipeline) isFinished() bool {
	left := p.waiters[:0]
	for _, w := range p.waiters {
		if w.until(p) {
			close(w.ch)
			continue
		}
		left = append(left, w)
	}
	p.waiters = left
	if !p.closing || p.flow.RunningTasks() > 0 || p.flow.HasQueued() || p.commitsInFlight > 0 {
		return false
	}
	if !p.flow.FinalCheckpoint() {
		return true
	}
	p.inbox.push(eventFunc(func(*Pipeline) {}))
	return false
}

// failWaiters answers all requests with the error that ended the pipeline.
func (p *Pipeline) failWaiters() {
	why := bus.Errorf(bus.CodeClosed, "pipeline %s has ended: %w", p.at.Name, p.err)
	for _, e := range p.inbox.take() {
		if put, ok := e.(*putEvent); ok {
			put.reply(why)
		}
	}
	p.flow.RejectPuts()
	p.applyEffects()
	p.flow.FailQueued(why)
	p.reply(p.flow.TakeEffects().Replies)
}

// replier receives the result of a request. It must not block.
type replier interface{ reply(err error) }

// applyEffects does what the flow decided.
func (p *Pipeline) applyEffects() {
	do := p.flow.TakeEffects()
	for _, t := range do.Starts {
		p.workers[t.Worker].start(t)
	}
	for _, c := range do.Cancels {
		if w := p.workers[c.Task.Worker]; w != nil {
			w.cancel(c.Task, c.Abort)
		}
	}
	for _, l := range do.Reads {
		p.readCh <- l // does not block: a lane has one read in flight, and there are fewer lanes than slots
	}
	p.reply(do.Replies)
	p.storeBodies(do.Bodies)
	for p.flow.CanCommit() && p.mayCommit() {
		p.commitsInFlight++
		p.commitCh <- p.flow.BuildCommit()
	}
}

func (p *Pipeline) reply(answers []flow.Reply) {
	for _, a := range answers {
		if a.Token != nil {
			a.Token.(replier).reply(a.Err)
		}
	}
}

// While a commit is in flight, another one is sent only if it is large enough to be worthwhile.
const (
	maxCommitsInFlight = 3
	worthwhileMessages = 256
	worthwhileBytes    = 1 << 20
)

func (p *Pipeline) mayCommit() bool {
	messages, bytes := p.flow.Backlog()
	return p.commitsInFlight == 0 || p.commitsInFlight < maxCommitsInFlight && (messages >= worthwhileMessages || bytes >= worthwhileBytes)
}

type commitDone struct {
	commit *flow.Commit
	first  uint64
}

func (l *commitDone) apply(p *Pipeline) {
	p.commitsInFlight--
	p.flow.Committed(l.commit, l.first)
	p.deadLetters += len(l.commit.DeadLetters)
	p.countDeadLetters(l.commit.DeadLetters)
	p.collectGarbage(l.commit)
}

// readLoop reads items from the log that now fit into memory.
func (p *Pipeline) readLoop() {
	for {
		select {
		case <-p.ctx.Done():
			return
		case want := <-p.readCh:
			got, ok := p.readWithRetry(want)
			if !ok {
				return
			}
			p.inbox.push(eventFunc(func(*Pipeline) {
				if want.Lane.ReadDone(got) {
					p.collectGarbage(nil)
				}
			}))
		}
	}
}

// readWithRetry reads until it succeeds or the pipeline ends.
func (p *Pipeline) readWithRetry(want flow.ReadRequest) (got flow.ReadResult, ok bool) {
	err := bus.Retry(p.ctx, backoff, func() (err error) {
		ctx, cancel := context.WithTimeout(p.ctx, 5*attemptTimeout)
		defer cancel()
		got, err = p.journal.read(ctx, want)
		return err
	})
	return got, err == nil
}

// inLoop runs f in the loop and waits for it.
func (p *Pipeline) inLoop(ctx context.Context, f func(p *Pipeline)) error {
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

// awaitState waits until the condition holds. It is evaluated after each turn of the loop.
func (p *Pipeline) awaitState(ctx context.Context, until func(p *Pipeline) bool) error {
	w := waiter{until: until, ch: make(chan struct{})}
	if err := p.inLoop(ctx, func(p *Pipeline) { p.waiters = append(p.waiters, w) }); err != nil {
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

// Done is closed when the pipeline has ended; Err then returns why, nil if it was closed.
func (p *Pipeline) Done() <-chan struct{} { return p.doneCh }

// Err is why the pipeline ended: bus.ErrFenced when another process has taken it over.
func (p *Pipeline) Err() error {
	select {
	case <-p.doneCh:
		return p.err
	default:
		return nil
	}
}

// Drain accepts no more puts and waits until every item has passed all stages: the rest is in sinks and dead letters. It
// fails with bus.ErrWorkerLost when items wait for a stage whose role has died.
func (p *Pipeline) Drain(ctx context.Context) error {
	if err := p.inLoop(ctx, func(p *Pipeline) { p.flow.CloseIntake() }); err != nil {
		return err
	}
	var stuck error // read when the condition held
	err := p.awaitState(ctx, func(p *Pipeline) bool {
		if p.flow.Idle() && p.commitsInFlight == 0 {
			return true
		}
		stuck = p.stuck()
		return stuck != nil
	})
	if err != nil {
		return err
	}
	return stuck
}

// Close starts no more tasks, lets handlers finish within Config.Grace, and commits their results. Unfinished items
// stay in their streams, and the next Open continues with them. It may be called more than once.
func (p *Pipeline) Close(ctx context.Context) error {
	ctx, cancel := detached(ctx, p.cfg.Grace+closeTimeout)
	defer cancel()
	err := p.inLoop(ctx, func(p *Pipeline) { p.flow.Stop(); p.closing = true })
	if err == nil {
		p.drainHandlers(ctx)
	}
	p.cancel(context.Canceled)
	<-p.doneCh
	p.exchange.Close()
	p.group.Wait()
	if p.err != nil && !errors.Is(p.err, context.Canceled) {
		return p.err
	}
	return nil
}

// drainHandlers waits for handlers, then revokes the remaining tasks, and waits until everything is committed.
func (p *Pipeline) drainHandlers(ctx context.Context) {
	select {
	case <-p.doneCh:
		return
	case <-time.After(p.cfg.Grace):
	}
	_ = p.inLoop(ctx, func(p *Pipeline) { p.flow.RevokeAll() }) // an error means that the pipeline has ended, as intended
	select {
	case <-p.doneCh:
	case <-ctx.Done():
	}
}

// Spec is the declaration of the pipeline, with defaults filled in.
func (p *Pipeline) Spec() spec.Spec { return p.spec }
