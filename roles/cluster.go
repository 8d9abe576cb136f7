package roles

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/dispatch"
	"troupe/nodes"
	"troupe/roles/life"
	"troupe/roles/registry"
)

// Cluster is a driver's handle on the running workers of one role. It is safe for concurrent use, and it can be an
// argument of a call, alone or inside another value: the method receives its Handle.
type Cluster struct {
	rt     *Runtime
	origin origin
	spec   Spec // of a role created elsewhere, only StopGrace
	to     bus.Address
	shape  atomic.Pointer[dispatch.Group] // current layout of the ranks; see size.go
	gate   dispatch.Gate                  // holds calls to ranks that are being restarted

	life      *lifecycle // its state, and that of its ranks
	performer performer  // carries out what its life asks for
	liveness  *liveness
	record    recordBook
	starter   starter
	workforce workforce
	recovery  recovery
	sizer     sizer
	scaler    scaler
	members   membership
	replayer  replayer
	output    outputs
	ender     ender
}

// Name is the role's name.
func (c *Cluster) Name() string { return c.to.Role }

// Mesh is the layout of the ranks, as this process knows it.
func (c *Cluster) Mesh() dispatch.Mesh { return c.shape.Load().Mesh }

// WorldSize is the number of workers; DPSize, TPSize, PPSize and CPSize are the sizes of the mesh.
func (c *Cluster) WorldSize() int { return c.Mesh().World() }
func (c *Cluster) DPSize() int    { return c.Mesh().DP }
func (c *Cluster) TPSize() int    { return c.Mesh().TP }
func (c *Cluster) PPSize() int    { return c.Mesh().PP }
func (c *Cluster) CPSize() int    { return c.Mesh().CP }

// RankInfo is a rank's coordinates in the mesh.
func (c *Cluster) RankInfo(rank int) (dispatch.RankInfo, error) { return c.Mesh().Info(rank) }

// Record is the role's registry entry as last read by this process.
func (c *Cluster) Record() registry.RoleRecord { return c.record.get() }

// Health is the last heartbeat of each worker. Every worker of a role that has failed is failed, also one that has not been
// stopped yet.
func (c *Cluster) Health() []actors.Heartbeat {
	beats := c.liveness.health(c.WorldSize())
	if failed := c.life.failure(); failed != nil {
		for i := range beats {
			if !beats[i].State.Over() {
				beats[i].State, beats[i].Err = actors.Failed, failed
			}
		}
	}
	return beats
}

// end refuses later calls, unless they are refused already.
func (c *Cluster) end(why error) { c.life.feed(life.Event{Kind: life.Destroy, Why: why}) }

// Destroy stops every worker, rank 0 last, and frees the name. Running calls may finish within the grace of the spec.
// Any attached driver may destroy a role. It may be called more than once.
func (c *Cluster) Destroy(ctx context.Context) error {
	return c.ender.destroy(ctx, c.spec.StopGrace, stopInOrder)
}

// Kill ends the role at once: every worker process gets SIGKILL, and pending calls fail with the cause. When it returns the name
// and the devices are free. Any attached driver may kill a role. Workers that are goroutines are only told to stop.
func (c *Cluster) Kill(ctx context.Context) error { return c.ender.destroy(ctx, 0, stopNow) }

// KillRanks kills the processes of some ranks with SIGKILL, and returns when their agents have seen them exit. What happens next is the
// role's policy for a worker that failed: with Ignore the other ranks continue.
func (c *Cluster) KillRanks(ctx context.Context, ranks ...int) error {
	rec := c.Record()
	if !rec.Process {
		return bus.Errorf(bus.CodeInvalid, "role %s: its workers are goroutines, which cannot be killed", c.Name())
	}
	for _, rank := range ranks {
		if rank < 0 || rank >= rec.World {
			return bus.Errorf(bus.CodeInvalid, "role %s has no rank %d: it has %d workers", c.Name(), rank, rec.World)
		}
	}
	order, groups := launchTargets(rec, ranks)
	var errs []error
	for _, at := range order {
		ids := make([]nodes.WorkerID, len(groups[at]))
		for i, rank := range groups[at] {
			ids[i] = rec.WorkerID(rank)
		}
		_, err := c.rt.agents().Evict(ctx, at.node, ids, 0, "killed by "+c.rt.cfg.Name) // a stop on request would be the end of the role
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Close releases the cluster: a role that was created here and is not detached is destroyed, others stay. A cluster
// opened from a handle is shared and stays open.
func (c *Cluster) Close(ctx context.Context) error {
	switch {
	case c.origin == created && !c.Record().Detached:
		return c.Destroy(ctx)
	case c.origin != opened:
		err := c.replayer.flushReplays(ctx)
		c.ender.release()
		return err
	}
	return nil
}

// What the processes that end roles and monitor them use.
func (c *Cluster) release()                                         { c.ender.release() }
func (c *Cluster) killFailed()                                      { c.ender.killFailed() }
func (c *Cluster) holdRestarting(rec registry.RoleRecord, _ []loss) { c.performer.applyRecord(rec) }
func (c *Cluster) destroy(ctx context.Context, grace time.Duration, manner stopManner) error {
	return c.ender.destroy(ctx, grace, manner)
}
