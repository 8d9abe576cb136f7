package rollouts

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/bus/wire"
	"troupe/pipeline/groups"
)

const (
	requestTimeout = 5 * time.Second
	largeBody      = 16 << 10 // larger bodies go from the client to the stream of bodies
	maxChunk       = 1 << 20
	maxBody        = 512 << 20
	fetchers       = 8 // messages that one client reads at once
)

// Client reaches rollouts from any process. Requests are repeated until they are answered or ctx ends, through restarts of the
// engine and of the server. It is safe for concurrent use.
type Client struct {
	b      *bus.Bus
	at     address
	inbox  string // the engine asks here whether tickets are held
	sub    *bus.Subscription
	source string
	putCh  chan struct{} // capacity one: a lock, because the numbers of puts count up

	mu      sync.Mutex // guards the following fields
	held    map[string]bool
	tickets uint64
	number  uint64
	log     *stream.Stream
	bodies  *stream.Stream
}

// Field is a named value, encoded.
type Field struct {
	Name string
	Data []byte
}

// Connect makes a client. Close ends it, and what it holds goes to others.
func Connect(b *bus.Bus, namespace, name string) (*Client, error) {
	if err := errors.Join(bus.CheckName("namespace", namespace), bus.CheckName("rollouts", name)); err != nil {
		return nil, err
	}
	c := &Client{b: b, at: address{namespace, name}, inbox: b.NewInbox(), source: bus.NewID(), putCh: make(chan struct{}, 1), held: map[string]bool{}}
	var err error
	if c.sub, err = b.Subscribe(c.inbox, c.handleHolding); err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "rollouts %s: %w", name, err)
	}
	return c, nil
}

// Close gives back what the client holds; the engine notices within seconds.
func (c *Client) Close() {
	c.mu.Lock()
	clear(c.held)
	c.mu.Unlock()
	_ = c.sub.Unsubscribe() // fails only on a closed connection
}

func (c *Client) newTicket() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tickets++
	ticket := c.inbox + "." + strconv.FormatUint(c.tickets, 36)
	c.held[ticket] = true
	return ticket
}

// drop reports whether the ticket was held.
func (c *Client) drop(ticket string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	was := c.held[ticket]
	delete(c.held, ticket)
	return was
}

// call sends a request until it is answered.
func (c *Client) call(ctx context.Context, verb string, r request, result any) error {
	body, err := wire.Marshal(r)
	if err != nil {
		return bus.Errorf(bus.CodeInvalid, "rollouts %s: %s: %w", c.at.name, verb, err)
	}
	for waits := backoff.Start(); ; {
		err := c.once(ctx, verb, body, result)
		if err == nil || !retryable(err) {
			return err
		}
		if errors.Is(err, bus.ErrBusy) && ctx.Err() == nil {
			waits.Reset() // the engine has waited
		}
		if waits.Wait(ctx) != nil {
			return bus.Errorf(bus.CodeOf(ctx.Err()), "rollouts %s: %s: %w (%w)", c.at.name, verb, ctx.Err(), err)
		}
	}
}

// retryable reports whether a request may be repeated. Every request may: the engine knows repeats.
func retryable(err error) bool {
	return errors.Is(err, bus.ErrTimedOut) || errors.Is(err, bus.ErrUnavailable) || errors.Is(err, bus.ErrClosed) || errors.Is(err, bus.ErrBusy)
}

func (c *Client) once(ctx context.Context, verb string, body []byte, result any) error {
	if c.b.Closed() {
		return bus.Errorf(bus.CodeCancelled, "rollouts %s: this session is closed", c.at.name)
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	m, err := c.b.Request(ctx, c.at.ask(verb), body)
	if err != nil {
		return bus.Errorf(bus.CodeUnavailable, "rollouts %s: %s: no answer; do they run? %w", c.at.name, verb, err)
	}
	var r response
	if err := wire.Unmarshal(m.Data, &r); err != nil {
		return bus.Errorf(bus.CodeMalformed, "rollouts %s: %s: %w", c.at.name, verb, err)
	}
	if r.Code != "" {
		return bus.Errorf(r.Code, "%s", r.Message)
	}
	if result == nil || len(r.Result) == 0 {
		return nil
	}
	return wire.Unmarshal(r.Result, result)
}

// Put stores a prompt. It waits while too many groups have not ended. A numbered put of a named source is stored once: a number
// that is not above the last one of the source is a repeat. Number 0: the client numbers.
func (c *Client) Put(ctx context.Context, source string, number uint64, fields []Field) error {
	select {
	case c.putCh <- struct{}{}:
		defer func() { <-c.putCh }()
	case <-ctx.Done():
		return bus.Errorf(bus.CodeOf(ctx.Err()), "rollouts %s: put: %w", c.at.name, ctx.Err())
	}
	if number == 0 {
		c.mu.Lock()
		c.number++
		source, number = c.source, c.number
		c.mu.Unlock()
	}
	r := request{Put: groups.NewGroup{Name: bus.NewID(), Source: source, Number: number}}
	if err := c.attach(ctx, &r, r.Put.Name, fields); err != nil {
		return err
	}
	return c.call(ctx, "put", r, nil)
}

// attach adds the bodies of fields to a request. A large one is stored here, and passes no other process.
func (c *Client) attach(ctx context.Context, r *request, group string, fields []Field) error {
	for _, f := range fields {
		r.Body.Parts = append(r.Body.Parts, groups.Part{Name: f.Name, Size: len(f.Data)})
		r.Data = append(r.Data, f.Data...)
	}
	if len(r.Data) > maxBody {
		return bus.Errorf(bus.CodeInvalid, "rollouts %s: %d bytes; one write may have %d", c.at.name, len(r.Data), maxBody)
	}
	if len(r.Data) < largeBody {
		return nil
	}
	chunk := min(maxChunk, c.b.MaxPayload()-4096)
	for at := 0; at < len(r.Data); at += chunk {
		piece := r.Data[at:min(at+chunk, len(r.Data))]
		err := bus.Retry(ctx, backoff, func() error {
			one, cancel := context.WithTimeout(ctx, attemptTimeout)
			defer cancel()
			ack, err := stream.Append(one, c.b, []*bus.Msg{{Subject: c.at.body(group), Data: piece}}, "")
			if err == nil {
				r.Body.Large = r.Body.Large.Append(ack.Seq)
			}
			return err
		})
		if err != nil {
			return bus.Errorf(bus.CodeOf(err), "rollouts %s: store %d bytes: %w", c.at.name, len(r.Data), err)
		}
	}
	r.Data = nil
	return nil
}

// Held is what this client holds until it ends it.
type Held struct {
	c      *Client
	ticket string
}

// Release gives back what is held. Without an answer the engine asks, and learns that it is not held.
func (h *Held) Release(ctx context.Context) error {
	if !h.c.drop(h.ticket) {
		return nil // it has ended
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	return h.c.call(ctx, "release", request{Ticket: h.ticket}, nil)
}

// hold runs a request that gets something for a ticket.
func (c *Client) hold(ctx context.Context, verb string, r request, result any) (*Held, error) {
	r.Ticket = c.newTicket()
	if err := c.call(ctx, verb, r, result); err != nil {
		c.drop(r.Ticket) // what it may have got is taken back
		return nil, err
	}
	return &Held{c, r.Ticket}, nil
}

// Taken is a sample that this process makes.
type Taken struct {
	Sample
	*Held
}

// Take waits for a sample to make. Its turns that are finished need not be made again.
func (c *Client) Take(ctx context.Context) (*Taken, error) {
	t := &Taken{}
	var err error
	t.Held, err = c.hold(ctx, "take", request{}, &t.Sample)
	return t, err
}

// Finish stores the next turn. The error is bus.ErrFenced when somebody else makes the sample by now.
func (t *Taken) Finish(ctx context.Context, turn int, version Version, last bool, fields []Field) error {
	r := request{Of: t.Lineage, Turn: turn, Version: version, Last: last}
	err := t.c.attach(ctx, &r, t.Name, fields)
	if err == nil {
		err = t.c.call(ctx, "finish", r, nil)
	}
	if last || turn+1 >= t.Limit || errors.Is(err, bus.ErrFenced) {
		t.c.drop(t.ticket)
	}
	return err
}

// Set stores fields of an ended sample. The first value of a field stays. name is that of the group; empty: the engine is asked.
func (c *Client) Set(ctx context.Context, group uint64, index int, name string, fields []Field) error {
	r := request{Of: Lineage{Group: group, Index: index}}
	if name == "" {
		if err := c.call(ctx, "name", request{Group: group}, &name); err != nil {
			return err
		}
	}
	if err := c.attach(ctx, &r, name, fields); err != nil {
		return err
	}
	return c.call(ctx, "set", r, nil)
}

// Scoring waits for ended samples that lack a field, n at most. Nobody else gets them until they are released.
func (c *Client) Scoring(ctx context.Context, field string, n int) ([]Sample, *Held, error) {
	var out []Sample
	h, err := c.hold(ctx, "scoring", request{Field: field, Count: n}, &out)
	return out, h, err
}

// Batch is complete groups that this process trains.
type Batch struct {
	Groups []Group
	*Held
}

// Batch waits for n complete groups.
func (c *Client) Batch(ctx context.Context, n int) (*Batch, error) {
	b := &Batch{}
	var err error
	b.Held, err = c.hold(ctx, "batch", request{Count: n}, &b.Groups)
	return b, err
}

// Done ends the groups: they are trained. The error is bus.ErrFenced when another trainer got one of them.
func (b *Batch) Done(ctx context.Context) error {
	r := request{Ticket: b.ticket}
	for _, g := range b.Groups {
		r.Groups = append(r.Groups, g.ID)
	}
	err := b.c.call(ctx, "done", r, nil)
	if err == nil || errors.Is(err, bus.ErrFenced) {
		b.c.drop(b.ticket)
	}
	return err
}

// SetVersion sets the version of the weights.
func (c *Client) SetVersion(ctx context.Context, v Version) error {
	return c.call(ctx, "version", request{Version: v}, nil)
}

// Redispatch takes unfinished samples from their workers; group 0: of all groups.
func (c *Client) Redispatch(ctx context.Context, group uint64) (n int, err error) {
	return n, c.call(ctx, "redispatch", request{Group: group}, &n)
}

// Status is the state in numbers.
func (c *Client) Status(ctx context.Context) (st Status, err error) {
	var text string
	if err := c.call(ctx, "status", request{}, &text); err != nil {
		return st, err
	}
	return st, json.Unmarshal([]byte(text), &st)
}

// Remove deletes everything that is stored. The rollouts must not run.
func (c *Client) Remove(ctx context.Context) error {
	body, err := wire.Marshal(request{})
	if err == nil {
		err = c.once(ctx, "status", body, nil)
	}
	switch {
	case err == nil:
		return bus.Errorf(bus.CodeRefused, "rollouts %s are running; close them first", c.at.name)
	case !errors.Is(err, bus.ErrNoResponders): // they may be running and slow to answer
		return err
	}
	return errors.Join(stream.Delete(ctx, c.b, c.at.stream()), stream.Delete(ctx, c.b, c.at.bodyStream()))
}

// streams opens the streams to read from.
func (c *Client) streams(ctx context.Context) (log, bodies *stream.Stream, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.bodies == nil {
		if c.log, err = stream.Find(ctx, c.b, c.at.stream()); err != nil {
			return nil, nil, err
		}
		if c.bodies, err = stream.Find(ctx, c.b, c.at.bodyStream()); err != nil {
			return nil, nil, err
		}
	}
	return c.log, c.bodies, nil
}

// Read reads bodies from their streams, several at once. A message with several of them is read once.
func (c *Client) Read(ctx context.Context, bodies []*Body) ([][]byte, error) {
	small := map[uint64][]int{} // by message
	var reads [][]int
	for i, b := range bodies {
		switch {
		case b.Size() == 0:
		case len(b.Large) > 0:
			reads = append(reads, []int{i})
		default:
			small[b.Seq] = append(small[b.Seq], i)
		}
	}
	for _, all := range small {
		reads = append(reads, all)
	}
	out := make([][]byte, len(bodies))
	errs := make([]error, len(reads))
	roomCh := make(chan struct{}, fetchers)
	var group sync.WaitGroup
	for k, all := range reads {
		roomCh <- struct{}{}
		group.Go(bus.Guard(func() {
			defer func() { <-roomCh }()
			data, err := c.readMessage(ctx, bodies[all[0]])
			for _, i := range all {
				b := bodies[i]
				if err == nil && b.At+b.Size() > len(data) {
					err = bus.Errorf(bus.CodeMalformed, "rollouts %s: a body of %d bytes at %d of %d", c.at.name, b.Size(), b.At, len(data))
				}
				if err == nil {
					out[i] = data[b.At : b.At+b.Size()]
				}
			}
			errs[k] = err
		}))
	}
	group.Wait()
	return out, errors.Join(errs...)
}

// readMessage reads the message of a small body, or the whole of a large one; it waits for a server that is away.
func (c *Client) readMessage(ctx context.Context, b *Body) (out []byte, err error) {
	err = bus.Retry(ctx, backoff, func() error {
		one, cancel := context.WithTimeout(ctx, 5*attemptTimeout)
		defer cancel()
		out, err = c.readNow(one, b)
		if errors.Is(err, bus.ErrNotFound) || errors.Is(err, bus.ErrMalformed) {
			return bus.Permanent(err)
		}
		return err
	})
	return out, err
}

func (c *Client) readNow(ctx context.Context, b *Body) ([]byte, error) {
	log, bodies, err := c.streams(ctx)
	if err != nil {
		return nil, err
	}
	if len(b.Large) == 0 {
		m, err := log.Get(ctx, b.Seq)
		return m.Data, err
	}
	out := make([]byte, 0, b.Size())
	for _, seq := range b.Large.All() {
		m, err := bodies.Get(ctx, seq)
		if err != nil {
			return nil, err
		}
		out = append(out, m.Data...)
	}
	return out, nil
}
