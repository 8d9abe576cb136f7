package nodes

import (
	"context"
	"errors"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

// OutputMode is the part of its workers' output that a driver receives.
type OutputMode string

const (
	OutputUnset  OutputMode = ""       // nothing is sent; the output is only stored
	OutputNone   OutputMode = "none"   // the last lines on stderr of a worker that died
	OutputErrors OutputMode = "errors" // stderr
	OutputAll    OutputMode = "all"    // stdout and stderr
	OutputRaw    OutputMode = "raw"    // every byte, unchanged; a worker that prints faster than the driver reads is blocked
)

// Check refuses an unknown mode.
func (m OutputMode) Check() error {
	switch m {
	case OutputUnset, OutputNone, OutputErrors, OutputAll, OutputRaw:
		return nil
	}
	return bus.Errorf(bus.CodeInvalid, "output %q is none of all, errors, none, raw", string(m))
}

const (
	feedDelay     = 20 * time.Millisecond // before the first message, to collect lines
	feedPause     = 60 * time.Millisecond // between two messages of workers that print all the time, unless one is full
	feedBatchSize = 256 << 10             // bytes of output in a message, about
	feedTimeout   = 2 * time.Second       // for one message to be acknowledged
	feedFlush     = time.Second           // for the last lines of workers that are stopped
	feedGone      = time.Minute           // after so long without a receiver, raw output does not block workers any more
	feedBytes     = 4 << 20               // bytes of pending output of one role; in raw mode workers are blocked beyond
	workerBurst   = 1000                  // lines of one worker that are sent at once
	workerRate    = 200                   // lines a second of one worker after that, at most; the others are counted
	feedRate      = 1000                  // lines a second of all workers of a role on this machine, in equal shares
	dyingLines    = 20                    // last lines on stderr of a worker that died
)

// feedBackoff paces attempts while nothing receives the output.
var feedBackoff = bus.Backoff{First: feedDelay, Most: time.Second}

// OutputItem is a line of a worker's output, or in raw mode a part of it.
type OutputItem struct {
	Rank   int          `msgpack:"rank"`
	Gen    uint32       `msgpack:"gen"`
	Stream OutputStream `msgpack:"stream"`
	Seq    uint64       `msgpack:"seq"` // counts the worker's lines; zero in raw mode
	Data   []byte       `msgpack:"data"`
	// Dying: one of the last lines on stderr of a worker that died. It may have been sent before.
	Dying bool `msgpack:"dying,omitempty"`
	// End: the worker prints nothing more.
	End bool `msgpack:"end,omitempty"`
	// LeftOut is a number of lines that were not sent, because the worker prints too many.
	LeftOut int `msgpack:"left_out,omitempty"`
}

// OutputBatch is a message on the output subject of a role. It may arrive twice.
type OutputBatch struct {
	Feed   string       `msgpack:"feed"`   // identifies the sender
	Number uint64       `msgpack:"number"` // counts its messages
	Items  []OutputItem `msgpack:"items"`
	// Role is the role whose workers printed it, if that is not the one that the subject names.
	Role string `msgpack:"role,omitempty"`
}

// outputAck answers an OutputBatch.
type outputAck struct {
	Busy bool `msgpack:"busy,omitempty"` // the driver has no room: repeat it later
}

// ReceiveOutput calls f with each message of output of a role's workers, from one goroutine, until stop is called. f must
// not block; it returns false if it has no room, and is called again with the same message later. ctx bounds the wait
// for the subscription.
func (c *Client) ReceiveOutput(ctx context.Context, role bus.Address, f func(OutputBatch) bool) (stop func(), err error) {
	if err := role.Check(); err != nil {
		return nil, err
	}
	received := map[string]uint64{} // by feed
	sub, err := c.b.Subscribe(role.Output(), func(m *bus.Msg) {
		var batch OutputBatch
		if err := wire.Unmarshal(m.Data, &batch); err != nil {
			c.b.Logger().Error("nodes: a malformed message of output", "role", role.Role, "error", err)
			return
		}
		fresh := batch.Number > received[batch.Feed]
		ack := outputAck{Busy: fresh && !f(batch)}
		if fresh && !ack.Busy {
			received[batch.Feed] = batch.Number
		}
		if data, err := wire.Marshal(ack); err == nil {
			_ = c.b.Respond(m, data) // a lost acknowledgement makes the agent repeat the message
		}
	})
	if err != nil {
		return nil, err
	}
	stop = func() { _ = sub.Unsubscribe() } // fails only on a closed connection
	if err := c.b.Flush(ctx); err != nil {
		stop()
		return nil, bus.Errorf(bus.CodeUnavailable, "subscribe to the output of %s: %w", role.Role, err)
	}
	return stop, nil
}

// FlushOutput returns when all that the role's workers on the node have printed so far was received by the driver, or
// nothing receives it.
func (c *Client) FlushOutput(ctx context.Context, node string, role bus.Address) error {
	_, err := c.ask(ctx, request{Op: opFlush, Node: node, Role: &role})
	return err
}

// outputFeed sends the output of a role's workers on this machine to the role's driver, one message at a time.
type outputFeed struct {
	b    *bus.Bus
	role bus.Address
	to   bus.Address // whose subject it is sent on
	mode OutputMode
	id   string
	team bool // the receiver has a team's credential
	// spawn runs a goroutine that ends with ctx; false: the agent ends.
	spawn func(func(ctx context.Context)) bool

	hurryCh chan struct{} // woken by flush

	// mu guards what follows.
	mu        sync.Mutex
	workers   int // that run
	items     []OutputItem
	bytes     int
	added     uint64 // items
	delivered uint64 // items
	movedCh   chan struct{}
	sending   bool // a goroutine sends
	sent      uint64
	deaf      bool      // the last message had no receiver
	deafSince time.Time // zero: it had one
}

func newOutputFeed(b *bus.Bus, role, to bus.Address, mode OutputMode, spawn func(func(context.Context)) bool) *outputFeed {
	return &outputFeed{b: b, role: role, to: to, mode: mode, id: bus.NewID(), spawn: spawn, hurryCh: make(chan struct{}, 1), movedCh: make(chan struct{})}
}

// join counts a worker that was started, and leave one that has ended.
func (f *outputFeed) join()  { f.count(1) }
func (f *outputFeed) leave() { f.count(-1) }

func (f *outputFeed) count(workers int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.workers += workers
}

// lineRate is the lines a second that one worker may send for long. The driver shows 500 a second of all workers together: what many
// workers print beyond their shares would be sent and decoded for nothing.
func (f *outputFeed) lineRate() float64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return min(workerRate, feedRate/float64(max(1, f.workers)))
}

// add queues an item, and drops it if there is no room.
func (f *outputFeed) add(item OutputItem) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.bytes > feedBytes {
		return false
	}
	f.addLocked(item)
	return true
}

// addWaiting queues an item. It waits for room until doneCh is closed, or nothing has received output for a minute.
func (f *outputFeed) addWaiting(item OutputItem, doneCh chan struct{}) {
	for {
		f.mu.Lock()
		gone := f.deaf && time.Since(f.deafSince) > feedGone
		if f.bytes <= feedBytes || closed(doneCh) && !gone {
			f.addLocked(item) // after the exit of the worker: what was left in its pipes
			f.mu.Unlock()
			return
		}
		movedCh := f.movedCh
		f.mu.Unlock()
		if gone {
			return
		}
		select {
		case <-movedCh:
		case <-doneCh:
		case <-time.After(feedTimeout): // gone may have changed
		}
	}
}

// addLast queues one of a bounded number of items, whether there is room or not.
func (f *outputFeed) addLast(item OutputItem) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.addLocked(item)
}

func (f *outputFeed) addLocked(item OutputItem) {
	f.items = append(f.items, item)
	f.bytes += len(item.Data) + lineOverhead
	f.added++
	if !f.sending {
		f.sending = f.spawn(f.send)
	}
}

// flush waits until everything added before is received, or is known to have no receiver.
func (f *outputFeed) flush(ctx context.Context) error {
	f.mu.Lock()
	until := f.added
	f.mu.Unlock()
	for {
		wake(f.hurryCh)
		f.mu.Lock()
		over, movedCh := f.delivered >= until || f.deaf || !f.sending, f.movedCh
		f.mu.Unlock()
		if over {
			return nil
		}
		select {
		case <-movedCh:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// send sends what is queued, and ends when nothing is.
func (f *outputFeed) send(ctx context.Context) {
	waits, pause := feedBackoff.Start(), feedDelay
	for {
		f.wait(ctx, pause)
		batch, ok := f.nextBatch(ctx)
		if !ok {
			return
		}
		busy, err := f.sendBatch(ctx, batch)
		f.finish(batch, err == nil && !busy, errors.Is(err, bus.ErrNoResponders))
		if err == nil && !busy {
			waits.Reset()
			pause = f.pause()
			continue
		}
		pause = waits.Next()
	}
}

// pause is the time in which lines are collected for the next message.
func (f *outputFeed) pause() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.bytes >= feedBatchSize {
		return 0
	}
	return feedPause
}

// wait collects lines, unless flush is waiting.
func (f *outputFeed) wait(ctx context.Context, pause time.Duration) {
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-f.hurryCh:
	case <-t.C:
	case <-ctx.Done():
	}
}

// nextBatch is the first queued items as a message; false: none are queued, or the agent ends.
func (f *outputFeed) nextBatch(ctx context.Context) (OutputBatch, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.items) == 0 || ctx.Err() != nil {
		f.sending = false
		f.movedLocked()
		return OutputBatch{}, false
	}
	taken, bytes, most := 0, 0, min(feedBatchSize, f.b.MaxPayload()/2)
	for _, item := range f.items {
		if bytes += len(item.Data) + lineOverhead; bytes > most && taken > 0 {
			break
		}
		taken++
	}
	batch := OutputBatch{Feed: f.id, Number: f.sent + 1, Items: f.items[:taken:taken]}
	if f.to != f.role {
		batch.Role = f.role.Role
	}
	return batch, true
}

func (f *outputFeed) sendBatch(ctx context.Context, batch OutputBatch) (busy bool, err error) {
	data, err := wire.Marshal(batch)
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeout(ctx, feedTimeout)
	defer cancel()
	ask := f.b.Request
	if f.team {
		ask = func(ctx context.Context, subject string, data []byte) (*bus.Msg, error) {
			return f.b.RequestWithin(ctx, f.to.Namespace, subject, data)
		}
	}
	m, err := ask(ctx, f.to.Output(), data)
	if err != nil {
		return false, err
	}
	var ack outputAck
	err = wire.Unmarshal(m.Data, &ack)
	return ack.Busy, err
}

// finish notes the outcome of a message.
func (f *outputFeed) finish(batch OutputBatch, received, deaf bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case received:
		f.deaf = false
		f.sent = batch.Number
		for i := range batch.Items {
			f.bytes -= len(batch.Items[i].Data) + lineOverhead
		}
		f.delivered += uint64(len(batch.Items))
		f.items = f.items[len(batch.Items):]
	case deaf && !f.deaf:
		f.deaf, f.deafSince = true, time.Now()
	case !deaf:
		f.deaf = false
	}
	if f.deaf && time.Since(f.deafSince) > feedGone {
		f.delivered += uint64(len(f.items))
		f.items, f.bytes = nil, 0 // the files and the log stream have them
	}
	f.movedLocked()
}

func (f *outputFeed) movedLocked() {
	close(f.movedCh)
	f.movedCh = make(chan struct{})
}

// outputFeeds is the feeds of an agent, by role.
type outputFeeds struct {
	b      *bus.Bus
	ctx    context.Context
	cancel context.CancelFunc
	group  sync.WaitGroup

	mu     sync.Mutex // guards what follows
	feeds  map[bus.Address]*outputFeed
	closed bool
}

func newOutputFeeds(b *bus.Bus) *outputFeeds {
	s := &outputFeeds{b: b, feeds: map[bus.Address]*outputFeed{}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// get is the feed of a role; the mode and the receiver of the launch of its first worker count. A nil receiver is the role itself.
func (s *outputFeeds) get(role bus.Address, l Launch) *outputFeed {
	mode, receiver := l.Output, l.OutputTo
	if mode == OutputUnset {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.feeds[role]
	if f == nil {
		to := role
		if receiver != nil {
			to = *receiver
		}
		f = newOutputFeed(s.b, role, to, mode, s.spawn)
		f.team = l.Credential != ""
		s.feeds[role] = f
	}
	return f
}

func (s *outputFeeds) spawn(run func(context.Context)) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.group.Go(bus.Guard(func() { run(s.ctx) }))
	return true
}

// flush returns when the role's driver has received its output, or nothing receives it.
func (s *outputFeeds) flush(ctx context.Context, role bus.Address) error {
	s.mu.Lock()
	f := s.feeds[role]
	s.mu.Unlock()
	if f == nil {
		return nil
	}
	return f.flush(ctx)
}

// forget drops the feeds of roles that have no worker here. Their last output is still sent.
func (s *outputFeeds) forget(hosted map[bus.Address]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for role := range s.feeds {
		if !hosted[role] {
			delete(s.feeds, role)
		}
	}
}

// close sends the last output for a short time, and ends.
func (s *outputFeeds) close() {
	ctx, cancel := context.WithTimeout(context.Background(), feedFlush)
	defer cancel()
	s.mu.Lock()
	all := make([]*outputFeed, 0, len(s.feeds))
	for _, f := range s.feeds {
		all = append(all, f)
	}
	s.mu.Unlock()
	for _, f := range all {
		_ = f.flush(ctx) // the files have the rest
	}
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.group.Wait()
}

// lineLimit admits lines of one worker: workerBurst at once, and a number a second after that. It is guarded by its owner.
type lineLimit struct {
	tokens  float64
	at      time.Time
	omitted int
}

// admit reports whether a line at this time may be sent, with the number of lines that were left out before it. The rate is
// in lines a second.
func (l *lineLimit) admit(now time.Time, rate float64) (ok bool, omitted int) {
	if l.at.IsZero() {
		l.tokens = workerBurst
	} else {
		l.tokens = min(workerBurst, l.tokens+now.Sub(l.at).Seconds()*rate)
	}
	l.at = now
	if l.tokens < 1 {
		l.omitted++
		return false, 0
	}
	l.tokens--
	omitted, l.omitted = l.omitted, 0
	return true, omitted
}
