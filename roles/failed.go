package roles

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"troupe/bus"
	"troupe/nodes"
	"troupe/placement"
)

const (
	endPause  = 500 * time.Millisecond // before the agents of a failed role's workers are asked again, doubled up to
	endPauses = 15 * time.Second       // this
)

// endFailed ends the processes of a role that has failed and gives back what they held. An agent that cannot be reached is
// asked again, until it has seen its workers end or the placement service counts its node as lost. It goes on until this
// runtime ends: the record stays, and with it the way for another process to finish.
func (c *Cluster) endFailed() {
	for pause := endPause; c.rt.ctx.Err() == nil; pause = min(2*pause, endPauses) {
		done, err := c.endFailedOnce()
		if done {
			return
		}
		c.rt.log.Warn("roles: the workers of a failed role have not all ended; asking again", "role", c.Name(), "in", pause, "error", err)
		select {
		case <-c.rt.ctx.Done():
		case <-time.After(pause/2 + rand.N(pause/2)):
		}
	}
}

// endFailedOnce reports true when nothing of the role is left but its record, or somebody takes it down.
func (c *Cluster) endFailedOnce() (done bool, _ error) {
	ctx, cancel := context.WithTimeout(c.rt.ctx, killGrace+agentAnswer+releaseActs+registryActs)
	defer cancel()
	if err := c.takeTurn(ctx); err != nil {
		return false, err
	}
	defer func() { <-c.downCh }()
	rec, err := c.look()
	switch {
	case errors.Is(err, bus.ErrNotFound) || err == nil && rec.State == RoleStopping:
		return true, nil
	case err != nil:
		return false, err
	}
	c.setRecord(rec)
	if err := c.endStrictly(ctx, rec); err != nil {
		return false, err
	}
	if err := c.giveBack(ctx); err != nil {
		return false, err
	}
	err = c.alter(ctx, func(r *Record) error {
		if r.State == RoleFailed {
			r.Held, r.Former = nil, nil
		}
		return nil
	})
	return err == nil || errors.Is(err, bus.ErrNotFound), err
}

// workers are the processes of a role by node: those on its seats, and those that were replaced.
func (r Record) workers() map[string][]nodes.WorkerID {
	out := map[string][]nodes.WorkerID{}
	for rank, seat := range r.Seats {
		out[seat.Node] = append(out[seat.Node], r.workerID(rank))
	}
	for node, ids := range r.formers() {
		out[node] = append(out[node], ids...)
	}
	return out
}

// formers are the processes that were replaced, by node.
func (r Record) formers() map[string][]nodes.WorkerID {
	out := map[string][]nodes.WorkerID{}
	for _, f := range r.Former {
		id := nodes.WorkerID{Namespace: r.Namespace, Role: r.Name, Incarnation: r.Incarnation, Rank: f.Rank, Gen: f.Gen}
		out[f.Node] = append(out[f.Node], id)
	}
	return out
}

// endStrictly returns when every process of the role is known to have ended, or its node is lost.
func (c *Cluster) endStrictly(ctx context.Context, rec Record) error {
	return c.endWorkers(ctx, rec.workers())
}

// endFormer ends the processes that were replaced.
func (c *Cluster) endFormer(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, killGrace+agentAnswer)
	defer cancel()
	return c.endWorkers(ctx, c.Record().formers())
}

// endWorkers asks the agents of all nodes at once. A node that does not answer is a failure, unless it is lost.
func (c *Cluster) endWorkers(ctx context.Context, byNode map[string][]nodes.WorkerID) error {
	var group sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	for node, ids := range byNode {
		group.Go(bus.Guard(func() {
			if err := c.endThere(ctx, node, ids); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}
		}))
	}
	group.Wait()
	return errors.Join(errs...)
}

func (c *Cluster) endThere(ctx context.Context, node string, ids []nodes.WorkerID) error {
	asking, cancel := context.WithTimeout(ctx, agentThere)
	_, err := c.rt.agents().Workers(asking, node) // an agent that is not there is not waited for
	cancel()
	if err == nil {
		_, err = c.rt.agents().Stop(ctx, node, ids, killGrace)
	}
	if err == nil || c.nodeLost(ctx, node) {
		return nil
	}
	return bus.Errorf(bus.CodeOf(err), "role %s: the agent of node %s has not said that its workers ended: %w", c.Name(), node, err)
}

// nodeLost reports whether the placement service counts a node as lost: its devices are not granted again before it has
// shown that they are free.
func (c *Cluster) nodeLost(ctx context.Context, node string) bool {
	client, err := c.rt.placement()
	if err != nil {
		return false
	}
	var all []placement.NodeStatus
	if all, err = client.Nodes(ctx); err != nil {
		return false
	}
	return nodeGone(all, node)
}
