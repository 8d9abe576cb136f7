package nodes

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"

	"troupe/bus"
	"troupe/bus/wire"
)

const (
	askLimit  = time.Minute            // for a question whose asker sets none
	askTry    = patience + time.Second // for one message and its answer; then it is sent again
	askPause  = 20 * time.Millisecond  // before it is sent again, at first
	askPauses = 500 * time.Millisecond // and at most
)

// Client asks agents to do things. It is safe for concurrent use and holds nothing. Every question may reach an agent
// more than once, and each has one effect; it is asked until an agent has answered or the context has ended, and for a
// minute if that has no deadline. An error that came from the agent names the node.
type Client struct{ b *bus.Bus }

// NewClient is a client on a connection that stays the caller's.
func NewClient(b *bus.Bus) *Client { return &Client{b} }

// Launch starts workers of one role on one node and answers for each what became of it, in their order. A worker that was
// started before, by this launch or an earlier one, is left as it is.
func (c *Client) Launch(ctx context.Context, l Launch) ([]Started, error) {
	if err := l.check(); err != nil {
		return nil, err
	}
	r, err := c.ask(ctx, request{Op: opLaunch, Node: l.Node, Launch: &l})
	return r.Started, err
}

// Stop ends workers: INT to each, TERM to its process group when the grace is over, and KILL to its whole tree soon after.
// It answers when the trees are gone, in the order of the ids; one that the node does not know has an Exit that says so,
// and cannot be started there any more. A grace of zero kills at once.
func (c *Client) Stop(ctx context.Context, node string, ids []WorkerID, grace time.Duration) ([]Exit, error) {
	if grace < 0 {
		return nil, bus.Errorf(bus.CodeInvalid, "stop on %s: a grace of %v", node, grace)
	}
	r, err := c.ask(ctx, request{Op: opStop, Node: node, Stop: &stopAsk{IDs: ids, Grace: grace}})
	return r.Exits, err
}

// Evict ends workers that their driver has not asked to end: to it that is a failure, for this reason.
func (c *Client) Evict(ctx context.Context, node string, ids []WorkerID, grace time.Duration, why string) ([]Exit, error) {
	if why == "" {
		return nil, bus.Errorf(bus.CodeInvalid, "evict workers of %s: say why", node)
	}
	r, err := c.ask(ctx, request{Op: opStop, Node: node, Stop: &stopAsk{IDs: ids, Grace: grace, Why: why}})
	return r.Exits, err
}

// Workers lists the workers of a node, those that have ended too until they are forgotten.
func (c *Client) Workers(ctx context.Context, node string) ([]Status, error) {
	r, err := c.ask(ctx, request{Op: opWorkers, Node: node})
	return r.Workers, err
}

// WorkersOf is Workers, of one role alone. An agent remembers thousands of workers that have ended: the list of all of them
// is long.
func (c *Client) WorkersOf(ctx context.Context, node string, role bus.Address) ([]Status, error) {
	r, err := c.ask(ctx, request{Op: opWorkers, Node: node, Role: &role})
	return slices.DeleteFunc(r.Workers, func(s Status) bool { return s.ID.Address() != role }), err // an older agent lists all
}

// Running is Workers, without those that have ended.
func (c *Client) Running(ctx context.Context, node string) ([]Status, error) {
	r, err := c.ask(ctx, request{Op: opWorkers, Node: node, Running: true})
	return slices.DeleteFunc(r.Workers, func(s Status) bool { return s.Exit != nil }), err // an older agent lists all
}

// Ports leases n ports of a node for the role of the holder, and says at which address the other nodes reach them. The
// same holder gets the same ports again. They are returned when the last worker of the role on that node has been stopped.
func (c *Client) Ports(ctx context.Context, node string, holder WorkerID, n int) (host string, ports []int, err error) {
	r, err := c.ask(ctx, request{Op: opPorts, Node: node, Ports: &portsAsk{Holder: holder, N: n}})
	return r.Host, r.Ports, err
}

// Exits calls f with each exit of a role's workers, from one goroutine, until stop is called. An exit is told more than
// once. What is told after Exits has returned is heard; ctx bounds the wait for that.
func (c *Client) Exits(ctx context.Context, role bus.Address, f func(Exit)) (stop func(), err error) {
	if err := role.Check(); err != nil {
		return nil, err
	}
	nc := c.b.Conn()
	sub, err := nc.Subscribe(role.Exit(), bus.GuardMsg(func(m *nats.Msg) {
		var e Exit
		if err := wire.Unmarshal(m.Data, &e); err != nil {
			c.b.Logger().Error("nodes: an exit that cannot be read", "role", role.Role, "error", err)
			return
		}
		f(e)
	}))
	if err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "listen for exits of %s: %w", role.Role, err)
	}
	stop = func() { _ = sub.Unsubscribe() } // fails only if the connection is closed
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	if err := nc.FlushWithContext(ctx); err != nil {
		stop()
		return nil, bus.Errorf(bus.CodeUnavailable, "listen for exits of %s: %w", role.Role, err)
	}
	return stop, nil
}

// ask sends a request until it is answered.
func (c *Client) ask(ctx context.Context, req request) (reply, error) {
	if err := bus.CheckName("node", req.Node); err != nil {
		return reply{}, err
	}
	ctx, cancel := bounded(ctx)
	defer cancel()
	data, err := wire.Marshal(req)
	if err != nil {
		return reply{}, bus.Errorf(bus.CodeInvalid, "%s on %s: %w", req.Op, req.Node, err)
	}
	var last error
	for pause := askPause; ; pause = min(2*pause, askPauses) {
		r, err := c.send(ctx, req.Node, data)
		switch {
		case err == nil && r.Err != nil && r.Err.Code == bus.CodeBusy:
			last = r.Err
		case err == nil && r.Err != nil:
			return reply{}, told(req.Node, r.Err)
		case err == nil && r.Pending:
			pause = askPause / 2
		case err == nil:
			return r, nil
		case errors.Is(err, bus.ErrInvalid), errors.Is(err, bus.ErrClosed):
			return reply{}, err
		default:
			last = err
		}
		select {
		case <-ctx.Done():
			return reply{}, silent(ctx, req, last)
		case <-time.After(pause):
		}
	}
}

// bounded is ctx with a deadline, if it has none.
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, askLimit)
}

// told is an agent's error, with its node.
func told(node string, err *bus.Error) error {
	if err.Node == "" {
		err.Node = node
	}
	return err
}

// silent is the error for a question that was not answered in time.
func silent(ctx context.Context, req request, last error) error {
	if last == nil {
		last = errors.New("it has begun, and is not done yet")
	}
	e := bus.Errorf(bus.CodeOf(ctx.Err()), "%s: the agent of node %s has not answered: %v; see troupe status", req.Op, req.Node, last)
	e.Node = req.Node
	return e.WithCause(ctx.Err())
}

// send sends one request, in parts if it must, and gets one answer, in parts if it comes so.
func (c *Client) send(ctx context.Context, node string, data []byte) (reply, error) {
	limit := c.part()
	if len(data) <= limit {
		r, err := c.message(ctx, node, data)
		return c.whole(ctx, node, r, err)
	}
	id := nuid.Next()
	for offset := 0; ; {
		end := min(offset+limit, len(data))
		r, err := c.parcel(ctx, node, opPart, parcelAsk{ID: id, Offset: offset, Total: len(data), Data: data[offset:end]})
		if err != nil || r.Parcel == nil || r.Parcel.ID != id {
			return c.whole(ctx, node, r, err)
		}
		offset = r.Parcel.Have
		if ctx.Err() != nil {
			return reply{}, ctx.Err()
		}
	}
}

// whole fetches the rest of an answer that came in part.
func (c *Client) whole(ctx context.Context, node string, r reply, err error) (reply, error) {
	if err != nil || r.Parcel == nil {
		return r, err
	}
	first := *r.Parcel
	data := append(make([]byte, 0, first.Total), first.Data...)
	for len(data) < first.Total {
		r, err := c.parcel(ctx, node, opRest, parcelAsk{ID: first.ID, Offset: len(data), Total: first.Total})
		if err != nil || r.Err != nil {
			return r, err
		}
		if r.Parcel == nil || len(r.Parcel.Data) == 0 {
			return reply{}, bus.Errorf(bus.CodeMalformed, "node %s: an answer of %d bytes ends after %d", node, first.Total, len(data))
		}
		data = append(data, r.Parcel.Data...)
	}
	var out reply
	if err := wire.Unmarshal(data, &out); err != nil {
		return reply{}, bus.Errorf(bus.CodeMalformed, "the answer of node %s: %w", node, err)
	}
	return out, nil
}

func (c *Client) parcel(ctx context.Context, node, op string, ask parcelAsk) (reply, error) {
	data, err := wire.Marshal(request{Op: op, Node: node, Parcel: &ask})
	if err != nil {
		return reply{}, err
	}
	return c.message(ctx, node, data)
}

// message is one message and its answer.
func (c *Client) message(ctx context.Context, node string, data []byte) (reply, error) {
	ctx, cancel := context.WithTimeout(ctx, askTry)
	defer cancel()
	m, err := c.b.Conn().RequestWithContext(ctx, bus.NodeDo(node), data)
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		return reply{}, bus.Errorf(bus.CodeUnavailable, "no agent of that node is connected")
	case errors.Is(err, nats.ErrConnectionClosed):
		return reply{}, bus.Errorf(bus.CodeClosed, "node %s: the connection to the bus is closed", node)
	case err != nil:
		return reply{}, bus.Errorf(bus.CodeUnavailable, "%w", err)
	}
	var r reply
	if err := wire.Unmarshal(m.Data, &r); err != nil {
		return reply{}, bus.Errorf(bus.CodeMalformed, "the answer of node %s: %w", node, err)
	}
	return r, nil
}

// part is how many bytes of a request or an answer go into one message.
func (c *Client) part() int { return partOf(c.b) }

func partOf(b *bus.Bus) int { return int(b.Conn().MaxPayload()) - parcelRoom }
