package rollouts

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/pipeline/flow"
	"troupe/pipeline/groups"
)

// Config is the configuration of an engine. Bus is required; the zero value of the other fields is usable.
type Config struct {
	// Bus is the connection; the caller keeps it. Its server needs JetStream.
	Bus *bus.Bus
	// Namespace is the namespace of the run. Zero: "default".
	Namespace string
	// By identifies this process for operators. Zero: the bus's name.
	By string
	// Replicas is the number of servers that store the data. Zero: one.
	Replicas int
	// Logger receives errors that no caller gets. Zero: the bus's.
	Logger *slog.Logger
}

const (
	headerEvents     = "Troupe-Events"
	headerCheckpoint = "Troupe-Record"
	headerEngine     = "Troupe-Engine"

	attemptTimeout = 2 * time.Second
	tickInterval   = 200 * time.Millisecond
	maxQueued      = 300 // events that wait for a commit; with those of one request and one tick they fit into a message
	maxQueuedBytes = 256 << 10
	tidyInterval   = time.Second
	maxDead        = 256 // messages of ended groups behind one that has not ended; then they are deleted one by one
	maxParked      = 4096
	parkedFor      = time.Second // then a request that waits is answered, and repeated
	orphanAge      = 10 * time.Minute
)

var backoff = bus.Backoff{First: 5 * time.Millisecond, Most: 500 * time.Millisecond}

// engine is the process that decides. The loop's goroutine owns the state; one commit is in flight at a time.
type engine struct {
	cfg    Config
	at     address
	id     string
	log    *stream.Stream
	bodies *stream.Stream
	sub    *bus.Subscription
	askCh  chan *bus.Msg
	doneCh chan struct{}
	err    error // why it ended; set before doneCh is closed

	ctx    context.Context // of all background goroutines
	cancel context.CancelCauseFunc
	group  sync.WaitGroup

	// The loop's goroutine owns the following fields.
	state      *groups.State
	data       map[*groups.Event][]byte // of small bodies that are not stored yet
	last       uint64                   // sequence of the log
	queue      []*groups.Event          // for the next commit
	flying     []*groups.Event          // in the commit in flight
	ending     []*groups.Group          // ended by it
	busy       bool                     // a commit is in flight
	enqueued   uint64                   // changes that were made
	bytes      int                      // of small bodies in the queue
	stored     uint64                   // of these, stored
	checkpoint bool                     // the next commit has one
	upTo       uint64                   // stored when the commit in flight is
	replies    []reply                  // in order
	parked     []*parked
	dirty      bool // parked requests may be served
	tidying    bool
	tidied     time.Time
	garbage    []string            // groups whose large bodies can be deleted
	kept       map[uint64][]uint64 // by message of the log, the groups with events in it
	ended      flow.OrdinalSet     // groups whose end is stored
	record     uint64              // message with the last checkpoint
	recording  bool                // the commit in flight has one

	storedCh  chan commitResult
	releaseCh chan []string
	listCh    chan chan map[string]bool
	tidyCh    chan struct{}
}

// reply answers a request when all changes up to after are stored.
type reply struct {
	m      *bus.Msg
	after  uint64
	result func() any
	err    error
}

// parked is a request that nothing can serve yet.
type parked struct {
	m     *bus.Msg
	verb  string
	req   request
	until time.Time
}

type commitResult struct {
	last uint64
	err  error
}

// open reads the log and takes it over from an engine before it.
func open(ctx context.Context, cfg Config, name string, declared Spec) (*engine, error) {
	e := &engine{
		cfg: cfg, at: address{cfg.Namespace, name}, id: bus.NewID(), askCh: make(chan *bus.Msg, 4096), doneCh: make(chan struct{}),
		data: map[*groups.Event][]byte{}, storedCh: make(chan commitResult, 1), releaseCh: make(chan []string), listCh: make(chan chan map[string]bool),
		tidyCh: make(chan struct{}, 1),
	}
	declared = declared.WithDefaults()
	var err error
	room := int64(declared.Bytes+declared.Bytes/4) + 64<<20 // the server reserves it, for each of the two
	if e.log, err = stream.Create(ctx, cfg.Bus, stream.Config{Name: e.at.stream(), Subject: e.at.log(), MaxBytes: room, Replicas: cfg.Replicas}); err == nil {
		e.bodies, err = stream.Create(ctx, cfg.Bus, stream.Config{Name: e.at.bodyStream(), Subject: e.at.body("*"), MaxBytes: room, Replicas: cfg.Replicas})
	}
	if err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "rollouts %s: cannot open their log: %w", name, err)
	}
	for waits := backoff.Start(); ; {
		err := e.takeOver(ctx, declared)
		if err == nil {
			break
		}
		if !errors.Is(err, bus.ErrConflict) || waits.Wait(ctx) != nil {
			return nil, bus.Errorf(bus.CodeUnavailable, "rollouts %s: cannot read their log: %w", name, err)
		}
	}
	e.ctx, e.cancel = context.WithCancelCause(context.Background())
	if e.sub, err = cfg.Bus.SubscribeChan(e.at.ask("*"), e.askCh); err != nil {
		e.cancel(err)
		return nil, bus.Errorf(bus.CodeUnavailable, "rollouts %s: %w", name, err)
	}
	err = cfg.Bus.Publish(e.at.ask("replaced"), []byte(e.id)) // an engine that does not hear it is fenced by its next commit
	if err = errors.Join(err, cfg.Bus.Flush(ctx)); err != nil {
		_ = e.sub.Unsubscribe() // fails only on a closed connection
		e.cancel(err)
		return nil, bus.Errorf(bus.CodeUnavailable, "rollouts %s: %w", name, err)
	}
	e.group.Go(bus.Guard(e.watchHolders))
	bus.Go(e.loop)
	return e, nil
}

// takeOver makes the state from the log and writes a first commit. From then on an engine before it cannot write.
func (e *engine) takeOver(ctx context.Context, declared Spec) error {
	info, err := e.log.State(ctx)
	if err != nil {
		return err
	}
	e.last, e.garbage, e.kept = info.LastSeq, nil, map[uint64][]uint64{}
	var events []groups.Event
	var seqs []uint64
	var from *groups.Checkpoint
	err = e.log.Each(ctx, stream.ReadOptions{HeadersOnly: true}, func(m stream.Message) error {
		var some []groups.Event
		err := json.Unmarshal([]byte(m.Header.Get(headerEvents)), &some)
		if text := m.Header.Get(headerCheckpoint); text != "" && err == nil {
			from = &groups.Checkpoint{}
			err = json.Unmarshal([]byte(text), from)
		}
		if err != nil {
			return bus.Errorf(bus.CodeMalformed, "message %d of the log is no commit: %w", m.Seq, err)
		}
		e.kept[m.Seq] = nil
		for _, ev := range some {
			events, seqs = append(events, ev), append(seqs, m.Seq)
		}
		return nil
	})
	if err != nil {
		return err
	}
	e.state = groups.New(declared, from)
	e.state.Now = time.Now()
	for i := range events {
		if e.state.Restore(&events[i], seqs[i]) {
			e.keep(seqs[i], events[i].Group)
		}
	}
	e.ended = e.state.Ended.Clone()
	orphans := map[string]bool{}
	err = e.bodies.Each(ctx, stream.ReadOptions{HeadersOnly: true}, func(m stream.Message) error {
		if name := lastToken(m.Subject); !orphans[name] && !e.state.Has(name) && time.Since(m.Time) > orphanAge {
			orphans[name] = true
			e.garbage = append(e.garbage, name)
		}
		return nil
	})
	if err != nil {
		return err
	}
	e.record, err = e.append(ctx, e.encode(nil, true))
	e.last = e.record
	return err
}

// keep notes that a message of the log has events of a group.
func (e *engine) keep(seq, group uint64) {
	if all := e.kept[seq]; len(all) == 0 || all[len(all)-1] != group {
		e.kept[seq] = append(all, group)
	}
}

// encode makes the message of a commit: events, the small bodies one after the other, and a checkpoint if it has one.
func (e *engine) encode(events []*groups.Event, checkpoint bool) *bus.Msg {
	m := &bus.Msg{Subject: e.at.log(), Header: bus.Header{headerEngine: {e.id}}}
	for _, ev := range events {
		if data := e.data[ev]; len(data) > 0 {
			ev.Body.At = len(m.Data)
			m.Data = append(m.Data, data...)
		}
	}
	if events == nil {
		events = []*groups.Event{}
	}
	text, _ := json.Marshal(events) // cannot fail
	m.Header[headerEvents] = []string{string(text)}
	if checkpoint {
		c := e.state.Snapshot()
		c.Engine, c.By, c.At = e.id, e.cfg.By, e.state.Now
		text, _ := json.Marshal(c) // cannot fail
		m.Header[headerCheckpoint] = []string{string(text)}
	}
	return m
}

// append writes a commit that follows e.last, and returns its sequence.
func (e *engine) append(ctx context.Context, m *bus.Msg) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	stream.ExpectLast(m, e.last)
	ack, err := stream.Append(ctx, e.cfg.Bus, []*bus.Msg{m}, "")
	return ack.Seq, err
}

// write writes a commit until it is stored, or another engine has taken the log over.
func (e *engine) write(m *bus.Msg) commitResult {
	for waits := backoff.Start(); ; {
		last, err := e.append(e.ctx, m)
		if err == nil {
			return commitResult{last: last}
		}
		if waits.Wait(e.ctx) != nil {
			return commitResult{err: context.Cause(e.ctx)}
		}
		if last, err := e.nextEngine(); err == nil && last != "" {
			if last == e.id { // it was stored, and the acknowledgement was lost
				return commitResult{last: e.last + 1}
			}
			return commitResult{err: bus.Errorf(bus.CodeFenced, "rollouts %s: another process runs them", e.at.name)}
		}
	}
}

// nextEngine is the engine that wrote the message after e.last; empty: there is none.
func (e *engine) nextEngine() (string, error) {
	ctx, cancel := context.WithTimeout(e.ctx, 5*attemptTimeout)
	defer cancel()
	info, err := e.log.State(ctx)
	if err != nil || info.LastSeq <= e.last {
		return "", err
	}
	m, err := e.log.Get(ctx, e.last+1)
	if errors.Is(err, bus.ErrNotFound) {
		return "deleted", nil // this engine has not deleted it
	}
	return m.Header.Get(headerEngine), err
}

// loop applies requests, and commits what they changed.
func (e *engine) loop() {
	ticker := time.NewTicker(tickInterval)
	defer ticker.Stop()
	err := e.turns(ticker.C)
	e.err = err
	_ = e.sub.Unsubscribe() // fails only on a closed connection
	e.cancel(err)
	closed := bus.Errorf(bus.CodeClosed, "rollouts %s: the process that ran them has ended or was replaced", e.at.name)
	for _, r := range e.replies {
		e.respond(reply{m: r.m, err: closed})
	}
	for _, p := range e.parked {
		e.respond(reply{m: p.m, err: closed})
	}
	close(e.doneCh)
}

func (e *engine) turns(tick <-chan time.Time) error {
	for {
		asks, ticks := e.askCh, tick
		if e.full() {
			asks, ticks = nil, nil
		}
		select {
		case <-e.ctx.Done():
			return context.Cause(e.ctx)
		case m := <-asks:
			e.state.Now = time.Now()
			e.handle(m)
			for more := true; more && !e.full(); { // one commit for many requests
				select {
				case m := <-e.askCh:
					e.handle(m)
				default:
					more = false
				}
			}
		case <-ticks:
			e.state.Now = time.Now()
			e.state.Tick()
			e.note()
			e.dirty = true
			e.expireParked()
			e.tidy()
		case r := <-e.storedCh:
			if r.err != nil {
				return r.err
			}
			e.committed(r.last)
		case tickets := <-e.releaseCh:
			for _, ticket := range tickets {
				e.state.Release(ticket)
			}
			e.dirty = true
		case ch := <-e.listCh:
			ch <- e.state.Tickets()
		case <-e.tidyCh:
			e.tidying, e.tidied = false, time.Now()
		}
		if e.dirty && !e.full() {
			e.retryParked()
		}
		e.commit()
		e.answer()
	}
}

// full reports whether the next commit has as much as fits into a batch; then no more requests are taken.
func (e *engine) full() bool { return e.enqueued-e.upTo >= maxQueued || e.bytes >= maxQueuedBytes }

// note counts what the state has to store.
func (e *engine) note() {
	events, checkpoint := e.state.TakeEvents()
	if len(events) == 0 && !checkpoint {
		return
	}
	e.checkpoint = e.checkpoint || checkpoint
	e.queue = append(e.queue, events...)
	e.enqueued += uint64(max(1, len(events)))
	e.dirty = true
}

// commit sends the queue, unless a commit is in flight.
func (e *engine) commit() {
	if e.busy || e.enqueued == e.upTo {
		return
	}
	e.flying, e.queue, e.ending = e.dropEnded(e.queue), nil, e.state.TakeEnded()
	e.recording = e.checkpoint
	m := e.encode(e.flying, e.checkpoint)
	e.checkpoint = false
	e.busy, e.upTo, e.bytes = true, e.enqueued, 0
	e.group.Go(bus.Guard(func() { e.storedCh <- e.write(m) }))
}

// dropEnded leaves out events of groups that have ended before they were stored.
func (e *engine) dropEnded(events []*groups.Event) []*groups.Event {
	out := events[:0]
	for _, ev := range events {
		if e.state.Ended.Contains(ev.Group) {
			delete(e.data, ev)
			continue
		}
		out = append(out, ev)
	}
	return out
}

func (e *engine) committed(last uint64) {
	for _, ev := range e.flying {
		ev.Stored(last)
		delete(e.data, ev)
		e.keep(last, ev.Group)
	}
	if len(e.flying) == 0 {
		e.kept[last] = nil
	}
	if e.recording {
		e.record, e.recording = last, false
	}
	e.last, e.busy, e.stored = last, false, e.upTo
	for _, g := range e.ending {
		e.ended.Add(g.ID)
		if g.Large {
			e.garbage = append(e.garbage, g.Name)
		}
	}
	e.flying, e.ending = nil, nil
}
