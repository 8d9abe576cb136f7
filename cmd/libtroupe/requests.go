package main

import (
	"context"
	"encoding/json"
	"path/filepath"
	"slices"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/shm"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/nodes"
	"troupe/roles"
	"troupe/roles/registry"
	"troupe/roles/sessions"
)

// request is the argument of troupe_ask; each op uses some of the fields.
type request struct {
	Op      string   `msgpack:"op"`
	Runtime uint64   `msgpack:"runtime"` // number of a runtime
	Cluster uint64   `msgpack:"cluster"`
	Name    string   `msgpack:"name"`
	Handle  wire.Raw `msgpack:"handle"` // ext type 3

	Bus       busRequest `msgpack:"bus"`
	Namespace string     `msgpack:"namespace"`
	Lease     float64    `msgpack:"lease"` // seconds
	CLI       cliRequest `msgpack:"cli"`
	Private   bool       `msgpack:"private"` // the head ends with this process
	Now       bool       `msgpack:"now"`     // kill instead of stop

	Background bool            `msgpack:"background"` // do not wait for the workers
	Seen       int             `msgpack:"seen"`       // deaths that the caller knows
	Side       bool            `msgpack:"side"`       // the result goes to the side queue
	Spec       specRequest     `msgpack:"spec"`
	Reserve    reserveRequest  `msgpack:"reserve"`
	Pipeline   pipeRequest     `msgpack:"pipeline"`
	Serve      serveRequest    `msgpack:"serve"`
	Router     routerRequest   `msgpack:"router"`
	Weights    weightsRequest  `msgpack:"weights"`
	Output     outputRequest   `msgpack:"output"`
	Rollouts   rolloutsRequest `msgpack:"rollouts"`

	Ranks    []int   `msgpack:"ranks"`
	Replicas int     `msgpack:"replicas"`
	Epoch    uint64  `msgpack:"epoch"`
	Reason   string  `msgpack:"reason"`
	Timeout  float64 `msgpack:"timeout"` // seconds; 0: none

	Assignment string     `msgpack:"assignment"` // path of the file
	Error      *bus.Error `msgpack:"error"`
	Grace      float64    `msgpack:"grace"` // seconds

	Measured []bus.Measured `msgpack:"measured"`
}

// cliRequest is how a shell reaches the head with the troupe command.
type cliRequest struct {
	Env   string `msgpack:"env"`
	Flags string `msgpack:"flags"`
}

type busRequest struct {
	URLs        []string `msgpack:"urls"`
	Token       string   `msgpack:"token"`
	TokenFile   string   `msgpack:"token_file"`
	CredsFile   string   `msgpack:"creds_file"`
	CAFile      string   `msgpack:"ca_file"`
	Fingerprint string   `msgpack:"fingerprint"`
}

// The environment of values that are kept for references.
const (
	valuesLimitVariable = "TROUPE_VALUES_LIMIT" // bus.ValuesConfig.Limit
	valuesSpillVariable = "TROUPE_VALUES_SPILL" // bus.ValuesConfig.SpillDir
)

// valuesConfig reads the environment.
func valuesConfig(getenv func(string) string) (bus.ValuesConfig, error) {
	limit, err := positive(getenv, valuesLimitVariable, "bytes")
	if err != nil {
		return bus.ValuesConfig{}, bus.Errorf(bus.CodeInvalid, "%v", err)
	}
	spill := getenv(valuesSpillVariable)
	if spill != "" && spill != bus.NoSpill && !filepath.IsAbs(spill) {
		return bus.ValuesConfig{}, bus.Errorf(bus.CodeInvalid, "%s is %q; give the absolute path of a folder, or 0 to refuse values past the bound", valuesSpillVariable, spill)
	}
	values := bus.ValuesConfig{Limit: limit, SpillDir: spill, Direct: bus.DirectConfigOf(getenv)}
	if values.Direct.Dir = getenv(shmDirVariable); values.Direct.Dir == "" {
		values.Direct.Dir = shm.DefaultDir()
	}
	return values, nil
}

func (b busRequest) config(values bus.ValuesConfig) bus.Config {
	return bus.Config{
		Values: values,
		Name:   "troupe-python", URLs: b.URLs, Token: b.Token, TokenFile: b.TokenFile, CredsFile: b.CredsFile,
		TLS: bus.TLSConfig{CAFile: b.CAFile, Fingerprint: b.Fingerprint},
	}
}

// answer executes a request. The comment of each op names the fields that it uses and its result.
func (c *core) answer(ctx context.Context, raw []byte) (any, error) {
	var r request
	if err := wire.UnmarshalWith(raw, &r, wire.UnmarshalOptions{Strict: true}); err != nil {
		return nil, err
	}
	if err := c.checkUsable(); err != nil && !opsAfterPanic[r.Op] {
		return nil, err
	}
	do, ok := ops[r.Op]
	if !ok {
		return nil, bus.Errorf(bus.CodeInvalid, "unknown op %q", r.Op)
	}
	return do(c, ctx, &r)
}

var ops map[string]func(*core, context.Context, *request) (any, error)

func init() {
	ops = map[string]func(*core, context.Context, *request) (any, error){
		"open":         (*core).open,            // bus, namespace, name, lease, private, output, cli → runtime
		"close":        (*core).close,           // runtime, now → nil: takes its roles down, or with now kills them
		"unfinished":   (*core).unfinished,      // runtime, now → lines: what close waits for; with now it is killed
		"end_created":  (*core).endCreated,      // runtime, now → nil: takes the roles down that a worker has created
		"flush_output": (*core).flushOutput,     // runtime → nil: what workers have printed so far is in the output pipe
		"create":       (*core).create,          // runtime, spec, background → cluster; with background its workers are being started
		"progress":     (*core).startProgress,   // runtime, name → how far the creation of the role is
		"started":      (*core).started,         // cluster, timeout → its description when its workers have been started
		"deaths":       (*core).deaths,          // cluster, seen, side → deaths after the first seen ones; waits for one
		"reserve":      (*core).reserve,         // runtime, reserve, name → reservation
		"reservation":  (*core).reservation,     // runtime, name → reservation
		"unreserve":    (*core).unreserve,       // name → nil
		"nodes":        (*core).nodes,           // runtime → nodes with their total and free resources
		"describe":     (*core).describe,        // cluster → its current description
		"attach":       (*core).attach,          // runtime, name → cluster
		"open_handle":  (*core).openHandle,      // runtime, handle → cluster
		"destroy":      (*core).destroy,         // cluster → nil: takes the role down
		"kill":         (*core).kill,            // cluster, ranks → nil: kills these workers; without ranks the role
		"release":      (*core).release,         // cluster → nil: drops the handle
		"roles":        (*core).roles,           // runtime → list of records
		"timeline":     (*core).timeline,        // runtime → the flight recorders of all roles of its namespace, as JSON
		"measured":     (*core).measured,        // runtime, measured → nil: tells the head the series that the program measures
		"info":         (*core).info,            // cluster → Info of each worker
		"health":       (*core).health,          // cluster → last heartbeat of each worker
		"stacks":       (*core).stacks,          // cluster, ranks → stacks of the workers, and as text
		"interrupt":    (*core).interrupt,       // cluster, ranks → the ranks with the names of their interrupted methods
		"wait_ready":   (*core).waitReady,       // cluster, timeout → nil: waits until no worker is being restarted
		"resize":       (*core).resize,          // cluster, replicas, timeout → nil: grows or shrinks the role
		"members":      (*core).members,         // cluster → epoch, cause and ranks
		"changed":      (*core).changed,         // cluster, epoch, timeout → the same, of a later epoch
		"replace":      (*core).replace,         // cluster, ranks (one), reason, timeout → nil: gives the rank another process
		"worker_open":  (*core).workerOpen,      // assignment → its content
		"worker_start": (*core).workerStart,     // → nil: starts the worker
		"worker_fail":  (*core).workerFail,      // error → nil: reports that the worker cannot start
		"worker_stop":  (*core).workerStop,      // grace → nil: stops the worker
		"worker_close": (*core).workerClose,     // → nil: disconnects
		"serve":        (*core).serve,           // runtime, name, serve → cluster with one object of this process
		"driver":       (*core).driver,          // runtime, name (a session) → handle of the object that this driver serves
		"sessions":     (*core).sessions,        // runtime, timeout → cluster of the control service of the namespace
		"show_output":  (*core).showOutput,      // runtime, name → nil: shows output that roles of others send to this driver under the name
		"references":   (*core).countReferences, // runtime → values that it owns, references that it holds, bytes that it keeps
		"panic":        (*core).panicForTest,    // for tests

		"pipeline_check":  (*core).pipelineCheck,  // pipeline (text) → nil: checks the declaration
		"pipeline_open":   (*core).pipelineOpen,   // runtime, pipeline (text, clusters, functions) → pipeline that runs in this process
		"pipeline_attach": (*core).pipelineAttach, // runtime, name → pipeline that runs in any process
		"pipeline_put":    (*core).pipelinePut,    // pipeline (id, stream, items) → nil: stores the items
		"pipeline_take":   (*core).pipelineTake,   // pipeline (id, stream, count) → loan; number 0 if no item came in time
		"pipeline_taken":  (*core).pipelineTaken,  // pipeline (id, loan, done) → nil: completes or returns the items
		"pipeline_verb":   (*core).pipelineVerb,   // pipeline (id, verb and what it needs) → JSON, or nil
		"pipeline_remove": (*core).pipelineRemove, // runtime, name → nil: removes everything stored
		"rollouts_open":   (*core).rolloutsOpen,   // runtime, name, rollouts (name, spec) → rollouts that this process runs or stands by for
		"rollouts_attach": (*core).rolloutsAttach, // runtime, rollouts (name) → rollouts that others run
		"rollouts_verb":   (*core).rolloutsVerb,   // rollouts (id, verb and what it needs) → what it got
		"rollouts_remove": (*core).rolloutsRemove, // runtime, rollouts (name) → nil: removes everything stored
		"rollouts_close":  (*core).rolloutsClose,  // rollouts (id) → nil
		"pipeline_close":  (*core).pipelineClose,  // pipeline (id) → nil: ends the pipeline, or drops the handle

		"router_open":  (*core).routerOpen,  // router (method, abort, credits, waiting, sticky, clusters) → router
		"router_call":  (*core).routerCall,  // router (id, request, key, body, again, timeout) → body of the answer
		"router_verb":  (*core).routerVerb,  // router (id, verb and what it needs) → JSON, or nil
		"router_close": (*core).routerClose, // router (id) → nil: cancels its requests

		// All of them: runtime, weights (name and the fields below).
		"weights_bind":    (*core).weightsBind,    // use, tensors → nil: the memory of the tensors stays in place until another bind or the end of the runtime
		"weights_publish": (*core).weightsPublish, // step, mode, ranks, timeout → version
		"weights_stage":   (*core).weightsStage,   // version, whole, epoch, timeout → version, tensors
		"weights_commit":  (*core).weightsCommit,  // version → version
		"weights_fill":    (*core).weightsFill,    // version, first, addresses → nil: copies whole tensors of what was staged
		"weights_loaded":  (*core).weightsLoaded,  // version, took, failure → nil: the engine has what was filled, or has failed
		"weights_next":    (*core).weightsNext,    // version, timeout → version: one that is newer
		"weights_status":  (*core).weightsStatus,  // → JSON
	}
}

// runtimeInfo describes the runtime of a driver or a worker.
type runtimeInfo struct {
	Runtime   uint64 `msgpack:"runtime"`
	URL       string `msgpack:"url"`
	Namespace string `msgpack:"namespace"`
	Session   string `msgpack:"session"`
}

func (c *core) addRuntime(rt *roles.Runtime) runtimeInfo {
	id := c.number()
	c.mu.Lock()
	c.runtimes[id] = rt
	c.connectedLocked()
	c.mu.Unlock()
	return runtimeInfo{Runtime: id, URL: rt.URL(), Namespace: rt.Namespace(), Session: rt.Session()}
}

// connectedLocked updates the connections of the outbox.
func (c *core) connectedLocked() {
	var all []*bus.Bus
	for _, rt := range c.runtimes {
		if !slices.Contains(all, rt.Bus()) {
			all = append(all, rt.Bus())
		}
	}
	c.outbox.set(all)
}

func (c *core) open(ctx context.Context, r *request) (any, error) {
	values, err := valuesConfig(processEnv)
	if err != nil {
		return nil, err
	}
	cfg := roles.Config{
		BusConfig: r.Bus.config(values), Namespace: r.Namespace, Name: r.Name, Lease: seconds(r.Lease), Private: r.Private, Logger: c.log,
		ClassFunc: c.servedClass, CLI: roles.CommandLine{Env: r.CLI.Env, Flags: r.CLI.Flags},
	}
	r.Output.apply(&c.output, &cfg)
	rt, err := roles.Open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return c.addRuntime(rt), nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

func (c *core) close(ctx context.Context, r *request) (any, error) {
	rt, err := c.runtime(r.Runtime)
	if err != nil {
		return nil, nil // closing twice is not an error
	}
	c.closePipelines(ctx, r.Runtime) // stages use the roles
	c.closeWeights(r.Runtime)
	c.closeRollouts(ctx, r.Runtime)
	c.mu.Lock()
	delete(c.runtimes, r.Runtime)
	c.closing[r.Runtime] = rt
	c.connectedLocked()
	last := len(c.runtimes) == 0 && c.worker == nil
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.closing, r.Runtime)
	}()
	if r.Now {
		err = rt.Kill(ctx)
	} else {
		err = rt.Close(ctx)
	}
	c.output.mark(outputEnd)
	if last {
		c.memory.shared.closeUnused()
	}
	return nil, err
}

// unfinished describes what the close of a runtime waits for; with now those workers are killed.
func (c *core) unfinished(ctx context.Context, r *request) (any, error) {
	c.mu.Lock()
	rt := c.closing[r.Runtime]
	c.mu.Unlock()
	switch {
	case rt == nil:
		return nil, nil
	case r.Now:
		return nil, rt.KillUnfinished(ctx)
	}
	return rt.Unfinished(), nil
}

// endCreated ends what a worker has created; its session goes on.
func (c *core) endCreated(ctx context.Context, r *request) (any, error) {
	rt, err := c.runtime(r.Runtime)
	if err != nil {
		return nil, nil
	}
	return nil, rt.DestroyCreated(ctx, r.Now)
}

// flushOutput writes what workers have printed so far to the output pipe, and outputFlushed after it, also if some of it does not arrive in time.
func (c *core) flushOutput(ctx context.Context, r *request) (any, error) {
	rt, err := c.runtime(r.Runtime)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, flushTimeout)
	defer cancel()
	err = rt.FlushOutput(ctx)
	c.output.mark(outputFlushed)
	return nil, err
}

// clusterInfo describes a cluster.
type clusterInfo struct {
	Cluster uint64        `msgpack:"cluster"`
	Name    string        `msgpack:"name"`
	World   int           `msgpack:"world"`
	Mesh    dispatch.Mesh `msgpack:"mesh"`
	Class   string        `msgpack:"class"`
	State   string        `msgpack:"state"`
	By      string        `msgpack:"by"`
	Open    bool          `msgpack:"open"`

	DeviceTensors bool `msgpack:"device_tensors"` // arguments may be tensors that stay on their device

	Incarnation string              `msgpack:"incarnation"`
	Methods     []actors.MethodInfo `msgpack:"methods"`
	Handle      wire.Raw            `msgpack:"handle"`     // the role as a serialised handle
	Placements  []rankPlacement     `msgpack:"placements"` // placement of its workers, if they are processes
	MasterAddr  string              `msgpack:"master_addr"`
	MasterPort  int                 `msgpack:"master_port"`
}

func (c *core) addCluster(cl *roles.Cluster) (any, error) {
	handle, err := wire.Marshal(cl.Handle())
	if err != nil {
		return nil, err
	}
	id := c.number()
	c.mu.Lock()
	c.clusters[id] = &cluster{Cluster: cl}
	c.mu.Unlock()
	return describe(id, currentRecord(cl), handle), nil
}

// started waits until the workers of a cluster have been started.
func (c *core) started(ctx context.Context, r *request) (any, error) {
	cl, err := c.cluster(r.Cluster)
	if err != nil {
		return nil, err
	}
	if r.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, seconds(r.Timeout))
		defer cancel()
	}
	if err := cl.WaitStarted(ctx); err != nil {
		return nil, err
	}
	return c.describe(ctx, r)
}

// deathsInfo is deaths of a cluster's workers, and their number so far. Ended: there will be no more.
type deathsInfo struct {
	Deaths []deathInfo `msgpack:"deaths"`
	Seen   int         `msgpack:"seen"`
	Ended  bool        `msgpack:"ended"`

	side bool // it goes to the side queue
}

type deathInfo struct {
	Rank  int        `msgpack:"rank"` // -1: the role
	Gen   uint32     `msgpack:"gen"`
	Error *bus.Error `msgpack:"error"`
}

func (c *core) deaths(ctx context.Context, r *request) (any, error) {
	cl, err := c.cluster(r.Cluster)
	if err != nil {
		return deathsInfo{Seen: r.Seen, Ended: true, side: r.Side}, nil
	}
	deaths, seen, ok, err := cl.Deaths(ctx, r.Seen)
	if err != nil {
		return nil, err
	}
	out := deathsInfo{Seen: seen, Ended: !ok, side: r.Side}
	for _, d := range deaths {
		out.Deaths = append(out.Deaths, deathInfo{Rank: d.Rank, Gen: d.Gen, Error: d.Why})
		out.Ended = out.Ended || d.Rank < 0
	}
	return out, nil
}

// describe returns the current description of a cluster: workers may have been replaced.
func (c *core) describe(_ context.Context, r *request) (any, error) {
	cl, err := c.cluster(r.Cluster)
	if err != nil {
		return nil, err
	}
	handle, err := wire.Marshal(cl.Handle())
	return describe(r.Cluster, currentRecord(cl.Cluster), handle), err
}

// currentRecord is the record of a role with the size that calls use: while the role is resized, the record has both.
func currentRecord(cl *roles.Cluster) registry.RoleRecord {
	rec := cl.Record()
	rec.Mesh = cl.Mesh()
	rec.World = rec.Mesh.World()
	rec.Placements = rec.Placements[:min(len(rec.Placements), rec.World)]
	return rec
}

func describe(id uint64, rec registry.RoleRecord, handle wire.Raw) clusterInfo {
	placements, host, port := placementsOf(rec)
	return clusterInfo{
		Placements: placements, MasterAddr: host, MasterPort: port,
		Cluster: id, Name: rec.Name, World: rec.World, Mesh: rec.Mesh, Class: rec.Class, State: string(rec.State), By: rec.By,
		Open: rec.Open, DeviceTensors: rec.DeviceTensors, Incarnation: rec.Incarnation, Methods: rec.Methods, Handle: handle,
	}
}

func (c *core) attach(ctx context.Context, r *request) (any, error) {
	rt, err := c.runtime(r.Runtime)
	if err != nil {
		return nil, err
	}
	cl, err := rt.Attach(ctx, r.Name)
	if err != nil {
		return nil, err
	}
	return c.addCluster(cl)
}

// sessions finds the control service of a namespace.
func (c *core) sessions(ctx context.Context, r *request) (any, error) {
	rt, err := c.runtime(r.Runtime)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, seconds(r.Timeout))
	defer cancel()
	cl, err := sessions.Find(ctx, rt)
	if err != nil {
		return nil, err
	}
	return c.addCluster(cl)
}

func (c *core) showOutput(ctx context.Context, r *request) (any, error) {
	rt, err := c.runtime(r.Runtime)
	if err != nil {
		return nil, err
	}
	return nil, rt.ReceiveOutput(ctx, r.Name)
}

func (c *core) openHandle(_ context.Context, r *request) (any, error) {
	rt, err := c.runtime(r.Runtime)
	if err != nil {
		return nil, err
	}
	var h roles.Handle
	if err := wire.Unmarshal(r.Handle, &h); err != nil {
		return nil, err
	}
	cl, err := rt.Open(h)
	if err != nil {
		return nil, err
	}
	return c.addCluster(cl)
}

func (c *core) forget(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.clusters, id)
}

func (c *core) destroy(ctx context.Context, r *request) (any, error) {
	cl, err := c.cluster(r.Cluster)
	if err != nil {
		return nil, nil // destroying twice is not an error
	}
	if err := cl.Destroy(ctx); err != nil {
		return nil, err
	}
	c.forget(r.Cluster)
	return nil, nil
}

func (c *core) kill(ctx context.Context, r *request) (any, error) {
	cl, err := c.cluster(r.Cluster)
	if err != nil {
		return nil, nil
	}
	if len(r.Ranks) > 0 {
		return nil, cl.KillRanks(ctx, r.Ranks...)
	}
	if err := cl.Kill(ctx); err != nil {
		return nil, err
	}
	c.forget(r.Cluster)
	return nil, nil
}

func (c *core) release(ctx context.Context, r *request) (any, error) {
	cl, err := c.cluster(r.Cluster)
	if err != nil {
		return nil, nil
	}
	c.forget(r.Cluster)
	return nil, cl.Close(ctx)
}

func (c *core) roles(ctx context.Context, r *request) (any, error) {
	rt, err := c.runtime(r.Runtime)
	if err != nil {
		return nil, err
	}
	all, err := rt.Roles(ctx)
	out := make([]clusterInfo, len(all))
	for i, rec := range all {
		out[i] = describe(0, rec, wire.Raw{0xc0})
	}
	return out, err
}

// timeline merges the flight recorders of all roles of the namespace whose workers run.
func (c *core) timeline(ctx context.Context, r *request) (any, error) {
	rt, err := c.runtime(r.Runtime)
	if err != nil {
		return nil, err
	}
	t, err := rt.Timeline(ctx)
	if err != nil {
		return nil, err
	}
	out, err := json.Marshal(t)
	return string(out), err
}

func (c *core) measured(_ context.Context, r *request) (any, error) {
	rt, err := c.runtime(r.Runtime)
	if err != nil {
		return nil, err
	}
	return nil, rt.Bus().PublishMeasured(rt.Namespace(), rt.Session(), r.Measured)
}

// info asks every worker for its Info; see restarting.go.
func (c *core) info(ctx context.Context, r *request) (any, error) {
	cl, err := c.cluster(r.Cluster)
	if err != nil {
		return nil, err
	}
	return cl.infos(ctx)
}

func (c *core) health(_ context.Context, r *request) (any, error) {
	cl, err := c.cluster(r.Cluster)
	if err != nil {
		return nil, err
	}
	return cl.beats(), nil
}

// waitReady waits until no worker of a cluster is being restarted.
func (c *core) waitReady(ctx context.Context, r *request) (any, error) {
	cl, err := c.cluster(r.Cluster)
	if err != nil {
		return nil, err
	}
	ctx, cancel := r.within(ctx)
	defer cancel()
	return nil, cl.WaitReady(ctx)
}

func (c *core) resize(ctx context.Context, r *request) (any, error) {
	cl, err := c.cluster(r.Cluster)
	if err != nil {
		return nil, err
	}
	ctx, cancel := r.within(ctx)
	defer cancel()
	return nil, cl.Resize(ctx, r.Replicas)
}

func (c *core) members(ctx context.Context, r *request) (any, error) {
	cl, err := c.cluster(r.Cluster)
	if err != nil {
		return nil, err
	}
	return cl.Members(ctx)
}

func (c *core) changed(ctx context.Context, r *request) (any, error) {
	cl, err := c.cluster(r.Cluster)
	if err != nil {
		return nil, err
	}
	ctx, cancel := r.within(ctx)
	defer cancel()
	return cl.Changed(ctx, r.Epoch)
}

func (c *core) replace(ctx context.Context, r *request) (any, error) {
	cl, err := c.cluster(r.Cluster)
	if err != nil {
		return nil, err
	}
	ctx, cancel := r.within(ctx)
	defer cancel()
	return nil, cl.Replace(ctx, r.Ranks[0], r.Reason)
}

// within is the context for the timeout of a request, if it has one.
func (r *request) within(ctx context.Context) (context.Context, context.CancelFunc) {
	if r.Timeout > 0 {
		return context.WithTimeout(ctx, seconds(r.Timeout))
	}
	return context.WithCancel(ctx)
}

// workerInfo describes the worker of this process and its runtime.
type workerInfo struct {
	runtimeInfo
	Role    string        `msgpack:"role"`
	Inc     string        `msgpack:"incarnation"`
	Class   string        `msgpack:"class"`
	Rank    int           `msgpack:"rank"`
	World   int           `msgpack:"world"`
	Gen     uint32        `msgpack:"gen"`
	Mesh    dispatch.Mesh `msgpack:"mesh"`
	Node    string        `msgpack:"node"`
	Config  wire.Raw      `msgpack:"config"`
	Devices []string      `msgpack:"devices"`
}

func (c *core) workerOpen(ctx context.Context, r *request) (any, error) {
	values, err := valuesConfig(processEnv)
	if err != nil {
		return nil, err
	}
	p, err := roles.OpenWorkerProcess(ctx, roles.WorkerProcessConfig{
		Assignment: r.Assignment, ClassFunc: c.class, LocalClassFunc: c.servedClass, Values: values, Logger: c.log,
	})
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	c.worker = &worker{core: c, process: p}
	c.mu.Unlock()
	a := p.Assignment
	config := a.Config
	if len(config) == 0 {
		config = wire.Raw{0xc0}
	}
	return workerInfo{
		runtimeInfo: c.addRuntime(p.Runtime()), Role: a.Role, Inc: a.Incarnation, Class: a.Class, Rank: a.Rank, World: a.World, Gen: a.Gen, Mesh: a.Mesh,
		Node: p.Node, Config: config, Devices: a.Devices,
	}, nil
}

func (c *core) workerOf() (*worker, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.worker == nil {
		return nil, bus.Errorf(bus.CodeInvalid, "this process is not a worker: %s is not set", nodes.AssignmentEnv)
	}
	return c.worker, nil
}

func (c *core) workerStart(ctx context.Context, _ *request) (any, error) {
	w, err := c.workerOf()
	if err == nil {
		err = w.process.Start(ctx)
	}
	if err == nil {
		spawn(w.follow, func(err error) { c.log.Error("libtroupe: follow the worker", "error", err) })
	}
	return nil, err
}

func (c *core) workerFail(_ context.Context, r *request) (any, error) {
	w, err := c.workerOf()
	if err == nil {
		w.process.Fail(r.Error)
	}
	return nil, err
}

func (c *core) workerStop(ctx context.Context, r *request) (any, error) {
	w, err := c.workerOf()
	if err != nil || w.process.Worker() == nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, seconds(r.Grace))
	defer cancel()
	_ = w.process.Worker().Stop(ctx) // a failure is reported by follow
	return nil, nil
}

func (c *core) workerClose(ctx context.Context, _ *request) (any, error) {
	w, err := c.workerOf()
	if err != nil {
		return nil, nil
	}
	c.closeAllWeights()
	return nil, w.process.Close(ctx)
}

// panicForTest panics in the request, or with the name "goroutine" in a goroutine of the packages below.
func (c *core) panicForTest(ctx context.Context, r *request) (any, error) {
	if r.Name == "goroutine" {
		bus.Go(func() { panic("on purpose") })
		<-ctx.Done()
		return nil, ctx.Err()
	}
	panic("on purpose")
}
