package roles

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"troupe/bus"
	"troupe/nodes"
	"troupe/roles/display"
	"troupe/roles/registry"
)

const (
	lastOutput    = 2 * time.Second  // timeout of the last lines at the end of the workers
	lastRawOutput = 30 * time.Second // the same in raw mode, which loses nothing
	eventRole     = "role_ready"
	eventGone     = "role_gone"
	eventFailed   = "worker_failed"

	eventRestart  = "role_restarting"
	eventResize   = "role_resized"
	eventStalled  = "worker_stalled" // Details: stacks
	eventClaimed  = "role_claimed"   // the registry had lost the record of a role that runs
	eventOrphaned = "role_orphaned"  // a role or reservation ends because its driver is dead

	eventUnclaimed = "process_unclaimed" // a process ends that no role claims
)

// roleOutput is the output of a role's workers on its way to the driver.
type roleOutput struct {
	mode    nodes.OutputMode
	sink    *outputSink
	ownSink bool         // the sink is not shared with other roles
	to      *bus.Address // another driver that receives the output; nil: this one
	stop    func()
}

// outputs shows the output of a role's workers, and publishes its events.
type outputs struct {
	c     *Cluster
	mu    sync.Mutex  // guards what follows
	shown *roleOutput // nil: output is not shown
}

// outputSink is the sink of the roles without a writer of their own; nil: the driver wants no output.
func (rt *Runtime) outputSink() *outputSink {
	if rt.cfg.OutputFunc == nil {
		return nil
	}
	rt.mu.Lock()
	defer rt.mu.Unlock()
	if rt.sink == nil && !rt.ended {
		rt.sink = newOutputSink(rt.cfg.OutputFunc, rt.cfg.OutputTerminal, rt.cfg.OutputColor)
	}
	return rt.sink
}

// endOutput ends the sink, after all roles.
func (rt *Runtime) endOutput() {
	rt.mu.Lock()
	sink := rt.sink
	rt.sink = nil
	rt.mu.Unlock()
	if sink != nil {
		sink.stop()
	}
}

// showOutput starts to receive the workers' output, if the driver wants it.
func (o *outputs) showOutput(ctx context.Context) error {
	p := o.c.spec.Process
	shown := &roleOutput{mode: cmp.Or(p.OutputMode, o.c.rt.cfg.OutputMode, nodes.OutputAll)}
	switch {
	case p.OutputTo != (bus.Address{}):
		shown.to = &p.OutputTo
	case p.Output != nil:
		shown.ownSink = true
		shown.sink = newOutputSink(func(t display.Text) { _, _ = p.Output.Write(t.Text) }, false, false) // the writer handles its own errors
	default:
		if shown.sink = o.c.rt.outputSink(); shown.sink == nil {
			return nil
		}
	}
	if shown.sink != nil {
		name, world := o.c.Name(), o.c.Record().World
		stop, err := o.c.rt.agents().ReceiveOutput(ctx, o.c.to, func(b nodes.OutputBatch) bool { return shown.sink.offer(name, world, shown.mode, b.Items) })
		if err != nil {
			if shown.ownSink {
				shown.sink.stop()
			}
			return err
		}
		shown.stop = stop
	}
	o.set(shown)
	return nil
}

// set sets what is shown, and returns what was before; get returns it.
func (o *outputs) set(shown *roleOutput) (before *roleOutput) {
	o.mu.Lock()
	defer o.mu.Unlock()
	before, o.shown = o.shown, shown
	return before
}

func (o *outputs) get() *roleOutput {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.shown
}

// outputMode is the mode for launches of workers, and the receiver, if that is another driver.
func (o *outputs) outputMode() (nodes.OutputMode, *bus.Address) {
	shown := o.get()
	if shown == nil {
		return nodes.OutputUnset, nil
	}
	return shown.mode, shown.to
}

// OutputReceiver is the address that Process.OutputTo takes for the output that this runtime receives under a name.
func (rt *Runtime) OutputReceiver(name string) bus.Address {
	return bus.Address{Namespace: rt.cfg.Namespace, Role: name, Incarnation: rt.ep.Session()}
}

// ReceiveOutput shows output of roles that other drivers create with OutputReceiver(name), until the runtime ends. Without
// Config.OutputFunc it does nothing.
func (rt *Runtime) ReceiveOutput(ctx context.Context, name string) error {
	sink := rt.outputSink()
	if sink == nil {
		return nil
	}
	mode := cmp.Or(rt.cfg.OutputMode, nodes.OutputAll)
	_, err := rt.agents().ReceiveOutput(ctx, rt.OutputReceiver(name), func(b nodes.OutputBatch) bool { return sink.offer(b.Role, 1, mode, b.Items) })
	return err
}

// FlushOutput returns when everything that the workers had printed has been written for the driver.
func (c *Cluster) FlushOutput(ctx context.Context) error {
	if mode, elsewhere := c.output.outputMode(); mode == nodes.OutputUnset || elsewhere != nil {
		return bus.Errorf(bus.CodeInvalid, "role %s: neither Process.Output nor Config.OutputFunc was set when the role was created", c.Name())
	}
	return c.output.flushShown(ctx)
}

// flushShown is FlushOutput for a role that may have ended, or whose output is not shown: then there is nothing to wait for.
func (o *outputs) flushShown(ctx context.Context) error {
	shown := o.get()
	if shown == nil || shown.sink == nil {
		return nil
	}
	if err := o.flushAgents(ctx, o.c.Record()); err != nil {
		return err
	}
	return shown.sink.flush(ctx)
}

// FlushOutput returns when everything that the workers of this runtime's roles had printed has been written for the driver.
func (rt *Runtime) FlushOutput(ctx context.Context) error {
	rt.mu.Lock()
	all := slices.Collect(maps.Keys(rt.clusters))
	rt.mu.Unlock()
	errs := make([]error, len(all))
	var group sync.WaitGroup
	for i, c := range all {
		group.Go(bus.Guard(func() { errs[i] = c.output.flushShown(ctx) }))
	}
	group.Wait()
	return errors.Join(errs...)
}

// flushAgents returns when the output of the workers has left their agents.
func (o *outputs) flushAgents(ctx context.Context, rec registry.RoleRecord) error {
	order, _ := launchTargets(rec, rec.PlacedRanks())
	errs := make([]error, len(order))
	var group sync.WaitGroup
	for i, at := range order {
		group.Go(bus.Guard(func() { errs[i] = o.flushAgent(ctx, at.node) }))
	}
	group.Wait()
	return errors.Join(errs...)
}

// flushAgent returns when an agent has sent the output of its workers. An absent agent is not waited for.
func (o *outputs) flushAgent(ctx context.Context, node string) error {
	probe, cancel := context.WithTimeout(ctx, agentProbe)
	err := o.c.rt.agents().FlushOutput(probe, node, o.c.to)
	cancel()
	if err == nil || ctx.Err() != nil || o.c.workforce.nodeLost(ctx, node) {
		return err
	}
	probe, cancel = context.WithTimeout(ctx, agentProbe)
	_, err = o.c.rt.agents().WorkersOf(probe, node, o.c.to)
	cancel()
	if err != nil {
		return err
	}
	return o.c.rt.agents().FlushOutput(ctx, node, o.c.to)
}

// endOutput writes the last output of the workers, and stops. Agents have sent it when the workers were stopped; raw
// output may be more than the driver has read so far.
func (o *outputs) endOutput(ctx context.Context) {
	shown := o.set(nil)
	if shown == nil {
		return
	}
	limit := lastOutput
	if shown.mode == nodes.OutputRaw {
		limit = lastRawOutput
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	if shown.mode == nodes.OutputRaw {
		_ = o.flushAgents(ctx, o.c.Record()) // the log stream has it
	}
	if shown.sink == nil {
		return
	}
	_ = shown.sink.flush(ctx)
	shown.stop()
	if shown.ownSink {
		shown.sink.stop()
	}
}

// emit publishes an event of a role of processes.
func (o *outputs) emit(kind string, rank *int, node, text string) {
	o.emitDetails(kind, rank, node, text, nil)
}

func (o *outputs) emitDetails(kind string, rank *int, node, text string, details map[string]string) {
	rec := o.c.Record()
	if !rec.Process || o.c.origin == opened || o.c.origin == attached {
		return
	}
	e := nodes.Event{Kind: kind, Namespace: rec.Namespace, Role: rec.Name, Rank: rank, Node: node, Text: text, Details: details}
	if err := nodes.Emit(o.c.rt.bus, e); err != nil {
		o.c.rt.log.Debug("roles: publishing an event failed", "role", o.c.Name(), "error", err)
	}
}
