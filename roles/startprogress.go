package roles

import (
	"context"
	"maps"
	"slices"

	"troupe/nodes"
	"troupe/roles/life"
)

// StartStep is what the start of a role waits for.
type StartStep string

const (
	StartName      StartStep = "name"      // the name is claimed; a role that has it may have to end first
	StartPlacement StartStep = "placement" // devices and nodes are reserved
	StartWorkers   StartStep = "workers"   // workers import and construct their class
	StartBarrier   StartStep = "barrier"   // all workers are ready; it is checked that calls reach them
)

// StartProgress is the progress of a role's start: Ready of World workers are ready.
type StartProgress struct {
	Step    StartStep
	World   int
	Ready   int
	Slowest *nodes.WorkerStacks // a worker that is not ready, and what its threads do; nil if the step is not StartWorkers
}

// StartProgress returns the progress of a role that this runtime is creating. It asks the agent of the slowest worker.
func (rt *Runtime) StartProgress(ctx context.Context, name string) StartProgress {
	c := rt.startingCluster(name)
	if c == nil {
		return StartProgress{Step: StartName}
	}
	rec := c.Record()
	p := StartProgress{Step: StartPlacement, World: rec.World}
	if len(rec.Placements) < rec.World {
		return p
	}
	states, _ := c.life.ranks()
	slowest := -1
	for rank := rec.World - 1; rank >= 0; rank-- {
		if states[rank].State == life.Ready {
			p.Ready++
		} else {
			slowest = rank
		}
	}
	if slowest < 0 {
		p.Step = StartBarrier
		return p
	}
	p.Step, p.Slowest = StartWorkers, &stacksOn(ctx, c, rec.Placements[slowest].Node, []int{slowest})[0]
	return p
}

// startingCluster is the cluster of a role whose start this runtime has not completed; nil: there is none yet.
func (rt *Runtime) startingCluster(name string) *Cluster {
	rt.mu.Lock()
	all := slices.Collect(maps.Keys(rt.clusters))
	rt.mu.Unlock()
	for _, c := range all {
		if c.origin == created && c.Name() == name && c.life.state() == life.Starting {
			return c
		}
	}
	return nil
}
