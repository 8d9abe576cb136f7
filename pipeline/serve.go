package pipeline

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"time"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/bus/wire"
	"troupe/pipeline/flow"
)

// serve subscribes to requests of other processes, and tells an engine that ran the pipeline before that it is replaced: one
// without work would not notice, and answer requests too.
func (p *Pipeline) serve() (err error) {
	if p.sub, err = p.cfg.Bus.Subscribe(p.at.Ask("*"), p.handleRequest); err != nil {
		return bus.Errorf(bus.CodeUnavailable, "pipeline %s: %w", p.at.Name, err)
	}
	return errors.Join(p.cfg.Bus.Publish(p.at.Ask("replaced"), []byte("{}")), p.cfg.Bus.Flush(p.ctx))
}

// endIfReplaced ends an engine whose log another one writes.
func (p *Pipeline) endIfReplaced(ctx context.Context) error {
	rec, _, err := p.journal.readCheckpoint(ctx)
	if err == nil && rec != nil && rec.Engine != p.journal.engine {
		p.cancel(p.journal.fenced(rec))
	}
	return err
}

func (p *Pipeline) unsubscribe() {
	if p.sub != nil {
		_ = p.sub.Unsubscribe() // fails only on a closed connection
	}
}

// handleRequest runs in the subscription's goroutine and must not block.
func (p *Pipeline) handleRequest(m *bus.Msg) {
	op := lastToken(m.Subject)
	if op == "put" {
		p.handlePut(m)
		return
	}
	var req request
	if err := json.Unmarshal(m.Data, &req); err != nil {
		respond(p.cfg.Bus, m, nil, bus.Errorf(bus.CodeMalformed, "%s: %w", op, err))
		return
	}
	p.group.Go(bus.Guard(func() {
		ctx, cancel := context.WithTimeout(p.ctx, requestTimeout-500*time.Millisecond)
		defer cancel()
		result, err := p.execute(ctx, op, req)
		if err != nil && p.ctx.Err() != nil {
			err = bus.Errorf(bus.CodeClosed, "pipeline %s has ended: %w", p.at.Name, context.Cause(p.ctx))
		}
		respond(p.cfg.Bus, m, result, err)
	}))
}

func (p *Pipeline) handlePut(m *bus.Msg) {
	var req putRequest
	if err := wire.Unmarshal(m.Data, &req); err != nil {
		respond(p.cfg.Bus, m, nil, bus.Errorf(bus.CodeMalformed, "put: %w", err))
		return
	}
	if err := bus.CheckName("source", req.Source); err != nil {
		respond(p.cfg.Bus, m, nil, err)
		return
	}
	if full := p.storeFull.Load(); full != nil {
		respond(p.cfg.Bus, m, nil, full)
		return
	}
	if req.Body.Len > 0 {
		p.handleLargePut(req, m)
		return
	}
	e := &putEvent{Put: flow.Put{Source: req.Source, Seq: req.Seq}, name: req.Stream, end: func(err error) { respond(p.cfg.Bus, m, nil, err) }}
	for _, w := range req.Items {
		e.Items = append(e.Items, w.item())
	}
	p.inbox.push(e)
}

// execute runs an operation.
func (p *Pipeline) execute(ctx context.Context, op string, req request) (any, error) {
	switch op {
	case "status":
		return p.Status(ctx)
	case "pause":
		return nil, p.Pause(ctx, req.Stage)
	case "resume":
		return nil, p.Resume(ctx, req.Stage)
	case "scale":
		ctx, cancel := context.WithTimeout(ctx, requestTimeout/2)
		defer cancel()
		return p.scaleStep(ctx, req.Stage, req.Workers)
	case "abort":
		return nil, p.Abort(ctx, req.ID)
	case "version":
		if req.Version == nil {
			return nil, bus.Errorf(bus.CodeInvalid, "version: no version given")
		}
		return nil, p.SetVersion(ctx, *req.Version)
	case "drain":
		ctx, cancel := context.WithTimeout(ctx, requestTimeout/2)
		defer cancel()
		err := p.Drain(ctx)
		if ctx.Err() != nil {
			return false, nil // the client repeats the request
		}
		return err == nil, err
	case "replaced":
		return nil, p.endIfReplaced(ctx)
	case "shutdown":
		bus.Go(func() { _ = p.Close(context.Background()) }) // the owner of the pipeline sees Done
		return nil, nil
	case "take":
		return p.claimItems(ctx, req.ID, req.Workers, req.Holder)
	case "taken":
		return nil, p.settleClaims(ctx, req.Seqs, true)
	case "given-back":
		return nil, p.settleClaims(ctx, req.Seqs, false)
	case "keep":
		return nil, p.extendClaims(req.Seqs)
	case "dead-retry":
		return p.RetryDead(ctx, req.Seqs, req.All)
	case "dead-drop":
		return p.DropDead(ctx, req.Seqs, req.All)
	}
	return nil, bus.Errorf(bus.CodeNotFound, "a pipeline has no operation %q", op)
}

// restoreProducersAndGroups reads what is not in the checkpoint: the last put of each producer, and the closed groups.
func (p *Pipeline) restoreProducersAndGroups(ctx context.Context) error {
	err := p.journal.each(ctx, p.at.Source("*"), func(m stream.Message) error {
		seq, err := strconv.ParseUint(string(m.Data), 10, 64)
		p.flow.RestoreSource(lastToken(m.Subject), seq)
		return err
	})
	if err != nil {
		return bus.Errorf(bus.CodeUnavailable, "pipeline %s: read its log: %w", p.at.Name, err)
	}
	for _, s := range p.flow.Stages {
		if s.Spec.Group == nil {
			continue
		}
		err := p.journal.each(ctx, p.at.Closed(s.Spec.Name, "*"), func(m stream.Message) error {
			var c closedGroupRecord
			if err := json.Unmarshal(m.Data, &c); err != nil {
				return err
			}
			s.RestoreClosedGroup(c.Group, c.Missing, time.UnixMilli(c.At))
			return nil
		})
		if err != nil {
			return bus.Errorf(bus.CodeUnavailable, "pipeline %s: read its log: %w", p.at.Name, err)
		}
	}
	return nil
}
