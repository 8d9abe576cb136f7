package nodes

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
	"troupe/bus/wire"
)

// LogQuery says which lines are wanted.
type LogQuery struct {
	Namespace   string
	Role        string
	Incarnation string    // zero: all of them
	Rank        int       // negative: all of them
	Since       time.Time // zero: from the beginning
	Follow      bool      // go on with what is printed from now on
}

// ReadLogs calls f with the stored lines of a query, in the order in which they were stored, and with Follow goes on until
// ctx ends, which is no error then. An error of f ends it. A line is told once. What was printed before the stream was full
// is in the files of its node alone.
func ReadLogs(ctx context.Context, b *bus.Bus, q LogQuery, f func(Line) error) error {
	once := lineFilter{since: q.Since, seen: map[WorkerID]uint64{}}
	filter := bus.Logs(q.Namespace, q.Role, q.Incarnation, q.Rank)
	return readStream(ctx, b, logStreamConfig(), filter, q.Since, q.Follow, func(m jetstream.Msg) error {
		var p page
		if err := wire.Unmarshal(m.Data(), &p); err != nil {
			return bus.Errorf(bus.CodeMalformed, "a page of logs on %s: %w", m.Subject(), err)
		}
		for _, l := range once.lines(p) {
			if err := f(l); err != nil {
				return err
			}
		}
		return nil
	})
}

// lineFilter leaves out lines that are too old, and those that were stored twice.
type lineFilter struct {
	since time.Time
	seen  map[WorkerID]uint64
}

func (f lineFilter) lines(p page) (out []Line) {
	for _, l := range p.Lines {
		if l.Seq <= f.seen[p.ID] {
			continue
		}
		f.seen[p.ID] = l.Seq
		if !l.At.Before(f.since) {
			out = append(out, Line{ID: p.ID, Name: p.Name, Node: p.Node, Stream: l.Stream, At: l.At, Seq: l.Seq, Text: l.Text})
		}
	}
	return out
}

// errEnough ends a reading in order.
var errEnough = errors.New("enough")

// readStream calls f with each message of a stream, up to the last or until ctx ends.
func readStream(ctx context.Context, b *bus.Bus, cfg jetstream.StreamConfig, filter string, since time.Time, follow bool, f func(jetstream.Msg) error) error {
	stream, err := openStream(ctx, b, cfg)
	if err != nil {
		return err
	}
	order := jetstream.OrderedConsumerConfig{FilterSubjects: []string{filter}, DeliverPolicy: jetstream.DeliverAllPolicy}
	if !since.IsZero() {
		order.DeliverPolicy, order.OptStartTime = jetstream.DeliverByStartTimePolicy, &since
	}
	consumer, err := stream.OrderedConsumer(ctx, order)
	if err != nil {
		return bus.Errorf(bus.CodeUnavailable, "read %s: %w", cfg.Name, err)
	}
	info, err := consumer.Info(ctx)
	if err != nil {
		return bus.Errorf(bus.CodeUnavailable, "read %s: %w", cfg.Name, err)
	}
	if !follow && info.NumPending == 0 && info.Delivered.Consumer == 0 {
		return nil
	}
	messages, err := consumer.Messages()
	if err != nil {
		return bus.Errorf(bus.CodeUnavailable, "read %s: %w", cfg.Name, err)
	}
	defer messages.Stop()
	defer context.AfterFunc(ctx, bus.Guard(messages.Stop))()
	for {
		m, err := messages.Next()
		switch {
		case ctx.Err() != nil && follow:
			return nil
		case ctx.Err() != nil:
			return bus.Errorf(bus.CodeOf(ctx.Err()), "read %s: %w", cfg.Name, ctx.Err())
		case err != nil:
			return bus.Errorf(bus.CodeUnavailable, "read %s: %w", cfg.Name, err)
		}
		if err := f(m); err != nil {
			if errors.Is(err, errEnough) {
				return nil
			}
			return err
		}
		if meta, err := m.Metadata(); err == nil && !follow && meta.NumPending == 0 {
			return nil
		}
	}
}

// Follower hands a driver what its workers print, as they print it.
type Follower struct {
	client *Client
	role   bus.Address
	cancel context.CancelFunc
	doneCh chan struct{}

	mu      sync.Mutex
	at      uint64        // the sequence in the stream up to which f has been called
	movedCh chan struct{} // closed, and replaced, when at grows
}

// Follow calls f with each line of a role's workers, from one goroutine, from the first line on and until Stop. f may be
// slow: what is printed meanwhile waits in the stream. Lines are stored every 20 ms or so.
func (c *Client) Follow(role bus.Address, f func(Line)) (*Follower, error) {
	if err := role.Check(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	w := &Follower{client: c, role: role, cancel: cancel, doneCh: make(chan struct{}), movedCh: make(chan struct{})}
	bus.Go(func() { w.run(ctx, f) })
	return w, nil
}

// run reads on over interruptions. Lines that it has told are not told again.
func (w *Follower) run(ctx context.Context, f func(Line)) {
	defer close(w.doneCh)
	once := lineFilter{seen: map[WorkerID]uint64{}}
	filter := bus.Logs(w.role.Namespace, w.role.Role, w.role.Incarnation, -1)
	for ctx.Err() == nil {
		err := readStream(ctx, w.client.b, logStreamConfig(), filter, time.Time{}, true, func(m jetstream.Msg) error {
			var p page
			if wire.Unmarshal(m.Data(), &p) == nil { // one that cannot be read is nobody's line
				for _, l := range once.lines(p) {
					f(l)
				}
			}
			if meta, err := m.Metadata(); err == nil {
				w.moved(meta.Sequence.Stream)
			}
			return nil
		})
		if ctx.Err() == nil {
			w.client.b.Logger().Debug("nodes: the output of workers is interrupted", "role", w.role.Role, "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(askPauses):
			}
		}
	}
}

func (w *Follower) moved(to uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.at = max(w.at, to)
	close(w.movedCh)
	w.movedCh = make(chan struct{})
}

// Flush returns when f has been called with everything that the role's workers on these nodes had printed when Flush was
// called, or after a minute if ctx has no deadline.
func (w *Follower) Flush(ctx context.Context, nodes ...string) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	for _, node := range nodes {
		r, err := w.client.ask(ctx, request{Op: opFlush, Node: node, Role: &w.role})
		if err != nil {
			return err
		}
		for {
			w.mu.Lock()
			at, movedCh := w.at, w.movedCh
			w.mu.Unlock()
			if at >= r.Stored {
				break
			}
			select {
			case <-movedCh:
			case <-w.doneCh:
				return bus.Errorf(bus.CodeClosed, "the follower of %s has been stopped", w.role.Role)
			case <-ctx.Done():
				return bus.Errorf(bus.CodeOf(ctx.Err()), "flush the output of %s: %w", w.role.Role, ctx.Err())
			}
		}
	}
	return nil
}

// Stop ends it; f is not called any more when it returns.
func (w *Follower) Stop() {
	w.cancel()
	<-w.doneCh
}
