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

	eventRestart = "role_restarting"
)

// roleOutput is the output of a role's workers on its way to the driver.
type roleOutput struct {
	mode    nodes.OutputMode
	sink    *outputSink
	ownSink bool         // the sink is not shared with other roles
	to      *bus.Address // another driver that receives the output; nil: this one
	stop    func()
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
func (c *Cluster) showOutput(ctx context.Context) error {
	p := c.spec.Process
	o := &roleOutput{mode: cmp.Or(p.OutputMode, c.rt.cfg.OutputMode, nodes.OutputAll)}
	if p.OutputTo != (bus.Address{}) {
		o.to = &p.OutputTo
		c.mu.Lock()
		defer c.mu.Unlock()
		c.output = o
		return nil
	}
	if p.Output != nil {
		o.ownSink = true
		o.sink = newOutputSink(func(t display.Text) { _, _ = p.Output.Write(t.Text) }, false, false) // the writer handles its own errors
	} else if o.sink = c.rt.outputSink(); o.sink == nil {
		return nil
	}
	name, world := c.Name(), c.Record().World
	stop, err := c.rt.agents().ReceiveOutput(ctx, c.to, func(b nodes.OutputBatch) bool { return o.sink.offer(name, world, o.mode, b.Items) })
	if err != nil {
		if o.ownSink {
			o.sink.stop()
		}
		return err
	}
	o.stop = stop
	c.mu.Lock()
	defer c.mu.Unlock()
	c.output = o
	return nil
}

// outputMode is the mode for launches of workers, and the receiver, if that is another driver.
func (c *Cluster) outputMode() (nodes.OutputMode, *bus.Address) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.output == nil {
		return nodes.OutputUnset, nil
	}
	return c.output.mode, c.output.to
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
	if mode, elsewhere := c.outputMode(); mode == nodes.OutputUnset || elsewhere != nil {
		return bus.Errorf(bus.CodeInvalid, "role %s: neither Process.Output nor Config.OutputFunc was set when the role was created", c.Name())
	}
	return c.flushShown(ctx)
}

// flushShown is FlushOutput for a role that may have ended, or whose output is not shown: then there is nothing to wait for.
func (c *Cluster) flushShown(ctx context.Context) error {
	c.mu.Lock()
	o, rec := c.output, c.rec
	c.mu.Unlock()
	if o == nil || o.sink == nil {
		return nil
	}
	if err := c.flushAgents(ctx, rec); err != nil {
		return err
	}
	return o.sink.flush(ctx)
}

// FlushOutput returns when everything that the workers of this runtime's roles had printed has been written for the driver.
func (rt *Runtime) FlushOutput(ctx context.Context) error {
	rt.mu.Lock()
	all := slices.Collect(maps.Keys(rt.clusters))
	rt.mu.Unlock()
	errs := make([]error, len(all))
	var group sync.WaitGroup
	for i, c := range all {
		group.Go(bus.Guard(func() { errs[i] = c.flushShown(ctx) }))
	}
	group.Wait()
	return errors.Join(errs...)
}

// flushAgents returns when the output of the workers has left their agents.
func (c *Cluster) flushAgents(ctx context.Context, rec registry.RoleRecord) error {
	order, _ := launchTargets(rec, rec.PlacedRanks())
	errs := make([]error, len(order))
	var group sync.WaitGroup
	for i, at := range order {
		group.Go(bus.Guard(func() { errs[i] = c.flushAgent(ctx, at.node) }))
	}
	group.Wait()
	return errors.Join(errs...)
}

// flushAgent returns when an agent has sent the output of its workers. An absent agent is not waited for.
func (c *Cluster) flushAgent(ctx context.Context, node string) error {
	probe, cancel := context.WithTimeout(ctx, agentProbe)
	err := c.rt.agents().FlushOutput(probe, node, c.to)
	cancel()
	if err == nil || ctx.Err() != nil || c.nodeLost(ctx, node) {
		return err
	}
	probe, cancel = context.WithTimeout(ctx, agentProbe)
	_, err = c.rt.agents().WorkersOf(probe, node, c.to)
	cancel()
	if err != nil {
		return err
	}
	return c.rt.agents().FlushOutput(ctx, node, c.to)
}

// endOutput writes the last output of the workers, and stops. Agents have sent it when the workers were stopped; raw
// output may be more than the driver has read so far.
func (c *Cluster) endOutput(ctx context.Context) {
	c.mu.Lock()
	o, rec := c.output, c.rec
	c.output = nil
	c.mu.Unlock()
	if o == nil {
		return
	}
	limit := lastOutput
	if o.mode == nodes.OutputRaw {
		limit = lastRawOutput
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	if o.mode == nodes.OutputRaw {
		_ = c.flushAgents(ctx, rec) // the log stream has it
	}
	if o.sink == nil {
		return
	}
	_ = o.sink.flush(ctx)
	o.stop()
	if o.ownSink {
		o.sink.stop()
	}
}

// emit publishes an event of a role of processes.
func (c *Cluster) emit(kind string, rank *int, node, text string) {
	rec := c.Record()
	if !rec.Process || c.origin == opened || c.origin == attached {
		return
	}
	e := nodes.Event{Kind: kind, Namespace: rec.Namespace, Role: rec.Name, Rank: rank, Node: node, Text: text}
	if err := nodes.Emit(c.rt.bus, e); err != nil {
		c.rt.log.Debug("roles: publishing an event failed", "role", c.Name(), "error", err)
	}
}
