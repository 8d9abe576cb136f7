package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"time"

	"github.com/nats-io/nats.go"

	"troupe/bus"
	"troupe/nodes"
	"troupe/roles"
)

// headStatus is what a head says of itself.
type headStatus struct {
	PID     int       `json:"pid"`
	Since   time.Time `json:"since"`
	Version string    `json:"version"`
	Refused uint64    `json:"refused"` // connections without credentials
	// Replicas is how many servers have a copy of what the head must not lose: the ledger, the registry and the leases.
	Replicas  int  `json:"replicas"`
	Clustered bool `json:"clustered"` // whether there could be more
}

// desk answers requests for the status of the head.
type desk struct {
	b        *bus.Bus
	log      *slog.Logger
	since    time.Time
	sub      *nats.Subscription
	replicas int
}

func openDesk(ctx context.Context, b *bus.Bus, log *slog.Logger, replicas int) (*desk, error) {
	if err := nodes.KeepEvents(ctx, b, replicas); err != nil {
		return nil, err
	}
	has, err := roles.Replicas(ctx, b, replicas)
	if err != nil {
		return nil, err
	}
	d := &desk{b: b, log: log, since: time.Now().UTC(), replicas: has}
	d.sub, err = b.Conn().Subscribe(bus.NodesHead(), d.answer)
	if err != nil {
		return nil, err
	}
	return d, nil
}

func (d *desk) close() {
	_ = d.sub.Unsubscribe() // fails only if the connection is closed
}

func (d *desk) answer(m *nats.Msg) {
	data, err := json.Marshal(headStatus{PID: os.Getpid(), Since: d.since, Version: version, Refused: d.b.Refused(), Replicas: d.replicas, Clustered: d.b.Clustered()})
	if err == nil {
		err = m.Respond(data)
	}
	if err != nil {
		d.log.Debug("troupe: nobody is told how the head is", "error", err)
	}
}
