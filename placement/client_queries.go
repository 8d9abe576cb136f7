package placement

import (
	"cmp"
	"context"
	"errors"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/placement/planner"
)

// Release releases a reservation. It may be repeated: releasing an unknown reservation succeeds. A token other than
// that of the grant is refused with a *StaleTokenError.
func (c *Client) Release(ctx context.Context, id string, token uint64) error {
	ctx, cancel := withTimeout(ctx)
	defer cancel()
	_, err := c.call(ctx, &message{Verb: verbRelease, ID: id, Token: token}, nil)
	if err == nil || errors.As(err, new(*StaleTokenError)) {
		c.forget(ReservationRef{ID: id, Token: token})
	}
	return wrap("release "+id, err)
}

// Explain returns what would happen to a request now. It changes nothing.
func (c *Client) Explain(ctx context.Context, r Request) (Explanation, error) {
	r.Namespace = cmp.Or(r.Namespace, c.namespace)
	raw, err := encodeRequest(r)
	if err != nil {
		return Explanation{}, err
	}
	ctx, cancel := withTimeout(ctx)
	defer cancel()
	a, err := c.call(ctx, &message{Verb: verbExplain, Request: raw}, nil)
	if err != nil {
		return Explanation{}, wrap("explain", err)
	}
	if a.Explanation == nil {
		return Explanation{}, bus.Errorf(bus.CodeMalformed, "the answer contains no explanation")
	}
	x := *a.Explanation
	if x.Reasons == nil {
		x.Reasons = []planner.Reason{}
	}
	if x.Workers == nil {
		x.Workers = []Worker{}
	}
	return x, nil
}

// Listing is the reservations and the queue.
type Listing struct {
	Records []Record  `json:"reservations"`
	Waiting []Waiting `json:"waiting"` // in the order of the queue, up to the limit of one message
}

// List returns the reservations of the namespace by id, and its part of the queue; for an operator, those of all
// namespaces. A long list takes several messages, and its parts may differ in time.
func (c *Client) List(ctx context.Context) (Listing, error) {
	ctx, cancel := withTimeout(ctx)
	defer cancel()
	list := Listing{Records: []Record{}, Waiting: []Waiting{}}
	for after, first := "", true; first || after != ""; first = false {
		a, err := c.call(ctx, &message{Verb: verbList, ID: after}, nil)
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

// Nodes returns the nodes that the leader knows, by name.
func (c *Client) Nodes(ctx context.Context) ([]NodeStatus, error) { return c.listNodes(ctx, false) }

// WorkingNodes returns the nodes whose agents may run workers: those that do not say that they are idle.
func (c *Client) WorkingNodes(ctx context.Context) ([]NodeStatus, error) {
	return c.listNodes(ctx, true)
}

func (c *Client) listNodes(ctx context.Context, working bool) ([]NodeStatus, error) {
	ctx, cancel := withTimeout(ctx)
	defer cancel()
	nodes := []NodeStatus{}
	for after, first := "", true; first || after != ""; first = false {
		a, err := c.call(ctx, &message{Verb: verbNodes, ID: after, Working: working}, nil)
		if err != nil {
			return nil, wrap("nodes", err)
		}
		nodes = append(nodes, a.Nodes...)
		after = a.Next
	}
	return nodes, nil
}

// Rules returns the rules of the queue.
func (c *Client) Rules(ctx context.Context) (Rules, error) {
	ctx, cancel := withTimeout(ctx)
	defer cancel()
	a, err := c.call(ctx, &message{Verb: verbRules}, nil)
	if err != nil {
		return Rules{}, wrap("rules", err)
	}
	if a.Rules == nil {
		return Rules{}, nil
	}
	return *a.Rules, nil
}

// SetRules stores new rules. Only operators may.
func (c *Client) SetRules(ctx context.Context, r Rules) error {
	ctx, cancel := withTimeout(ctx)
	defer cancel()
	_, err := c.call(ctx, &message{Verb: verbSetRules, Rules: &r}, nil)
	return wrap("set the rules", err)
}

// Cordon closes a node to new grants, or only one device of it (by UUID or index), and returns the stored cordon.
// Existing reservations are not affected. Repeating it replaces By and Why. Only operators may.
func (c *Client) Cordon(ctx context.Context, one Cordon) (Cordon, error) {
	kept, _, err := c.setCordon(ctx, verbCordon, one)
	return kept, wrap("cordon "+one.target(), err)
}

// Uncordon removes a cordon and reports whether there was one. Cordons of devices remain when their node is uncordoned.
// Only operators may.
func (c *Client) Uncordon(ctx context.Context, node, device string) (bool, error) {
	one := Cordon{Node: node, Device: device}
	_, was, err := c.setCordon(ctx, verbUncordon, one)
	return was, wrap("uncordon "+one.target(), err)
}

func (c *Client) setCordon(ctx context.Context, v verb, one Cordon) (_ Cordon, there bool, err error) {
	ctx, cancel := withTimeout(ctx)
	defer cancel()
	a, err := c.call(ctx, &message{Verb: v, Cordon: &one}, nil)
	if err != nil || a.Cordon == nil {
		return one, false, err
	}
	return *a.Cordon, true, nil
}

// Events calls handle, one event at a time, for each event of the namespace's reservations from its return until ctx
// ends. Events are lost with the connection; List returns the current state.
func (c *Client) Events(ctx context.Context, handle func(Event)) error {
	sub, err := c.b.Subscribe(eventSubject(c.namespace), func(m *bus.Msg) {
		var ev Event
		if wire.Unmarshal(m.Data, &ev) == nil {
			handle(ev)
		}
	})
	if err != nil {
		return bus.Errorf(bus.CodeClosed, "placement events: %w", err)
	}
	stop := func() { _ = sub.Unsubscribe() } // fails only if the connection is closed
	if err := c.b.Flush(ctx); err != nil {
		stop()
		return bus.Errorf(bus.CodeUnavailable, "subscribe to placement events: %w", err)
	}
	context.AfterFunc(ctx, bus.Guard(stop))
	return nil
}
