package roles

import (
	"context"
	"errors"
	"sync"

	"troupe/bus"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles/registry"
)

// killAll returns when every process of the role is known to have exited, or its node is lost.
func (w *workforce) killAll(ctx context.Context, rec registry.RoleRecord) error {
	return w.killWorkers(ctx, rec.WorkersByNode())
}

// killReplaced kills the replaced processes.
func (w *workforce) killReplaced(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, killGrace+agentTimeout)
	defer cancel()
	return w.killWorkers(ctx, w.c.Record().ReplacedByNode())
}

// killWorkers kills processes on all nodes concurrently. A node that does not answer is an error, unless it is lost.
func (w *workforce) killWorkers(ctx context.Context, byNode map[string][]nodes.WorkerID) error {
	var group sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	for node, ids := range byNode {
		group.Go(bus.Guard(func() {
			if err := w.killWorkersOn(ctx, node, ids); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}
		}))
	}
	group.Wait()
	return errors.Join(errs...)
}

func (w *workforce) killWorkersOn(ctx context.Context, node string, ids []nodes.WorkerID) error {
	asking, cancel := context.WithTimeout(ctx, agentProbe)
	_, err := w.c.rt.agents().Workers(asking, node) // an absent agent is not waited for
	cancel()
	if err == nil {
		_, err = w.c.rt.agents().Stop(ctx, node, ids, killGrace)
	}
	if err == nil || w.nodeLost(ctx, node) {
		return nil
	}
	return bus.Errorf(bus.CodeOf(err), "role %s: the agent of node %s has not confirmed the exit of its workers: %w", w.c.Name(), node, err)
}

// nodeLost reports whether placement counts a node as lost: its devices are not granted again before it has shown that
// they are free.
func (w *workforce) nodeLost(ctx context.Context, node string) bool {
	client, err := w.c.rt.placement()
	if err != nil {
		return false
	}
	var all []placement.NodeStatus
	if all, err = client.Nodes(ctx); err != nil {
		return false
	}
	return nodeIsLost(all, node)
}
