package nodes

import (
	"context"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/bus/wire"
)

// LogQuery selects stored lines.
type LogQuery struct {
	Namespace   string
	Role        string
	Incarnation string    // zero: all
	Rank        int       // negative: all
	Since       time.Time // zero: from the beginning
	Follow      bool      // wait for lines that are printed later
}

// ReadLogs calls f with the selected lines in the order in which they were stored; with Follow it waits for later ones
// until ctx ends, which is no error then. An error of f ends it. Each line is passed once. Lines that the full stream
// has dropped are only in the files of their node.
func ReadLogs(ctx context.Context, b *bus.Bus, q LogQuery, f func(Line) error) error {
	once := lineFilter{since: q.Since, seen: map[WorkerID]uint64{}}
	filter := bus.Logs(q.Namespace, q.Role, q.Incarnation, q.Rank)
	return readStream(ctx, b, logStreamConfig(), stream.ReadOptions{Subject: filter, Since: q.Since}, q.Follow, func(m stream.Message) error {
		var p lineBatch
		if err := wire.Unmarshal(m.Data, &p); err != nil {
			return bus.Errorf(bus.CodeMalformed, "the log message on %s: %w", m.Subject, err)
		}
		for _, l := range once.lines(p) {
			if err := f(l); err != nil {
				return err
			}
		}
		return nil
	})
}

// lineFilter drops lines that are too old, and lines that were stored twice.
type lineFilter struct {
	since time.Time
	seen  map[WorkerID]uint64
}

func (f lineFilter) lines(p lineBatch) (out []Line) {
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

// readStream calls f with the selected messages of a stream; with follow it waits for later ones until ctx ends, which is
// no error then.
func readStream(ctx context.Context, b *bus.Bus, cfg stream.Config, o stream.ReadOptions, follow bool, f func(stream.Message) error) error {
	s, err := stream.Open(ctx, b, cfg)
	switch {
	case err != nil:
	case follow:
		err = s.Follow(ctx, o, f)
	default:
		return s.Each(ctx, o, f)
	}
	if follow && ctx.Err() != nil {
		return nil
	}
	return err
}

// Follower passes the output of a role's workers to its driver as it is printed.
type Follower struct {
	client *Client
	role   bus.Address
	cancel context.CancelFunc
	doneCh chan struct{}

	mu      sync.Mutex
	at      uint64        // stream sequence up to which f has been called
	movedCh chan struct{} // closed and replaced when at grows
}

// Follow calls f with each line of a role's workers, from one goroutine, from the first line on and until Stop. f may
// block: later lines wait in the stream. Agents store lines every 20 ms.
func (c *Client) Follow(role bus.Address, f func(Line)) (*Follower, error) {
	if err := role.Check(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	w := &Follower{client: c, role: role, cancel: cancel, doneCh: make(chan struct{}), movedCh: make(chan struct{})}
	bus.Go(func() { w.run(ctx, f) })
	return w, nil
}

// run reads the stream again after each interruption. The filter drops lines that were passed before.
func (w *Follower) run(ctx context.Context, f func(Line)) {
	defer close(w.doneCh)
	once := lineFilter{seen: map[WorkerID]uint64{}}
	filter := bus.Logs(w.role.Namespace, w.role.Role, w.role.Incarnation, -1)
	waits := (bus.Backoff{}).Start()
	for ctx.Err() == nil {
		err := readStream(ctx, w.client.b, logStreamConfig(), stream.ReadOptions{Subject: filter}, true, func(m stream.Message) error {
			var p lineBatch
			if wire.Unmarshal(m.Data, &p) == nil { // a malformed message has no lines
				for _, l := range once.lines(p) {
					f(l)
				}
			}
			w.moved(m.Seq)
			waits.Reset()
			return nil
		})
		if ctx.Err() == nil {
			w.client.b.Logger().Debug("nodes: reading the output of workers was interrupted", "role", w.role.Role, "error", err)
			_ = waits.Wait(ctx) // the loop checks ctx
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

// Flush returns when f has been called with everything that the role's workers on these nodes had printed before, or
// after a minute if ctx has no deadline.
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
				return bus.Errorf(bus.CodeClosed, "the follower of %s is stopped", w.role.Role)
			case <-ctx.Done():
				return bus.Errorf(bus.CodeOf(ctx.Err()), "flush the output of %s: %w", w.role.Role, ctx.Err())
			}
		}
	}
	return nil
}

// Stop ends the follower; f is not called after it returns.
func (w *Follower) Stop() {
	w.cancel()
	<-w.doneCh
}
