package head

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/nodes"
	"troupe/roles/registry"
)

const (
	storeLimit   = time.Minute      // until the store of a starting head answers
	askTimeout   = time.Second      // for the answer of a head
	headsMost    = 16               // that answer at once
	storeAttempt = 10 * time.Second // a request that a server without a leader got is never answered
)

// Status is the answer of a head to Ask.
type Status struct {
	PID     int       `json:"pid"`
	Since   time.Time `json:"since"`
	Version string    `json:"version"`
	// Replaced: another program is installed where this one was started from.
	Replaced bool   `json:"replaced,omitempty"`
	Refused  uint64 `json:"refused"` // connections without valid credentials
	Denied   uint64 `json:"denied"`  // what connections have tried that their credentials do not permit
	// Replicas is how many servers have a copy of the ledger, the registry and the leases.
	Replicas  int  `json:"replicas"`
	Clustered bool `json:"clustered"` // whether the server is one of several
	// Member is the head among the Members of its cluster; empty: it has none, or an external one. Formed: the members have a leader, so that
	// the store takes requests. Leads: the head grants. Peers are the members with a route to this one.
	Member  string     `json:"member,omitempty"`
	Members []string   `json:"members,omitempty"`
	Formed  bool       `json:"formed,omitempty"`
	Leads   bool       `json:"leads"`
	Ready   bool       `json:"ready"` // the head has started, its agent too
	Peers   []bus.Peer `json:"peers,omitempty"`
	// Now is the time of the answer by the clock of the head's machine. Store is that of an embedded server.
	Now   time.Time       `json:"now"`
	Store *bus.StoreUsage `json:"store,omitempty"`
}

// statusServer answers requests for the status of the head.
type statusServer struct {
	b        *bus.Bus
	log      *slog.Logger
	since    time.Time
	sub      *bus.Subscription
	replicas int
	store    string
	leads    func() bool
	ready    atomic.Bool
}

func serveStatus(ctx context.Context, b *bus.Bus, log *slog.Logger, h *head, leads func() bool) (*statusServer, error) {
	has, err := awaitStore(ctx, b, log, h.replicas, h.auditKept)
	if err != nil {
		return nil, err
	}
	s := &statusServer{b: b, log: log, since: time.Now().UTC(), replicas: has, store: h.store, leads: leads}
	s.sub, err = b.Subscribe(bus.NodesHead(), s.answer)
	if err != nil {
		return nil, err
	}
	return s, nil
}

// awaitStore opens the streams of the head and returns the replicas of the registry. A server that rebuilds its store after a
// crash, or a cluster that elects a leader, may not answer for a while.
func awaitStore(ctx context.Context, b *bus.Bus, log *slog.Logger, replicas int, auditKept time.Duration) (has int, err error) {
	ctx, cancel := context.WithTimeout(ctx, storeLimit)
	defer cancel()
	for waits := (bus.Backoff{}).Start(); ; {
		attempt, cancel := context.WithTimeout(ctx, storeAttempt)
		err = nodes.CreateEventStream(attempt, b, replicas)
		if err == nil {
			err = nodes.CreateAuditStream(attempt, b, replicas, auditKept)
		}
		if err == nil {
			has, err = registry.Replicas(attempt, b, replicas)
		}
		cancel()
		// A stream that another head creates at the same time is not there for all servers at once.
		transient := errors.Is(err, context.DeadlineExceeded) || errors.Is(err, bus.ErrNotFound) || b.Member() != nil && errors.Is(err, bus.ErrUnavailable)
		if !transient || waits.Wait(ctx) != nil {
			return has, err
		}
		log.Warn("troupe: the store does not answer; trying again", "limit", storeLimit, "error", err)
	}
}

func (s *statusServer) close() {
	_ = s.sub.Unsubscribe() // fails only if the connection is closed
}

func (s *statusServer) answer(m *bus.Msg) {
	status := Status{PID: os.Getpid(), Since: s.since, Version: cli.Version, Replaced: programReplaced(), Refused: s.b.Refused(), Denied: s.b.Denied(), Replicas: s.replicas, Clustered: s.b.Clustered(), Leads: s.leads(), Ready: s.ready.Load(), Now: time.Now().UTC()}
	s.addMember(&status)
	if usage, ours := s.b.Store(); ours {
		status.Store = &usage
	}
	data, err := json.Marshal(status)
	if err == nil {
		err = s.b.Respond(m, data)
	}
	if err != nil {
		s.log.Debug("troupe: an answer about the status of the head is lost", "error", err)
	}
}

// addMember adds what the embedded server knows of its cluster. The list of members is in the store, because one may be replaced.
func (s *statusServer) addMember(status *Status) {
	m := s.b.Member()
	if m == nil {
		return
	}
	status.Member, status.Formed, status.Peers = m.Name(), m.Formed(), m.Peers()
	if f, err := readCluster(s.store); err == nil && f != nil {
		status.Members = f.Members
	}
}

// AskAll is the status of every head that answers in time: the members of a cluster, by name, or the heads on one external NATS.
func AskAll(ctx context.Context, b *bus.Bus) (all []Status) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	answerCh := make(chan *bus.Msg, headsMost)
	inbox := b.NewInbox()
	sub, err := b.SubscribeChan(inbox, answerCh)
	if err != nil {
		return nil
	}
	defer func() { _ = sub.Unsubscribe() }() // fails only if the connection is closed
	if b.PublishRequest(bus.NodesHead(), inbox, nil) != nil {
		return nil
	}
	for {
		select {
		case m := <-answerCh:
			var status Status
			if json.Unmarshal(m.Data, &status) != nil || status.PID == 0 { // the server says that no head is there
				return all
			}
			all = append(all, status)
		case <-ctx.Done():
			return all
		}
		slices.SortFunc(all, func(x, y Status) int { return strings.Compare(x.Member, y.Member) })
		if !all[0].Clustered || len(Members(all)) > 0 && len(MissingMembers(all)) == 0 {
			return all
		}
	}
}

// Ask is the status of the head; nil if none answers in time.
func Ask(ctx context.Context, b *bus.Bus) *Status {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	m, err := b.Request(ctx, bus.NodesHead(), nil)
	var status Status
	if err != nil || json.Unmarshal(m.Data, &status) != nil {
		return nil
	}
	return &status
}
