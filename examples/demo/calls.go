package main

import (
	"context"
	"time"

	"troupe"
	"troupe/dispatch/plan"
)

// callRecord is one call as the driver measured it.
type callRecord struct {
	Role     string       `json:"role"`
	Method   string       `json:"method"`
	Mode     string       `json:"mode,omitempty"`     // empty: ranks that the caller named
	Argument string       `json:"argument,omitempty"` // a role, if the argument is one
	Parts    []partRecord `json:"parts"`
	Messages uint64       `json:"messages"`       // sent by the driver's connection for the call
	Sent     uint64       `json:"sent_bytes"`     // in these messages
	Received int          `json:"received_bytes"` // in the answers
	Millis   float64      `json:"ms"`             // until the last answer
}

// partRecord is the part of a call that some ranks got.
type partRecord struct {
	Ranks []int `json:"ranks"`
	From  int   `json:"from,omitempty"` // the first row
	Rows  int   `json:"rows,omitempty"`
	Empty bool  `json:"empty,omitempty"` // called without data
}

// pendingCall is a call whose answers may be missing.
type pendingCall struct {
	future *troupe.Future
	record callRecord
	began  time.Time
	doneCh chan time.Time // holds one: the time of the last answer
}

// call calls a method in its declared mode and returns the result.
func call[R any](ctx context.Context, d *driver, c *troupe.Cluster, method string, args ...any) (R, error) {
	p, err := d.send(ctx, c, method, args...)
	if err != nil {
		return *new(R), err
	}
	return receive[R](ctx, d, p)
}

func receive[R any](ctx context.Context, d *driver, p *pendingCall) (R, error) {
	r, err := troupe.Await[R](ctx, p.future)
	if err == nil {
		d.out.called(p)
	}
	return r, err
}

func (d *driver) send(ctx context.Context, c *troupe.Cluster, method string, args ...any) (*pendingCall, error) {
	call := troupe.FutureCall{Method: method, Args: args, Timeout: callTimeout}
	for _, m := range c.Record().Methods {
		if m.Name == method {
			call.Mode = troupe.Mode(m.Mode)
		}
	}
	return d.start(ctx, c, call)
}

// start sends a call and records what the connection sent for it.
func (d *driver) start(ctx context.Context, c *troupe.Cluster, call troupe.FutureCall) (*pendingCall, error) {
	parts, err := partsOf(c, call)
	if err != nil {
		return nil, err
	}
	p := &pendingCall{record: callRecord{Role: c.Name(), Method: call.Method, Mode: string(call.Mode), Parts: parts}, doneCh: make(chan time.Time, 1)}
	for _, a := range call.Args {
		if role, ok := a.(troupe.Handle); ok {
			p.record.Argument = "role " + role.Record.Name
		}
	}
	before := d.bus.Conn().Stats()
	p.began = time.Now()
	if p.future, err = c.Go(ctx, call); err != nil {
		return nil, err
	}
	after := d.bus.Conn().Stats()
	p.record.Messages, p.record.Sent = after.OutMsgs-before.OutMsgs, after.OutBytes-before.OutBytes
	go func() {
		<-p.future.Done()
		p.doneCh <- time.Now()
	}()
	return p, nil
}

// partsOf plans the call as Cluster.Go does: the plan is a pure function.
func partsOf(c *troupe.Cluster, call troupe.FutureCall) ([]partRecord, error) {
	mesh := c.Record().Mesh
	pl, err := plan.PlanRanks(mesh, call.Ranks)
	if call.Mode != "" {
		pl, err = plan.NewPlan(call.Mode, mesh)
	}
	if err != nil {
		return nil, err
	}
	var rows []int // of each shard
	for _, a := range call.Args {
		if b, ok := a.(troupe.Batch); ok {
			rows = plan.Sizes(b.Len(), pl.Shards)
		}
	}
	parts := make([]partRecord, len(pl.Parts))
	for i, p := range pl.Parts {
		parts[i] = partRecord{Ranks: p.Ranks, Empty: p.Shard == plan.NoData}
		if p.Shard != plan.NoData && rows != nil {
			parts[i].Rows = rows[p.Shard]
			for _, n := range rows[:p.Shard] {
				parts[i].From += n
			}
		}
	}
	return parts, nil
}

// finish is the record of a call that has all its answers.
func (p *pendingCall) finish() callRecord {
	if p.record.Millis == 0 {
		p.record.Millis = millis((<-p.doneCh).Sub(p.began))
		for _, a := range p.future.Answers() {
			p.record.Received += len(a.Body)
		}
	}
	return p.record
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
