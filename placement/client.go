package placement

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"

	"troupe/bus"
)

const (
	firstRetry    = 250 * time.Millisecond // a message that is not answered is sent again after this; doubled up to renewEvery
	absentPause   = 25 * time.Millisecond  // nobody leads: look again soon
	clientTimeout = 10 * time.Second       // of a call whose context has no deadline, but for Reserve, which waits
	lastActs      = 3 * time.Second        // of a withdrawal, whose own context has ended
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
	replies   string
	sub       *nats.Subscription

	mu     sync.Mutex // guards what follows
	seq    uint64
	floor  uint64 // every call up to this one is over
	open   map[uint64]*pending
	epoch  uint64    // of the leader that answered last
	base   time.Time // when its term began, by our clock
	closed bool
}

// pending is a call that waits for its answer.
type pending struct {
	answerCh chan *answer
	absentCh chan struct{} // nobody took the message
}

// NewClient is a client that works in a namespace, or with an empty one an operator, who works for all of them. The
// bus stays the caller's.
func NewClient(b *bus.Bus, namespace string) (*Client, error) {
	if namespace != "" {
		if err := bus.CheckName("namespace", namespace); err != nil {
			return nil, err
		}
	}
	c := &Client{b: b, namespace: namespace, session: nuid.Next(), subject: bus.PlacementRequest(namespace), open: map[uint64]*pending{}}
	c.replies = bus.PlacementReply(namespace, c.session) + "."
	sub, err := b.Conn().Subscribe(c.replies+"*", c.hear)
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
func (c *Client) hear(m *nats.Msg) {
	seq, err := strconv.ParseUint(strings.TrimPrefix(m.Subject, c.replies), 10, 64)
	if err != nil {
		return
	}
	if len(m.Data) == 0 && m.Header.Get("Status") == "503" {
		c.mu.Lock()
		if p := c.open[seq]; p != nil {
			wake(p.absentCh)
		}
		c.mu.Unlock()
		return
	}
	a := new(answer)
	if err := bus.Unmarshal(m.Data, a); err != nil || a.Seq != seq {
		return
	}
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if a.Epoch >= c.epoch {
		// The answer was on its way for a while, so the term is older than this: what we stamp counts rather too short.
		c.epoch, c.base = a.Epoch, now.Add(-time.Duration(a.Now)*time.Microsecond)
	}
	if p := c.open[seq]; p != nil {
		select {
		case p.answerCh <- a:
		default: // it has enough to read; the message will be sent again
		}
	}
}

func wake(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// begin opens a call.
func (c *Client) begin() (uint64, *pending, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0, nil, bus.Errorf(bus.CodeClosed, "the placement client is closed")
	}
	c.seq++
	p := &pending{answerCh: make(chan *answer, 8), absentCh: make(chan struct{}, 1)}
	c.open[c.seq] = p
	return c.seq, p, nil
}

// end closes a call.
func (c *Client) end(seq uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.open, seq)
	for c.floor < c.seq && c.open[c.floor+1] == nil {
		c.floor++
	}
}

// stamp says which leader a message is for and until when it counts: no longer than its client waits.
func (c *Client) stamp(m *message, deadline time.Time) {
	until := time.Now().Add(freshFor)
	if !deadline.IsZero() && deadline.Before(until) {
		until = deadline
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	m.Floor, m.Epoch, m.Until = c.floor, c.epoch, until.Sub(c.base).Microseconds()
}

// do makes a call. waits, if any, is told each time the service says that the request waits.
func (c *Client) do(ctx context.Context, m *message, waits func(*answer)) (*answer, error) {
	seq, p, err := c.begin()
	if err != nil {
		return nil, err
	}
	defer c.end(seq)
	m.Session, m.Seq = c.session, seq
	return c.persist(ctx, m, p, waits)
}

// persist sends until there is an answer.
func (c *Client) persist(ctx context.Context, m *message, p *pending, waits func(*answer)) (*answer, error) {
	began := time.Now()
	deadline, _ := ctx.Deadline()
	retry := time.NewTimer(firstRetry)
	defer retry.Stop()
	pause, queued := firstRetry, false
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
		a, err := c.await(ctx, m, p, retry.C, func(a *answer) {
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
	data, err := bus.Marshal(m)
	if err != nil {
		return err
	}
	if limit := c.b.Conn().MaxPayload(); limit > 0 && int64(len(data)) > limit {
		return &RequestError{ErrTooManyBundles, fmt.Sprintf("a request of %d bytes is too large", len(data)), fmt.Sprintf("the server takes %d", limit)}
	}
	err = c.b.Conn().PublishRequest(c.subject, c.replies+strconv.FormatUint(m.Seq, 10), data)
	if errors.Is(err, nats.ErrConnectionClosed) {
		return bus.Errorf(bus.CodeClosed, "the connection to the bus is closed: %w", err)
	}
	return nil // anything else is an outage, and the message is sent again
}

// await returns the last answer of the call, or nothing when it is time to send the message again.
func (c *Client) await(ctx context.Context, m *message, p *pending, retryCh <-chan time.Time, waits func(*answer)) (*answer, error) {
	for {
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-retryCh:
			return nil, nil
		case <-p.absentCh:
			select {
			case <-time.After(absentPause):
				return nil, nil
			case a, ok := <-p.answerCh: // from one that has just gone
				if over, err := c.judge(a, ok, m); over || err != nil {
					return a, err
				}
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		case a, ok := <-p.answerCh:
			over, err := c.judge(a, ok, m)
			switch {
			case over || err != nil:
				return a, err
			case a.Kind == answerWaits && a.Epoch == m.Epoch:
				waits(a)
			case a.Kind == answerHello && a.Attempt == m.Attempt:
				return nil, nil
			}
		}
	}
}

// judge reports whether an answer ends its call. A refusal of a leader that has been followed by another is none: the
// other may grant.
func (c *Client) judge(a *answer, ok bool, m *message) (over bool, err error) {
	switch {
	case !ok:
		return false, bus.Errorf(bus.CodeClosed, "the placement client is closed")
	case a.Kind == answerDone:
		return true, nil
	case a.Kind == answerFailed && a.Epoch == m.Epoch:
		if a.Error == nil {
			return true, bus.Errorf(bus.CodeMalformed, "the placement service failed without a word")
		}
		return true, a.Error.err()
	}
	return false, nil
}

// bounded gives a call without a deadline one.
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, clientTimeout)
}

// named fills in what a request need not say. The id makes the reservation findable when the answer is lost.
func (c *Client) named(r Request) Request {
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
	return c.reserve(ctx, c.named(r), false)
}

// TryReserve is Reserve without waiting: what is not free now is a *NoCapacityError that says what it would wait for.
func (c *Client) TryReserve(ctx context.Context, r Request) (Record, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	return c.reserve(ctx, c.named(r), true)
}

func (c *Client) reserve(ctx context.Context, r Request, try bool) (Record, error) {
	raw, err := encodeRequest(r)
	if err != nil {
		return Record{}, err
	}
	seq, p, err := c.begin()
	if err != nil {
		return Record{}, err
	}
	defer c.end(seq)
	m := &message{Session: c.session, Seq: seq, Verb: verbReserve, Request: raw, Try: try}
	var last *Wait
	a, err := c.persist(ctx, m, p, func(a *answer) { last = a.Wait })
	if err == nil {
		return a.record()
	}
	if a != nil || ctx.Err() == nil {
		return Record{}, err // the service has refused it, or nothing was sent
	}
	return Record{}, c.giveUp(ctx, r.ID, seq, last)
}

// giveUp withdraws a request whose client does not wait any longer.
func (c *Client) giveUp(ctx context.Context, id string, seq uint64, last *Wait) error {
	cause := context.Cause(ctx)
	final, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastActs)
	defer cancel()
	if _, err := c.do(final, &message{Verb: verbWithdraw, ID: id, Call: seq}, nil); err != nil {
		return bus.Errorf(bus.CodeOutcomeUnknown, "reservation %s: %w, and the placement service cannot be told; if it is granted all the same, it is found and released by its id", id, cause)
	}
	return &WaitError{ID: id, Wait: last, cause: cause}
}

// record is the reservation of an answer.
func (a *answer) record() (Record, error) {
	var s stored
	if err := bus.Unmarshal(a.Record, &s); err != nil {
		return Record{}, err
	}
	s.Token = a.Token
	return s.Record, nil
}

// Release gives a reservation back. It may be repeated: what is not there has been released. A token other than that of
// the grant is refused with a *StaleTokenError.
func (c *Client) Release(ctx context.Context, id string, token uint64) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	_, err := c.do(ctx, &message{Verb: verbRelease, ID: id, Token: token}, nil)
	return wrap("release "+id, err)
}

// Explain says what would become of a request now, and changes nothing.
func (c *Client) Explain(ctx context.Context, r Request) (Explanation, error) {
	r.Namespace = cmp.Or(r.Namespace, c.namespace)
	raw, err := encodeRequest(r)
	if err != nil {
		return Explanation{}, err
	}
	ctx, cancel := bounded(ctx)
	defer cancel()
	a, err := c.do(ctx, &message{Verb: verbExplain, Request: raw}, nil)
	if err != nil {
		return Explanation{}, wrap("explain", err)
	}
	if a.Explanation == nil {
		return Explanation{}, bus.Errorf(bus.CodeMalformed, "an explanation without one")
	}
	x := *a.Explanation
	if x.Reasons == nil {
		x.Reasons = []Reason{}
	}
	if x.Workers == nil {
		x.Workers = []Worker{}
	}
	return x, nil
}

// Listing is what is held and what waits.
type Listing struct {
	Records []Record  `json:"reservations"`
	Waiting []Waiting `json:"waiting"` // in the order of the queue, as far as a message goes
}

// List is the reservations of the namespace, for an operator of all of them, by id, and the queue. A list that takes
// several messages may be of several moments.
func (c *Client) List(ctx context.Context) (Listing, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	list := Listing{Records: []Record{}, Waiting: []Waiting{}}
	for after, first := "", true; first || after != ""; first = false {
		a, err := c.do(ctx, &message{Verb: verbList, ID: after}, nil)
		if err != nil {
			return Listing{}, wrap("list", err)
		}
		list.Records = append(list.Records, a.Records...)
		if first {
			list.Waiting = append(list.Waiting, a.Waiting...)
		}
		after = a.Next
	}
	return list, nil
}

// Nodes is every node that the leader knows, by name.
func (c *Client) Nodes(ctx context.Context) ([]NodeStatus, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	nodes := []NodeStatus{}
	for after, first := "", true; first || after != ""; first = false {
		a, err := c.do(ctx, &message{Verb: verbNodes, ID: after}, nil)
		if err != nil {
			return nil, wrap("nodes", err)
		}
		nodes = append(nodes, a.Nodes...)
		after = a.Next
	}
	return nodes, nil
}

// Rules are the rules of the queue.
func (c *Client) Rules(ctx context.Context) (Rules, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	a, err := c.do(ctx, &message{Verb: verbRules}, nil)
	if err != nil {
		return Rules{}, wrap("rules", err)
	}
	if a.Rules == nil {
		return Rules{}, nil
	}
	return *a.Rules, nil
}

// SetRules changes the rules for good. Only an operator may.
func (c *Client) SetRules(ctx context.Context, r Rules) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	_, err := c.do(ctx, &message{Verb: verbSetRules, Rules: &r}, nil)
	return wrap("set the rules", err)
}

// Cordon closes a node to new grants, or with a Device (its UUID, or its index on that node) only that, and returns the
// cordon as it is kept. What is held there stays. Doing it again changes who and why. Only an operator may.
func (c *Client) Cordon(ctx context.Context, one Cordon) (Cordon, error) {
	kept, _, err := c.setCordon(ctx, verbCordon, one)
	return kept, wrap("cordon "+one.place(), err)
}

// Uncordon opens again what was cordoned, and reports whether it was. Only an operator may. Devices that were cordoned by
// themselves stay so when their node is opened.
func (c *Client) Uncordon(ctx context.Context, node, device string) (bool, error) {
	one := Cordon{Node: node, Device: device}
	_, was, err := c.setCordon(ctx, verbUncordon, one)
	return was, wrap("uncordon "+one.place(), err)
}

func (c *Client) setCordon(ctx context.Context, v verb, one Cordon) (_ Cordon, there bool, err error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	a, err := c.do(ctx, &message{Verb: v, Cordon: &one}, nil)
	if err != nil || a.Cordon == nil {
		return one, false, err
	}
	return *a.Cordon, true, nil
}

// Events calls handle, one at a time, for what becomes of the namespace's reservations, until ctx ends, which is no
// error. Events can be lost with the connection: after a doubt, List has the truth.
func (c *Client) Events(ctx context.Context, handle func(Event)) error {
	sub, err := c.b.Conn().Subscribe(bus.PlacementEvents(c.namespace), func(m *nats.Msg) {
		var ev Event
		if bus.Unmarshal(m.Data, &ev) == nil {
			handle(ev)
		}
	})
	if err != nil {
		return bus.Errorf(bus.CodeClosed, "placement events: %w", err)
	}
	<-ctx.Done()
	_ = sub.Unsubscribe() // fails only if the connection is closed
	return nil
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

// WaitError is a request that was taken back because its client did not wait any longer. It matches the cause of that:
// context.DeadlineExceeded, say.
type WaitError struct {
	ID    string
	Wait  *Wait // what it waited for, as far as the service said
	cause error
}

func (e *WaitError) Error() string {
	text := fmt.Sprintf("reservation %s: %v", e.ID, e.cause)
	if e.Wait == nil {
		return text + ", and the placement service has not said why"
	}
	text += "; " + e.Wait.Text
	for i, o := range e.Wait.WaitsFor {
		if i == listLimit {
			return text + fmt.Sprintf("; and %d more", len(e.Wait.WaitsFor)-i)
		}
		text += "; " + o.String()
	}
	return text
}

// Unwrap is the cause.
func (e *WaitError) Unwrap() error { return e.cause }
