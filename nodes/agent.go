package nodes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/nodes/capture"
	"troupe/nodes/folders"
	"troupe/nodes/proctree"
	"troupe/nodes/protocol"
)

const (
	rememberExits    = 10 * time.Minute       // how long an exit is remembered
	exitsMost        = 4096                   // and how many exits
	publishAgainMost = 30 * time.Second       // the longest interval between two publications of an exit that no driver has confirmed
	maintenanceEvery = 250 * time.Millisecond // interval of maintenance
	pruneEvery       = time.Minute            // interval of pruning the log folder
	killTimeout      = 20 * time.Second       // how long the end of the agent waits for workers that survive SIGKILL
)

// Agent runs on one machine: it reports the machine's nodes, starts and stops worker processes on them, and publishes
// their exits.
type Agent struct {
	cfg   AgentConfig
	since time.Time // of its start

	// Set by Run before any goroutine starts, and constant afterwards.
	identity    string
	forkServers *forkServers
	spares      *spares
	spawner     *spawner
	treeKiller  *proctree.Killer
	uploader    *logUploader
	pipes       *capture.Poller
	feeds       *outputFeeds
	cgroups     proctree.Cgroups
	kernel      *kernelLog
	nodes       []*localNode
	ports       portLeases
	folders     *folders.Cache
	exchange    *values.Exchange
	debuggers   debugSessionsOf
	group       sync.WaitGroup // the goroutines of workers and requests

	// mu guards what follows.
	mu      sync.Mutex
	closing bool // no more workers
	closed  bool // no more requests
}

// NewAgent makes the agent that cfg describes. It does nothing before Run.
func NewAgent(cfg AgentConfig) (*Agent, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if len(cfg.Program) == 0 {
		self, err := os.Executable()
		if err != nil {
			return nil, bus.Errorf(bus.CodeInternal, "nodes.AgentConfig: Program is not set, and the path of this executable is unknown: %w", err)
		}
		cfg.Program = []string{self, "worker"}
	}
	a := &Agent{cfg: cfg, since: time.Now().UTC()}
	for _, node := range cfg.Nodes {
		s, err := newLocalNode(a, node)
		if err != nil {
			return nil, err
		}
		a.nodes = append(a.nodes, s)
	}
	return a, nil
}

// Run runs the agent until ctx ends, which is no error: then it refuses new workers, stops the running ones and gives
// up its nodes. First it kills the processes that an earlier agent of the same folder left.
func (a *Agent) Run(ctx context.Context) (err error) {
	removeDir, err := a.cfg.makeDirs()
	if err != nil {
		return err
	}
	defer removeDir()
	unlock, identity, err := lockDir(a.cfg.Dir)
	if err != nil {
		return err
	}
	defer unlock()
	a.identity, a.cgroups, a.kernel = identity, proctree.OpenCgroups(identity), openKernelLog()
	defer a.kernel.close()
	defer a.cgroups.Remove()
	if err := a.killOrphans(); err != nil {
		return err
	}
	a.exchange = values.NewExchange(a.cfg.Bus, bus.NodesNamespace)
	a.folders = folders.NewCache(a.cfg.Bus, filepath.Join(a.cfg.Dir, foldersDir))
	if a.pipes, err = capture.NewPoller(); err != nil {
		return bus.Errorf(bus.CodeUnavailable, "watch the output of workers: %w", err)
	}
	defer a.pipes.Close()
	a.spawner, a.treeKiller, a.uploader = newSpawner(), proctree.NewKiller(), newLogUploader(a.cfg.Bus)
	a.feeds, a.forkServers = newOutputFeeds(a.cfg.Bus), newForkServers(a, a.cfg.ForkIdle)
	a.spares = newSpares(a)
	defer a.uploader.close()
	defer a.feeds.close()
	defer a.debuggers.expire(time.Now(), true)
	defer a.treeKiller.Close()
	defer a.spawner.close()
	if a.cfg.OwnProcess {
		defer a.reapOrphans()()
	}
	defer a.ports.releaseAll()
	a.pruneLogs()
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	failedCh := make(chan error, 3*len(a.nodes)) // every goroutine can send without blocking
	var reporters sync.WaitGroup
	for _, s := range a.nodes {
		if err := s.begin(ctx, run, &reporters, failedCh); err != nil {
			failedCh <- err
			break
		}
	}
	reporters.Go(bus.Guard(func() { a.callReady(run) }))
	err = a.maintain(ctx, failedCh)
	why := "the agent of its node was stopped"
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		why = cause.Error()
	}
	a.stopWorkers(why)
	a.spares.close()
	a.forkServers.close()
	stop() // only now: no worker is left on the nodes
	reporters.Wait()
	for _, s := range a.nodes {
		s.close()
	}
	a.mu.Lock()
	a.closed = true
	a.mu.Unlock()
	a.exchange.Close() // ends requests that are being pulled
	a.group.Wait()
	return ended(ctx, err)
}

// callReady calls ReadyFunc when all nodes are registered, which lasts while another agent holds a name.
func (a *Agent) callReady(run context.Context) {
	for _, s := range a.nodes {
		select {
		case <-s.servingCh:
		case <-run.Done():
			return
		}
	}
	if a.cfg.ReadyFunc != nil {
		a.cfg.ReadyFunc()
	}
}

// foldersDir is the folder in the run folder with the shipped folders.
const foldersDir = "folders"

// killOrphans kills the processes and removes the files that an earlier agent of this folder left.
func (a *Agent) killOrphans() error {
	a.cgroups.Clear()
	mine := func(marker string) bool { return strings.HasPrefix(marker, a.identity+".") }
	if left := proctree.KillMarked(mine, proctree.SurvivorTimeout); len(left) > 0 {
		return bus.Errorf(bus.CodeInternal, "processes of an earlier agent survive SIGKILL: %v", left)
	}
	old, err := filepath.Glob(filepath.Join(a.cfg.Dir, workersDir, "*"))
	for _, dir := range append(old, filepath.Join(a.cfg.Dir, foldersDir)) {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	return err
}

// reapOrphans reaps orphaned descendants of workers until the returned function is called.
func (a *Agent) reapOrphans() (stop func()) {
	if err := becomeSubreaper(); err != nil {
		a.cfg.Logger.Warn("nodes: orphaned processes of workers are reaped by init", "error", err)
	}
	stopCh, doneCh := make(chan struct{}), make(chan struct{})
	bus.Go(func() {
		defer close(doneCh)
		reapAdopted(a.awaits, maintenanceEvery, stopCh)
	})
	return func() { close(stopCh); <-doneCh }
}

// awaits reports whether a process is a child that other goroutines wait for. While a worker is being started its pid is unknown,
// so that every pid counts.
func (a *Agent) awaits(pid int) bool {
	for _, s := range a.nodes {
		if s.awaits(pid) {
			return true
		}
	}
	return a.forkServers.awaits(pid) || a.spares.awaits(pid)
}

// workerDir is the folder of a worker, or of a fork server, in the run folder.
func (a *Agent) workerDir(marker string) string { return filepath.Join(a.cfg.Dir, workersDir, marker) }

// own reports whether a process belongs to the process tree of a worker.
func (a *Agent) own(pid int) bool { return strings.HasPrefix(proctree.MarkerOf(pid), a.identity+".") }

// maintain does the periodic maintenance until ctx ends or a part of the agent fails.
func (a *Agent) maintain(ctx context.Context, failedCh <-chan error) error {
	tick, tidy := time.NewTicker(maintenanceEvery), time.NewTicker(pruneEvery)
	defer tick.Stop()
	defer tidy.Stop()
	connected := true
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-failedCh:
			return err
		case <-tidy.C:
			a.pruneLogs()
		case <-tick.C:
			back := !connected
			connected = a.cfg.Bus.Connected()
			for _, s := range a.nodes {
				if back && connected {
					s.repeatExits()
				}
				s.maintain(time.Now())
			}
			hosted := a.hostedRoles()
			a.ports.expire(time.Now(), hosted)
			a.feeds.forget(hosted)
			a.debuggers.expire(time.Now(), false)
			a.forkServers.maintain(time.Now())
			a.spares.maintain(time.Now())
		}
	}
}

// stopWorkers refuses new workers and stops the running ones.
func (a *Agent) stopWorkers(why string) {
	a.mu.Lock()
	a.closing = true
	a.mu.Unlock()
	var all []*worker
	for _, s := range a.nodes {
		all = append(all, s.all()...)
	}
	for _, w := range all {
		w.stop(a.cfg.Grace, why)
	}
	late := time.After(a.cfg.Grace + termGrace + killTimeout)
	for _, w := range all {
		select {
		case <-w.goneCh:
		case <-late:
			a.cfg.Logger.Error("nodes: a worker survives SIGKILL", "worker", w.ID.String())
		}
	}
}

func (a *Agent) isClosing() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.closing
}

// pruneLogs keeps the log folder within its limit.
func (a *Agent) pruneLogs() {
	busy := map[string]bool{}
	for _, s := range a.nodes {
		for _, w := range s.all() {
			if w.running() {
				busy[w.log.path] = true
			}
		}
	}
	if err := pruneLogs(a.cfg.LogDir, a.cfg.LogTotal, func(path string) bool { return busy[path] }); err != nil {
		a.cfg.Logger.Warn("nodes: pruning the log folder failed", "folder", a.cfg.LogDir, "error", err)
	}
}

// logFailed reports that lines of a worker's output are lost; the worker continues.
func (a *Agent) logFailed(w *worker, err error) {
	a.cfg.Logger.Error("nodes: writing a worker's log file failed", "worker", w.ID.String(), "error", err)
	a.emit(Event{
		Kind: protocol.EventLogsFailed, Namespace: w.ID.Namespace, Role: w.ID.Role, Rank: &w.ID.Rank, Node: w.node.name,
		Text: fmt.Sprintf("writing its output to %s failed; the worker continues: %v", w.log.path, err),
	})
}

// emit publishes an event, and drops it when that fails.
func (a *Agent) emit(e Event) {
	if err := Emit(a.cfg.Bus, e); err != nil {
		a.cfg.Logger.Debug("nodes: publishing an event failed", "kind", e.Kind, "error", err)
	}
}

// spawn runs f in a goroutine that Run waits for, unless Run has ended.
func (a *Agent) spawn(f func()) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.closed {
		a.group.Go(bus.Guard(f))
	}
	return !a.closed
}

// publishExit publishes an exit. A lost message is repeated by maintain.
func (a *Agent) publishExit(e Exit) {
	data, err := wire.Marshal(e)
	if err == nil {
		err = a.cfg.Bus.Publish(e.ID.Address().Exit(), data)
	}
	if err != nil {
		a.cfg.Logger.Debug("nodes: publishing an exit failed; it is repeated", "worker", e.ID.String(), "error", err)
	}
}

// workerGone releases the ports of a role that was stopped on request, with its last worker.
func (a *Agent) workerGone(w *worker) {
	role := w.ID.Address()
	if a.hosts(role) {
		return
	}
	w.mu.Lock()
	asked, why := w.stopping, w.why
	w.mu.Unlock()
	a.spares.workerGone(role, asked && why == "")
	if asked {
		a.ports.release(role)
		if a.hosts(role) { // a worker was started meanwhile, for a restart of the role
			a.ports.workerStarted(role)
		}
	}
}

// hosts reports whether a worker of the role may be running.
func (a *Agent) hosts(role bus.Address) bool {
	return slices.ContainsFunc(a.nodes, func(s *localNode) bool { return s.hosts(role) })
}

// hostedRoles is the roles with a running worker.
func (a *Agent) hostedRoles() map[bus.Address]bool {
	roles := map[bus.Address]bool{}
	for _, s := range a.nodes {
		for _, w := range s.all() {
			if w.running() {
				roles[w.ID.Address()] = true
			}
		}
	}
	return roles
}

// serve answers one request.
func (a *Agent) serve(s *localNode, m *bus.Msg) {
	data, err := a.answerTo(s, m)
	if err == nil {
		err = a.exchange.Respond(m, data)
	}
	if err != nil && bus.CodeOf(err) != bus.CodeUnavailable {
		data, _ = wire.Marshal(failed(fmt.Errorf("node %s: %w", s.name, err))) // an error reply always fits
		err = a.cfg.Bus.Respond(m, data)
	}
	if err != nil {
		a.cfg.Logger.Debug("nodes: sending an answer failed; the client repeats its request", "node", s.name, "error", err)
	}
}

// answerTo is the encoded answer to a request, which is pulled if it is long.
func (a *Agent) answerTo(s *localNode, m *bus.Msg) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), askLimit)
	defer cancel()
	data, err := a.exchange.Read(ctx, m)
	if err != nil {
		return nil, err
	}
	var req request
	if err := wire.Unmarshal(data, &req); err != nil {
		return wire.Marshal(failed(bus.Errorf(bus.CodeMalformed, "node %s: the request is malformed: %w", s.name, err)))
	}
	return wire.Marshal(a.answer(s, req))
}

func (a *Agent) answer(s *localNode, req request) reply {
	if err := req.check(); err != nil {
		return failed(err)
	}
	switch {
	case req.Op == opLaunch && req.Launch != nil:
		return s.launch(*req.Launch)
	case req.Op == opStop && req.Stop != nil:
		return s.stop(*req.Stop)
	case req.Op == opWorkers:
		return s.workersReply(req)
	case req.Op == opPorts && req.Ports != nil:
		return a.leasePorts(*req.Ports)
	case req.Op == opFlush && req.Role != nil:
		return s.flush(*req.Role)
	case req.Op == opHost:
		return reply{HostInfo: a.hostInfo()}
	case req.Op == opInspect && req.Inspect != nil && req.Role != nil:
		return s.inspect(*req.Role, *req.Inspect)
	case req.Op == opDebug && req.Debug != nil && req.Role != nil:
		return s.debug(*req.Role, *req.Debug)
	}
	return failed(bus.Errorf(bus.CodeVersion, "node %s: the agent does not support %q; it may be older than the client: upgrade it", s.name, req.Op))
}

func (a *Agent) leasePorts(ask portsRequest) reply {
	if a.isClosing() {
		return failed(errClosing)
	}
	ports, err := a.ports.acquire(ask.Holder, ask.N)
	if err != nil {
		return failed(err)
	}
	return reply{Host: a.cfg.Host, Ports: ports}
}

var errClosing = bus.Errorf(bus.CodeUnavailable, "the agent is stopping and starts no more workers")
