package roles

import (
	"context"
	"errors"
	"sync"
	"time"

	"troupe/bus"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles/registry"
)

// listTimeout is the timeout of listing a node's workers; a silent node is listed the next time.
const listTimeout = 2 * time.Second

// KillOrphanProcesses kills the worker processes that belong to no role, and returns them: those of a node that was unreachable
// while their role was destroyed or restarted. A role's record exists before its first process and until after the last
// that could be reached, so that a process without a record is an orphan. Only processes older than olderThan are
// killed. A head calls it periodically.
func KillOrphanProcesses(ctx context.Context, b *bus.Bus, olderThan time.Duration) ([]nodes.Status, error) {
	client, err := placement.NewClient(b, "")
	if err != nil {
		return nil, err
	}
	defer client.Close()
	all, err := client.Nodes(ctx)
	if err != nil {
		return nil, err
	}
	s := &orphanKiller{bus: b, olderThan: olderThan, agents: nodes.NewClient(b)}
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

type orphanKiller struct {
	bus       *bus.Bus
	agents    *nodes.Client
	olderThan time.Duration

	mu    sync.Mutex         // guards what follows
	open  *registry.Registry // nil until it is needed
	ended []nodes.Status
	errs  []error
}

func (s *orphanKiller) killOn(ctx context.Context, node string) {
	asking, cancel := context.WithTimeout(ctx, listTimeout)
	workers, err := s.agents.Running(asking, node)
	cancel()
	if err != nil {
		return // reported by placement
	}
	var ids []nodes.WorkerID
	var found []nodes.Status
	for _, w := range workers {
		if w.Exit == nil && w.For >= s.olderThan && s.isOrphan(ctx, w.ID) {
			ids, found = append(ids, w.ID), append(found, w)
		}
	}
	if len(ids) == 0 {
		return
	}
	ending, cancel := context.WithTimeout(ctx, killGrace+agentTimeout)
	defer cancel()
	_, err = s.agents.Stop(ending, node, ids, killGrace)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.errs = append(s.errs, err)
		return
	}
	s.ended = append(s.ended, found...)
}

// isOrphan reports whether the process certainly belongs to no role.
func (s *orphanKiller) isOrphan(ctx context.Context, id nodes.WorkerID) bool {
	reg, err := s.registry(ctx, id.Namespace)
	if err != nil {
		return false
	}
	rec, err := reg.Read(ctx, id.Role)
	switch {
	case errors.Is(err, bus.ErrNotFound):
		return true
	case err != nil:
		return false
	case rec.Incarnation != id.Incarnation:
		return true
	}
	if rec.State == registry.RoleFailed {
		return true // its driver kills it, or died before
	}
	known := id.Rank < len(rec.Placements)
	return len(rec.Placements) > 0 && (!known || rec.Placements[id.Rank].Gen > id.Gen) && rec.State != registry.RoleStarting
}

// registry is the registry of a namespace.
func (s *orphanKiller) registry(ctx context.Context, namespace string) (registry.Registry, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == nil {
		reg, err := registry.Open(ctx, s.bus, namespace)
		if err != nil {
			return registry.Registry{}, err
		}
		s.open = &reg
	}
	return s.open.Of(namespace), nil
}
