package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/roles"
)

const (
	lostAfter = 3 * time.Second // without a heartbeat a node counts as lost
	deskLook  = 250 * time.Millisecond
)

// headStatus is the answer of a head to askHead.
type headStatus struct {
	PID     int       `json:"pid"`
	Since   time.Time `json:"since"`
	Version string    `json:"version"`
	Refused uint64    `json:"refused"` // connections without valid credentials
	// Replicas is how many servers have a copy of the ledger, the registry and the leases.
	Replicas  int  `json:"replicas"`
	Clustered bool `json:"clustered"` // whether the server is one of several
}

// statusServer answers requests for the status of the head, and emits events of nodes that come and go.
type statusServer struct {
	b     *bus.Bus
	log   *slog.Logger
	since time.Time
	subs  []*bus.Subscription
	stop  context.CancelFunc
	group sync.WaitGroup

	replicas int

	mu   sync.Mutex
	seen map[string]seenNode
}

type seenNode struct {
	session string
	at      time.Time
}

func serveStatus(ctx context.Context, b *bus.Bus, log *slog.Logger, replicas int) (*statusServer, error) {
	if err := nodes.KeepEvents(ctx, b, replicas); err != nil {
		return nil, err
	}
	has, err := roles.Replicas(ctx, b, replicas)
	if err != nil {
		return nil, err
	}
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s := &statusServer{b: b, log: log, since: time.Now().UTC(), stop: cancel, replicas: has, seen: map[string]seenNode{}}
	for subject, handle := range map[string]func(*bus.Msg){bus.NodesHead(): s.answer, bus.NodeBeats(): s.beat} {
		sub, err := b.Subscribe(subject, handle)
		if err != nil {
			s.close()
			return nil, err
		}
		s.subs = append(s.subs, sub)
	}
	s.group.Go(func() { s.look(run) })
	return s, nil
}

func (s *statusServer) close() {
	for _, sub := range s.subs {
		_ = sub.Unsubscribe() // fails only if the connection is closed
	}
	s.stop()
	s.group.Wait()
}

func (s *statusServer) answer(m *bus.Msg) {
	data, err := json.Marshal(headStatus{PID: os.Getpid(), Since: s.since, Version: version, Refused: s.b.Refused(), Replicas: s.replicas, Clustered: s.b.Clustered()})
	if err == nil {
		err = m.Respond(data)
	}
	if err != nil {
		s.log.Debug("troupe: an answer about the status of the head is lost", "error", err)
	}
}

// beat records the heartbeat of a node.
func (s *statusServer) beat(m *bus.Msg) {
	var beat gpu.Beat
	if wire.Unmarshal(m.Data, &beat) != nil {
		return // the placement service reports it
	}
	s.mu.Lock()
	old, known := s.seen[beat.Node]
	if beat.Bye {
		delete(s.seen, beat.Node)
	} else {
		s.seen[beat.Node] = seenNode{beat.Session, time.Now()}
	}
	s.mu.Unlock()
	switch {
	case beat.Bye:
		s.emit(nodes.EventNodeLeft, beat.Node, "its agent has ended in order")
	case !known:
		s.emit(nodes.EventNodeJoined, beat.Node, "its agent is there")
	case old.session != beat.Session:
		s.emit(nodes.EventNodeJoined, beat.Node, "its agent was started again")
	}
}

// look emits an event for each node without a heartbeat.
func (s *statusServer) look(ctx context.Context) {
	for tick := time.NewTicker(deskLook); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return
		case <-tick.C:
		}
		s.mu.Lock()
		var lost []string
		for name, n := range s.seen {
			if time.Since(n.at) > lostAfter {
				lost = append(lost, name)
				delete(s.seen, name)
			}
		}
		s.mu.Unlock()
		for _, name := range lost {
			s.emit(nodes.EventNodeLost, name, "no sign of life for "+lostAfter.String())
		}
	}
}

func (s *statusServer) emit(kind, node, text string) {
	if err := nodes.Emit(s.b, nodes.Event{Kind: kind, Node: node, Text: text}); err != nil {
		s.log.Debug("troupe: an event is lost", "kind", kind, "error", err)
	}
}

// askHead is the status of the head; nil if none answers within askNode.
func askHead(ctx context.Context, b *bus.Bus) *headStatus {
	ctx, cancel := context.WithTimeout(ctx, askNode)
	defer cancel()
	m, err := b.Request(ctx, bus.NodesHead(), nil)
	var status headStatus
	if err != nil || json.Unmarshal(m.Data, &status) != nil {
		return nil
	}
	return &status
}
