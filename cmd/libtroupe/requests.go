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
	"troupe/roles/rendezvous"
	"troupe/roles/sessions"
)

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

// ops is the operations of troupe_ask, by name.
var ops = map[string]operation{
	"open":         asks((*core).open),
	"close":        does((*core).close).always(),
	"unfinished":   asks((*core).unfinished),
	"end_created":  does((*core).endCreated),
	"flush_output": does((*core).flushOutput),
	"roles":        asks((*core).roles),
	"timeline":     asks((*core).timeline),
	"measured":     does((*core).measured),
	"show_output":  does((*core).showOutput),
	"references":   asks((*core).countReferences),
	"hand_over":    does((*core).handOver),
	"sessions":     asks((*core).sessions),
	"serve":        asks((*core).serve),
	"driver":       asks((*core).driver),
	"reserve":      asks((*core).reserve),
	"reservation":  asks((*core).reservation),
	"unreserve":    does((*core).unreserve),
	"nodes":        asks((*core).nodes),

	"create":      asks((*core).create),
	"progress":    asks((*core).startProgress),
	"started":     asks((*core).started),
	"attach":      asks((*core).attach),
	"open_handle": asks((*core).openHandle),
	"describe":    asks((*core).describe),
	"deaths":      asks((*core).deaths),
	"destroy":     does((*core).destroy),
	"kill":        does((*core).kill),
	"info":        asks((*core).info),
	"health":      asks((*core).health),
	"stacks":      asks((*core).stacks),
	"interrupt":   asks((*core).interrupt),
	"wait_ready":  does((*core).waitReady),
	"resize":      does((*core).resize),
	"members":     asks((*core).members),
	"changed":     asks((*core).changed),
	"replace":     does((*core).replace),

	"worker_open":  asks((*core).workerOpen),
	"worker_start": does((*core).workerStart),
	"worker_fail":  does((*core).workerFail),
	"worker_stop":  does((*core).workerStop).always(),
	"worker_close": does((*core).workerClose).always(),
	"rendezvous":   asks((*core).rendezvous),

	"pipeline_check":      does((*core).pipelineCheck),
	"pipeline_open":       asks((*core).pipelineOpen),
	"pipeline_attach":     asks((*core).pipelineAttach),
	"pipeline_remove":     does((*core).pipelineRemove),
	"pipeline_put":        does((*core).pipelinePut),
	"pipeline_take":       asks((*core).pipelineTake),
	"pipeline_taken":      does((*core).pipelineTaken),
	"pipeline_stats":      asks((*core).pipelineStats),
	"pipeline_pause":      does((*core).pipelinePause),
	"pipeline_resume":     does((*core).pipelineResume),
	"pipeline_scale":      does((*core).pipelineScale),
	"pipeline_join":       does((*core).pipelineJoin),
	"pipeline_leave":      does((*core).pipelineLeave),
	"pipeline_abort":      does((*core).pipelineAbort),
	"pipeline_version":    does((*core).pipelineVersion),
	"pipeline_drain":      does((*core).pipelineDrain),
	"pipeline_dead":       asks((*core).pipelineDead),
	"pipeline_retry_dead": asks((*core).pipelineRetryDead),
	"pipeline_drop_dead":  asks((*core).pipelineDropDead),
	"pipeline_stop":       does((*core).pipelineStop),
	"pipeline_close":      does((*core).pipelineClose),

	"rollouts_open":       asks((*core).rolloutsOpen),
	"rollouts_attach":     asks((*core).rolloutsAttach),
	"rollouts_remove":     does((*core).rolloutsRemove),
	"rollouts_put":        does((*core).rolloutsPut),
	"rollouts_take":       asks((*core).rolloutsTake),
	"rollouts_scoring":    asks((*core).rolloutsScoring),
	"rollouts_batch":      asks((*core).rolloutsBatch),
	"rollouts_set":        asks((*core).rolloutsSet),
	"rollouts_finish":     asks((*core).rolloutsFinish),
	"rollouts_done":       does((*core).rolloutsDone),
	"rollouts_release":    does((*core).rolloutsRelease),
	"rollouts_version":    does((*core).rolloutsVersion),
	"rollouts_redispatch": asks((*core).rolloutsRedispatch),
	"rollouts_stats":      asks((*core).rolloutsStats),
	"rollouts_close":      does((*core).rolloutsClose),

	"router_open":    asks((*core).routerOpen),
	"router_call":    asks((*core).routerCall),
	"router_suspend": does((*core).routerSuspend),
	"router_resume":  does((*core).routerResume),
	"router_abort":   does((*core).routerAbort),
	"router_stats":   asks((*core).routerStats),
	"router_join":    does((*core).routerJoin),
	"router_leave":   does((*core).routerLeave),
	"router_scale":   does((*core).routerScale),
	"router_close":   does((*core).routerClose),

	"weights_bind":    does((*core).weightsBind),
	"weights_publish": asks((*core).weightsPublish),
	"weights_stage":   asks((*core).weightsStage),
	"weights_commit":  asks((*core).weightsCommit),
	"weights_fill":    does((*core).weightsFill),
	"weights_loaded":  does((*core).weightsLoaded),
	"weights_move":    asks((*core).weightsMove),
	"weights_next":    asks((*core).weightsNext),
	"weights_status":  asks((*core).weightsStatus),
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

// openRequest begins a session.
type openRequest struct {
	ofProcess
	Bus       busRequest    `msgpack:"bus"`
	Namespace string        `msgpack:"namespace"`
	Name      string        `msgpack:"name"`
	Lease     float64       `msgpack:"lease"`   // seconds
	Private   bool          `msgpack:"private"` // the head ends with this process
	Output    outputRequest `msgpack:"output"`
	CLI       cliRequest    `msgpack:"cli"`
}

func (c *core) open(ctx context.Context, _ *core, r openRequest) (runtimeInfo, error) {
	values, err := valuesConfig(processEnv)
	if err != nil {
		return runtimeInfo{}, err
	}
	cfg := roles.Config{
		BusConfig: r.Bus.config(values), Namespace: r.Namespace, Name: r.Name, Lease: seconds(r.Lease), Private: r.Private, Logger: c.log,
		ClassFunc: c.servedClass, CLI: roles.CommandLine{Env: r.CLI.Env, Flags: r.CLI.Flags},
	}
	r.Output.apply(&c.output, &cfg)
	rt, err := roles.Open(ctx, cfg)
	if err != nil {
		return runtimeInfo{}, err
	}
	return c.addRuntime(rt), nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// endRequest ends something of a runtime, which may have ended already.
type endRequest struct {
	ofProcess
	Runtime uint64 `msgpack:"runtime"`
	Now     bool   `msgpack:"now,omitempty"` // kill instead of stop
}

// close takes the roles of a runtime down, or kills them.
func (c *core) close(ctx context.Context, _ *core, r endRequest) error {
	rt, err := c.runtime(r.Runtime)
	if err != nil {
		return nil // closing twice is not an error
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
	return err
}

// unfinished describes what the close of a runtime waits for; with now those workers are killed.
func (c *core) unfinished(ctx context.Context, _ *core, r endRequest) ([]string, error) {
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
func (c *core) endCreated(ctx context.Context, _ *core, r endRequest) error {
	rt, err := c.runtime(r.Runtime)
	if err != nil {
		return nil
	}
	return rt.DestroyCreated(ctx, r.Now)
}

// flushOutput writes what workers have printed so far to the output pipe, and outputFlushed after it, also if some of it does not arrive in time.
func (c *core) flushOutput(ctx context.Context, rt *roles.Runtime, _ runtimeRequest) error {
	ctx, cancel := context.WithTimeout(ctx, flushTimeout)
	defer cancel()
	err := rt.FlushOutput(ctx)
	c.output.mark(outputFlushed)
	return err
}

type (
	// runtimeRequest and clusterRequest say no more than what they are about.
	runtimeRequest struct{ ofRuntime }
	clusterRequest struct{ ofCluster }
	// nameRequest names a role, a driver's session or a reservation.
	nameRequest struct {
		ofRuntime
		Name string `msgpack:"name"`
	}
	ranksRequest struct {
		ofCluster
		Ranks []int `msgpack:"ranks"` // empty: all
	}
)

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

func (c *core) addCluster(cl *roles.Cluster) (clusterInfo, error) {
	handle, err := wire.Marshal(cl.Handle())
	if err != nil {
		return clusterInfo{}, err
	}
	id := c.number()
	c.mu.Lock()
	c.clusters[id] = &cluster{Cluster: cl}
	c.mu.Unlock()
	return describe(id, currentRecord(cl), handle), nil
}

// startedRequest waits until the workers of a cluster have been started.
type startedRequest struct {
	ofCluster
	within
}

func (c *core) started(ctx context.Context, cl *cluster, r startedRequest) (clusterInfo, error) {
	if err := cl.WaitStarted(ctx); err != nil {
		return clusterInfo{}, err
	}
	return c.describe(ctx, cl, clusterRequest{r.ofCluster})
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

// deathsRequest waits for a death after the first Seen ones.
type deathsRequest struct {
	ofAnyCluster
	Seen int  `msgpack:"seen"`
	Side bool `msgpack:"side,omitempty"` // the result goes to the side queue
}

func (c *core) deaths(ctx context.Context, cl *cluster, r deathsRequest) (deathsInfo, error) {
	if cl == nil {
		return deathsInfo{Seen: r.Seen, Ended: true, side: r.Side}, nil
	}
	deaths, seen, ok, err := cl.Deaths(ctx, r.Seen)
	if err != nil {
		return deathsInfo{}, err
	}
	out := deathsInfo{Seen: seen, Ended: !ok, side: r.Side}
	for _, d := range deaths {
		out.Deaths = append(out.Deaths, deathInfo{Rank: d.Rank, Gen: d.Gen, Error: d.Why})
		out.Ended = out.Ended || d.Rank < 0
	}
	return out, nil
}

// describe returns the current description of a cluster: workers may have been replaced.
func (c *core) describe(_ context.Context, cl *cluster, r clusterRequest) (clusterInfo, error) {
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

func (c *core) attach(ctx context.Context, rt *roles.Runtime, r nameRequest) (clusterInfo, error) {
	cl, err := rt.Attach(ctx, r.Name)
	if err != nil {
		return clusterInfo{}, err
	}
	return c.addCluster(cl)
}

type sessionsRequest struct {
	ofRuntime
	within
}

// sessions finds the control service of a namespace.
func (c *core) sessions(ctx context.Context, rt *roles.Runtime, _ sessionsRequest) (clusterInfo, error) {
	cl, err := sessions.Find(ctx, rt)
	if err != nil {
		return clusterInfo{}, err
	}
	return c.addCluster(cl)
}

// showOutput shows output that roles of others send to this driver under the name.
func (c *core) showOutput(ctx context.Context, rt *roles.Runtime, r nameRequest) error {
	return rt.ReceiveOutput(ctx, r.Name)
}

type handleRequest struct {
	ofRuntime
	Handle roles.Handle `msgpack:"handle"`
}

func (c *core) openHandle(_ context.Context, rt *roles.Runtime, r handleRequest) (clusterInfo, error) {
	cl, err := rt.Open(r.Handle)
	if err != nil {
		return clusterInfo{}, err
	}
	return c.addCluster(cl)
}

func (c *core) forget(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.clusters, id)
}

type anyClusterRequest struct{ ofAnyCluster }

// destroy takes a role down. Destroying twice is not an error.
func (c *core) destroy(ctx context.Context, cl *cluster, r anyClusterRequest) error {
	if cl == nil {
		return nil
	}
	if err := cl.Destroy(ctx); err != nil {
		return err
	}
	c.forget(r.Cluster)
	return nil
}

type killRequest struct {
	ofAnyCluster
	Ranks []int `msgpack:"ranks,omitempty"` // empty: the role
}

func (c *core) kill(ctx context.Context, cl *cluster, r killRequest) error {
	if cl == nil {
		return nil
	}
	if len(r.Ranks) > 0 {
		return cl.KillRanks(ctx, r.Ranks...)
	}
	if err := cl.Kill(ctx); err != nil {
		return err
	}
	c.forget(r.Cluster)
	return nil
}

func (c *core) roles(ctx context.Context, rt *roles.Runtime, _ runtimeRequest) ([]clusterInfo, error) {
	all, err := rt.Roles(ctx)
	out := make([]clusterInfo, len(all))
	for i, rec := range all {
		out[i] = describe(0, rec, wire.Raw{0xc0})
	}
	return out, err
}

// timeline merges the flight recorders of all roles of the namespace whose workers run.
func (c *core) timeline(ctx context.Context, rt *roles.Runtime, _ runtimeRequest) (string, error) {
	t, err := rt.Timeline(ctx)
	if err != nil {
		return "", err
	}
	return jsonText(t)
}

func jsonText(v any) (string, error) {
	text, err := json.Marshal(v)
	return string(text), err
}

// measuredRequest is series that the program measures.
type measuredRequest struct {
	ofRuntime
	Measured []bus.Measured `msgpack:"measured"`
}

func (c *core) measured(_ context.Context, rt *roles.Runtime, r measuredRequest) error {
	return rt.Bus().PublishMeasured(rt.Namespace(), rt.Session(), r.Measured)
}

// info asks every worker for its Info; see restarting.go.
func (c *core) info(ctx context.Context, cl *cluster, _ clusterRequest) ([]actors.Info, error) {
	return cl.infos(ctx)
}

func (c *core) health(_ context.Context, cl *cluster, _ clusterRequest) ([]actors.Heartbeat, error) {
	return cl.beats(), nil
}

// waitReady waits until no worker of a cluster is being restarted.
func (c *core) waitReady(ctx context.Context, cl *cluster, _ startedRequest) error {
	return cl.WaitReady(ctx)
}

type resizeRequest struct {
	ofCluster
	within
	Replicas int `msgpack:"replicas"`
}

func (c *core) resize(ctx context.Context, cl *cluster, r resizeRequest) error {
	return cl.Resize(ctx, r.Replicas)
}

type (
	changedRequest struct {
		ofCluster
		within
		Epoch uint64 `msgpack:"epoch"`
	}
	replaceRequest struct {
		ofCluster
		within
		Rank   int    `msgpack:"rank"`
		Reason string `msgpack:"reason"`
	}
)

func (c *core) members(ctx context.Context, cl *cluster, _ clusterRequest) (roles.Membership, error) {
	return cl.Members(ctx)
}

// changed waits for a membership of a later epoch.
func (c *core) changed(ctx context.Context, cl *cluster, r changedRequest) (roles.Membership, error) {
	return cl.Changed(ctx, r.Epoch)
}

// replace gives a rank another process.
func (c *core) replace(ctx context.Context, cl *cluster, r replaceRequest) error {
	return cl.Replace(ctx, r.Rank, r.Reason)
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

type assignmentRequest struct {
	ofProcess
	Assignment string `msgpack:"assignment"` // path of the file
}

func (c *core) workerOpen(ctx context.Context, _ *core, r assignmentRequest) (workerInfo, error) {
	values, err := valuesConfig(processEnv)
	if err != nil {
		return workerInfo{}, err
	}
	p, err := roles.OpenWorkerProcess(ctx, roles.WorkerProcessConfig{
		Assignment: r.Assignment, ClassFunc: c.class, LocalClassFunc: c.servedClass, Values: values, Logger: c.log,
	})
	if err != nil {
		return workerInfo{}, err
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

// ofWorker is of requests about the worker of this process.
type ofWorker struct{}

func (ofWorker) find(c *core) (*worker, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.worker == nil {
		return nil, bus.Errorf(bus.CodeInvalid, "this process is not a worker: %s is not set", nodes.AssignmentEnv)
	}
	return c.worker, nil
}

type (
	workerRequest     struct{ ofWorker }
	workerFailRequest struct {
		ofWorker
		Error *bus.Error `msgpack:"error"`
	}
	workerStopRequest struct {
		ofWorker
		Grace float64 `msgpack:"grace"` // seconds
	}
	// rendezvousRequest is for the store of the ranks; with a timeout, a get or check waits.
	rendezvousRequest struct {
		ofWorker
		within
		Verb   rendezvous.Verb `msgpack:"verb"`
		Group  string          `msgpack:"group"`
		Epoch  uint64          `msgpack:"epoch,omitempty"`
		Round  uint64          `msgpack:"round,omitempty"`
		Keys   []string        `msgpack:"keys,omitempty"`
		Values [][]byte        `msgpack:"values,omitempty"`
		Delta  int64           `msgpack:"delta,omitempty"`
		Waits  bool            `msgpack:"waits,omitempty"` // for the keys
	}
)

func (c *core) workerStart(ctx context.Context, w *worker, _ workerRequest) error {
	if err := w.process.Start(ctx); err != nil {
		return err
	}
	spawn(w.follow, func(err error) { c.log.Error("libtroupe: follow the worker", "error", err) })
	return nil
}

// workerFail reports that the worker cannot start.
func (c *core) workerFail(_ context.Context, w *worker, r workerFailRequest) error {
	w.process.Fail(r.Error)
	return nil
}

func (c *core) workerStop(ctx context.Context, w *worker, r workerStopRequest) error {
	if w.process.Worker() == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, seconds(r.Grace))
	defer cancel()
	_ = w.process.Worker().Stop(ctx) // a failure is reported by follow
	return nil
}

// workerClose disconnects. A process that is not a worker has nothing to disconnect.
func (c *core) rendezvous(ctx context.Context, w *worker, r rendezvousRequest) (rendezvous.Answer, error) {
	q := rendezvous.Request{Verb: r.Verb, Group: r.Group, Epoch: r.Epoch, Round: r.Round, Keys: r.Keys, Values: r.Values, Delta: r.Delta}
	if r.Waits {
		q.Wait = rendezvous.MostWait
	}
	return w.process.Rendezvous(ctx, q)
}

func (c *core) workerClose(ctx context.Context, _ *core, _ processRequest) error {
	w, err := ofWorker{}.find(c)
	if err != nil {
		return nil
	}
	c.closeAllWeights()
	return w.process.Close(ctx)
}

type processRequest struct{ ofProcess }
