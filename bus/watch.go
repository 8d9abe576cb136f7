package bus

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	watchAhead     = 128                    // messages asked for ahead of the reader: what bounds a watch's memory
	watchHeartbeat = 2 * time.Second        // twice this in silence, and the session is begun anew
	watchRecheck   = 100 * time.Millisecond // how often an unfinished state is compared with the leader's
	watchPause     = time.Second            // between sessions that fail, at most
)

// EventKind says what an Event is about.
type EventKind uint8

const (
	EventPut      EventKind = iota + 1 // the key has this value
	EventDelete                        // the key is gone: deleted, expired, or lost with its bucket
	EventComplete                      // the current state has been delivered; comes again after each interruption
)

// Event is one thing a watch has seen. A deletion has no value, and no revision if it was found out after the fact.
type Event struct {
	Kind EventKind
	Entry
}

// Watch delivers the key named prefix and every key under it (all keys if it is empty), then EventComplete, then each
// change. It is not a log: values that are replaced quickly may be passed over, but the last event of a key is always its
// latest state, also over reconnects, restarts of the server and buckets that are lost and made again. At EventComplete
// everything acknowledged before the call has been delivered. The watch ends, and the channel is closed, when ctx ends or
// the bus is closed. A slow reader holds up nobody but itself.
func (kv *KV) Watch(ctx context.Context, prefix string) (<-chan Event, error) {
	w := &watch{kv: kv, ch: make(chan Event), known: map[string]uint64{}, filters: []string{kv.prefix + ">"}}
	if prefix != "" {
		if err := checkKey(prefix); err != nil {
			return nil, err
		}
		w.filters = []string{kv.prefix + prefix, kv.prefix + prefix + ".>"}
	}
	go w.run(ctx)
	return w.ch, nil
}

// watch is owned by its goroutine.
type watch struct {
	kv      *KV
	filters []string
	ch      chan Event
	known   map[string]uint64 // the keys the reader believes to exist, at which revision
	born    time.Time         // of the bucket those revisions belong to
}

var errReconnected = errors.New("reconnected")

func (w *watch) run(ctx context.Context) {
	defer close(w.ch)
	for pause := retryPause; ; pause = min(2*pause, watchPause) {
		completed, err := w.session(ctx)
		if ctx.Err() != nil || w.kv.b.nc.IsClosed() {
			return
		}
		w.kv.b.cfg.Logger.Debug("bus: watch interrupted", "bucket", w.kv.cfg.Bucket, "error", err)
		if completed || errors.Is(err, errReconnected) {
			pause = retryPause
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// session follows one consumer for as long as that can be trusted, and reports whether it got through the current state.
func (w *watch) session(ctx context.Context) (completed bool, err error) {
	ctx, cancel := w.untilReconnect(ctx)
	defer cancel()
	s, err := w.open(ctx)
	if err != nil {
		return false, err
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

// untilReconnect ends the context when the connection has been replaced: what was on its way is lost.
func (w *watch) untilReconnect(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	statusCh := w.kv.b.nc.StatusChanged(nats.CONNECTED, nats.CLOSED)
	go func() {
		select {
		case <-statusCh:
			cancel(errReconnected)
		case <-ctx.Done():
		}
		w.kv.b.nc.RemoveStatusListener(statusCh)
	}()
	return ctx, func() { cancel(nil) }
}

// session is a consumer and what is known of its place. It begins with the last message of every key.
type session struct {
	w        *watch
	consumer jetstream.Consumer
	messages jetstream.MessagesContext
	floor    uint64              // the leader's newest message: a replica that lags behind has not shown us everything
	highest  uint64              // the newest that we have seen
	pending  uint64              // how many more there are
	sequence uint64              // of the consumer; a gap is a loss
	fresh    map[string]struct{} // keys seen to exist; nil once the state is complete
}

func (w *watch) open(ctx context.Context) (*session, error) {
	call, cancel := bounded(ctx)
	defer cancel()
	stream, err := w.kv.open(call, w.kv.cfg.Memory)
	if err != nil {
		return nil, err
	}
	if born := stream.CachedInfo().Created; !born.Equal(w.born) { // another bucket: its revisions say nothing about ours
		w.born = born
		for key := range w.known {
			w.known[key] = 0
		}
	}
	s := &session{w: w, fresh: map[string]struct{}{}}
	if s.floor, err = w.newest(call); err != nil {
		return nil, err
	}
	s.consumer, err = stream.CreateConsumer(call, jetstream.ConsumerConfig{
		FilterSubjects:    w.filters,
		DeliverPolicy:     jetstream.DeliverLastPerSubjectPolicy,
		AckPolicy:         jetstream.AckNonePolicy,
		MemoryStorage:     true,
		Replicas:          1,
		InactiveThreshold: 30 * time.Second,
	})
	if err != nil {
		return nil, err
	}
	s.pending = s.consumer.CachedInfo().NumPending
	s.messages, err = s.consumer.Messages(jetstream.PullMaxMessages(watchAhead), jetstream.PullHeartbeat(watchHeartbeat))
	return s, err
}

// newest is the revision of the leader's newest message that concerns this watch.
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

// close gives the consumer back at the end of the watch. After a failure it is left to expire.
func (s *session) close(ctx context.Context) {
	s.messages.Stop()
	if err := context.Cause(ctx); err == nil || errors.Is(err, errReconnected) {
		return
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), attemptLimit)
	defer cancel()
	_ = s.w.kv.b.js.DeleteConsumer(last, s.w.kv.stream, s.consumer.CachedInfo().Name) // expires if this fails
}

// next returns the next record. While the state is incomplete it also returns without one, after a look at where
// consumer and leader are: a message that was counted may have expired before it was sent.
func (s *session) next(ctx context.Context, completed bool) (*record, error) {
	wait, cancel := ctx, context.CancelFunc(func() {})
	if !completed {
		wait, cancel = context.WithTimeout(ctx, watchRecheck)
	}
	defer cancel()
	msg, err := s.messages.Next(jetstream.NextContext(wait))
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil && wait.Err() != nil:
		return nil, s.recheck(ctx)
	case err != nil:
		return nil, err
	}
	return s.read(msg)
}

func (s *session) recheck(ctx context.Context) (err error) {
	call, cancel := bounded(ctx)
	defer cancel()
	info, err := s.consumer.Info(call)
	if err != nil {
		return err
	}
	if info.Delivered.Consumer == s.sequence { // nothing is on its way
		s.pending = info.NumPending
	}
	s.floor, err = s.w.newest(call)
	return err
}

func (s *session) read(msg jetstream.Msg) (*record, error) {
	meta, err := msg.Metadata()
	if err != nil {
		return nil, err
	}
	s.sequence++
	if meta.Sequence.Consumer != s.sequence {
		return nil, errors.New("messages were lost on the way")
	}
	s.pending, s.highest = meta.NumPending, max(s.highest, meta.Sequence.Stream)
	rec := newRecord(strings.TrimPrefix(msg.Subject(), s.w.kv.prefix), msg.Data(), meta.Sequence.Stream, meta.Timestamp, msg.Headers())
	return &rec, nil
}

// see delivers what is news.
func (w *watch) see(ctx context.Context, s *session, rec record) error {
	revision, known := w.known[rec.Key]
	if s.fresh != nil && !rec.deleted {
		s.fresh[rec.Key] = struct{}{}
	}
	switch {
	case known && rec.Revision <= revision:
		return nil
	case !rec.deleted:
		w.known[rec.Key] = rec.Revision
		return w.deliver(ctx, Event{Kind: EventPut, Entry: rec.Entry})
	case !known:
		return nil
	}
	delete(w.known, rec.Key)
	delete(s.fresh, rec.Key)
	return w.deliver(ctx, Event{Kind: EventDelete, Entry: Entry{Key: rec.Key, Revision: rec.Revision, Time: rec.Time}})
}

// complete delivers the deletions that nobody told us of, and says that this is the state.
func (w *watch) complete(ctx context.Context, s *session) error {
	for key := range w.known {
		if _, ok := s.fresh[key]; ok {
			continue
		}
		delete(w.known, key)
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
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
