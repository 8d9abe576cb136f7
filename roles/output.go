package roles

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"troupe/bus"
	"troupe/nodes"
)

const (
	foldTick    = time.Second
	lastOutput  = 2 * time.Second // timeout of the last lines at the end of the workers
	eventRole   = "role_ready"
	eventGone   = "role_gone"
	eventFailed = "worker_failed"

	eventRestart = "role_restarting"
)

// output writes the workers' output to the driver's writer.
type output struct {
	follower *nodes.Follower
	stopCh   chan struct{}
	doneCh   chan struct{}

	mu   sync.Mutex // guards what follows
	to   io.Writer
	fold nodes.LineMerger
}

// showOutput starts to follow the workers' output, if Process.Output is set.
func (c *Cluster) showOutput() error {
	if c.spec.Process.Output == nil {
		return nil
	}
	o := &output{to: c.spec.Process.Output, stopCh: make(chan struct{}), doneCh: make(chan struct{})}
	follower, err := c.rt.agents().Follow(c.to, func(l nodes.Line) {
		o.print(func(f *nodes.LineMerger, now time.Time) []string { return f.Add(l, now) })
	})
	if err != nil {
		return err
	}
	o.follower = follower
	bus.Go(o.tick)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.output = o
	return nil
}

func (o *output) print(next func(*nodes.LineMerger, time.Time) []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, line := range next(&o.fold, time.Now()) {
		_, _ = fmt.Fprintln(o.to, line) // the driver's writer handles its own errors
	}
}

// tick writes the counts of repeated lines.
func (o *output) tick() {
	defer close(o.doneCh)
	t := time.NewTicker(foldTick)
	defer t.Stop()
	for {
		select {
		case <-o.stopCh:
			return
		case <-t.C:
			o.print((*nodes.LineMerger).Tick)
		}
	}
}

// stop ends it. A blocked writer is abandoned after a timeout.
func (o *output) stop() {
	close(o.stopCh)
	endedCh := make(chan struct{})
	bus.Go(func() {
		defer close(endedCh)
		o.follower.Stop()
		<-o.doneCh
		o.print(func(f *nodes.LineMerger, _ time.Time) []string { return f.Flush() })
	})
	select {
	case <-endedCh:
	case <-time.After(lastOutput):
	}
}

// FlushOutput returns when everything that the workers had printed has been written to Process.Output.
func (c *Cluster) FlushOutput(ctx context.Context) error {
	c.mu.Lock()
	o, rec := c.output, c.rec
	c.mu.Unlock()
	if o == nil {
		return bus.Errorf(bus.CodeInvalid, "role %s: Process.Output was not set when the role was created", c.Name())
	}
	order, _ := rec.launchTargets(rec.placedRanks())
	names := make([]string, 0, len(order))
	for _, at := range order {
		names = append(names, at.node)
	}
	if err := o.follower.Flush(ctx, names...); err != nil {
		return err
	}
	return o.flush(ctx)
}

// flush writes the counts of repeated lines. The writer may block.
func (o *output) flush(ctx context.Context) error {
	writtenCh := make(chan struct{})
	bus.Go(func() {
		defer close(writtenCh)
		o.print(func(f *nodes.LineMerger, _ time.Time) []string { return f.Flush() })
	})
	select {
	case <-writtenCh:
		return nil
	case <-ctx.Done():
		return bus.Errorf(bus.CodeOf(ctx.Err()), "flush the output of the workers: %w", ctx.Err())
	}
}

// endOutput writes the last output of the workers, and stops.
func (c *Cluster) endOutput(ctx context.Context) {
	c.mu.Lock()
	o := c.output
	c.mu.Unlock()
	if o == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastOutput)
	defer cancel()
	_ = c.FlushOutput(ctx) // the log stream has it
	c.mu.Lock()
	c.output = nil
	c.mu.Unlock()
	o.stop()
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
