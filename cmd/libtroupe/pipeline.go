package main

import (
	"context"
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

// ofPipe is of requests about a pipeline.
type ofPipe struct {
	ID uint64 `msgpack:"id"`
}

func (q ofPipe) find(c *core) (*pipe, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.pipelines[q.ID]; p != nil {
		return p, nil
	}
	return nil, bus.Errorf(bus.CodeClosed, "this pipeline is closed")
}

type (
	pipeRequest  struct{ ofPipe }
	checkRequest struct {
		ofProcess
		Text string `msgpack:"text"` // the declaration, as in a file
	}
	pipeOpenRequest struct {
		ofRuntime
		By         string   `msgpack:"by"`
		Text       string   `msgpack:"text"`
		Clusters   []uint64 `msgpack:"clusters"`  // clusters of the roles that its stages name
		FuncsToken uint64   `msgpack:"functions"` // token of the completions for its stage functions
		TakeOver   bool     `msgpack:"take_over"`
		Grace      float64  `msgpack:"grace"` // seconds
	}
	pipePutRequest struct {
		ofPipe
		within
		Stream string        `msgpack:"stream"`
		Items  []itemRequest `msgpack:"items"`
	}
	pipeTakeRequest struct {
		ofPipe
		within
		Stream string `msgpack:"stream"`
		Count  int    `msgpack:"count"`
	}
	pipeTakenRequest struct {
		ofPipe
		Loan uint64 `msgpack:"loan"`
		Done bool   `msgpack:"done"`
	}
	stageRequest struct {
		ofPipe
		Stage string `msgpack:"stage"`
	}
	stageScaleRequest struct {
		stageRequest
		Workers int `msgpack:"workers"`
	}
	stageRanksRequest struct {
		stageRequest
		within
		Cluster uint64 `msgpack:"cluster"`
		Ranks   []int  `msgpack:"ranks"` // empty: all
	}
	pipeAbortRequest struct {
		ofPipe
		Item string `msgpack:"item"`
	}
	pipeVersionRequest struct {
		ofPipe
		Version float64 `msgpack:"version"`
	}
	pipeDrainRequest struct {
		ofPipe
		within
	}
	deadRequest struct {
		ofPipe
		Seqs []uint64 `msgpack:"seqs"`
		All  bool     `msgpack:"all"`
	}
)

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

func (c *core) addPipe(rt *roles.Runtime, p *pipe, name string) (uint64, error) {
	client, err := pipeline.Connect(rt.Bus(), rt.Namespace(), name)
	if err != nil {
		return 0, err
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
func (c *core) pipelineOpen(ctx context.Context, rt *roles.Runtime, r pipeOpenRequest) (uint64, error) {
	stageFuncs := c.newStageFuncs(r.FuncsToken)
	p, err := c.runPipeline(ctx, rt, r, stageFuncs)
	if err != nil {
		stageFuncs.end()
		return 0, err
	}
	spawn(func() { <-p.Done(); stageFuncs.end() }, func(err error) { c.log.Error("libtroupe: follow a pipeline", "error", err) })
	if ctx.Err() != nil { // the request was cancelled
		return 0, errors.Join(ctx.Err(), p.Close(ctx))
	}
	if _, err := c.runtime(r.Runtime); err != nil { // it was closed meanwhile
		return 0, errors.Join(err, p.Close(ctx))
	}
	return c.addPipe(rt, &pipe{runtime: r.Runtime, own: p}, p.Spec().Name)
}

func (c *core) runPipeline(ctx context.Context, rt *roles.Runtime, r pipeOpenRequest, stageFuncs *stageFuncs) (*pipeline.Pipeline, error) {
	spec, err := declared(r.Text, stageFuncs)
	if err != nil {
		return nil, err
	}
	cfg := pipeline.Config{Bus: rt.Bus(), Namespace: rt.Namespace(), By: r.By, TakeOver: r.TakeOver, Grace: seconds(r.Grace), Logger: c.log}
	for _, id := range r.Clusters {
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
func (c *core) pipelineCheck(_ context.Context, _ *core, r checkRequest) error {
	_, err := declared(r.Text, c.newStageFuncs(0))
	return err
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

// pipelineAttach finds a pipeline that runs in any process.
func (c *core) pipelineAttach(ctx context.Context, rt *roles.Runtime, r nameRequest) (uint64, error) {
	client, err := pipeline.Connect(rt.Bus(), rt.Namespace(), r.Name)
	if err == nil {
		_, err = client.Status(ctx)
	}
	if err != nil {
		return 0, err
	}
	return c.addPipe(rt, &pipe{runtime: r.Runtime}, r.Name)
}

// pipelineRemove removes the stored data of a pipeline that does not run.
func (c *core) pipelineRemove(ctx context.Context, rt *roles.Runtime, r nameRequest) error {
	client, err := pipeline.Connect(rt.Bus(), rt.Namespace(), r.Name)
	if err != nil {
		return err
	}
	return client.Remove(ctx)
}

func (c *core) pipelinePut(ctx context.Context, p *pipe, r pipePutRequest) error {
	items := make([]pipeline.Item, len(r.Items))
	for i, it := range r.Items {
		items[i] = it.item()
	}
	if p.own != nil {
		return p.own.Put(ctx, r.Stream, items...)
	}
	return p.producer.Put(ctx, r.Stream, items...)
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

// pipelineTake takes items out of a sink; the loan has number 0 if none came in time.
func (c *core) pipelineTake(ctx context.Context, p *pipe, r pipeTakeRequest) (loanAnswer, error) {
	take := takeElsewhere
	if p.own != nil {
		take = takeHere
	}
	items, end, err := take(ctx, p, r.Stream, r.Count)
	if errors.Is(err, bus.ErrTimedOut) && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return loanAnswer{}, nil
	}
	if err != nil || len(items) == 0 {
		return loanAnswer{}, err
	}
	if errors.Is(ctx.Err(), context.Canceled) { // the request was cancelled
		return loanAnswer{}, errors.Join(ctx.Err(), end(context.WithoutCancel(ctx), false))
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

// pipelineTaken completes or returns the items of a loan.
func (c *core) pipelineTaken(ctx context.Context, p *pipe, r pipeTakenRequest) error {
	c.mu.Lock()
	end := p.loans[r.Loan]
	delete(p.loans, r.Loan)
	c.mu.Unlock()
	if end == nil {
		return bus.Errorf(bus.CodeInvalid, "this loan has already ended")
	}
	return end(ctx, r.Done)
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

func (p *pipe) control() pipelineControl {
	if p.own != nil {
		return p.own
	}
	return p.client
}

func (c *core) pipelineStats(ctx context.Context, p *pipe, _ pipeRequest) (string, error) {
	status, err := p.control().Status(ctx)
	if err != nil {
		return "", err
	}
	return jsonText(status)
}

func (c *core) pipelinePause(ctx context.Context, p *pipe, r stageRequest) error {
	return p.control().Pause(ctx, r.Stage)
}

func (c *core) pipelineResume(ctx context.Context, p *pipe, r stageRequest) error {
	return p.control().Resume(ctx, r.Stage)
}

func (c *core) pipelineScale(ctx context.Context, p *pipe, r stageScaleRequest) error {
	return p.control().Scale(ctx, r.Stage, r.Workers)
}

// pipelineJoin adds ranks of another cluster to a stage.
func (c *core) pipelineJoin(ctx context.Context, p *pipe, r stageRanksRequest) error {
	cl, err := c.stageCluster(p, r)
	if err != nil {
		return err
	}
	return p.own.Join(ctx, r.Stage, cl.Cluster, r.Ranks...)
}

// pipelineLeave removes ranks of another cluster from a stage.
func (c *core) pipelineLeave(ctx context.Context, p *pipe, r stageRanksRequest) error {
	cl, err := c.stageCluster(p, r)
	if err != nil {
		return err
	}
	return p.own.Leave(ctx, r.Stage, cl.Cluster, r.Ranks...)
}

func (c *core) stageCluster(p *pipe, r stageRanksRequest) (*cluster, error) {
	if p.own == nil {
		return nil, bus.Errorf(bus.CodeRefused, "the pipeline runs in another process; change the ranks of its stages there")
	}
	return c.cluster(r.Cluster)
}

func (c *core) pipelineAbort(ctx context.Context, p *pipe, r pipeAbortRequest) error {
	return p.control().Abort(ctx, r.Item)
}

func (c *core) pipelineVersion(ctx context.Context, p *pipe, r pipeVersionRequest) error {
	return p.control().SetVersion(ctx, pipeline.VersionOf(r.Version))
}

func (c *core) pipelineDrain(ctx context.Context, p *pipe, _ pipeDrainRequest) error {
	return p.control().Drain(ctx)
}

// pipelineStop ends the pipeline wherever it runs.
func (c *core) pipelineStop(ctx context.Context, p *pipe, _ pipeRequest) error {
	return p.client.Shutdown(ctx)
}

func (c *core) pipelineRetryDead(ctx context.Context, p *pipe, r deadRequest) (int, error) {
	return p.control().RetryDead(ctx, r.Seqs, r.All)
}

func (c *core) pipelineDropDead(ctx context.Context, p *pipe, r deadRequest) (int, error) {
	return p.control().DropDead(ctx, r.Seqs, r.All)
}

// deadLetter is a dead letter with its body, which JSON omits otherwise.
type deadLetter struct {
	pipeline.DeadLetter
	Body []byte `json:"body"`
}

func (c *core) pipelineDead(ctx context.Context, p *pipe, _ pipeRequest) (string, error) {
	all, err := p.client.Dead(ctx, true)
	if err != nil {
		return "", err
	}
	out := make([]deadLetter, len(all))
	for i, d := range all {
		out[i] = deadLetter{d, d.Body}
	}
	return jsonText(out)
}

// closeRequest closes something by its number. Closing twice is not an error.
type closeRequest struct {
	ofProcess
	ID uint64 `msgpack:"id"`
}

// pipelineClose ends a pipeline of this process: handlers may finish within its grace. A pipeline elsewhere continues.
func (c *core) pipelineClose(ctx context.Context, _ *core, r closeRequest) error {
	c.mu.Lock()
	p := c.pipelines[r.ID]
	delete(c.pipelines, r.ID)
	var loans map[uint64]loan
	if p != nil {
		loans, p.loans = p.loans, map[uint64]loan{}
	}
	c.mu.Unlock()
	for _, end := range loans {
		_ = end(ctx, false) // otherwise they return when the pipeline is opened again
	}
	if p == nil || p.own == nil {
		return nil
	}
	return p.own.Close(ctx)
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
		if err := c.pipelineClose(ctx, c, closeRequest{ID: id}); err != nil {
			c.log.Error("libtroupe: close a pipeline of a closed session", "error", err)
		}
	}
}
