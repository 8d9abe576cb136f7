package placement

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/placement/planner"
)

const (
	initialRetry    = 250 * time.Millisecond // a message that is not answered is sent again after this; doubled up to renewEvery
	noLeaderPause   = 25 * time.Millisecond  // nobody leads: look again soon
	clientTimeout   = 10 * time.Second       // of a call whose context has no deadline, but for Reserve, which waits
	withdrawTimeout = 3 * time.Second        // of a withdrawal, whose own context has ended
)

// Client asks the placement service. It is safe for concurrent use.
//
// Every call is sent again, under its number, until it is answered or its context ends, over changes of leaders and
// outages of the server; however often it arrives, it is done once.
type Client struct {
	b         *bus.Bus
	namespace string
	session   string
	subject   string
	replies   [8]string // the subjects of answers
	sub       *nats.Subscription

	mu         sync.Mutex // guards what follows
	seq        uint64
	floor      uint64 // every call up to this one is over
	open       map[uint64]*pendingCall
	epoch      uint64    // of the leader that answered last
	termStart  time.Time // when its term began, by our clock
	lastAnswer time.Time // when it last answered
	closed     bool
}

// pending is a call that waits for its answer.
type pendingCall struct {
	answerCh   chan *answer
	noLeaderCh chan struct{} // nobody took the message
}

// NewClient is a client that works in a namespace, or with an empty one an operator, who works for all of them. The
// bus stays the caller's.
func NewClient(b *bus.Bus, namespace string) (*Client, error) {
	if namespace != "" {
		if err := bus.CheckName("namespace", namespace); err != nil {
			return nil, err
		}
	}
	c := &Client{b: b, namespace: namespace, session: nuid.Next(), subject: bus.PlacementRequest(namespace), open: map[uint64]*pendingCall{}}
	reply := bus.PlacementReply(namespace, c.session) + "."
	for i := range c.replies {
		c.replies[i] = reply + strconv.Itoa(i)
	}
	sub, err := b.Conn().Subscribe(reply+"*", bus.GuardMsg(c.handleAnswer))
	if err != nil {
		return nil, bus.Errorf(bus.CodeClosed, "placement client: %w", err)
	}
	c.sub = sub
	return c, nil
}

// Close ends the client; calls that wait fail. What was reserved stays reserved.
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

// hear hands an answer to its call. One that comes for a call that is over is dropped.
func (c *Client) handleAnswer(m *nats.Msg) {
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
	// Epochs go back where the ledger has lost its end. A leader that has been followed does not answer, and what was held up
	// on its way does no harm: the leader says hello again.
	if a.Epoch >= c.epoch || now.Sub(c.lastAnswer) > messageTTL {
		// The answer was on its way for a while, so the term is older than this: what we stamp counts rather too short.
		c.epoch, c.termStart, c.lastAnswer = a.Epoch, now.Add(-time.Duration(a.Now)*time.Microsecond), now
	}
	if p := c.open[a.Seq]; p != nil {
		select {
		case p.answerCh <- a:
		default: // it has enough to read; the message will be sent again
		}
	}
}

// hearNobody wakes the calls of which one found nobody to take it. The others look again a little early.
func (c *Client) handleNoResponders(subject string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for seq, p := range c.open {
		if c.replyTo(seq) == subject {
			wake(p.noLeaderCh)
		}
	}
}

// replyTo is where the answer of a call goes. There are few such subjects, because the server remembers the way of each.
func (c *Client) replyTo(seq uint64) string { return c.replies[seq%uint64(len(c.replies))] }

func wake(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// begin opens a call.
func (c *Client) openCall() (uint64, *pendingCall, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0, nil, bus.Errorf(bus.CodeClosed, "the placement client is closed")
	}
	c.seq++
	p := &pendingCall{answerCh: make(chan *answer, 8), noLeaderCh: make(chan struct{}, 1)}
	c.open[c.seq] = p
	return c.seq, p, nil
}

// end closes a call.
func (c *Client) closeCall(seq uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.open, seq)
	for c.floor < c.seq && c.open[c.floor+1] == nil {
		c.floor++
	}
}

// stamp says which leader a message is for and until when it counts: no longer than its client waits.
func (c *Client) stamp(m *message, deadline time.Time) {
	until := time.Now().Add(messageTTL)
	if !deadline.IsZero() && deadline.Before(until) {
		until = deadline
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	m.Floor, m.Epoch, m.Until = c.floor, c.epoch, until.Sub(c.termStart).Microseconds()
}

// do makes a call. waits, if any, is told each time the service says that the request waits.
func (c *Client) call(ctx context.Context, m *message, waits func(*answer)) (*answer, error) {
	seq, p, err := c.openCall()
	if err != nil {
		return nil, err
	}
	defer c.closeCall(seq)
	m.Session, m.Seq = c.session, seq
	return c.sendUntilAnswered(ctx, m, p, waits)
}

// persist sends until there is an answer.
func (c *Client) sendUntilAnswered(ctx context.Context, m *message, p *pendingCall, waits func(*answer)) (*answer, error) {
	began := time.Now()
	deadline, _ := ctx.Deadline()
	retry := time.NewTimer(initialRetry)
	defer retry.Stop()
	pause, queued := initialRetry, false
	for {
		if m.Attempt++; m.Attempt > 1 && m.Verb == verbReserve {
			m.Waited = time.Since(began).Microseconds()
		}
		c.stamp(m, deadline)
		if err := c.publish(m); err != nil {
			return nil, err
		}
		retry.Reset(pause)
		if !queued {
			pause = min(2*pause, renewEvery)
		}
		a, err := c.awaitAnswer(ctx, m, p, retry.C, func(a *answer) {
			queued, pause = true, renewEvery
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
	if limit := c.b.Conn().MaxPayload(); limit > 0 && int64(len(data)) > limit {
		return &RequestError{Problem: planner.ErrTooManyBundles, Detail: fmt.Sprintf("a request of %d bytes is too large", len(data)), Hint: fmt.Sprintf("the server takes %d", limit)}
	}
	err = c.b.Conn().PublishRequest(c.subject, c.replyTo(m.Seq), data)
	if errors.Is(err, nats.ErrConnectionClosed) {
		return bus.Errorf(bus.CodeClosed, "the connection to the bus is closed: %w", err)
	}
	return nil // anything else is an outage, and the message is sent again
}

// await returns the last answer of the call, or nothing when it is time to send the message again.
func (c *Client) awaitAnswer(ctx context.Context, m *message, p *pendingCall, retryCh <-chan time.Time, waits func(*answer)) (*answer, error) {
	for {
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-retryCh:
			return nil, nil
		case <-p.noLeaderCh:
			select {
			case <-time.After(noLeaderPause):
				return nil, nil
			case a, ok := <-p.answerCh: // from one that has just gone
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

// judge reports whether an answer ends its call. A refusal of a leader that has been followed by another is none: the
// other may grant.
func (c *Client) isFinal(a *answer, ok bool, m *message) (over bool, err error) {
	switch {
	case !ok:
		return false, bus.Errorf(bus.CodeClosed, "the placement client is closed")
	case a.Kind == answerDone:
		return true, nil
	case a.Kind == answerFailed && a.Epoch == m.Epoch:
		if a.Error == nil {
			return true, bus.Errorf(bus.CodeMalformed, "the placement service failed without a word")
		}
		return true, a.Error.decode()
	}
	return false, nil
}

// bounded gives a call without a deadline one.
func withTimeout(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, clientTimeout)
}

// named fills in what a request need not say. The id makes the reservation findable when the answer is lost.
func (c *Client) withDefaults(r Request) Request {
	r.ID = cmp.Or(r.ID, nuid.Next())
	r.Namespace = cmp.Or(r.Namespace, c.namespace)
	return r
}

// Reserve asks for a reservation and waits in the queue until it is granted or ctx ends; a context without a deadline
// waits for ever. The error says what is wrong: a *RequestError for a request that makes no sense, a *NoCapacityError
// that can never fit, a *WaitError when ctx ended first.
//
// Asking again with the id and the same request finds the reservation if it was granted, so that a driver may lose its
// memory. A request without an id gets one. A client that gives up takes its request back; if even that could not be
// told to anybody, the error matches bus.ErrOutcomeUnknown, and the reservation may be found by its id.
func (c *Client) Reserve(ctx context.Context, r Request) (Record, error) {
	return c.reserve(ctx, c.withDefaults(r), false)
}

// TryReserve is Reserve without waiting: what is not free now is a *NoCapacityError that says what it would wait for.
func (c *Client) TryReserve(ctx context.Context, r Request) (Record, error) {
	ctx, cancel := withTimeout(ctx)
	defer cancel()
	return c.reserve(ctx, c.withDefaults(r), true)
}

// reserve asks, and asks again after a grant that has ended before we heard of it.
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
		return a.record()
	}
	if a != nil || ctx.Err() == nil {
		return Record{}, err // the service has refused it, or nothing was sent
	}
	return Record{}, c.withdraw(ctx, id, seq, last)
}

// giveUp withdraws a request whose client does not wait any longer.
func (c *Client) withdraw(ctx context.Context, id string, seq uint64, last *planner.Wait) error {
	cause := context.Cause(ctx)
	final, cancel := context.WithTimeout(context.WithoutCancel(ctx), withdrawTimeout)
	defer cancel()
	if _, err := c.call(final, &message{Verb: verbWithdraw, ID: id, Call: seq}, nil); err != nil {
		return bus.Errorf(bus.CodeOutcomeUnknown, "reservation %s: %w, and the placement service cannot be told; if it is granted all the same, it is found and released by its id", id, cause)
	}
	return &WaitError{ID: id, Wait: last, cause: cause}
}

// record is the reservation of an answer.
func (a *answer) record() (Record, error) {
	var s storedRecord
	if err := wire.Unmarshal(a.Record, &s); err != nil {
		return Record{}, err
	}
	s.Token = a.Token
	return s.Record, nil
}

// wrap says what was being done.
func wrap(doing string, err error) error {
	if err == nil {
		return nil
	}
	if err == context.DeadlineExceeded || err == context.Canceled {
		return bus.Errorf(bus.CodeOf(err), "placement: %s: no answer from the placement service: %w", doing, err)
	}
	return fmt.Errorf("%s: %w", doing, err)
}
