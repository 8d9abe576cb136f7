package main

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"troupe/bus"
	"troupe/pipeline"
	"troupe/pipeline/rollouts"
)

// openRollouts is rollouts that this process runs, stands by for, or uses.
type openRollouts struct {
	*rollouts.Client
	runtime uint64
	server  *rollouts.Server // nil: others run them
	held    map[uint64]any   // *rollouts.Taken, *rollouts.Batch and *rollouts.Held, by number; core.mu guards it
}

// rolloutsRequest is the fields of rollouts ops.
type rolloutsRequest struct {
	ID       uint64        `msgpack:"id"`
	Spec     rollouts.Spec `msgpack:"spec"`
	After    float64       `msgpack:"after"` // seconds, as the timeout of a turn
	Turn     float64       `msgpack:"turn_timeout"`
	Stale    float64       `msgpack:"stale"`
	Replicas int           `msgpack:"replicas"`

	Verb    string         `msgpack:"verb"`
	Held    uint64         `msgpack:"held"`
	Source  string         `msgpack:"source"`
	Number  uint64         `msgpack:"number"`
	Name    string         `msgpack:"name"` // of a group
	Group   uint64         `msgpack:"group"`
	Index   int            `msgpack:"index"`
	At      int            `msgpack:"at"` // turn
	Last    bool           `msgpack:"last"`
	Version float64        `msgpack:"version"`
	Fields  []rolloutField `msgpack:"fields"`
	Field   string         `msgpack:"field"`
	Count   int            `msgpack:"count"`
	Timeout *float64       `msgpack:"timeout"` // seconds; nil: none
}

// rolloutField is a named value with its encoded body.
type rolloutField struct {
	Name string `msgpack:"name"`
	Body []byte `msgpack:"body"`
}

// rolloutTurn is a finished turn as Python gets it.
type rolloutTurn struct {
	Attempt int            `msgpack:"attempt"`
	Version float64        `msgpack:"version"`
	Fields  []rolloutField `msgpack:"fields"`
}

// rolloutSample is a sample as Python gets it.
type rolloutSample struct {
	Held    uint64         `msgpack:"held"`
	Group   uint64         `msgpack:"group"`
	Index   int            `msgpack:"index"`
	Attempt int            `msgpack:"attempt"`
	Of      int            `msgpack:"of"`
	Limit   int            `msgpack:"limit"`
	Name    string         `msgpack:"name"`
	Version float64        `msgpack:"version"`
	Prompt  []rolloutField `msgpack:"prompt"`
	Turns   []rolloutTurn  `msgpack:"turns"`
	Fields  []rolloutField `msgpack:"fields"`
}

// rolloutGroup is a complete group as Python gets it.
type rolloutGroup struct {
	ID      uint64          `msgpack:"id"`
	Version float64         `msgpack:"version"`
	Prompt  []rolloutField  `msgpack:"prompt"`
	Samples []rolloutSample `msgpack:"samples"`
}

// rolloutsGot is what a verb got and holds; number 0: nothing was ready in time.
type rolloutsGot struct {
	Held    uint64          `msgpack:"held"`
	Samples []rolloutSample `msgpack:"samples"`
	Groups  []rolloutGroup  `msgpack:"groups"`
}

// rolloutsOpen runs rollouts in this process, or stands by.
func (c *core) rolloutsOpen(ctx context.Context, r *request) (any, error) {
	rt, err := c.runtime(r.Runtime)
	if err != nil {
		return nil, err
	}
	q := &r.Rollouts
	q.Spec.After, q.Spec.Timeout, q.Spec.Bound = seconds(q.After), seconds(q.Turn), pipeline.VersionOf(q.Stale)
	server, err := rollouts.Serve(ctx, rollouts.Config{Bus: rt.Bus(), Namespace: rt.Namespace(), Replicas: q.Replicas, By: r.Name, Logger: c.log}, q.Name, q.Spec)
	if err != nil {
		return nil, err
	}
	id, err := c.addRollouts(r, server)
	if err != nil {
		server.Close()
	}
	return id, err
}

// rolloutsAttach uses rollouts that another process runs, now or later.
func (c *core) rolloutsAttach(_ context.Context, r *request) (any, error) {
	return c.addRollouts(r, nil)
}

func (c *core) addRollouts(r *request, server *rollouts.Server) (any, error) {
	rt, err := c.runtime(r.Runtime)
	if err != nil {
		return nil, err
	}
	client, err := rollouts.Connect(rt.Bus(), rt.Namespace(), r.Rollouts.Name)
	if err != nil {
		return nil, err
	}
	id := c.number()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rollouts[id] = &openRollouts{client, r.Runtime, server, map[uint64]any{}}
	return id, nil
}

// rolloutsRemove removes the stored data of rollouts that do not run.
func (c *core) rolloutsRemove(ctx context.Context, r *request) (any, error) {
	rt, err := c.runtime(r.Runtime)
	if err != nil {
		return nil, err
	}
	client, err := rollouts.Connect(rt.Bus(), rt.Namespace(), r.Rollouts.Name)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	return nil, client.Remove(ctx)
}

// rolloutsClose ends what this process runs and gives back what it holds.
func (c *core) rolloutsClose(ctx context.Context, r *request) (any, error) {
	c.mu.Lock()
	o := c.rollouts[r.Rollouts.ID]
	delete(c.rollouts, r.Rollouts.ID)
	c.mu.Unlock()
	if o != nil {
		o.Close()
		if o.server != nil {
			o.server.Close()
		}
	}
	return nil, nil
}

// closeRollouts ends the rollouts of a runtime that is being closed.
func (c *core) closeRollouts(ctx context.Context, runtime uint64) {
	c.mu.Lock()
	var ids []uint64
	for id, o := range c.rollouts {
		if o.runtime == runtime {
			ids = append(ids, id)
		}
	}
	c.mu.Unlock()
	for _, id := range ids {
		_, _ = c.rolloutsClose(ctx, &request{Rollouts: rolloutsRequest{ID: id}}) // never fails
	}
}

// hold keeps what was got under a number.
func (c *core) hold(o *openRollouts, what any) uint64 {
	id := c.number()
	c.mu.Lock()
	defer c.mu.Unlock()
	o.held[id] = what
	return id
}

// find is what is held under a number; with end it is held no longer.
func (c *core) find(o *openRollouts, id uint64, end bool) any {
	c.mu.Lock()
	defer c.mu.Unlock()
	what := o.held[id]
	if end {
		delete(o.held, id)
	}
	return what
}

// rolloutsVerb runs a verb of a client.
func (c *core) rolloutsVerb(ctx context.Context, r *request) (any, error) {
	q := &r.Rollouts
	c.mu.Lock()
	o := c.rollouts[q.ID]
	c.mu.Unlock()
	if o == nil {
		return nil, bus.Errorf(bus.CodeClosed, "these rollouts are closed")
	}
	ctx, cancel := within(ctx, q.Timeout)
	defer cancel()
	switch q.Verb {
	case "take", "scoring", "batch":
		got, err := c.rolloutsGet(ctx, o, q)
		if errors.Is(err, bus.ErrTimedOut) && errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return rolloutsGot{}, nil
		}
		return got, err
	case "put":
		return nil, o.Put(ctx, q.Source, q.Number, fieldsOf(q.Fields))
	case "set":
		return kept(o.Set(ctx, q.Group, q.Index, q.Name, fieldsOf(q.Fields)))
	case "finish":
		t, _ := c.find(o, q.Held, false).(*rollouts.Taken)
		if t == nil {
			return nil, bus.Errorf(bus.CodeInvalid, "this sample was released")
		}
		return kept(t.Finish(ctx, q.At, pipeline.VersionOf(q.Version), q.Last, fieldsOf(q.Fields)))
	case "done":
		b, _ := c.find(o, q.Held, false).(*rollouts.Batch)
		if b == nil {
			return nil, bus.Errorf(bus.CodeInvalid, "this batch was released")
		}
		err := b.Done(ctx)
		if err == nil {
			c.find(o, q.Held, true)
		}
		return nil, err
	case "release":
		return nil, release(ctx, c.find(o, q.Held, true))
	case "version":
		return nil, o.SetVersion(ctx, pipeline.VersionOf(q.Version))
	case "redispatch":
		return o.Redispatch(ctx, q.Group)
	case "stats":
		st, err := o.Status(ctx)
		if err != nil {
			return nil, err
		}
		text, err := json.Marshal(st)
		return string(text), err
	}
	return nil, bus.Errorf(bus.CodeInvalid, "rollouts have no verb %q", q.Verb)
}

// kept says whether a write was stored; false: somebody else makes that part by now.
func kept(err error) (any, error) {
	if errors.Is(err, bus.ErrFenced) {
		return false, nil
	}
	return err == nil, err
}

func release(ctx context.Context, what any) error {
	if h, ok := what.(interface{ Release(context.Context) error }); ok {
		return h.Release(ctx)
	}
	return nil // it was released before
}

func fieldsOf(fields []rolloutField) []rollouts.Field {
	out := make([]rollouts.Field, len(fields))
	for i, f := range fields {
		out[i] = rollouts.Field{Name: f.Name, Data: f.Body}
	}
	return out
}

// rolloutsGet gets samples or groups and reads their bodies. If a body cannot be read, what was got is given back.
func (c *core) rolloutsGet(ctx context.Context, o *openRollouts, q *rolloutsRequest) (got rolloutsGot, err error) {
	var held any
	var read bodyReads
	switch q.Verb {
	case "take":
		t, err := o.Take(ctx)
		if err != nil {
			return got, err
		}
		held = t
		got.Samples = read.samples([]rollouts.Sample{t.Sample}, true)
	case "scoring":
		all, h, err := o.Scoring(ctx, q.Field, q.Count)
		if err != nil {
			return got, err
		}
		held = h
		got.Samples = read.samples(all, true)
	case "batch":
		b, err := o.Batch(ctx, q.Count)
		if err != nil {
			return got, err
		}
		held = b
		for _, g := range b.Groups {
			got.Groups = append(got.Groups, rolloutGroup{ID: g.ID, Version: g.Version.Float(), Samples: read.samples(g.Samples, false)})
		}
		for i := range b.Groups {
			read.add(&b.Groups[i].Prompt, &got.Groups[i].Prompt)
		}
	}
	reading, cancel := context.WithTimeout(context.WithoutCancel(ctx), readTimeout)
	defer cancel()
	if err := read.run(reading, o.Client); err != nil || errors.Is(ctx.Err(), context.Canceled) {
		return rolloutsGot{}, errors.Join(err, ctx.Err(), release(context.WithoutCancel(ctx), held))
	}
	got.Held = c.hold(o, held)
	return got, nil
}

// readTimeout bounds the reads of what was got: longer than a restart of the server.
const readTimeout = 2 * time.Minute

// bodyReads collects bodies to read, and where their parts go.
type bodyReads struct {
	bodies []*rollouts.Body
	to     []*[]rolloutField
}

func (b *bodyReads) add(body *rollouts.Body, to *[]rolloutField) {
	b.bodies, b.to = append(b.bodies, body), append(b.to, to)
}

func (b *bodyReads) samples(all []rollouts.Sample, prompt bool) []rolloutSample {
	out := make([]rolloutSample, len(all))
	for i := range all {
		m, to := &all[i], &out[i]
		*to = rolloutSample{
			Group: m.Lineage.Group, Index: m.Lineage.Index, Attempt: m.Lineage.Attempt, Of: m.Of, Limit: m.Limit, Name: m.Name,
			Version: m.Version.Float(), Turns: make([]rolloutTurn, len(m.Turns)),
		}
		if prompt {
			b.add(&m.Prompt, &to.Prompt)
		}
		for k, f := range m.Turns {
			to.Turns[k] = rolloutTurn{Attempt: f.Attempt, Version: f.Version.Float()}
			b.add(f.Body, &to.Turns[k].Fields)
		}
		read := map[string]bool{}
		for _, body := range m.Fields {
			if first := body.Parts[0].Name; !read[first] { // fields that were set together are one body
				read[first] = true
				b.add(body, &to.Fields)
			}
		}
	}
	return out
}

func (b *bodyReads) run(ctx context.Context, c *rollouts.Client) error {
	data, err := c.Read(ctx, b.bodies)
	if err != nil {
		return err
	}
	for i, body := range b.bodies {
		at := 0
		for _, p := range body.Parts {
			*b.to[i] = append(*b.to[i], rolloutField{p.Name, data[i][at : at+p.Size]})
			at += p.Size
		}
	}
	return nil
}
