package main

import (
	"context"
	"errors"
	"time"

	"troupe/bus"
	"troupe/pipeline"
	"troupe/pipeline/rollouts"
	"troupe/roles"
)

// openRollouts is rollouts that this process runs, stands by for, or uses.
type openRollouts struct {
	*rollouts.Client
	runtime uint64
	server  *rollouts.Server // nil: others run them
	loans   map[uint64]any   // *rollouts.Taken, *rollouts.Batch and *rollouts.Held, by number; core.mu guards it
}

// ofRollouts is of requests about open rollouts.
type ofRollouts struct {
	ID uint64 `msgpack:"id"`
}

func (q ofRollouts) find(c *core) (*openRollouts, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if o := c.rollouts[q.ID]; o != nil {
		return o, nil
	}
	return nil, bus.Errorf(bus.CodeClosed, "these rollouts are closed")
}

type (
	rolloutsRequest     struct{ ofRollouts }
	rolloutsOpenRequest struct {
		nameRequest
		By       string        `msgpack:"by"`
		Spec     rollouts.Spec `msgpack:"spec"`
		After    float64       `msgpack:"after"` // seconds, as the timeout of a turn
		Turn     float64       `msgpack:"turn_timeout"`
		Stale    float64       `msgpack:"stale"`
		Replicas int           `msgpack:"replicas"`
	}
	rolloutsPutRequest struct {
		ofRollouts
		within
		Source string         `msgpack:"source"`
		Number uint64         `msgpack:"number"`
		Fields []rolloutField `msgpack:"fields"`
	}
	rolloutsTakeRequest struct {
		ofRollouts
		within
	}
	rolloutsScoringRequest struct {
		rolloutsTakeRequest
		Field string `msgpack:"field"`
		Count int    `msgpack:"count"`
	}
	rolloutsBatchRequest struct {
		rolloutsTakeRequest
		Count int `msgpack:"count"`
	}
	rolloutsSetRequest struct {
		ofRollouts
		Group  uint64         `msgpack:"group"`
		Index  int            `msgpack:"index"`
		Name   string         `msgpack:"name"` // of the group
		Fields []rolloutField `msgpack:"fields"`
	}
	rolloutsLoanRequest struct {
		ofRollouts
		Loan uint64 `msgpack:"loan"`
	}
	rolloutsFinishRequest struct {
		rolloutsLoanRequest
		Turn    int            `msgpack:"turn"`
		Last    bool           `msgpack:"last"`
		Version float64        `msgpack:"version"`
		Fields  []rolloutField `msgpack:"fields"`
	}
	rolloutsVersionRequest struct {
		ofRollouts
		Version float64 `msgpack:"version"`
	}
	rolloutsGroupRequest struct {
		ofRollouts
		Group uint64 `msgpack:"group"` // 0: all
	}
)

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

// rolloutsGot is what a request got on loan; number 0: nothing was ready in time.
type rolloutsGot struct {
	Loan    uint64          `msgpack:"loan"`
	Samples []rolloutSample `msgpack:"samples"`
	Groups  []rolloutGroup  `msgpack:"groups"`
}

// rolloutsOpen runs rollouts in this process, or stands by.
func (c *core) rolloutsOpen(ctx context.Context, rt *roles.Runtime, q rolloutsOpenRequest) (uint64, error) {
	q.Spec.After, q.Spec.Timeout, q.Spec.Bound = seconds(q.After), seconds(q.Turn), pipeline.VersionOf(q.Stale)
	server, err := rollouts.Serve(ctx, rollouts.Config{Bus: rt.Bus(), Namespace: rt.Namespace(), Replicas: q.Replicas, By: q.By, Logger: c.log}, q.Name, q.Spec)
	if err != nil {
		return 0, err
	}
	id, err := c.addRollouts(rt, q.nameRequest, server)
	if err != nil {
		server.Close()
	}
	return id, err
}

// rolloutsAttach uses rollouts that another process runs, now or later.
func (c *core) rolloutsAttach(_ context.Context, rt *roles.Runtime, q nameRequest) (uint64, error) {
	return c.addRollouts(rt, q, nil)
}

func (c *core) addRollouts(rt *roles.Runtime, q nameRequest, server *rollouts.Server) (uint64, error) {
	client, err := rollouts.Connect(rt.Bus(), rt.Namespace(), q.Name)
	if err != nil {
		return 0, err
	}
	id := c.number()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rollouts[id] = &openRollouts{client, q.Runtime, server, map[uint64]any{}}
	return id, nil
}

// rolloutsRemove removes the stored data of rollouts that do not run.
func (c *core) rolloutsRemove(ctx context.Context, rt *roles.Runtime, q nameRequest) error {
	client, err := rollouts.Connect(rt.Bus(), rt.Namespace(), q.Name)
	if err != nil {
		return err
	}
	defer client.Close()
	return client.Remove(ctx)
}

// rolloutsClose ends what this process runs and gives back what it has on loan.
func (c *core) rolloutsClose(_ context.Context, _ *core, q closeRequest) error {
	c.mu.Lock()
	o := c.rollouts[q.ID]
	delete(c.rollouts, q.ID)
	c.mu.Unlock()
	if o != nil {
		o.Close()
		if o.server != nil {
			o.server.Close()
		}
	}
	return nil
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
		_ = c.rolloutsClose(ctx, c, closeRequest{ID: id}) // never fails
	}
}

// lendRollouts keeps what was got under a number.
func (c *core) lendRollouts(o *openRollouts, what any) uint64 {
	id := c.number()
	c.mu.Lock()
	defer c.mu.Unlock()
	o.loans[id] = what
	return id
}

// rolloutsLoan is what was got under a number; with end the number is of nothing from now on.
func (c *core) rolloutsLoan(o *openRollouts, id uint64, end bool) any {
	c.mu.Lock()
	defer c.mu.Unlock()
	what := o.loans[id]
	if end {
		delete(o.loans, id)
	}
	return what
}

func (c *core) rolloutsPut(ctx context.Context, o *openRollouts, q rolloutsPutRequest) error {
	return o.Put(ctx, q.Source, q.Number, fieldsOf(q.Fields))
}

func (c *core) rolloutsSet(ctx context.Context, o *openRollouts, q rolloutsSetRequest) (bool, error) {
	return stored(o.Set(ctx, q.Group, q.Index, q.Name, fieldsOf(q.Fields)))
}

func (c *core) rolloutsFinish(ctx context.Context, o *openRollouts, q rolloutsFinishRequest) (bool, error) {
	t, _ := c.rolloutsLoan(o, q.Loan, false).(*rollouts.Taken)
	if t == nil {
		return false, bus.Errorf(bus.CodeInvalid, "this sample was released")
	}
	return stored(t.Finish(ctx, q.Turn, pipeline.VersionOf(q.Version), q.Last, fieldsOf(q.Fields)))
}

func (c *core) rolloutsDone(ctx context.Context, o *openRollouts, q rolloutsLoanRequest) error {
	b, _ := c.rolloutsLoan(o, q.Loan, false).(*rollouts.Batch)
	if b == nil {
		return bus.Errorf(bus.CodeInvalid, "this batch was released")
	}
	err := b.Done(ctx)
	if err == nil {
		c.rolloutsLoan(o, q.Loan, true)
	}
	return err
}

func (c *core) rolloutsRelease(ctx context.Context, o *openRollouts, q rolloutsLoanRequest) error {
	return release(ctx, c.rolloutsLoan(o, q.Loan, true))
}

func (c *core) rolloutsVersion(ctx context.Context, o *openRollouts, q rolloutsVersionRequest) error {
	return o.SetVersion(ctx, pipeline.VersionOf(q.Version))
}

func (c *core) rolloutsRedispatch(ctx context.Context, o *openRollouts, q rolloutsGroupRequest) (int, error) {
	return o.Redispatch(ctx, q.Group)
}

func (c *core) rolloutsStats(ctx context.Context, o *openRollouts, _ rolloutsRequest) (string, error) {
	status, err := o.Status(ctx)
	if err != nil {
		return "", err
	}
	return jsonText(status)
}

// stored says whether a write was stored; false: another process makes that part by now.
func stored(err error) (bool, error) {
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

func (c *core) rolloutsTake(ctx context.Context, o *openRollouts, _ rolloutsTakeRequest) (rolloutsGot, error) {
	t, err := o.Take(ctx)
	if err != nil {
		return nothingInTime(ctx, err)
	}
	var read bodyReads
	return c.got(ctx, o, t, &read, rolloutsGot{Samples: read.samples([]rollouts.Sample{t.Sample}, true)})
}

func (c *core) rolloutsScoring(ctx context.Context, o *openRollouts, q rolloutsScoringRequest) (rolloutsGot, error) {
	all, loan, err := o.Scoring(ctx, q.Field, q.Count)
	if err != nil {
		return nothingInTime(ctx, err)
	}
	var read bodyReads
	return c.got(ctx, o, loan, &read, rolloutsGot{Samples: read.samples(all, true)})
}

func (c *core) rolloutsBatch(ctx context.Context, o *openRollouts, q rolloutsBatchRequest) (got rolloutsGot, err error) {
	b, err := o.Batch(ctx, q.Count)
	if err != nil {
		return nothingInTime(ctx, err)
	}
	var read bodyReads
	for _, g := range b.Groups {
		got.Groups = append(got.Groups, rolloutGroup{ID: g.ID, Version: g.Version.Float(), Samples: read.samples(g.Samples, false)})
	}
	for i := range b.Groups {
		read.add(&b.Groups[i].Prompt, &got.Groups[i].Prompt)
	}
	return c.got(ctx, o, b, &read, got)
}

// nothingInTime is the answer after an error: no loan if nothing came in time.
func nothingInTime(ctx context.Context, err error) (rolloutsGot, error) {
	if errors.Is(err, bus.ErrTimedOut) && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		err = nil
	}
	return rolloutsGot{}, err
}

// got reads the bodies of what was got. If one cannot be read, it is given back.
func (c *core) got(ctx context.Context, o *openRollouts, loan any, read *bodyReads, got rolloutsGot) (rolloutsGot, error) {
	reading, cancel := context.WithTimeout(context.WithoutCancel(ctx), readTimeout)
	defer cancel()
	if err := read.run(reading, o.Client); err != nil || errors.Is(ctx.Err(), context.Canceled) {
		return rolloutsGot{}, errors.Join(err, ctx.Err(), release(context.WithoutCancel(ctx), loan))
	}
	got.Loan = c.lendRollouts(o, loan)
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
