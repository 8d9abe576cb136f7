package main

import (
	"context"
	"encoding/json"
	"errors"
	"slices"

	"troupe/bus"
	"troupe/pipeline"
	"troupe/pipeline/spec"
	"troupe/roles"
)

// pipe is a pipeline in this process or in another.
type pipe struct {
	runtime  uint64
	client   *pipeline.Client
	producer *pipeline.Producer
	own      *pipeline.Pipeline // nil: it runs in another process
	loans    map[uint64]loan    // by number; core.mu guards it
}

// loan completes or returns items of a sink that Python has taken.
type loan func(ctx context.Context, done bool) error

// pipeRequest is the fields of pipeline ops.
type pipeRequest struct {
	ID         uint64        `msgpack:"id"`
	Text       string        `msgpack:"text"`      // the declaration, as in a file
	Clusters   []uint64      `msgpack:"clusters"`  // clusters of the roles that its stages name
	FuncsToken uint64        `msgpack:"functions"` // token of the completions for its stage functions
	TakeOver   bool          `msgpack:"take_over"`
	Grace      float64       `msgpack:"grace"` // seconds
	Stream     string        `msgpack:"stream"`
	Items      []itemRequest `msgpack:"items"`
	Count      int           `msgpack:"count"`
	Timeout    *float64      `msgpack:"timeout"` // seconds; nil: none
	Loan       uint64        `msgpack:"loan"`
	Done       bool          `msgpack:"done"`

	Verb    string   `msgpack:"verb"`
	Stage   string   `msgpack:"stage"`
	Item    string   `msgpack:"item"`
	Workers int      `msgpack:"workers"`
	Cluster uint64   `msgpack:"cluster"`
	Ranks   []int    `msgpack:"ranks"`
	Version float64  `msgpack:"version"`
	Seqs    []uint64 `msgpack:"seqs"`
	All     bool     `msgpack:"all"`
}

// itemRequest is an item with its encoded body.
type itemRequest struct {
	ID       string   `msgpack:"id"`
	Key      string   `msgpack:"key"`
	Group    string   `msgpack:"group"`
	Of       int      `msgpack:"of"`
	Priority int      `msgpack:"priority"`
	Version  *float64 `msgpack:"version"`
	Stream   string   `msgpack:"stream"`
	Body     []byte   `msgpack:"body"`
}

func (r itemRequest) item() pipeline.Item {
	it := pipeline.Item{ID: r.ID, Key: r.Key, Group: r.Group, Of: r.Of, Priority: r.Priority, Body: r.Body}
	if r.Version != nil {
		it.Version, it.Stamped = pipeline.VersionOf(*r.Version), true
	}
	return it
}

func (c *core) pipe(id uint64) (*pipe, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.pipelines[id]; p != nil {
		return p, nil
	}
	return nil, bus.Errorf(bus.CodeClosed, "this pipeline is closed")
}

func (c *core) addPipe(rt *roles.Runtime, p *pipe, name string) (any, error) {
	client, err := pipeline.Connect(rt.Bus(), rt.Namespace(), name)
	if err != nil {
		return nil, err
	}
	p.client, p.producer, p.loans = client, client.Producer(), map[uint64]loan{}
	id := c.number()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pipelines[id] = p
	return id, nil
}

// pipelineOpen runs a pipeline in this process. Errors in the declaration have no line numbers, because it is not a
// file.
func (c *core) pipelineOpen(ctx context.Context, r *request) (any, error) {
	stageFuncs := c.newStageFuncs(r.Pipeline.FuncsToken)
	p, err := c.runPipeline(ctx, r, stageFuncs)
	if err != nil {
		stageFuncs.end()
		return nil, err
	}
	spawn(func() { <-p.Done(); stageFuncs.end() }, func(err error) { c.log.Error("libtroupe: follow a pipeline", "error", err) })
	if ctx.Err() != nil { // the request was cancelled
		return nil, errors.Join(ctx.Err(), p.Close(ctx))
	}
	rt, err := c.runtime(r.Runtime)
	if err != nil {
		return nil, errors.Join(err, p.Close(ctx))
	}
	return c.addPipe(rt, &pipe{runtime: r.Runtime, own: p}, p.Spec().Name)
}

func (c *core) runPipeline(ctx context.Context, r *request, stageFuncs *stageFuncs) (*pipeline.Pipeline, error) {
	rt, err := c.runtime(r.Runtime)
	if err != nil {
		return nil, err
	}
	spec, err := declared(r.Pipeline.Text, stageFuncs)
	if err != nil {
		return nil, err
	}
	cfg := pipeline.Config{Bus: rt.Bus(), Namespace: rt.Namespace(), By: r.Name, TakeOver: r.Pipeline.TakeOver, Grace: seconds(r.Pipeline.Grace), Logger: c.log}
	for _, id := range r.Pipeline.Clusters {
		cl, err := c.cluster(id)
		if err != nil {
			return nil, err
		}
		cfg.Clusters = append(cfg.Clusters, cl.Cluster)
	}
	return pipeline.Open(ctx, cfg, spec)
}

// declared parses a declaration. Stages whose role is a function run it through funcs.
func declared(text string, stageFuncs *stageFuncs) (pipeline.Spec, error) {
	file, err := spec.ParseFile([]byte(text), nil)
	if err != nil {
		return pipeline.Spec{}, bus.Errorf(bus.CodeInvalid, "%w", withoutLines(err))
	}
	for i := range file.Spec.Stages {
		s := &file.Spec.Stages[i]
		if slices.ContainsFunc(file.Roles, func(r spec.RoleSpec) bool { return r.Name == s.Role && r.Function != "" }) {
			s.Role, s.Method, s.AbortMethod, s.Style = "", "", "", ""
			s.Func = stageFuncs.function(*s)
		}
	}
	return file.Spec, nil
}

// pipelineCheck checks a declaration.
func (c *core) pipelineCheck(_ context.Context, r *request) (any, error) {
	_, err := declared(r.Pipeline.Text, c.newStageFuncs(0))
	return nil, err
}

func withoutLines(err error) error {
	var spec *spec.SpecError
	if !errors.As(err, &spec) {
		return err
	}
	for i := range spec.Problems {
		spec.Problems[i].Line = 0
	}
	return spec
}

// pipelineClient connects to a pipeline by name.
func (c *core) pipelineClient(r *request) (*roles.Runtime, *pipeline.Client, error) {
	rt, err := c.runtime(r.Runtime)
	if err != nil {
		return nil, nil, err
	}
	client, err := pipeline.Connect(rt.Bus(), rt.Namespace(), r.Name)
	return rt, client, err
}

func (c *core) pipelineAttach(ctx context.Context, r *request) (any, error) {
	rt, client, err := c.pipelineClient(r)
	if err != nil {
		return nil, err
	}
	if _, err := client.Status(ctx); err != nil {
		return nil, err
	}
	return c.addPipe(rt, &pipe{runtime: r.Runtime}, r.Name)
}

// pipelineRemove removes the stored data of a pipeline that does not run.
func (c *core) pipelineRemove(ctx context.Context, r *request) (any, error) {
	_, client, err := c.pipelineClient(r)
	if err != nil {
		return nil, err
	}
	return nil, client.Remove(ctx)
}

// within bounds ctx by a timeout, if there is one.
func within(ctx context.Context, timeout *float64) (context.Context, context.CancelFunc) {
	if timeout == nil {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, seconds(*timeout))
}

func (c *core) pipelinePut(ctx context.Context, r *request) (any, error) {
	p, err := c.pipe(r.Pipeline.ID)
	if err != nil {
		return nil, err
	}
	ctx, cancel := within(ctx, r.Pipeline.Timeout)
	defer cancel()
	items := make([]pipeline.Item, len(r.Pipeline.Items))
	for i, it := range r.Pipeline.Items {
		items[i] = it.item()
	}
	if p.own != nil {
		return nil, p.own.Put(ctx, r.Pipeline.Stream, items...)
	}
	return nil, p.producer.Put(ctx, r.Pipeline.Stream, items...)
}

// loanAnswer is a loan as Python gets it.
type loanAnswer struct {
	Loan  uint64        `msgpack:"loan"`
	Items []itemRequest `msgpack:"items"`
}

func loanItem(stream, id, key, group string, of, priority int, v pipeline.Version, body []byte) itemRequest {
	version := v.Float()
	return itemRequest{ID: id, Key: key, Group: group, Of: of, Priority: priority, Version: &version, Stream: stream, Body: body}
}

func (c *core) pipelineTake(ctx context.Context, r *request) (any, error) {
	p, err := c.pipe(r.Pipeline.ID)
	if err != nil {
		return nil, err
	}
	ctx, cancel := within(ctx, r.Pipeline.Timeout)
	defer cancel()
	take := takeElsewhere
	if p.own != nil {
		take = takeHere
	}
	items, end, err := take(ctx, p, r.Pipeline.Stream, r.Pipeline.Count)
	if errors.Is(err, bus.ErrTimedOut) && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return loanAnswer{}, nil
	}
	if err != nil || len(items) == 0 {
		return loanAnswer{}, err
	}
	if errors.Is(ctx.Err(), context.Canceled) { // the request was cancelled
		return nil, errors.Join(ctx.Err(), end(context.WithoutCancel(ctx), false))
	}
	id := c.number()
	c.mu.Lock()
	p.loans[id] = end
	c.mu.Unlock()
	return loanAnswer{Loan: id, Items: items}, nil
}

// takeHere takes items of a pipeline in this process.
func takeHere(ctx context.Context, p *pipe, stream string, n int) ([]itemRequest, loan, error) {
	b, err := p.own.Take(ctx, stream, n)
	if err != nil {
		return nil, nil, err
	}
	var items []itemRequest
	for _, it := range b.Items {
		items = append(items, loanItem(stream, it.ID, it.Key, it.Group, it.Of, it.Priority, it.Version, it.Body))
	}
	return items, func(ctx context.Context, done bool) error {
		if done {
			return b.Ack(ctx)
		}
		return b.Nak(ctx)
	}, nil
}

// takeElsewhere takes items of a pipeline in another process; the loan lasts as long as this process.
func takeElsewhere(ctx context.Context, p *pipe, stream string, n int) ([]itemRequest, loan, error) {
	for ctx.Err() == nil {
		l, err := p.client.Claim(context.WithoutCancel(ctx), stream, n) // at most a second; after a cancellation the items would be unavailable for a while
		if err != nil {
			return nil, nil, err
		}
		if l == nil {
			continue // none within a second
		}
		var items []itemRequest
		for _, it := range l.Items {
			items = append(items, loanItem(stream, it.ID, it.Key, it.Group, 0, 0, it.Version, it.Body))
		}
		return items, func(ctx context.Context, done bool) error {
			if done {
				return l.Ack(ctx)
			}
			return l.Nak(ctx)
		}, nil
	}
	return nil, nil, bus.Errorf(bus.CodeOf(ctx.Err()), "take from stream %s: %w", stream, ctx.Err())
}

func (c *core) pipelineTaken(ctx context.Context, r *request) (any, error) {
	p, err := c.pipe(r.Pipeline.ID)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	end := p.loans[r.Pipeline.Loan]
	delete(p.loans, r.Pipeline.Loan)
	c.mu.Unlock()
	if end == nil {
		return nil, bus.Errorf(bus.CodeInvalid, "this loan has already ended")
	}
	return nil, end(ctx, r.Pipeline.Done)
}

// pipelineControl is implemented by pipelines here and in other processes.
type pipelineControl interface {
	Status(ctx context.Context) (pipeline.Status, error)
	Pause(ctx context.Context, stage string) error
	Resume(ctx context.Context, stage string) error
	Scale(ctx context.Context, stage string, workers int) error
	Abort(ctx context.Context, id string) error
	SetVersion(ctx context.Context, v pipeline.Version) error
	Drain(ctx context.Context) error
	RetryDead(ctx context.Context, seqs []uint64, all bool) (int, error)
	DropDead(ctx context.Context, seqs []uint64, all bool) (int, error)
}

func (c *core) pipelineVerb(ctx context.Context, r *request) (any, error) {
	p, err := c.pipe(r.Pipeline.ID)
	if err != nil {
		return nil, err
	}
	ctx, cancel := within(ctx, r.Pipeline.Timeout)
	defer cancel()
	if v := r.Pipeline.Verb; v == "join" || v == "leave" {
		return nil, c.changeStageRanks(ctx, p, &r.Pipeline)
	}
	result, err := p.control(ctx, &r.Pipeline)
	if err != nil || result == nil {
		return nil, err
	}
	text, err := json.Marshal(result)
	return string(text), err
}

// changeStageRanks adds ranks of another cluster to a stage, or removes them.
func (c *core) changeStageRanks(ctx context.Context, p *pipe, r *pipeRequest) error {
	if p.own == nil {
		return bus.Errorf(bus.CodeRefused, "the pipeline runs in another process; change the ranks of its stages there")
	}
	cl, err := c.cluster(r.Cluster)
	if err != nil {
		return err
	}
	if r.Verb == "join" {
		return p.own.Join(ctx, r.Stage, cl.Cluster, r.Ranks...)
	}
	return p.own.Leave(ctx, r.Stage, cl.Cluster, r.Ranks...)
}

func (p *pipe) control(ctx context.Context, r *pipeRequest) (any, error) {
	var to pipelineControl = p.client
	if p.own != nil {
		to = p.own
	}
	switch r.Verb {
	case "stats":
		return to.Status(ctx)
	case "pause":
		return nil, to.Pause(ctx, r.Stage)
	case "resume":
		return nil, to.Resume(ctx, r.Stage)
	case "scale":
		return nil, to.Scale(ctx, r.Stage, r.Workers)
	case "abort":
		return nil, to.Abort(ctx, r.Item)
	case "version":
		return nil, to.SetVersion(ctx, pipeline.VersionOf(r.Version))
	case "drain":
		return nil, to.Drain(ctx)
	case "shutdown":
		return nil, p.client.Shutdown(ctx)
	case "dead":
		return p.dead(ctx)
	case "dead_retry":
		return to.RetryDead(ctx, r.Seqs, r.All)
	case "dead_drop":
		return to.DropDead(ctx, r.Seqs, r.All)
	}
	return nil, bus.Errorf(bus.CodeInvalid, "a pipeline has no verb %q", r.Verb)
}

// deadLetter is a dead letter with its body, which JSON omits otherwise.
type deadLetter struct {
	pipeline.DeadLetter
	Body []byte `json:"body"`
}

func (p *pipe) dead(ctx context.Context) (any, error) {
	all, err := p.client.Dead(ctx, true)
	out := make([]deadLetter, len(all))
	for i, d := range all {
		out[i] = deadLetter{d, d.Body}
	}
	return out, err
}

// pipelineClose ends a pipeline of this process: handlers may finish within its grace. A pipeline elsewhere continues.
func (c *core) pipelineClose(ctx context.Context, r *request) (any, error) {
	p, err := c.pipe(r.Pipeline.ID)
	if err != nil {
		return nil, nil // closing twice is not an error
	}
	c.mu.Lock()
	delete(c.pipelines, r.Pipeline.ID)
	loans := p.loans
	p.loans = map[uint64]loan{}
	c.mu.Unlock()
	for _, end := range loans {
		_ = end(ctx, false) // otherwise they return when the pipeline is opened again
	}
	if p.own == nil {
		return nil, nil
	}
	return nil, p.own.Close(ctx)
}

// closePipelines ends the pipelines of a runtime that is being closed.
func (c *core) closePipelines(ctx context.Context, runtime uint64) {
	c.mu.Lock()
	var ids []uint64
	for id, p := range c.pipelines {
		if p.runtime == runtime {
			ids = append(ids, id)
		}
	}
	c.mu.Unlock()
	for _, id := range ids {
		if _, err := c.pipelineClose(ctx, &request{Pipeline: pipeRequest{ID: id}}); err != nil {
			c.log.Error("libtroupe: close a pipeline of a closed session", "error", err)
		}
	}
}
