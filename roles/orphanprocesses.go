package roles

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"troupe/bus"
	"troupe/nodes"
	"troupe/nodes/evidence"
	"troupe/placement"
	"troupe/roles/registry"
)

// listTimeout is the timeout of listing a node's workers; a silent node is listed the next time.
const listTimeout = 2 * time.Second

// OrphanProcesses kills the worker processes that belong to no role: those of a node that was unreachable while their role was destroyed
// or restarted. A head has one.
type OrphanProcesses struct {
	Bus *bus.Bus
	// Unclaimed is how long a process may have no record in the registry. The record of its role exists before it and until after it, but the
	// registry may have lost it, and whoever holds the role writes it again. Zero: evidence.Unclaimed.
	Unclaimed time.Duration

	agents *nodes.Client
	mu     sync.Mutex                   // guards what follows
	open   *registry.Registry           // nil until it is needed
	since  map[nodes.WorkerID]time.Time // since when processes have no record
	ended  []nodes.Status               // of this pass, as errs
	errs   []error
}

// Kill is one pass, and returns the processes that it has killed. A head repeats it every few seconds.
func (s *OrphanProcesses) Kill(ctx context.Context) ([]nodes.Status, error) {
	client, err := placement.NewClient(s.Bus, "")
	if err != nil {
		return nil, err
	}
	defer client.Close()
	all, err := client.WorkingNodes(ctx)
	if err != nil {
		return nil, err
	}
	if s.agents == nil {
		s.agents, s.since = nodes.NewClient(s.Bus), map[nodes.WorkerID]time.Time{}
	}
	s.ended, s.errs = nil, nil
	var group sync.WaitGroup
	for _, node := range all {
		if node.State == placement.NodeLost {
			continue // unreachable
		}
		group.Go(bus.Guard(func() { s.killOn(ctx, node.Report.Node) }))
	}
	group.Wait()
	return s.ended, errors.Join(s.errs...)
}

func (s *OrphanProcesses) killOn(ctx context.Context, node string) {
	asking, cancel := context.WithTimeout(ctx, listTimeout)
	workers, err := s.agents.Running(asking, node)
	cancel()
	if err != nil {
		return // reported by placement
	}
	found := map[string][]nodes.Status{} // by reason
	for _, w := range workers {
		if w.Exit != nil {
			continue
		}
		if why := s.judge(ctx, w, time.Now()); why != "" {
			found[why] = append(found[why], w)
		}
	}
	for why, some := range found {
		s.kill(ctx, node, some, why)
	}
}

func (s *OrphanProcesses) kill(ctx context.Context, node string, workers []nodes.Status, why string) {
	ids := make([]nodes.WorkerID, len(workers))
	for i, w := range workers {
		ids[i] = w.ID
		_ = nodes.Emit(s.Bus, nodes.Event{Kind: eventUnclaimed, Namespace: w.ID.Namespace, Role: w.ID.Role, Rank: &w.ID.Rank, Node: node, Text: "its process ends: " + why}) // lost in an outage
	}
	ending, cancel := context.WithTimeout(ctx, killGrace+agentTimeout)
	defer cancel()
	_, err := s.agents.Evict(ending, node, ids, killGrace, why)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.errs = append(s.errs, err)
		return
	}
	s.ended = append(s.ended, workers...)
}

// judge is why a process belongs to no role; empty: it does, or that is not certain.
func (s *OrphanProcesses) judge(ctx context.Context, w nodes.Status, now time.Time) string {
	reg, err := s.registry(ctx, w.ID.Namespace)
	if err != nil {
		return ""
	}
	rec, err := reg.Read(ctx, w.ID.Role)
	missing := errors.Is(err, bus.ErrNotFound) || err == nil && rec.Incarnation != w.ID.Incarnation
	s.mu.Lock()
	defer s.mu.Unlock()
	if !missing {
		delete(s.since, w.ID)
	} else if s.since[w.ID].IsZero() {
		s.since[w.ID] = now
	}
	limit := cmp.Or(s.Unclaimed, evidence.Unclaimed)
	switch {
	case missing && now.Sub(s.since[w.ID]) >= limit:
		delete(s.since, w.ID)
		return fmt.Sprintf("the registry has no record of its role, and nobody has claimed it for %v", limit)
	case err != nil || missing || w.For < min(evidence.Superseded, limit):
		return ""
	case rec.State == registry.RoleFailed: // its driver kills it, or died before
		return "its role has failed"
	}
	known := w.ID.Rank < len(rec.Placements)
	if len(rec.Placements) > 0 && (!known || rec.Placements[w.ID.Rank].Gen > w.ID.Gen) && rec.State != registry.RoleStarting {
		return "its role has replaced or removed it"
	}
	return ""
}

// registry is the registry of a namespace.
func (s *OrphanProcesses) registry(ctx context.Context, namespace string) (registry.Registry, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == nil {
		reg, err := registry.Open(ctx, s.Bus, namespace)
		if err != nil {
			return registry.Registry{}, err
		}
		s.open = &reg
	}
	return s.open.Of(namespace), nil
}
