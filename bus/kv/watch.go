package kv

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"troupe/bus"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	watchAhead     = 128                    // messages requested ahead of the reader, which bounds the memory of a watch
	watchExpires   = 30 * time.Second       // lifetime of a request to the server; then it is repeated
	watchHeartbeat = time.Second            // after twice this time of silence the watch starts a new consumer
	calmHeartbeat  = 5 * time.Second        // the same, where a consumer is lost with the connection only: each costs the server as much as a message
	watchRecheck   = 100 * time.Millisecond // interval of comparisons with the leader until the state is complete
	watchPause     = time.Second            // between consumers that fail, at most
)

// EventKind is the kind of an Event.
type EventKind uint8

const (
	EventPut      EventKind = iota + 1 // the key has this value
	EventDelete                        // the key is gone: deleted, expired, or lost with its bucket
	EventComplete                      // the current state has been delivered; repeated after each interruption
)

// Event is one event of a watch. A deletion has no value, and no revision if the watch found it by comparison after an
// interruption.
type Event struct {
	Kind EventKind
	Entry
}

// Watch delivers the key prefix and every key under it (all keys if it is empty), then EventComplete, then each change.
// It is not a log: values that are replaced quickly may be skipped, but the last event of a key is always its latest
// state, also across reconnects, restarts of the server and buckets that are lost and created again. At EventComplete
// everything acknowledged before the call has been delivered. The watch ends, and the channel is closed, when ctx ends
// or the bus is closed. A slow reader delays only its own watch.
func (bucket *Bucket) Watch(ctx context.Context, prefix string) (<-chan Event, error) {
	w := &watch{kv: bucket, ch: make(chan Event), known: map[string]uint64{}, filters: []string{bucket.prefix + ">"}}
	if prefix != "" {
		if err := checkKey(prefix); err != nil {
			return nil, err
		}
		w.filters = []string{bucket.prefix + prefix, bucket.prefix + prefix + ".>"}
	}
	if bucket.caller != nil {
		bus.Go(func() { w.watchAtDoor(ctx, prefix) })
		return w.ch, nil
	}
	bus.Go(func() { w.run(ctx) })
	return w.ch, nil
}

// watch is the state of one Watch; its goroutine owns it.
type watch struct {
	kv      *Bucket
	filters []string
	ch      chan Event
	known   map[string]uint64 // revisions of the keys that were delivered
	born    time.Time         // creation time of the bucket of those revisions
	bare    bool              // without values
}

var errReconnected = errors.New("reconnected")

func (w *watch) run(ctx context.Context) {
	defer close(w.ch)
	waits := bus.Backoff{First: retryPause, Most: watchPause}.Start()
	for {
		completed, err := w.follow(ctx)
		if ctx.Err() != nil || w.kv.b.Closed() {
			return
		}
		w.kv.b.Logger().Debug("bus: watch interrupted", "bucket", w.kv.cfg.Bucket, "error", err)
		if completed || errors.Is(err, errReconnected) {
			waits.Reset()
		}
		if waits.Wait(ctx) != nil {
			return
		}
	}
}

// follow follows one consumer until an error, and reports whether the current state was complete.
func (w *watch) follow(ctx context.Context) (completed bool, err error) {
	ctx, cancel := w.untilReconnect(ctx)
	defer cancel()
	s, err := w.open(ctx)
	if err != nil {
		return false, cmp.Or(context.Cause(ctx), err)
	}
	defer s.close(ctx)
	for {
		if !completed && s.pending == 0 && s.highest >= s.floor {
			if err := w.complete(ctx, s); err != nil {
				return false, err
			}
			completed = true
		}
		rec, err := s.next(ctx, completed)
		if err != nil {
			return completed, err
		}
		if rec != nil {
			if err := w.see(ctx, s, *rec); err != nil {
				return completed, err
			}
		}
	}
}

// untilReconnect cancels the context when the connection has been replaced: messages in flight are lost.
func (w *watch) untilReconnect(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	upCh, stop := w.kv.b.Connections()
	bus.Go(func() {
		defer stop()
		for ctx.Err() == nil {
			select {
			case up := <-upCh:
				if up || w.kv.b.Closed() {
					cancel(errReconnected)
				}
			case <-ctx.Done():
			}
		}
	})
	return ctx, func() { cancel(nil) }
}

// watchConsumer is a consumer and its progress. It begins with the last message of every key.
type watchConsumer struct {
	w         *watch
	consumer  jetstream.Consumer
	sub       *bus.Subscription
	msgCh     chan *nats.Msg      // has room for all messages of one request, including heartbeats
	asked     int                 // messages that the current request may still bring
	absent    int                 // consecutive requests without a responder
	silence   time.Duration       // since the last message or heartbeat
	heartbeat time.Duration       // how often the server says that there is nothing new
	floor     uint64              // the leader's newest message: a lagging replica may not have delivered it
	highest   uint64              // the newest delivered message
	pending   uint64              // number of messages to come
	sequence  uint64              // of the consumer; a gap means a lost message
	fresh     map[string]struct{} // keys of the current state; nil once it is complete
	ghosts    ghostFilter         // only records stored before the consumer can be ghosts
}

func (w *watch) open(ctx context.Context) (*watchConsumer, error) {
	call, cancel := bounded(ctx)
	defer cancel()
	var stream jetstream.Stream
	err := untilAnswered(call, func(ctx context.Context) (err error) {
		stream, err = w.kv.open(ctx, w.kv.cfg.Memory)
		return err
	})
	if err != nil {
		return nil, err
	}
	if born := stream.CachedInfo().Created; !born.Equal(w.born) { // another bucket, with unrelated revisions
		w.born = born
		for key := range w.known {
			w.known[key] = 0
		}
	}
	s := &watchConsumer{w: w, fresh: map[string]struct{}{}}
	if s.floor, err = w.newest(call); err != nil {
		return nil, err
	}
	err = untilAnswered(call, func(ctx context.Context) (err error) { // one whose creation was not answered expires
		s.consumer, err = stream.CreateConsumer(ctx, jetstream.ConsumerConfig{
			FilterSubjects:    w.filters,
			DeliverPolicy:     jetstream.DeliverLastPerSubjectPolicy,
			AckPolicy:         jetstream.AckNonePolicy,
			MemoryStorage:     true,
			Replicas:          1,
			HeadersOnly:       w.bare,
			InactiveThreshold: 30 * time.Second,
		})
		return err
	})
	if err != nil {
		return nil, err
	}
	if s.ghosts, err = w.kv.ghostFilter(call); err != nil {
		return nil, err
	}
	s.pending = s.consumer.CachedInfo().NumPending
	s.heartbeat = w.heartbeat()
	s.msgCh = make(chan *nats.Msg, watchAhead+2*int(watchExpires/watchHeartbeat))
	s.sub, err = w.kv.b.SubscribeChan(w.kv.b.NewInbox(), s.msgCh)
	return s, err
}

// heartbeat is how often the server says that it has nothing new. A server of a cluster may take a consumer with it while this connection lasts,
// and the embedded one may close its store.
func (w *watch) heartbeat() time.Duration {
	if w.kv.b.Clustered() || w.kv.b.Embedded() {
		return watchHeartbeat
	}
	return calmHeartbeat
}

// newest is the revision of the leader's newest message for this watch.
func (w *watch) newest(ctx context.Context) (revision uint64, err error) {
	for _, filter := range w.filters {
		rec, err := w.kv.last(ctx, filter)
		if err != nil {
			return 0, err
		}
		revision = max(revision, rec.Revision)
	}
	return revision, nil
}

// close deletes the consumer at the end of the watch. After a failure it expires.
func (s *watchConsumer) close(ctx context.Context) {
	_ = s.sub.Unsubscribe() // fails only if the connection is closed
	if err := context.Cause(ctx); err == nil || errors.Is(err, errReconnected) {
		return
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), attemptLimit)
	defer cancel()
	_ = s.w.kv.b.JetStream().DeleteConsumer(last, s.w.kv.stream, s.consumer.CachedInfo().Name) // expires if this fails
}

// next returns the next record. Until the state is complete it also returns without one, after a comparison with
// consumer and leader: a message that was counted may have expired before it was sent.
func (s *watchConsumer) next(ctx context.Context, completed bool) (*record, error) {
	if s.asked == 0 {
		if err := s.ask(); err != nil {
			return nil, err
		}
	}
	patience := 2 * s.heartbeat
	if !completed {
		patience = watchRecheck
	}
	select {
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case msg := <-s.msgCh:
		s.silence = 0
		return s.read(ctx, msg)
	case <-time.After(patience):
		if s.silence += patience; s.silence >= 2*s.heartbeat {
			return nil, errors.New("the consumer sends no heartbeats")
		}
		return nil, s.recheck(ctx)
	}
}

// ask requests the next messages. There is one request at a time.
func (s *watchConsumer) ask() error {
	s.asked = watchAhead
	subject := "$JS.API.CONSUMER.MSG.NEXT." + s.w.kv.stream + "." + s.consumer.CachedInfo().Name
	request := fmt.Sprintf(`{"batch":%d,"expires":%d,"idle_heartbeat":%d}`, watchAhead, watchExpires, s.heartbeat)
	return s.w.kv.b.PublishRequest(subject, s.sub.Subject(), []byte(request))
}

func (s *watchConsumer) recheck(ctx context.Context) (err error) {
	call, cancel := bounded(ctx)
	defer cancel()
	var info *jetstream.ConsumerInfo
	err = untilAnswered(call, func(ctx context.Context) (err error) {
		info, err = s.consumer.Info(ctx)
		return err
	})
	if err != nil {
		return err
	}
	if info.Delivered.Consumer == s.sequence { // nothing is in flight
		s.pending = info.NumPending
	}
	s.floor, err = s.w.newest(call)
	return err
}

// read handles a message, or a status message of the server, which has no record.
func (s *watchConsumer) read(ctx context.Context, msg *nats.Msg) (*record, error) {
	switch status := msg.Header.Get("Status"); status {
	case "":
	case "100": // a heartbeat
		return nil, nil
	case "408": // the request has expired
		s.asked = 0
		return nil, nil
	case "503": // in a cluster, a new consumer may not be known everywhere yet
		if s.absent++; s.absent > 10 {
			return nil, errors.New("the consumer is gone")
		}
		s.asked = 0
		return nil, bus.Sleep(ctx, time.Duration(s.absent)*retryPause)
	default:
		return nil, fmt.Errorf("the consumer ended: %s %s", status, msg.Header.Get("Description"))
	}
	meta, err := msg.Metadata()
	if err != nil {
		return nil, err
	}
	s.asked, s.absent, s.sequence = s.asked-1, 0, s.sequence+1
	if meta.Sequence.Consumer != s.sequence {
		return nil, errors.New("messages were lost")
	}
	s.pending, s.highest = meta.NumPending, max(s.highest, meta.Sequence.Stream)
	rec := newRecord(strings.TrimPrefix(msg.Subject, s.w.kv.prefix), msg.Data, meta.Sequence.Stream, meta.Timestamp, msg.Header)
	return &rec, nil
}

// see delivers changes. Only delivered events are recorded in known: the consumer may fail while the reader is slow.
func (w *watch) see(ctx context.Context, s *watchConsumer, rec record) error {
	if isReserved(rec.Key) {
		return nil
	}
	rec.deleted = rec.deleted || s.ghosts.hide(rec)
	revision, known := w.known[rec.Key]
	if s.fresh != nil && !rec.deleted {
		s.fresh[rec.Key] = struct{}{}
	}
	switch {
	case known && rec.Revision <= revision, rec.deleted && !known:
		return nil
	case rec.deleted:
		delete(s.fresh, rec.Key)
		return w.deliver(ctx, Event{Kind: EventDelete, Entry: Entry{Key: rec.Key, Revision: rec.Revision, Time: rec.Time}})
	}
	return w.deliver(ctx, Event{Kind: EventPut, Entry: rec.Entry})
}

// complete delivers the deletions that the consumer did not report, and then EventComplete.
func (w *watch) complete(ctx context.Context, s *watchConsumer) error {
	for key := range w.known {
		if _, ok := s.fresh[key]; ok {
			continue
		}
		if err := w.deliver(ctx, Event{Kind: EventDelete, Entry: Entry{Key: key}}); err != nil {
			return err
		}
	}
	s.fresh = nil
	return w.deliver(ctx, Event{Kind: EventComplete})
}

func (w *watch) deliver(ctx context.Context, ev Event) error {
	select {
	case w.ch <- ev:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	switch ev.Kind {
	case EventPut:
		w.known[ev.Key] = ev.Revision
	case EventDelete:
		delete(w.known, ev.Key)
	}
	return nil
}
