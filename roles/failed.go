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

// killBackoff paces requests to the agents of a failed role's workers.
var killBackoff = bus.Backoff{First: 500 * time.Millisecond, Most: 15 * time.Second}

// killFailed kills the processes of a failed role and releases their reservations. It retries until every agent has seen
// its workers exit or placement counts the node as lost, or this runtime ends: the record stays, so that another
// process can finish.
func (c *Cluster) killFailed() {
	for waits := killBackoff.Start(); c.rt.ctx.Err() == nil; {
		done, err := c.killFailedOnce()
		if done {
			return
		}
		pause := waits.Next()
		c.rt.log.Warn("roles: some workers of a failed role may still run; retrying", "role", c.Name(), "in", pause, "error", err)
		_ = bus.Sleep(c.rt.ctx, pause) // the loop checks the context
	}
}

// killFailedOnce reports whether only the record of the role is left, or another process destroys it.
func (c *Cluster) killFailedOnce() (done bool, _ error) {
	ctx, cancel := context.WithTimeout(c.rt.ctx, killGrace+agentTimeout+releaseTimeout+registryTimeout)
	defer cancel()
	if err := c.lockDestroy(ctx); err != nil {
		return false, err
	}
	defer func() { <-c.destroyCh }()
	rec, err := c.readRecord()
	switch {
	case errors.Is(err, bus.ErrNotFound) || err == nil && rec.State == registry.RoleStopping:
		return true, nil
	case err != nil:
		return false, err
	}
	c.setRecord(rec)
	if err := c.killAll(ctx, rec); err != nil {
		return false, err
	}
	if err := c.releaseReservations(ctx); err != nil {
		return false, err
	}
	err = c.alter(ctx, func(r *registry.RoleRecord) error {
		if r.State == registry.RoleFailed {
			r.Reservations, r.Replaced = nil, nil
		}
		return nil
	})
	return err == nil || errors.Is(err, bus.ErrNotFound), err
}

// killAll returns when every process of the role is known to have exited, or its node is lost.
func (c *Cluster) killAll(ctx context.Context, rec registry.RoleRecord) error {
	return c.killWorkers(ctx, rec.WorkersByNode())
}

// killReplaced kills the replaced processes.
func (c *Cluster) killReplaced(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, killGrace+agentTimeout)
	defer cancel()
	return c.killWorkers(ctx, c.Record().ReplacedByNode())
}

// killWorkers kills processes on all nodes concurrently. A node that does not answer is an error, unless it is lost.
func (c *Cluster) killWorkers(ctx context.Context, byNode map[string][]nodes.WorkerID) error {
	var group sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	for node, ids := range byNode {
		group.Go(bus.Guard(func() {
			if err := c.killWorkersOn(ctx, node, ids); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}
		}))
	}
	group.Wait()
	return errors.Join(errs...)
}

func (c *Cluster) killWorkersOn(ctx context.Context, node string, ids []nodes.WorkerID) error {
	asking, cancel := context.WithTimeout(ctx, agentProbe)
	_, err := c.rt.agents().Workers(asking, node) // an absent agent is not waited for
	cancel()
	if err == nil {
		_, err = c.rt.agents().Stop(ctx, node, ids, killGrace)
	}
	if err == nil || c.nodeLost(ctx, node) {
		return nil
	}
	return bus.Errorf(bus.CodeOf(err), "role %s: the agent of node %s has not confirmed the exit of its workers: %w", c.Name(), node, err)
}

// nodeLost reports whether placement counts a node as lost: its devices are not granted again before it has shown that
// they are free.
func (c *Cluster) nodeLost(ctx context.Context, node string) bool {
	client, err := c.rt.placement()
	if err != nil {
		return false
	}
	var all []placement.NodeStatus
	if all, err = client.Nodes(ctx); err != nil {
		return false
	}
	return nodeIsLost(all, node)
}
