package nodes

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/nodes/evidence"
)

const (
	askLimit     = time.Minute                // deadline of a request whose context has none
	askTry       = answerWithin + time.Second // for one message and its answer; then the request is repeated
	pendingDelay = 10 * time.Millisecond      // before a request is repeated because its answer is not ready

	startSilence = 2 * evidence.NodeSilence // of an agent that is to start workers, while the client is connected
)

// Client sends requests to agents. It is safe for concurrent use. A request may reach an agent more
// than once and has one effect. It is repeated until an agent has answered or the context has ended, and for a minute
// if the context has no deadline. An error from an agent names the node.
type Client struct {
	b        *bus.Bus
	exchange *values.Exchange
	subject  func(node string) string // of requests to the node's agent

	mu    sync.Mutex // guards needs
	needs map[string]needs
}

// NewClient makes a client on a connection that the caller closes.
func NewClient(b *bus.Bus) *Client {
	if team, ok := b.Team(); ok { // the head passes its requests on, see Relay
		return &Client{b: b, exchange: values.NewExchange(b, team.Namespace), subject: func(node string) string { return team.DoorSubject(door, node) }}
	}
	return &Client{b: b, exchange: values.NewExchange(b, bus.NodesNamespace), subject: bus.NodeDo, needs: map[string]needs{}}
}

// Launch starts workers of one role on one node and returns the outcome of each, in their order. A worker that was
// started before, by this launch or an earlier one, is left unchanged.
func (c *Client) Launch(ctx context.Context, l Launch) ([]Started, error) {
	if err := l.check(); err != nil {
		return nil, err
	}
	r, err := c.ask(ctx, request{Op: opLaunch, Node: l.Node, Launch: &l})
	return r.Started, err
}

// Stop stops workers: SIGINT to each, SIGTERM to its process group after the grace, and SIGKILL to its whole process
// tree soon after. It returns when the trees are gone, with exits in the order of ids. An unknown worker has an Exit
// with Unknown set, and cannot be started on the node any more. A grace of zero kills at once.
func (c *Client) Stop(ctx context.Context, node string, ids []WorkerID, grace time.Duration) ([]Exit, error) {
	if grace < 0 {
		return nil, bus.Errorf(bus.CodeInvalid, "stop on %s: the grace %v must not be negative", node, grace)
	}
	r, err := c.ask(ctx, request{Op: opStop, Node: node, Stop: &stopRequest{IDs: ids, Grace: grace}})
	return r.Exits, err
}

// Evict stops workers without a request of their driver, which sees a failure with this reason.
func (c *Client) Evict(ctx context.Context, node string, ids []WorkerID, grace time.Duration, why string) ([]Exit, error) {
	if why == "" {
		return nil, bus.Errorf(bus.CodeInvalid, "evict workers of %s: the reason is empty", node)
	}
	r, err := c.ask(ctx, request{Op: opStop, Node: node, Stop: &stopRequest{IDs: ids, Grace: grace, Why: why}})
	return r.Exits, err
}

// Workers lists the workers of a node, including exited ones that the agent still remembers.
func (c *Client) Workers(ctx context.Context, node string) ([]Status, error) {
	r, err := c.ask(ctx, request{Op: opWorkers, Node: node})
	return r.Workers, err
}

// WorkersOf is Workers for one role. An agent remembers thousands of exited workers: the list of all of them is long.
func (c *Client) WorkersOf(ctx context.Context, node string, role bus.Address) ([]Status, error) {
	r, err := c.ask(ctx, request{Op: opWorkers, Node: node, Role: &role})
	return r.Workers, err
}

// Running is Workers without the exited ones.
func (c *Client) Running(ctx context.Context, node string) ([]Status, error) {
	r, err := c.ask(ctx, request{Op: opWorkers, Node: node, Running: true})
	return r.Workers, err
}

// Ports leases n ports of a node for the role of the holder, and returns the address at which other nodes reach them.
// The same holder gets the same ports again. The agent releases them when the last worker of the role on that node has
// been stopped.
func (c *Client) Ports(ctx context.Context, node string, holder WorkerID, n int) (host string, ports []int, err error) {
	r, err := c.ask(ctx, request{Op: opPorts, Node: node, Ports: &portsRequest{Holder: holder, N: n}})
	return r.Host, r.Ports, err
}

// Exits calls f with each exit of a role's workers, from one goroutine, until stop is called. An exit may be reported
// more than once. Exits published after Exits has returned are received; ctx bounds the wait for the subscription.
func (c *Client) Exits(ctx context.Context, role bus.Address, f func(Exit)) (stop func(), err error) {
	if err := role.Check(); err != nil {
		return nil, err
	}
	sub, err := c.b.Subscribe(role.Exit(), func(m *bus.Msg) {
		var e Exit
		if err := wire.Unmarshal(m.Data, &e); err != nil {
			c.b.Logger().Error("nodes: a malformed exit message", "role", role.Role, "error", err)
			return
		}
		f(e)
	})
	if err != nil {
		return nil, err
	}
	stop = func() { _ = sub.Unsubscribe() } // fails only on a closed connection
	if err := c.b.Flush(ctx); err != nil {
		stop()
		return nil, bus.Errorf(bus.CodeUnavailable, "subscribe to exits of %s: %w", role.Role, err)
	}
	return stop, nil
}

// ask repeats a request until it is answered. One that belongs to a start ends before its deadline if the agent is silent for
// startSilence: the node is lost, and its workers may be started elsewhere.
func (c *Client) ask(ctx context.Context, req request) (reply, error) {
	if err := bus.CheckName("node", req.Node); err != nil {
		return reply{}, err
	}
	ctx, cancel := bounded(ctx)
	defer cancel()
	data, err := c.encode(req)
	if err != nil {
		return reply{}, err
	}
	var last error
	heard := time.Now() // the last answer, or when none could arrive
	for waits := (bus.Backoff{}).Start(); ; {
		r, err := c.send(ctx, req.Node, data)
		if err == nil || !c.b.Conn().IsConnected() {
			heard = time.Now()
		}
		pause := pendingDelay
		switch {
		case err == nil && r.Err != nil && r.Err.Code == bus.CodeBusy:
			last, pause = r.Err, waits.Next()
		case err == nil && r.Needs != nil && c.learn(req.Node, *r.Needs):
			if data, err = c.encode(req); err != nil {
				return reply{}, err
			}
			continue
		case err == nil && r.Err != nil:
			return reply{}, fromAgent(req.Node, r.Err)
		case err == nil && r.Pending:
			waits.Reset()
		case err == nil:
			return r, nil
		case errors.Is(err, bus.ErrInvalid), errors.Is(err, bus.ErrClosed):
			return reply{}, err
		default:
			last, pause = err, waits.Next()
		}
		if silent := time.Since(heard); silent > startSilence && (req.Op == opLaunch || req.Op == opPorts) {
			e := bus.Errorf(bus.CodeWorkerLost, "%s: the agent of node %s has not answered for %s: %v; see troupe status", req.Op, req.Node, silent.Round(time.Second), last)
			e.Node = req.Node
			return reply{}, e
		}
		if bus.Sleep(ctx, pause) != nil {
			return reply{}, unanswered(ctx, req, last)
		}
	}
}

// encode encodes a request. Workers of a launch get what they connect with, if the node's agent is known to need that: of a team, or confined,
// a credential; of any other driver what it connects with itself.
func (c *Client) encode(req request) ([]byte, error) {
	c.mu.Lock()
	need, needed := c.needs[req.Node]
	c.mu.Unlock()
	if req.Launch != nil && needed {
		l := *req.Launch
		l.Workers = slices.Clone(l.Workers)
		for i := range l.Workers {
			w := &l.Workers[i]
			credential := bus.ForConfined(need.Agent, w.ID.Namespace)
			if l.Credential != "" {
				credential = bus.ForWorker(l.Credential, w.ID.Namespace)
			}
			var err error
			if w.Token = c.b.OwnToken(); need.Confine || l.Credential != "" || w.Token == "" {
				w.Token, _, err = c.b.IssueCredential(credential)
			}
			if err != nil {
				return nil, fmt.Errorf("launch on %s: %w", req.Node, err)
			}
		}
		req.Launch = &l
	}
	data, err := wire.Marshal(req)
	if err != nil {
		return nil, bus.Errorf(bus.CodeInvalid, "%s on %s: %w", req.Op, req.Node, err)
	}
	return data, nil
}

// learn remembers what an agent needs, and reports whether that is new.
func (c *Client) learn(node string, n needs) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if known, ok := c.needs[node]; c.needs == nil || ok && known == n {
		return false
	}
	c.needs[node] = n
	return true
}

// bounded gives ctx a deadline if it has none.
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, askLimit)
}

// fromAgent adds the node to the error of an agent.
func fromAgent(node string, err *bus.Error) error {
	if err.Node == "" {
		err.Node = node
	}
	return err
}

// unanswered is the error of a request that was not answered in time.
func unanswered(ctx context.Context, req request, last error) error {
	if last == nil {
		last = errors.New("the agent has accepted the request and is not done")
	}
	e := bus.Errorf(bus.CodeOf(ctx.Err()), "%s: the agent of node %s has not answered: %v; see troupe status", req.Op, req.Node, last)
	e.Node = req.Node
	return e.WithCause(ctx.Err())
}

// send sends one request and returns its answer.
func (c *Client) send(ctx context.Context, node string, data []byte) (reply, error) {
	data, err := c.exchange.Request(ctx, c.subject(node), data, askTry)
	switch {
	case errors.Is(err, bus.ErrNoResponders):
		return reply{}, bus.Errorf(bus.CodeUnavailable, "no agent of that node is connected")
	case errors.Is(err, bus.ErrClosed):
		return reply{}, bus.Errorf(bus.CodeClosed, "node %s: the connection to the bus is closed", node)
	case err != nil:
		return reply{}, bus.Errorf(bus.CodeUnavailable, "%w", err)
	}
	var r reply
	if err := wire.Unmarshal(data, &r); err != nil {
		return reply{}, bus.Errorf(bus.CodeMalformed, "the answer of node %s: %w", node, err)
	}
	return r, nil
}
