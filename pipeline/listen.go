package pipeline

import (
	"context"
	"encoding/json"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
	"troupe/bus/wire"
)

// listen takes requests from other processes.
func (p *Pipeline) listen() (err error) {
	if p.sub, err = p.cfg.Bus.Conn().Subscribe(p.at.Ask("*"), bus.GuardMsg(p.receive)); err != nil {
		return bus.Errorf(bus.CodeUnavailable, "pipeline %s: %w", p.at.Name, err)
	}
	return p.cfg.Bus.Conn().Flush()
}

// receive runs in the subscription's goroutine and must not wait.
func (p *Pipeline) receive(m *nats.Msg) {
	verb := lastWord(m.Subject)
	switch verb {
	case "put":
		p.receivePut(m)
		return
	case "part":
		p.group.Go(bus.Guard(func() { p.servePart(m) }))
		return
	}
	var o Order
	if err := json.Unmarshal(m.Data, &o); err != nil {
		respond(m, nil, bus.Errorf(bus.CodeMalformed, "%s: %w", verb, err))
		return
	}
	p.group.Go(bus.Guard(func() {
		ctx, cancel := context.WithTimeout(p.ctx, verbLimit-500*time.Millisecond)
		defer cancel()
		result, err := p.obey(ctx, verb, o)
		respond(m, result, err)
	}))
}

func (p *Pipeline) receivePut(m *nats.Msg) {
	var req putRequest
	if err := wire.Unmarshal(m.Data, &req); err != nil {
		respond(m, nil, bus.Errorf(bus.CodeMalformed, "put: %w", err))
		return
	}
	if err := bus.CheckName("source", req.Source); err != nil {
		respond(m, nil, err)
		return
	}
	if full := p.full.Load(); full != nil {
		respond(m, nil, full)
		return
	}
	if req.Size > 0 {
		p.receiveLarge(req, m)
		return
	}
	e := &putEvent{put: put{source: req.Source, seq: req.Seq}, name: req.Stream, end: func(err error) { respond(m, nil, err) }}
	for _, w := range req.Items {
		e.items = append(e.items, w.item())
	}
	p.inbox.push(e)
}

// obey carries out a verb.
func (p *Pipeline) obey(ctx context.Context, verb string, o Order) (any, error) {
	switch verb {
	case "status":
		return p.Status(ctx)
	case "pause":
		return nil, p.Pause(ctx, o.Stage)
	case "resume":
		return nil, p.Resume(ctx, o.Stage)
	case "scale":
		return nil, p.Scale(ctx, o.Stage, o.Workers)
	case "abort":
		return nil, p.Abort(ctx, o.ID)
	case "version":
		if o.Version == nil {
			return nil, bus.Errorf(bus.CodeInvalid, "version: none given")
		}
		return nil, p.SetVersion(ctx, *o.Version)
	case "drain":
		ctx, cancel := context.WithTimeout(ctx, verbLimit/2)
		defer cancel()
		err := p.Drain(ctx)
		if ctx.Err() != nil {
			return false, nil // not yet; it is asked again
		}
		return err == nil, err
	case "shutdown":
		bus.Go(func() { _ = p.Close(context.Background()) }) // its owner sees Done
		return nil, nil
	case "take":
		return p.lend(ctx, o.ID, o.Workers, o.Holder)
	case "taken":
		return nil, p.settle(ctx, o.Seqs, true)
	case "given-back":
		return nil, p.settle(ctx, o.Seqs, false)
	case "keep":
		return nil, p.keep(o.Seqs)
	case "dead-retry":
		return p.RetryDead(ctx, o.Seqs, o.All)
	case "dead-drop":
		return p.DropDead(ctx, o.Seqs, o.All)
	}
	return nil, bus.Errorf(bus.CodeNotFound, "a pipeline has no verb %q", verb)
}

// recall reads back what is not in the record: who has put what, and which groups were handed over.
func (p *Pipeline) recall(ctx context.Context) error {
	err := p.journal.each(ctx, p.at.Source("*"), func(m jetstream.Msg, _ uint64) error {
		seq, err := strconv.ParseUint(string(m.Data()), 10, 64)
		p.flow.sources[lastWord(m.Subject())] = &source{accepted: seq, stored: seq, used: p.flow.now}
		return err
	})
	if err != nil {
		return bus.Errorf(bus.CodeUnavailable, "pipeline %s: read its log: %w", p.at.Name, err)
	}
	for _, s := range p.flow.stages {
		if s.groups == nil {
			continue
		}
		err := p.journal.each(ctx, p.at.Closed(s.spec.Name, "*"), func(m jetstream.Msg, _ uint64) error {
			var c closedRecord
			if err := json.Unmarshal(m.Data(), &c); err != nil {
				return err
			}
			delete(s.groups.closed, c.Group) // the newest counts, also where it has nothing to remember
			s.groups.remember(c.Group, c.Left, time.UnixMilli(c.At))
			return nil
		})
		if err != nil {
			return bus.Errorf(bus.CodeUnavailable, "pipeline %s: read its log: %w", p.at.Name, err)
		}
	}
	return nil
}
