package nodes

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// door is where processes with a team's credential send requests to agents; the node is the word behind it.
const door = "nodes"

// Granted is what a reservation in the ledger has of one device; for a worker without devices, of its node.
type Granted struct {
	Reservation string
	Token       uint64
	Over        string // the reservation whose devices it shares
	Node        string
	Device      string // its UUID; empty: none
	Share       int    // in thousandths
}

// Relay passes requests of processes with a team's credential to agents. Each must be about workers of the caller's namespace, and devices and
// reservations of a launch need a grant of the namespace in the ledger; a worker that names neither needs none. Workers get credentials of the
// team. What is for operators is refused.
type Relay struct {
	Bus *bus.Bus
	// Serves says whether this process answers: one of several heads does.
	Serves func() bool
	// GrantsFunc lists what a namespace has been granted; false: it is not known here.
	GrantsFunc func(namespace string) ([]Granted, bool)
}

// Start serves until stop is called or the bus is closed.
func (r Relay) Start() (stop func(), err error) {
	s := relay{Relay: r, agents: NewClient(r.Bus), exchanges: map[string]*values.Exchange{}}
	unhear, err := r.Bus.ServeDoor(door, bus.TeamCredential, r.Serves, s.serve)
	if err != nil {
		return nil, err
	}
	return func() { unhear(); s.close() }, nil
}

type relay struct {
	Relay
	agents *Client

	mu        sync.Mutex // guards what follows
	exchanges map[string]*values.Exchange
}

// exchange is that of a namespace. Its session is opened with the first long message.
func (s *relay) exchange(namespace string) *values.Exchange {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.exchanges[namespace]
	if x == nil {
		if len(s.exchanges) >= relayNamespaces {
			for old, one := range s.exchanges {
				one.Close()
				delete(s.exchanges, old)
				break
			}
		}
		x = values.NewExchange(s.Bus, namespace)
		s.exchanges[namespace] = x
	}
	return x
}

// relayNamespaces bounds the sessions for long messages.
const relayNamespaces = 256

func (s *relay) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range s.exchanges {
		x.Close()
	}
}

func (s *relay) serve(ctx context.Context, c bus.Caller, m *bus.Msg) {
	exchange := s.exchange(c.Namespace)
	answer, err := s.pass(ctx, c, exchange, m)
	if err == nil {
		err = exchange.Respond(m, answer)
	}
	if err != nil {
		if answer, err = wire.Marshal(failed(err)); err == nil {
			err = s.Bus.Respond(m, answer)
		}
	}
	if err != nil {
		s.Bus.Logger().Debug("nodes: sending an answer failed; the client repeats its request", "namespace", c.Namespace, "error", err)
	}
}

// pass sends a request on, once: the client repeats it.
func (s *relay) pass(ctx context.Context, c bus.Caller, exchange *values.Exchange, m *bus.Msg) ([]byte, error) {
	data, err := exchange.Read(ctx, m)
	if err != nil {
		return nil, err
	}
	var req request
	if err := wire.Unmarshal(data, &req); err != nil {
		return nil, bus.Errorf(bus.CodeMalformed, "the request is malformed: %w", err)
	}
	if err := errors.Join(req.check(), bus.CheckName("node", c.Word)); err != nil {
		return nil, err
	}
	if req.Node != c.Word {
		return nil, bus.Errorf(bus.CodeInvalid, "a request for node %q was sent to node %q", wire.Clip(req.Node), c.Word)
	}
	if err := s.permit(c, &req); err != nil {
		return nil, err
	}
	for {
		if data, err = s.agents.encode(req); err != nil {
			return nil, err
		}
		answer, err := s.agents.exchange.Request(ctx, bus.NodeDo(req.Node), data, askTry)
		if err != nil {
			return nil, bus.Errorf(bus.CodeBusy, "the agent of node %s has not answered: %w", req.Node, err) // the client repeats the request
		}
		var r reply
		if req.Op != opLaunch || wire.Unmarshal(answer, &r) != nil || r.Needs == nil || !s.agents.learn(req.Node, *r.Needs) {
			return answer, nil
		}
	}
}

// permit refuses what a team may not ask for. Parts of the request that its operation does not use are dropped.
func (s *relay) permit(c bus.Caller, req *request) error {
	whole := *req
	*req = request{Op: whole.Op, Node: whole.Node}
	own := func(ids ...WorkerID) error {
		for _, id := range ids {
			if id.Namespace != c.Namespace {
				return bus.Errorf(bus.CodeRefused, "%s: the credential of namespace %s does not permit it for %s", whole.Op, c.Namespace, id)
			}
		}
		return nil
	}
	switch {
	case whole.Op == opLaunch && whole.Launch != nil:
		req.Launch = whole.Launch
		return s.permitLaunch(c, req.Launch, own)
	case whole.Op == opStop && whole.Stop != nil:
		req.Stop = whole.Stop
		return own(whole.Stop.IDs...)
	case whole.Op == opPorts && whole.Ports != nil:
		req.Ports = whole.Ports
		return own(whole.Ports.Holder)
	case whole.Role != nil && (whole.Op == opWorkers || whole.Op == opFlush || whole.Op == opInspect || whole.Op == opDebug):
		req.Role, req.Running, req.Inspect, req.Debug = whole.Role, whole.Running, whole.Inspect, whole.Debug
		return own(WorkerID{Namespace: whole.Role.Namespace, Role: whole.Role.Role})
	}
	return bus.Errorf(bus.CodeRefused, "%s: the credential of namespace %s does not permit it; it needs the head's token", wire.Clip(whole.Op), c.Namespace)
}

func (s *relay) permitLaunch(c bus.Caller, l *Launch, own func(...WorkerID) error) error {
	l.Credential = c.Team()
	if to := l.OutputTo; to != nil {
		if err := own(WorkerID{Namespace: to.Namespace, Role: to.Role}); err != nil {
			return err
		}
	}
	granted, known := s.GrantsFunc(c.Namespace)
	if !known {
		return bus.Errorf(bus.CodeBusy, "the ledger is being read; repeat the launch later")
	}
	for i, w := range l.Workers {
		l.Workers[i].Token = ""
		if err := own(w.ID); err != nil {
			return err
		}
		needs := w.Devices
		if len(needs) == 0 && (l.Reservation != "" || l.Over != "") {
			needs = []string{""}
		}
		for _, uuid := range needs {
			grants := func(g Granted) bool {
				enough := g.Share >= cmp.Or(w.Share, wholeDevice) && g.Device == uuid
				return g.Reservation == l.Reservation && g.Token == l.Token && g.Over == l.Over && g.Node == l.Node && (uuid == "" || enough)
			}
			if !slices.ContainsFunc(granted, grants) {
				return bus.Errorf(bus.CodeRefused, "worker %s: reservation %q of namespace %s with token %d does not grant it %d thousandths of device %q of node %s",
					w.ID, l.Reservation, c.Namespace, l.Token, cmp.Or(w.Share, wholeDevice), uuid, l.Node)
			}
		}
	}
	return nil
}

// eventDoor is where such processes, and agents with a credential of their own, publish events.
const eventDoor = "events"

// EventDoor publishes the events of processes with the credential of a team or an agent, some a second of each namespace or agent: the stream
// drops its oldest. It records the actions of teams too.
type EventDoor struct {
	Bus    *bus.Bus
	Of     bus.CredentialKind
	Serves func() bool

	events, actions limiter
}

// limiter admits some messages a second of each namespace.
type limiter struct {
	burst, perSecond float64

	mu   sync.Mutex // guards sent
	sent map[string]sentRate
}

type sentRate struct {
	at      time.Time
	left    float64 // messages that are admitted at that time
	dropped int     // since the last one that was admitted
}

// Start serves until stop is called or the bus is closed.
func (d *EventDoor) Start() (stop func(), err error) {
	d.events = limiter{burst: 64, perSecond: 2, sent: map[string]sentRate{}}
	d.actions = limiter{burst: 512, perSecond: 32, sent: map[string]sentRate{}}
	return d.Bus.ServeDoor(eventDoor, d.Of, d.Serves, func(_ context.Context, c bus.Caller, m *bus.Msg) {
		var e Event
		if wire.Unmarshal(m.Data, &e) != nil {
			return
		}
		if c.Kind == bus.TeamCredential {
			e.Namespace = c.Namespace
		} else if e.By != nil || !c.Has(e.Node) && e.Node != c.Node {
			return
		}
		publish := Emit
		ok := false
		if e.By != nil {
			publish = Audit
			e, ok = d.actionOf(c, e, time.Now())
		} else {
			ok, _ = d.events.admit(c.Sharer(), time.Now())
		}
		if !ok {
			return
		}
		if err := publish(d.Bus, e); err != nil {
			d.Bus.Logger().Debug("nodes: an event is lost", "caller", c.String(), "error", err)
		}
	})
}

// admit also returns how many were dropped before the one that is admitted.
func (l *limiter) admit(namespace string, now time.Time) (ok bool, dropped int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r, known := l.sent[namespace]
	if !known {
		r.left = l.burst
	} else {
		r.left = min(l.burst, r.left+l.perSecond*now.Sub(r.at).Seconds())
	}
	r.at = now
	if ok = r.left >= 1; ok {
		r.left--
		dropped, r.dropped = r.dropped, 0
	} else {
		r.dropped++
	}
	if !known && len(l.sent) >= relayNamespaces {
		clear(l.sent)
	}
	l.sent[namespace] = r
	return ok, dropped
}
