package placement

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/bus/wire"
	"troupe/nodes/protocol"
)

// Service is a placement service. Of all services on one bus one leads; the others stand by.
type Service struct {
	cfg  Config
	desk *Desk
}

// NewService returns a service that does nothing before Run.
func NewService(cfg Config) (*Service, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Service{cfg: cfg, desk: newDesk()}, nil
}

// Run serves until ctx ends, which is no error. A leader that is deposed, or does not know the outcome of a write,
// steps down, and reads the ledger again when it next leads. Run fails only if the bus is closed or the ledger cannot
// be decoded.
func (s *Service) Run(ctx context.Context) error {
	beside, stop := context.WithCancel(ctx)
	var group sync.WaitGroup
	group.Go(bus.Guard(func() { s.refuseWhileFull(beside) }))
	group.Go(bus.Guard(func() { s.desk.run(beside) }))
	defer func() { stop(); group.Wait() }()
	backoff := bus.Backoff{First: campaignPause, Most: 10 * campaignPause}.Start()
	for {
		err := s.campaign(ctx)
		if ctx.Err() != nil || !isTransient(err) {
			return ignoreCancelled(ctx, err)
		}
		s.cfg.Logger.Warn("placement: the term has ended; campaigning again", "id", s.cfg.ID, "error", err)
		if errors.As(err, new(*stepDownError)) {
			backoff.Reset() // it has led
		}
		if backoff.Wait(ctx) != nil {
			return nil
		}
	}
}

// campaign opens the buckets and leads when the lease is free.
func (s *Service) campaign(ctx context.Context) error {
	bucket, err := openLedger(ctx, s.cfg)
	if err != nil {
		return err
	}
	nodes, err := kv.Open(ctx, s.cfg.Bus, kv.Config{Bucket: protocol.LeaseBucket, Memory: true, Leases: true})
	if err != nil {
		return err
	}
	lead := kv.LeadConfig{Key: "lead", ID: s.cfg.ID, TTL: s.cfg.Lead}
	if s.cfg.Bus.Member() == nil {
		lead.Leases, err = kv.Open(ctx, s.cfg.Bus, kv.Config{Bucket: ledgerBucket + "_leases", Replicas: s.cfg.Replicas, MaxBytes: leaseBytes, Leases: true})
		if err != nil {
			return err
		}
	}
	mark, err := openWatermark(ctx, s.cfg)
	if err != nil {
		return err
	}
	return bucket.Lead(ctx, lead, func(ctx context.Context, term *kv.Term) error {
		maintaining, stop := context.WithCancel(ctx)
		var group sync.WaitGroup
		group.Go(bus.Guard(func() { bucket.Maintain(maintaining) }))
		defer func() { stop(); group.Wait() }()
		return s.serveTerm(ctx, &ledger{kv: bucket, term: term, watermarks: &watermarkStore{kv: mark}, log: s.cfg.Logger}, nodes)
	})
}

// isTransient reports whether the error may be gone at the next attempt: the leader stepped down, or the server was
// unavailable.
func isTransient(err error) bool {
	var down *stepDownError
	if errors.As(err, &down) {
		return true
	}
	switch bus.CodeOf(err) {
	case bus.CodeUnavailable, bus.CodeTimedOut, bus.CodeCancelled, bus.CodeRefused, bus.CodeNotFound, bus.CodeConflict, bus.CodeOutcomeUnknown, bus.CodeFenced, bus.CodeNoSpace:
		return true
	}
	return false
}

// ignoreCancelled returns err, or nil if ctx has ended.
func ignoreCancelled(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// stepDownError ends the term of a leader. Another leader, or the same one in a new term, may continue.
type stepDownError struct{ cause error }

func (e *stepDownError) Error() string { return "the leader steps down: " + e.cause.Error() }
func (e *stepDownError) Unwrap() error { return e.cause }

// serveTerm runs one term: read the ledger, subscribe, decide.
func (s *Service) serveTerm(ctx context.Context, l *ledger, nodes *kv.Bucket) error {
	began := time.Now()
	mark, err := l.watermarks.read(ctx)
	if err != nil {
		return err
	}
	found, err := l.read(ctx)
	if err != nil {
		return err
	}
	t, err := newLeaderTerm(s.cfg, l, found, mark, began)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer l.awaitCheckpoint()
	s.desk.begin(t)
	defer s.desk.end()
	stop, err := s.listen(ctx, t, nodes)
	defer func() { cancel(); stop() }()
	if err != nil {
		return &stepDownError{err}
	}
	s.cfg.Logger.Info("placement: leading", "id", s.cfg.ID, "epoch", l.term.Epoch(), "reservations", len(found.records), "after", time.Since(began))
	return s.loop(ctx, t)
}

// listen fills the input queue. stop is valid even after an error; it returns when nothing more arrives. ctx has ended
// by then.
func (s *Service) listen(ctx context.Context, t *leaderTerm, nodes *kv.Bucket) (stop func(), err error) {
	var subs []*bus.Subscription
	watchedCh := make(chan struct{})
	upCh, stopConnections := s.cfg.Bus.Connections()
	stop = func() {
		stopConnections()
		for _, sub := range subs {
			_ = sub.Unsubscribe() // fails only if the connection is closed
		}
		<-watchedCh
	}
	events, err := nodes.Watch(ctx, "node")
	if err != nil {
		close(watchedCh)
		return stop, err
	}
	bus.Go(func() {
		defer close(watchedCh)
		for {
			select {
			case ev, open := <-events:
				if !open {
					return
				}
				s.receiveLease(t.inputs, ev)
			case up := <-upCh:
				if up {
					t.inputs.put(input{reconnected: true})
				}
			}
		}
	})
	for subject, hear := range map[string]func(*bus.Msg){
		requestSubjects(): func(m *bus.Msg) { s.receiveRequest(t, m) },
		bus.NodeBeats():   func(m *bus.Msg) { s.receiveHeartbeat(t.inputs, m) },
	} {
		sub, err := s.cfg.Bus.Subscribe(subject, hear)
		if err != nil {
			return stop, err
		}
		subs = append(subs, sub)
	}
	data, err := wire.Marshal(protocol.ReportRequest{})
	if err != nil {
		return stop, err
	}
	return stop, s.cfg.Bus.Publish(bus.NodeAsk(""), data)
}

func (s *Service) receiveLease(q *inputQueue, ev kv.Event) {
	change := &leaseChange{}
	switch ev.Kind {
	case kv.EventComplete:
		change.complete = true
	case kv.EventDelete:
		change.gone = ev.Key[len(protocol.LeaseKey("")):]
	case kv.EventPut:
		change.report = new(protocol.Report)
		if err := wire.Unmarshal(ev.Value, change.report); err != nil || protocol.LeaseKey(change.report.Node) != ev.Key {
			s.cfg.Logger.Warn("placement: a node's lease cannot be read", "key", ev.Key, "error", err)
			return
		}
	}
	q.put(input{lease: change})
}

func (s *Service) receiveHeartbeat(q *inputQueue, m *bus.Msg) {
	hb := new(protocol.Heartbeat)
	err := wire.Unmarshal(m.Data, hb)
	if err = cmp.Or(err, bus.CheckName("node", hb.Node)); err != nil || bus.NodeBeat(hb.Node) != m.Subject {
		s.cfg.Bus.Malformed("a heartbeat", err)
		return
	}
	q.put(input{heartbeat: hb})
}

// receiveRequest decodes a request outside the loop.
func (s *Service) receiveRequest(t *leaderTerm, m *bus.Msg) {
	if m.Reply == "" {
		return // no reply subject
	}
	namespace, ok := requesterOf(m.Subject)
	if !ok {
		s.cfg.Bus.Malformed("a request for placement", bus.CheckName("namespace", namespace))
		return
	}
	if !repliesTo(m.Reply, namespace) {
		s.cfg.Bus.Malformed("a request for placement", bus.Errorf(bus.CodeRefused, "the answer to namespace %q is to go to %q", namespace, m.Reply))
		return
	}
	c := &call{reply: m.Reply, namespace: namespace}
	err := wire.Unmarshal(m.Data, &c.message)
	if err == nil && len(c.message.Request) > 0 {
		c.request, c.err = decodeRequest(c.message.Request)
		c.digest = digest(c.message.Request)
	}
	if err != nil {
		c.err = bus.Errorf(bus.CodeMalformed, "the request cannot be read: %w", err)
	}
	if !t.inputs.put(input{call: c}) {
		c.err = bus.Errorf(bus.CodeBusy, "%d requests wait for the placement service", maxInputs)
		t.cfg.post(outgoing{c.reply, t.encodeAnswer(c, &answer{Kind: answerFailed, Error: encodeError(c.err)})})
	}
}

// loop decides and commits rounds until the lead is lost. It shares t with the desk, under the desk's lock.
func (s *Service) loop(ctx context.Context, t *leaderTerm) error {
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	together := newBatchWindow(t.inputs)
	var items []input
	for {
		if !t.hasWork() && !together.wait(ctx) {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-t.inputs.wakeCh:
			case <-tick.C:
			}
		}
		items = t.inputs.take(items)
		now := time.Now()
		if !t.ledger.term.Valid() {
			return &stepDownError{bus.Errorf(bus.CodeFenced, "the lead has expired")}
		}
		t.desk.mu.Lock()
		round := t.decide(items, now)
		t.desk.mu.Unlock()
		calls := len(items)
		clear(items)
		var unknown error
		t.ledger.commit(ctx, round.changes, func(c *change) {
			t.desk.mu.Lock()
			defer t.desk.mu.Unlock()
			unknown = errors.Join(unknown, t.apply(c, time.Now()))
		})
		if unknown == nil && !t.outbox.empty() && !slices.ContainsFunc(round.changes, func(c *change) bool { return c.err == nil }) {
			unknown = t.ledger.term.Confirm(ctx) // what was only read may be another leader's by now
		}
		if unknown == nil {
			t.outbox.deliver(t.cfg)
			unknown = t.ledger.maintain(ctx, now)
		}
		if unknown != nil {
			return &stepDownError{unknown}
		}
		together.roundDone(calls, len(round.changes) > 0, time.Since(now))
	}
}

// hasWork reports whether there is something to decide or to write.
func (t *leaderTerm) hasWork() bool {
	t.desk.mu.Lock()
	defer t.desk.mu.Unlock()
	return t.needsSchedule || len(t.round.changes) > 0
}

// send answers a call. The client asks again for an answer that is lost.
func (t *leaderTerm) send(c *call, a *answer) []byte {
	if c.local != nil {
		return nil // the desk is told outcomes alone
	}
	data := t.encodeAnswer(c, a)
	t.publish(c.reply, data)
	return data
}

func (t *leaderTerm) encodeAnswer(c *call, a *answer) []byte {
	a.Seq, a.Attempt, a.Epoch, a.Now = c.Seq, c.Attempt, t.ledger.term.Epoch(), t.termTime(time.Now())
	data, err := wire.Marshal(a)
	if err != nil {
		a = &answer{Seq: a.Seq, Attempt: a.Attempt, Epoch: a.Epoch, Now: a.Now, Kind: answerFailed, Error: encodeError(err)}
		data, _ = wire.Marshal(a) // cannot fail: an error and four numbers
	}
	return data
}

// publish sends a message once the round is committed, or the term confirmed.
func (t *leaderTerm) publish(subject string, data []byte) { t.outbox.add(outgoing{subject, data}) }

// refuseWhileFull answers requests with ErrNoSpace while the store of the embedded server takes no writes. Without it
// no leader would answer, because the leader's lease is in that store, and clients would repeat until their deadline.
// It returns when ctx ends. An external server reports a full store by itself.
func (s *Service) refuseWhileFull(ctx context.Context) {
	var sub *bus.Subscription
	stop := func() {
		if sub != nil {
			_ = sub.Unsubscribe() // fails only if the connection is closed
			sub = nil
		}
	}
	defer stop()
	for {
		changedCh, full := s.cfg.Bus.StoreErr()
		stop()
		if full != nil {
			var err error
			sub, err = s.cfg.Bus.Subscribe(requestSubjects(), func(m *bus.Msg) { s.refuseMessage(m, full) })
			if err != nil {
				s.cfg.Logger.Warn("placement: cannot refuse requests while the store is full; they will time out", "error", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-changedCh:
		}
	}
}

// refuseMessage answers one request with an error, under the epoch that the client has last seen: the client ignores
// answers of other epochs.
func (s *Service) refuseMessage(m *bus.Msg, full error) {
	var msg message
	if m.Reply == "" || wire.Unmarshal(m.Data, &msg) != nil {
		return
	}
	data, err := wire.Marshal(&answer{Seq: msg.Seq, Attempt: msg.Attempt, Epoch: msg.Epoch, Kind: answerFailed, Error: encodeError(full)})
	if err == nil {
		err = s.cfg.Bus.Respond(m, data)
	}
	if err != nil {
		s.cfg.Logger.Debug("placement: a refusal is lost; the client asks again", "error", err)
	}
}
