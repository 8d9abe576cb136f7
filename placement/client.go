package placement

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/nodes/protocol"
	"troupe/placement/planner"
)

const (
	initialRetry    = 250 * time.Millisecond // until the first repetition; it grows up to renewEvery
	noLeaderPause   = 25 * time.Millisecond  // before a repetition when no leader listens
	clientTimeout   = 10 * time.Second       // of calls whose context has no deadline, other than Reserve
	withdrawTimeout = 3 * time.Second        // of a withdrawal, which outlives its context
)

// Client calls the placement service. It is safe for concurrent use.
//
// Every call is repeated under its sequence number until it is answered or its context ends, across leader changes and
// server outages. The service performs it once, however often it arrives.
type Client struct {
	b         *bus.Bus
	namespace string
	session   string
	subject   string
	replies   [8]string // subjects of answers
	sub       *bus.Subscription
	by        *protocol.Actor

	mu         sync.Mutex // guards the fields below
	seq        uint64
	floor      uint64 // every call up to this one has ended
	open       map[uint64]*pendingCall
	epoch      uint64                   // of the leader that answered last
	termStart  time.Time                // of its term, by the local clock
	lastAnswer time.Time                // when it last answered
	granted    map[string]grantedRecord // and not released through this client, by reservation
	closed     bool
}

// pendingCall is a call that waits for its answer.
type pendingCall struct {
	answerCh   chan *answer
	noLeaderCh chan struct{} // no leader listens

	noLeaderWaits *bus.Waits // owned by the calling goroutine
}

// NewClient returns a client of a namespace. An empty namespace makes it an operator, which may act in all of them. The
// caller keeps the ownership of the bus.
func NewClient(b *bus.Bus, namespace string) (*Client, error) {
	if namespace != "" {
		if err := bus.CheckName("namespace", namespace); err != nil {
			return nil, err
		}
	}
	c := &Client{b: b, by: &protocol.Actor{Name: bus.ProcessName(), Credential: b.CredentialID()}, namespace: namespace, session: bus.NewID(), subject: requestSubject(namespace), open: map[uint64]*pendingCall{}, granted: map[string]grantedRecord{}}
	reply := replySubject(namespace, c.session) + "."
	for i := range c.replies {
		c.replies[i] = reply + strconv.Itoa(i)
	}
	sub, err := b.Subscribe(reply+"*", c.handleAnswer)
	if err != nil {
		return nil, bus.Errorf(bus.CodeClosed, "placement client: %w", err)
	}
	c.sub = sub
	return c, nil
}

// Close ends the client and fails pending calls. Reservations remain.
func (c *Client) Close() {
	_ = c.sub.Unsubscribe() // fails only if the connection is closed
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for seq, p := range c.open {
		close(p.answerCh)
		delete(c.open, seq)
	}
}

// handleAnswer passes an answer to its call. Answers to calls that have ended are dropped.
func (c *Client) handleAnswer(m *bus.Msg) {
	if len(m.Data) == 0 && m.Header.Get("Status") == "503" {
		c.handleNoResponders(m.Subject)
		return
	}
	a := new(answer)
	if err := wire.Unmarshal(m.Data, a); err != nil {
		return
	}
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	// Epochs decrease when the ledger has lost its end. A deposed leader does not answer, and a delayed answer is
	// harmless: the leader answers the next message with a resync.
	if a.Epoch >= c.epoch || now.Sub(c.lastAnswer) > messageTTL {
		// The answer has travelled for a while, so the term is older than this: deadlines in term time are rather too
		// early.
		c.epoch, c.termStart, c.lastAnswer = a.Epoch, now.Add(-time.Duration(a.Now)*time.Microsecond), now
	}
	if p := c.open[a.Seq]; p != nil {
		select {
		case p.answerCh <- a:
		default: // the buffer is full; the message will be repeated
		}
	}
}

// handleNoResponders wakes the calls that use a reply subject. Other calls of the subject repeat a little early.
func (c *Client) handleNoResponders(subject string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for seq, p := range c.open {
		if c.replyTo(seq) == subject {
			wake(p.noLeaderCh)
		}
	}
}

// replyTo returns the subject for the answer of a call. The number of subjects is small because the server keeps a
// route for each.
func (c *Client) replyTo(seq uint64) string { return c.replies[seq%uint64(len(c.replies))] }

func wake(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

func (c *Client) openCall() (uint64, *pendingCall, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0, nil, bus.Errorf(bus.CodeClosed, "the placement client is closed")
	}
	c.seq++
	p := &pendingCall{answerCh: make(chan *answer, 8), noLeaderCh: make(chan struct{}, 1), noLeaderWaits: bus.Backoff{First: noLeaderPause, Most: 4 * noLeaderPause}.Start()}
	c.open[c.seq] = p
	return c.seq, p, nil
}

// closeCall removes a call and raises the floor.
func (c *Client) closeCall(seq uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.open, seq)
	for c.floor < c.seq && c.open[c.floor+1] == nil {
		c.floor++
	}
}

// stamp sets the leader that a message is for and its deadline: at most messageTTL, and no later than the client's.
func (c *Client) stamp(m *message, deadline time.Time) {
	until := time.Now().Add(messageTTL)
	if !deadline.IsZero() && deadline.Before(until) {
		until = deadline
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	m.Floor, m.Epoch, m.Until = c.floor, c.epoch, until.Sub(c.termStart).Microseconds()
}

// call makes a call. waits, if not nil, is called each time the service reports that the request waits.
func (c *Client) call(ctx context.Context, m *message, waits func(*answer)) (*answer, error) {
	seq, p, err := c.openCall()
	if err != nil {
		return nil, err
	}
	defer c.closeCall(seq)
	m.Session, m.Seq = c.session, seq
	return c.sendUntilAnswered(ctx, m, p, waits)
}

// sendUntilAnswered repeats the message until it is answered.
func (c *Client) sendUntilAnswered(ctx context.Context, m *message, p *pendingCall, waits func(*answer)) (*answer, error) {
	began := time.Now()
	deadline, _ := ctx.Deadline()
	backoff := bus.Backoff{First: initialRetry, Most: renewEvery * 2 / 3}.Start() // at most renewEvery with its jitter
	retry := time.NewTimer(initialRetry)
	defer retry.Stop()
	queued := false
	if m.Verb.audited() {
		m.By = c.by
	}
	for {
		if m.Attempt++; m.Attempt > 1 && m.Verb == verbReserve {
			m.Waited = time.Since(began).Microseconds()
		}
		c.stamp(m, deadline)
		if err := c.publish(m); err != nil {
			return nil, err
		}
		if queued {
			retry.Reset(renewEvery)
		} else {
			retry.Reset(backoff.Next())
		}
		a, err := c.awaitAnswer(ctx, m, p, retry.C, func(a *answer) {
			queued = true
			retry.Reset(renewEvery)
			if waits != nil {
				waits(a)
			}
		})
		if a != nil || err != nil {
			return a, err
		}
	}
}

func (c *Client) publish(m *message) error {
	data, err := wire.Marshal(m)
	if err != nil {
		return err
	}
	if limit := c.b.MaxPayload(); limit > 0 && len(data) > limit {
		return &RequestError{Problem: planner.ErrTooManyBundles, Detail: fmt.Sprintf("a request of %d bytes is too large", len(data)), Hint: fmt.Sprintf("the server takes %d", limit)}
	}
	err = c.b.PublishRequest(c.subject, c.replyTo(m.Seq), data)
	if errors.Is(err, bus.ErrClosed) {
		return bus.Errorf(bus.CodeClosed, "the connection to the bus is closed: %w", err)
	}
	return nil // other errors are outages; the message will be repeated
}

// awaitAnswer returns the final answer of the call, or nil when the message must be repeated.
func (c *Client) awaitAnswer(ctx context.Context, m *message, p *pendingCall, retryCh <-chan time.Time, waits func(*answer)) (*answer, error) {
	for {
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-retryCh:
			return nil, nil
		case <-p.noLeaderCh:
			select {
			case <-time.After(p.noLeaderWaits.Next()):
				return nil, nil
			case a, ok := <-p.answerCh: // of a leader that has just stepped down
				if over, err := c.isFinal(a, ok, m); over || err != nil {
					return a, err
				}
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		case a, ok := <-p.answerCh:
			over, err := c.isFinal(a, ok, m)
			switch {
			case over || err != nil:
				return a, err
			case a.Kind == answerWaits && a.Epoch == m.Epoch:
				waits(a)
			case a.Kind == answerResync && a.Attempt == m.Attempt:
				return nil, nil
			}
		}
	}
}

// isFinal reports whether an answer ends its call. A refusal by a deposed leader does not: its successor may grant.
func (c *Client) isFinal(a *answer, ok bool, m *message) (over bool, err error) {
	switch {
	case !ok:
		return false, bus.Errorf(bus.CodeClosed, "the placement client is closed")
	case a.Kind == answerDone:
		return true, nil
	case a.Kind == answerFailed && a.Epoch == m.Epoch:
		if a.Error == nil {
			return true, bus.Errorf(bus.CodeMalformed, "the placement service sent a failure without an error")
		}
		return true, a.Error.decode()
	}
	return false, nil
}

// withTimeout adds clientTimeout to a context without a deadline.
func withTimeout(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, clientTimeout)
}

// withDefaults sets the id and the namespace. The id makes the reservation findable when the answer is lost.
func (c *Client) withDefaults(r Request) Request {
	r.ID = cmp.Or(r.ID, bus.NewID())
	r.Namespace = cmp.Or(r.Namespace, c.namespace)
	return r
}

// Reserve asks for a reservation and waits in the queue until it is granted or ctx ends; a context without a deadline
// waits without limit. The error is a *RequestError for an invalid request, a *NoCapacityError for one that never fits,
// and a *WaitError if ctx ends first.
//
// Repeating the call with the same id and request returns the reservation if it was granted, so a restarted driver
// finds it. A request without an id gets one. When ctx ends, the client withdraws the request; if the service cannot be
// reached for that, the error matches bus.ErrOutcomeUnknown, and the reservation may exist under its id.
func (c *Client) Reserve(ctx context.Context, r Request) (Record, error) {
	return c.reserve(ctx, c.withDefaults(r), false)
}

// TryReserve is Reserve without waiting. A request that does not fit now fails with a *NoCapacityError that lists what
// it would wait for.
func (c *Client) TryReserve(ctx context.Context, r Request) (Record, error) {
	ctx, cancel := withTimeout(ctx)
	defer cancel()
	return c.reserve(ctx, c.withDefaults(r), true)
}

// reserve repeats the request if its grant has ended before the answer arrived.
func (c *Client) reserve(ctx context.Context, r Request, try bool) (Record, error) {
	raw, err := encodeRequest(r)
	if err != nil {
		return Record{}, err
	}
	for {
		record, err := c.reserveOnce(ctx, r.ID, raw, try)
		if !errors.Is(err, ErrEnded) || ctx.Err() != nil {
			return record, err
		}
	}
}

func (c *Client) reserveOnce(ctx context.Context, id string, raw wire.Raw, try bool) (Record, error) {
	seq, p, err := c.openCall()
	if err != nil {
		return Record{}, err
	}
	defer c.closeCall(seq)
	m := &message{Session: c.session, Seq: seq, Verb: verbReserve, Request: raw, Try: try}
	var last *planner.Wait
	a, err := c.sendUntilAnswered(ctx, m, p, func(a *answer) { last = a.Wait })
	if err == nil {
		rec, err := a.record()
		if err == nil {
			c.mu.Lock()
			c.granted[rec.ID] = grantedRecord{rec.Token, a.Record}
			c.mu.Unlock()
		}
		return rec, err
	}
	if a != nil || ctx.Err() == nil {
		return Record{}, err // the service has refused, or nothing was sent
	}
	return Record{}, c.withdraw(ctx, id, seq, last)
}

// withdraw takes back a request whose context has ended.
func (c *Client) withdraw(ctx context.Context, id string, seq uint64, last *planner.Wait) error {
	cause := context.Cause(ctx)
	final, cancel := context.WithTimeout(context.WithoutCancel(ctx), withdrawTimeout)
	defer cancel()
	if _, err := c.call(final, &message{Verb: verbWithdraw, ID: id, Call: seq}, nil); err != nil {
		return bus.Errorf(bus.CodeOutcomeUnknown, "reservation %s: %w, and the withdrawal did not reach the placement service; if the request is granted nevertheless, find and release the reservation by its id", id, cause)
	}
	return &WaitError{ID: id, Wait: last, cause: cause}
}

// record decodes the reservation of an answer.
func (a *answer) record() (Record, error) {
	var s storedRecord
	if err := wire.Unmarshal(a.Record, &s); err != nil {
		return Record{}, err
	}
	s.Token = a.Token
	return s.Record, nil
}

// wrap adds the operation to an error.
func wrap(doing string, err error) error {
	if err == nil {
		return nil
	}
	if err == context.DeadlineExceeded || err == context.Canceled {
		return bus.Errorf(bus.CodeOf(err), "placement: %s: no answer from the placement service: %w", doing, err)
	}
	return fmt.Errorf("%s: %w", doing, err)
}
