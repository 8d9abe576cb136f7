package placement

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/bus/wire"
	"troupe/nodes/protocol"
)

// Service grants devices. Of all that run on one bus one leads; the others stand by.
type Service struct {
	cfg Config
}

// NewService is a service that does nothing before Run.
func NewService(cfg Config) (*Service, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Service{cfg: cfg}, nil
}

// Run serves until ctx ends, which is no error. A leader that is deposed, or does not know what has become of a write,
// stands by again and reads the ledger anew when it next leads. Run ends by itself only if that can never go well: the
// bus is closed, or the ledger makes no sense.
func (s *Service) Run(ctx context.Context) error {
	refusing, stop := context.WithCancel(ctx)
	stoppedCh := make(chan struct{})
	bus.Go(func() {
		defer close(stoppedCh)
		s.refuseWhileFull(refusing)
	})
	defer func() { stop(); <-stoppedCh }()
	for {
		err := s.stand(ctx)
		if ctx.Err() != nil || !passing(err) {
			return ended(ctx, err)
		}
		s.cfg.Logger.Warn("placement: standing again", "id", s.cfg.ID, "error", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(standAgainPause):
		}
	}
}

// stand opens the buckets and leads when its turn comes.
func (s *Service) stand(ctx context.Context) error {
	bucket, err := openLedger(ctx, s.cfg)
	if err != nil {
		return err
	}
	nodes, err := kv.Open(ctx, s.cfg.Bus, kv.Config{Bucket: protocol.LeaseBucket, Memory: true, Leases: true})
	if err != nil {
		return err
	}
	leases, err := kv.Open(ctx, s.cfg.Bus, kv.Config{Bucket: ledgerBucket + "_leases", Replicas: s.cfg.Replicas, MaxBytes: leaseBytes, Leases: true})
	if err != nil {
		return err
	}
	mark, err := openMark(ctx, s.cfg)
	if err != nil {
		return err
	}
	return bucket.Lead(ctx, kv.LeadConfig{Key: "lead", Leases: leases, ID: s.cfg.ID, TTL: s.cfg.Lead}, func(ctx context.Context, term *kv.Term) error {
		maintaining, stop := context.WithCancel(ctx)
		var group sync.WaitGroup
		group.Go(bus.Guard(func() { bucket.Maintain(maintaining) }))
		defer func() { stop(); group.Wait() }()
		return s.lead(ctx, &ledger{kv: bucket, term: term, mark: &marker{kv: mark}, log: s.cfg.Logger}, nodes)
	})
}

// passing reports whether an error may be gone the next time: a leader had to go, or the server was away.
func passing(err error) bool {
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

// ended is err, unless ctx was ended: that is what was asked for.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// stepDownError is a leader that must not go on, though another may, or it itself in another term.
type stepDownError struct{ cause error }

func (e *stepDownError) Error() string { return "the leader cannot go on: " + e.cause.Error() }
func (e *stepDownError) Unwrap() error { return e.cause }

// lead is one term: read the ledger, listen, decide.
func (s *Service) lead(ctx context.Context, l *ledger, nodes *kv.Bucket) error {
	began := time.Now()
	marked, err := l.mark.read(ctx)
	if err != nil {
		return err
	}
	found, err := l.read(ctx)
	if err != nil {
		return err
	}
	r, err := newReign(s.cfg, l, found, marked, began)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer l.stop()
	stop, err := s.listen(ctx, r, nodes)
	defer func() { cancel(); stop() }()
	if err != nil {
		return &stepDownError{err}
	}
	s.cfg.Logger.Info("placement: leading", "id", s.cfg.ID, "epoch", l.term.Epoch(), "reservations", len(found.records), "after", time.Since(began))
	return s.loop(ctx, r)
}

// listen fills the inbox. stop, which is there even after an error, returns when nothing more comes; ctx has ended then.
func (s *Service) listen(ctx context.Context, r *reign, nodes *kv.Bucket) (stop func(), err error) {
	nc := s.cfg.Bus.Conn()
	var subs []*nats.Subscription
	watchedCh := make(chan struct{})
	stop = func() {
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
		for ev := range events {
			s.hearLease(r.in, ev)
		}
	})
	for subject, hear := range map[string]nats.MsgHandler{
		bus.PlacementRequests(): func(m *nats.Msg) { s.hearRequest(r, m) },
		bus.NodeBeats():         func(m *nats.Msg) { s.hearBeat(r.in, m) },
	} {
		sub, err := nc.Subscribe(subject, bus.GuardMsg(hear))
		if err != nil {
			return stop, err
		}
		subs = append(subs, sub)
	}
	return stop, nc.Publish(bus.NodeAsk(""), nil)
}

func (s *Service) hearLease(in *inbox, ev kv.Event) {
	news := &leaseNews{}
	switch ev.Kind {
	case kv.EventComplete:
		news.all = true
	case kv.EventDelete:
		news.gone = ev.Key[len(protocol.LeaseKey("")):]
	case kv.EventPut:
		news.report = new(protocol.Report)
		if err := wire.Unmarshal(ev.Value, news.report); err != nil || protocol.LeaseKey(news.report.Node) != ev.Key {
			s.cfg.Logger.Warn("placement: a node's lease cannot be read", "key", ev.Key, "error", err)
			return
		}
	}
	in.put(item{lease: news})
}

func (s *Service) hearBeat(in *inbox, m *nats.Msg) {
	beat := new(protocol.Heartbeat)
	if err := wire.Unmarshal(m.Data, beat); err != nil || bus.NodeBeat(beat.Node) != m.Subject {
		s.cfg.Logger.Warn("placement: a heartbeat cannot be read", "subject", m.Subject, "error", err)
		return
	}
	in.put(item{beat: beat})
}

// hearRequest decodes a request where it arrives, so that the loop need not.
func (s *Service) hearRequest(r *reign, m *nats.Msg) {
	if m.Reply == "" {
		return // nobody waits for an answer
	}
	c := &call{reply: m.Reply, namespace: bus.PlacementRequester(m.Subject)}
	err := wire.Unmarshal(m.Data, &c.message)
	if err == nil && len(c.message.Request) > 0 {
		c.request, c.err = decodeRequest(c.message.Request)
		c.digest = digest(c.message.Request)
	}
	if err != nil {
		c.err = bus.Errorf(bus.CodeMalformed, "the request cannot be read: %w", err)
	}
	if !r.in.put(item{call: c}) {
		c.err = bus.Errorf(bus.CodeBusy, "%d requests wait for the placement service", inboxLimit)
		r.send(c, &answer{Kind: answerFailed, Error: toWire(c.err)})
	}
}

// loop decides and commits, round after round, until the lead is lost. It owns r.
func (s *Service) loop(ctx context.Context, r *reign) error {
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	together := newGathering(r.in)
	var items []item
	for {
		if !r.dirty && len(r.round.changes) == 0 && !together.wait(ctx) {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-r.in.wakeCh:
			case <-tick.C:
			}
		}
		items = r.in.take(items)
		now := time.Now()
		if !r.ledger.term.Valid() {
			return &stepDownError{bus.Errorf(bus.CodeFenced, "the lead has expired")}
		}
		round := r.decide(items, now)
		calls := len(items)
		clear(items)
		var unknown error
		r.ledger.commit(ctx, round.changes, func(c *change) { unknown = errors.Join(unknown, r.apply(c, time.Now())) })
		if err := errors.Join(unknown, r.ledger.tend(ctx, now)); err != nil {
			return &stepDownError{err}
		}
		together.after(calls, len(round.changes) > 0, time.Since(now))
	}
}

// send answers a call. An answer that is lost is asked for again.
func (r *reign) send(c *call, a *answer) []byte {
	a.Seq, a.Attempt, a.Epoch, a.Now = c.Seq, c.Attempt, r.ledger.term.Epoch(), r.termTime(time.Now())
	data, err := wire.Marshal(a)
	if err != nil {
		a = &answer{Seq: a.Seq, Attempt: a.Attempt, Epoch: a.Epoch, Now: a.Now, Kind: answerFailed, Error: toWire(err)}
		data, _ = wire.Marshal(a) // an error and four numbers
	}
	r.publish(c.reply, data)
	return data
}

func (r *reign) publish(subject string, data []byte) {
	if err := r.cfg.Bus.Conn().Publish(subject, data); err != nil {
		r.cfg.Logger.Debug("placement: an answer is lost", "error", err)
	}
}
