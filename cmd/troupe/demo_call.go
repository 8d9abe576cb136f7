package main

import (
	"context"
	"time"

	"troupe/dispatch"
	"troupe/dispatch/plan"
	"troupe/roles"
)

// demoCall is one call as the driver saw it.
type demoCall struct {
	Role     string     `json:"role"`
	Method   string     `json:"method"`
	Mode     string     `json:"mode,omitempty"`     // empty: some ranks, named by the caller
	Argument string     `json:"argument,omitempty"` // a role that was sent
	Parts    []demoPart `json:"parts"`
	Messages uint64     `json:"messages"`       // that the driver's connection sent for it
	Sent     uint64     `json:"sent_bytes"`     // in them
	Received int        `json:"received_bytes"` // in the answers
	Millis   float64    `json:"ms"`             // until the last answer
}

// demoPart is what some ranks were sent: rows, or none.
type demoPart struct {
	Ranks []int `json:"ranks"`
	From  int   `json:"from,omitempty"` // the first row
	Rows  int   `json:"rows,omitempty"`
	Empty bool  `json:"empty,omitempty"` // called without data
}

// inFlight is a call of the driver's and what is known of it.
type inFlight struct {
	future *dispatch.Future
	note   demoCall
	began  time.Time
	doneCh chan time.Time // holds one: when the last answer came
}

// ask calls a method in its own mode and gives the result; tell only waits until it is done everywhere.
func ask[R any](ctx context.Context, d *demo, c *roles.Cluster, method string, args ...any) (R, error) {
	f, err := d.send(ctx, c, method, args...)
	if err != nil {
		return *new(R), err
	}
	return receive[R](ctx, d, f)
}

func (d *demo) tell(ctx context.Context, c *roles.Cluster, method string, args ...any) error {
	f, err := d.send(ctx, c, method, args...)
	if err == nil {
		err = f.future.Wait(ctx)
	}
	if err == nil {
		d.show.called(f)
	}
	return err
}

func (d *demo) send(ctx context.Context, c *roles.Cluster, method string, args ...any) (*inFlight, error) {
	call := dispatch.Call{Method: method, Args: args, Timeout: demoTimeout}
	for _, m := range c.Record().Methods {
		if m.Name == method {
			call.Mode = dispatch.Mode(m.Mode)
		}
	}
	return d.start(ctx, c, call)
}

// start sends a call and notes what the connection sent for it.
func (d *demo) start(ctx context.Context, c *roles.Cluster, call dispatch.Call) (*inFlight, error) {
	parts, err := planned(c, call)
	if err != nil {
		return nil, err
	}
	f := &inFlight{note: demoCall{Role: c.Name(), Method: call.Method, Mode: string(call.Mode), Parts: parts}, doneCh: make(chan time.Time, 1)}
	for _, a := range call.Args {
		if role, ok := a.(roles.Handle); ok {
			f.note.Argument = "role " + role.Record.Name
		}
	}
	before := d.head.Conn().Stats()
	f.began = time.Now()
	if f.future, err = c.Go(ctx, call); err != nil {
		return nil, err
	}
	after := d.head.Conn().Stats()
	f.note.Messages, f.note.Sent = after.OutMsgs-before.OutMsgs, after.OutBytes-before.OutBytes
	go func() {
		<-f.future.Done()
		f.doneCh <- time.Now()
	}()
	return f, nil
}

// planned is what the call's plan sends to whom. The plan is a pure function, and the call makes the same one.
func planned(c *roles.Cluster, call dispatch.Call) ([]demoPart, error) {
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
		if b, ok := a.(dispatch.Batch); ok {
			rows = plan.Sizes(b.Len(), pl.Shards)
		}
	}
	parts := make([]demoPart, len(pl.Parts))
	for i, p := range pl.Parts {
		parts[i] = demoPart{Ranks: p.Ranks, Empty: p.Shard == plan.NoData}
		if p.Shard != plan.NoData && rows != nil {
			parts[i].Rows = rows[p.Shard]
			for _, n := range rows[:p.Shard] {
				parts[i].From += n
			}
		}
	}
	return parts, nil
}

// receive waits for a call and gives its result.
func receive[R any](ctx context.Context, d *demo, f *inFlight) (R, error) {
	r, err := dispatch.Await[R](ctx, f.future)
	if err == nil {
		d.show.called(f)
	}
	return r, err
}

// over fills in what is known once the call is over.
func (f *inFlight) over() demoCall {
	if f.note.Millis == 0 {
		f.note.Millis = millis((<-f.doneCh).Sub(f.began))
		for _, a := range f.future.Answers() {
			f.note.Received += len(a.Body)
		}
	}
	return f.note
}
