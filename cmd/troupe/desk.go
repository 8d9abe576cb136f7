package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/roles"
)

const (
	lostAfter = 3 * time.Second // without a sign of life a node counts as lost
	deskLook  = 250 * time.Millisecond
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

// desk is where a head answers how it is, and where nodes that come and go are noted as events.
type desk struct {
	b     *bus.Bus
	log   *slog.Logger
	since time.Time
	subs  []*nats.Subscription
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

func openDesk(ctx context.Context, b *bus.Bus, log *slog.Logger, replicas int) (*desk, error) {
	if err := nodes.CreateEventStream(ctx, b, replicas); err != nil {
		return nil, err
	}
	has, err := roles.Replicas(ctx, b, replicas)
	if err != nil {
		return nil, err
	}
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	d := &desk{b: b, log: log, since: time.Now().UTC(), stop: cancel, replicas: has, seen: map[string]seenNode{}}
	for subject, handle := range map[string]nats.MsgHandler{bus.NodesHead(): d.answer, bus.NodeBeats(): d.beat} {
		sub, err := b.Conn().Subscribe(subject, handle)
		if err != nil {
			d.close()
			return nil, err
		}
		d.subs = append(d.subs, sub)
	}
	d.group.Go(func() { d.look(run) })
	return d, nil
}

func (d *desk) close() {
	for _, sub := range d.subs {
		_ = sub.Unsubscribe() // fails only if the connection is closed
	}
	d.stop()
	d.group.Wait()
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

// beat notes a node's sign of life.
func (d *desk) beat(m *nats.Msg) {
	var beat gpu.Beat
	if wire.Unmarshal(m.Data, &beat) != nil {
		return // the placement service complains of it
	}
	d.mu.Lock()
	old, known := d.seen[beat.Node]
	if beat.Bye {
		delete(d.seen, beat.Node)
	} else {
		d.seen[beat.Node] = seenNode{beat.Session, time.Now()}
	}
	d.mu.Unlock()
	switch {
	case beat.Bye:
		d.emit(nodes.EventNodeLeft, beat.Node, "its agent has ended in order")
	case !known:
		d.emit(nodes.EventNodeJoined, beat.Node, "its agent is there")
	case old.session != beat.Session:
		d.emit(nodes.EventNodeJoined, beat.Node, "its agent was started again")
	}
}

// look notes nodes that have gone silent.
func (d *desk) look(ctx context.Context) {
	for tick := time.NewTicker(deskLook); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return
		case <-tick.C:
		}
		d.mu.Lock()
		var lost []string
		for name, n := range d.seen {
			if time.Since(n.at) > lostAfter {
				lost = append(lost, name)
				delete(d.seen, name)
			}
		}
		d.mu.Unlock()
		for _, name := range lost {
			d.emit(nodes.EventNodeLost, name, "no sign of life for "+lostAfter.String())
		}
	}
}

func (d *desk) emit(kind, node, text string) {
	if err := nodes.Emit(d.b, nodes.Event{Kind: kind, Node: node, Text: text}); err != nil {
		d.log.Debug("troupe: an event is lost", "kind", kind, "error", err)
	}
}
