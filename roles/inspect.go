package roles

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/dispatch"
	"troupe/nodes"
	"troupe/roles/registry"
)

// infoTimeout bounds the wait for what a worker says of its running calls, beside its stacks.
const infoTimeout = 800 * time.Millisecond

// Stacks is the stacks of the workers of some ranks, or of all, with the methods that they run. A worker answers also while its
// program holds the interpreter lock. Agents that do not answer are reported in the stacks of their ranks.
func (c *Cluster) Stacks(ctx context.Context, ranks ...int) ([]nodes.WorkerStacks, error) {
	rec, ranks, err := inspected(c, ranks)
	if err != nil {
		return nil, err
	}
	order, groups := launchTargets(rec, ranks)
	var group sync.WaitGroup
	parts := make([][]nodes.WorkerStacks, len(order))
	for i, at := range order {
		group.Go(bus.Guard(func() { parts[i] = stacksOn(ctx, c, at.node, groups[at]) }))
	}
	calls := make([][]actors.CallState, len(ranks))
	for i, rank := range ranks {
		group.Go(bus.Guard(func() { calls[i] = runningCalls(ctx, c, rank) }))
	}
	group.Wait()
	all := slices.Concat(parts...)
	for i := range all {
		if at := slices.Index(ranks, all[i].Rank); at >= 0 {
			for _, call := range calls[at] {
				all[i].AddCall(call.Method, call.For)
			}
		}
	}
	return all, nil
}

// inspected checks the ranks; none are all.
func inspected(c *Cluster, ranks []int) (registry.RoleRecord, []int, error) {
	rec := c.Record()
	if !rec.Process {
		return rec, nil, bus.Errorf(bus.CodeRefused, "the workers of role %s are goroutines of their driver: inspect that process", rec.Name)
	}
	for _, rank := range ranks {
		if rank < 0 || rank >= len(rec.Placements) {
			return rec, nil, bus.Errorf(bus.CodeNotFound, "role %s has no rank %d: it has %d", rec.Name, rank, len(rec.Placements))
		}
	}
	if len(ranks) == 0 {
		ranks = rec.PlacedRanks()
	}
	return rec, ranks, nil
}

// stacksOn asks one agent. A rank that it does not have is reported.
func stacksOn(ctx context.Context, c *Cluster, node string, ranks []int) []nodes.WorkerStacks {
	got, err := c.rt.agents().Stacks(ctx, node, c.to, ranks...)
	why := "no worker of this rank runs on its node"
	if err != nil {
		why = err.Error()
	}
	for _, rank := range ranks {
		if !slices.ContainsFunc(got, func(w nodes.WorkerStacks) bool { return w.Rank == rank }) {
			got = append(got, nodes.WorkerStacks{Role: c.Name(), Rank: rank, Node: node, Error: why})
		}
	}
	return got
}

// runningCalls is the running calls of a rank; none if it does not answer.
func runningCalls(ctx context.Context, c *Cluster, rank int) []actors.CallState {
	ctx, cancel := context.WithTimeout(ctx, infoTimeout)
	defer cancel()
	f, err := c.send(ctx, dispatch.Call{Method: actors.VerbInfo, Ranks: []int{rank}, Control: true})
	if err != nil {
		return nil
	}
	infos, err := dispatch.AwaitEach[actors.Info](ctx, f)
	if err != nil || len(infos) == 0 {
		return nil
	}
	return slices.DeleteFunc(infos[0].Calls, func(s actors.CallState) bool { return !s.Running || s.Method == actors.VerbInfo })
}

// Interrupt raises KeyboardInterrupt in the methods that a Python worker runs, and returns their names. An empty list and no error:
// the worker did not answer, because its program holds the interpreter lock; it is interrupted when it runs Python code again.
func (c *Cluster) Interrupt(ctx context.Context, rank int) ([]string, error) {
	rec, ranks, err := inspected(c, []int{rank})
	if err != nil {
		return nil, err
	}
	got, err := c.rt.agents().Interrupt(ctx, rec.Placements[ranks[0]].Node, c.to, rank)
	switch {
	case err != nil:
		return nil, bus.Errorf(bus.CodeOf(err), "interrupt %s/%d: %w", rec.Name, rank, err)
	case got.Error != "":
		return nil, bus.Errorf(bus.CodeUnavailable, "interrupt %s/%d: %w", rec.Name, rank, errors.New(got.Error))
	case len(got.Interrupted) == 0 && !got.Signalled:
		return nil, bus.Errorf(bus.CodeNotFound, "%s runs no method that could be interrupted", fmt.Sprintf("%s/%d", rec.Name, rank))
	}
	c.rt.audit(actionInterrupted, rec, &rank, "methods "+strings.Join(got.Interrupted, ", "), "")
	return got.Interrupted, nil
}

// Debug attaches to the debugger of a Python worker that is stopped at a breakpoint, until it continues or in ends.
func (c *Cluster) Debug(ctx context.Context, rank int, in io.Reader, out io.Writer) error {
	rec, _, err := inspected(c, []int{rank})
	if err != nil {
		return err
	}
	c.rt.audit(actionDebugged, rec, &rank, "a debugger was attached", "")
	if err := c.rt.agents().Debug(ctx, rec.Placements[rank].Node, c.to, rank, in, out); err != nil {
		return bus.Errorf(bus.CodeOf(err), "debug %s/%d: %w", rec.Name, rank, err)
	}
	return nil
}
