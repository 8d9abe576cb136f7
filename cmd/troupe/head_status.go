package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"time"

	"troupe/bus"
	"troupe/nodes"
	"troupe/roles"
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
	// Now is the time of the answer by the clock of the head's machine. Store is that of an embedded server.
	Now   time.Time       `json:"now,omitzero"`
	Store *bus.StoreUsage `json:"store,omitempty"`
}

// statusServer answers requests for the status of the head.
type statusServer struct {
	b        *bus.Bus
	log      *slog.Logger
	since    time.Time
	sub      *bus.Subscription
	replicas int
}

func serveStatus(ctx context.Context, b *bus.Bus, log *slog.Logger, replicas int) (*statusServer, error) {
	if err := nodes.CreateEventStream(ctx, b, replicas); err != nil {
		return nil, err
	}
	has, err := roles.Replicas(ctx, b, replicas)
	if err != nil {
		return nil, err
	}
	s := &statusServer{b: b, log: log, since: time.Now().UTC(), replicas: has}
	s.sub, err = b.Subscribe(bus.NodesHead(), s.answer)
	if err != nil {
		return nil, err
	}
	return s, nil
}

func (s *statusServer) close() {
	_ = s.sub.Unsubscribe() // fails only if the connection is closed
}

func (s *statusServer) answer(m *bus.Msg) {
	status := headStatus{PID: os.Getpid(), Since: s.since, Version: version, Refused: s.b.Refused(), Replicas: s.replicas, Clustered: s.b.Clustered(), Now: time.Now().UTC()}
	if usage, ours := s.b.Store(); ours {
		status.Store = &usage
	}
	data, err := json.Marshal(status)
	if err == nil {
		err = m.Respond(data)
	}
	if err != nil {
		s.log.Debug("troupe: an answer about the status of the head is lost", "error", err)
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
