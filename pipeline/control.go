package pipeline

import (
	"context"

	"troupe/bus"
	"troupe/pipeline/flow"
	"troupe/pipeline/spec"
)

// stageNamed finds a stage. It is called in the loop.
func (p *Pipeline) stageNamed(name string) (*flow.StageState, error) {
	if s := p.flow.StageNamed(name); s != nil {
		return s, nil
	}
	var names []string
	for _, s := range p.spec.Stages {
		names = append(names, s.Name)
	}
	return nil, bus.Errorf(bus.CodeNotFound, "pipeline %s has no stage %q%s; it has %v", p.at.Name, name, spec.Suggest(name, names...), names)
}

// inStage calls do with a stage, in the loop.
func (p *Pipeline) inStage(ctx context.Context, name string, do func(s *flow.StageState) error) error {
	var inner error
	err := p.inLoop(ctx, func(p *Pipeline) {
		s, err := p.stageNamed(name)
		if err == nil {
			err = do(s)
		}
		inner = err
	})
	if err != nil {
		return err
	}
	return inner
}

// Pause starts no more tasks of a stage; running ones continue. It lasts until Resume, also over restarts.
func (p *Pipeline) Pause(ctx context.Context, stage string) error {
	return p.setPaused(ctx, stage, true)
}

// Resume starts tasks of the stage again.
func (p *Pipeline) Resume(ctx context.Context, stage string) error {
	return p.setPaused(ctx, stage, false)
}

func (p *Pipeline) setPaused(ctx context.Context, stage string, paused bool) error {
	return p.commitAndWait(ctx, func(token any) error {
		s, err := p.stageNamed(stage)
		if err != nil {
			return err
		}
		p.flow.SetPaused(s, paused, token)
		return nil
	})
}

type replyChan chan error

func (s replyChan) reply(err error) { s <- err }

// commitAndWait calls do in the loop with a token that is answered when the change is committed, and waits for that.
func (p *Pipeline) commitAndWait(ctx context.Context, do func(token any) error) error {
	doneCh := make(replyChan, 1)
	p.inbox.push(eventFunc(func(*Pipeline) {
		if err := do(doneCh); err != nil {
			doneCh <- err
		}
	}))
	select {
	case err := <-doneCh:
		return err
	case <-p.doneCh:
		return p.ended()
	case <-ctx.Done():
		return bus.Errorf(bus.CodeOf(ctx.Err()), "pipeline %s: %w", p.at.Name, ctx.Err())
	}
}

// SetVersion sets the version that new items get and stale items are compared with. It must not decrease.
func (p *Pipeline) SetVersion(ctx context.Context, v spec.Version) error {
	return p.commitAndWait(ctx, func(token any) error {
		if now := p.flow.Version; v < now {
			return bus.Errorf(bus.CodeInvalid, "pipeline %s is at version %v and versions only grow; %v was given", p.at.Name, now, v)
		}
		p.flow.SetVersion(v, token)
		return nil
	})
}

// Abort aborts an item: its handler is cancelled with ErrAborted as the cause, and what it returns is stored. A waiting
// item is dropped when its turn comes.
func (p *Pipeline) Abort(ctx context.Context, id string) error {
	found := false
	if err := p.inLoop(ctx, func(p *Pipeline) { found = p.flow.Abort(id) }); err != nil {
		return err
	}
	if !found {
		return bus.Errorf(bus.CodeNotFound, "pipeline %s: item %q is neither running nor waiting in memory", p.at.Name, id)
	}
	return nil
}

// Scale sets the number of workers of a stage: goroutines of a function, or ranks of a role of processes. Running tasks
// finish.
func (p *Pipeline) Scale(ctx context.Context, name string, workers int) error {
	if workers < 1 {
		return bus.Errorf(bus.CodeInvalid, "stage %s: %d workers; pause it instead", name, workers)
	}
	isFunc := false
	err := p.inStage(ctx, name, func(s *flow.StageState) error {
		if isFunc = s.Spec.Func != nil; isFunc {
			p.scaleFunc(s, workers)
		}
		return nil
	})
	if err != nil || isFunc {
		return err
	}
	return p.resize(ctx, name, workers)
}

// scaleFunc replaces the goroutines of a function; the old ones finish their tasks.
func (p *Pipeline) scaleFunc(s *flow.StageState, workers int) {
	for _, slots := range s.Workers.All {
		slots.Draining = true
		p.flow.Unassign(s, slots)
	}
	s.Spec.Workers = workers
	p.addFuncWorker(s)
}

// Batch is items taken from a sink.
type Batch struct {
	Items []spec.Item
	p     *Pipeline
	id    uint64
}

// Take takes up to n items from a sink, and waits for at least one. They belong to the caller until Ack or Nak, and go
// back to the sink when the pipeline is opened again.
func (p *Pipeline) Take(ctx context.Context, stream string, n int) (*Batch, error) {
	b := &Batch{p: p}
	var bad error
	err := p.awaitState(ctx, func(p *Pipeline) bool {
		if ctx.Err() != nil {
			return true // the caller has gone
		}
		if !p.flow.IsSink(stream) {
			bad = bus.Errorf(bus.CodeInvalid, "pipeline %s has no sink %q; its streams are %v", p.at.Name, stream, p.streamNames())
			return true
		}
		b.id, b.Items = p.flow.Take(stream, n)
		return b.id != 0
	})
	if err != nil {
		p.inbox.push(eventFunc(func(p *Pipeline) { // they may have been taken at the same moment
			if b.id != 0 {
				p.flow.Settle(b.id, false, nil)
			}
		}))
		return nil, err
	}
	if bad != nil {
		return nil, bad
	}
	return b, nil
}

// Ack completes the items.
func (b *Batch) Ack(ctx context.Context) error { return b.settle(ctx, true) }

// Nak returns the items to the sink.
func (b *Batch) Nak(ctx context.Context) error { return b.settle(ctx, false) }

func (b *Batch) settle(ctx context.Context, done bool) error {
	return b.p.commitAndWait(ctx, func(token any) error {
		if !b.p.flow.Settle(b.id, done, token) {
			return bus.Errorf(bus.CodeInvalid, "the batch was settled before")
		}
		return nil
	})
}
