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

	"github.com/nats-io/nats.go"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/nodes/protocol"
)

const (
	keepEnded  = 10 * time.Minute       // how long an exit is remembered
	endedMost  = 4096                   // and how many of them
	tellMost   = 30 * time.Second       // between two tellings of an exit that nobody has asked about
	housework  = 250 * time.Millisecond // between two looks at what is to be told or forgotten
	tidyEvery  = time.Minute            // between two looks at how much is in the log folder
	endingMost = 20 * time.Second       // for what does not die when the agent ends
)

// Agent is the Troupe process of one machine: it reports its nodes, starts and ends worker processes on them, and says
// how they ended.
type Agent struct {
	cfg AgentConfig

	// What Run makes before anything else runs, and leaves as it is.
	identity string
	spawner  *spawner
	sweeper  *sweeper
	shipper  *shipper
	cgroups  cgroups
	kernel   *kernelLog
	sites    []*site
	leases   leases
	folders  folders
	parcels  parcels
	group    sync.WaitGroup // the goroutines of workers and requests

	// mu guards what follows.
	mu      sync.Mutex
	closing bool // no more workers
	closed  bool // no more requests
}

// NewAgent is an agent as cfg says. It does nothing before Run.
func NewAgent(cfg AgentConfig) (*Agent, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if len(cfg.Program) == 0 {
		self, err := os.Executable()
		if err != nil {
			return nil, bus.Errorf(bus.CodeInternal, "nodes.AgentConfig: Program is not set, and this program does not know where it is: %w", err)
		}
		cfg.Program = []string{self, "worker"}
	}
	a := &Agent{cfg: cfg}
	for _, node := range cfg.Nodes {
		s, err := newSite(a, node)
		if err != nil {
			return nil, err
		}
		a.sites = append(a.sites, s)
	}
	return a, nil
}

// Run is the agent until ctx ends, which is no error: then it takes no more workers, ends those it has, and leaves. It
// begins by ending what an earlier agent of the same folder left behind.
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
	a.identity, a.cgroups, a.kernel = identity, openCgroups(identity), openKernelLog()
	defer a.kernel.close()
	defer a.cgroups.remove()
	if err := a.clear(); err != nil {
		return err
	}
	a.folders.b, a.folders.dir = a.cfg.Bus, filepath.Join(a.cfg.Dir, foldersDir)
	a.spawner, a.sweeper, a.shipper = newSpawner(), newSweeper(), newShipper(a.cfg.Bus)
	defer a.shipper.close()
	defer a.sweeper.close()
	defer a.spawner.close()
	if a.cfg.OwnProcess {
		defer a.adopt()()
	}
	defer a.leases.releaseAll()
	a.tidyLogs()
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	failedCh := make(chan error, 3*len(a.sites)) // room for all, so that nobody waits
	var reporters sync.WaitGroup
	for _, s := range a.sites {
		if err := s.begin(ctx, run, &reporters, failedCh); err != nil {
			failedCh <- err
			break
		}
	}
	reporters.Go(bus.Guard(func() { a.tellReady(run) }))
	err = a.await(ctx, failedCh)
	a.end()
	stop() // only now: nothing of the nodes is left
	reporters.Wait()
	for _, s := range a.sites {
		s.close()
	}
	a.mu.Lock()
	a.closed = true
	a.mu.Unlock()
	a.group.Wait()
	return ended(ctx, err)
}

// tellReady says that the nodes are registered, once all of them are: another agent may hold a name for a while.
func (a *Agent) tellReady(run context.Context) {
	for _, s := range a.sites {
		select {
		case <-s.servedCh:
		case <-run.Done():
			return
		}
	}
	if a.cfg.ReadyFunc != nil {
		a.cfg.ReadyFunc()
	}
}

// clear ends what an earlier agent of this folder left.
func (a *Agent) clear() error {
	a.cgroups.clear()
	mine := func(marker string) bool { return strings.HasPrefix(marker, a.identity+".") }
	if left := killMarked(mine, sweepMost); len(left) > 0 {
		return bus.Errorf(bus.CodeInternal, "processes of an earlier agent cannot be killed: %v", left)
	}
	old, err := filepath.Glob(filepath.Join(a.cfg.Dir, workersDir, "*"))
	for _, dir := range append(old, filepath.Join(a.cfg.Dir, foldersDir)) {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	return err
}

// adopt reaps what workers leave, until the returned function is called.
func (a *Agent) adopt() (stop func()) {
	if err := adopt(); err != nil {
		a.cfg.Logger.Warn("nodes: what workers leave behind is reaped by the system", "error", err)
	}
	stopCh, doneCh := make(chan struct{}), make(chan struct{})
	bus.Go(func() {
		defer close(doneCh)
		reapAdopted(a.awaits, housework, stopCh)
	})
	return func() { close(stopCh); <-doneCh }
}

// awaits reports whether a process is a worker's own. One that is just being started counts, because it is not known yet.
func (a *Agent) awaits(pid int) bool {
	for _, s := range a.sites {
		if s.awaits(pid) {
			return true
		}
	}
	return false
}

// own reports whether a process is of a worker's tree.
func (a *Agent) own(pid int) bool { return strings.HasPrefix(markerOf(pid), a.identity+".") }

// await keeps house until ctx ends or a part of the agent does.
func (a *Agent) await(ctx context.Context, failedCh <-chan error) error {
	tick, tidy := time.NewTicker(housework), time.NewTicker(tidyEvery)
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
			a.tidyLogs()
		case <-tick.C:
			back := !connected
			connected = a.cfg.Bus.Conn().IsConnected()
			for _, s := range a.sites {
				if back && connected {
					s.tellSoon()
				}
				s.keepHouse(time.Now())
			}
			a.leases.tidy(time.Now(), a.playing())
		}
	}
}

// end refuses new workers and ends those that there are.
func (a *Agent) end() {
	a.mu.Lock()
	a.closing = true
	a.mu.Unlock()
	var all []*worker
	for _, s := range a.sites {
		all = append(all, s.all()...)
	}
	for _, w := range all {
		w.stop(a.cfg.Grace, "the agent of its node was ended")
	}
	late := time.After(a.cfg.Grace + termGrace + endingMost)
	for _, w := range all {
		select {
		case <-w.goneCh:
		case <-late:
			a.cfg.Logger.Error("nodes: a worker does not end", "worker", w.ID.String())
		}
	}
}

func (a *Agent) isClosing() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.closing
}

// tidyLogs keeps the log folder within its bound.
func (a *Agent) tidyLogs() {
	busy := map[string]bool{}
	for _, s := range a.sites {
		for _, w := range s.all() {
			if w.running() {
				busy[w.log.path] = true
			}
		}
	}
	if err := pruneLogs(a.cfg.LogDir, a.cfg.LogTotal, func(path string) bool { return busy[path] }); err != nil {
		a.cfg.Logger.Warn("nodes: old logs cannot be removed", "folder", a.cfg.LogDir, "error", err)
	}
}

// logFailed says that a worker's lines are lost; the worker goes on.
func (a *Agent) logFailed(w *worker, err error) {
	a.cfg.Logger.Error("nodes: the output of a worker cannot be written down", "worker", w.ID.String(), "error", err)
	a.emit(Event{
		Kind: protocol.EventLogsFailed, Namespace: w.ID.Namespace, Role: w.ID.Role, Rank: &w.ID.Rank, Node: w.site.name,
		Text: fmt.Sprintf("its output cannot be written to %s; it goes on: %v", w.log.path, err),
	})
}

// emit tells of an event, if it can be.
func (a *Agent) emit(e Event) {
	if err := Emit(a.cfg.Bus, e); err != nil {
		a.cfg.Logger.Debug("nodes: an event is lost", "kind", e.Kind, "error", err)
	}
}

// goes runs f unless the agent has ended.
func (a *Agent) goes(f func()) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.closed {
		a.group.Go(bus.Guard(f))
	}
	return !a.closed
}

// tell publishes an exit. One that is lost is told again.
func (a *Agent) tell(e Exit) {
	data, err := wire.Marshal(e)
	if err == nil {
		err = a.cfg.Bus.Conn().Publish(e.ID.Address().Exit(), data)
	}
	if err != nil {
		a.cfg.Logger.Debug("nodes: an exit could not be told yet", "worker", e.ID.String(), "error", err)
	}
}

// workerGone returns the ports of a role that was stopped, with its last worker.
func (a *Agent) workerGone(w *worker) {
	role := w.ID.Address()
	if a.plays(role) {
		return
	}
	w.mu.Lock()
	asked := w.asked
	w.mu.Unlock()
	if asked {
		a.leases.release(role)
	}
}

// plays reports whether a worker of the role may be running.
func (a *Agent) plays(role bus.Address) bool {
	return slices.ContainsFunc(a.sites, func(s *site) bool { return s.plays(role) })
}

// playing are the roles that have a worker here.
func (a *Agent) playing() map[bus.Address]bool {
	roles := map[bus.Address]bool{}
	for _, s := range a.sites {
		for _, w := range s.all() {
			if w.running() {
				roles[w.ID.Address()] = true
			}
		}
	}
	return roles
}

// serve answers one message.
func (a *Agent) serve(s *site, m *nats.Msg) {
	var req request
	var r reply
	if err := wire.Unmarshal(m.Data, &req); err != nil {
		r = failed(bus.Errorf(bus.CodeMalformed, "node %s: a request that cannot be read: %w", s.name, err))
	} else {
		r = a.answer(s, req)
	}
	data, err := wire.Marshal(r)
	if part := partOf(a.cfg.Bus); err == nil && len(data) > part {
		var first parcel
		if first, err = a.parcels.keep(data, part, time.Now()); err == nil {
			data, err = wire.Marshal(reply{Parcel: &first})
		}
	}
	if err != nil {
		data, _ = wire.Marshal(failed(fmt.Errorf("node %s: %w", s.name, err))) // an error can be said
	}
	if err := m.Respond(data); err != nil {
		a.cfg.Logger.Debug("nodes: an answer is lost; it will be asked for again", "node", s.name, "error", err)
	}
}

func (a *Agent) answer(s *site, req request) reply {
	switch {
	case req.Op == opLaunch && req.Launch != nil:
		return s.launch(*req.Launch)
	case req.Op == opStop && req.Stop != nil:
		return s.stop(*req.Stop)
	case req.Op == opWorkers:
		return s.workersReply(req)
	case req.Op == opPorts && req.Ports != nil:
		return a.ports(*req.Ports)
	case req.Op == opFlush && req.Role != nil:
		return s.flush(*req.Role)
	case req.Op == opPart && req.Parcel != nil:
		return a.part(s, *req.Parcel)
	case req.Op == opRest && req.Parcel != nil:
		p, err := a.parcels.rest(*req.Parcel, partOf(a.cfg.Bus), time.Now())
		if err != nil {
			return failed(err)
		}
		return reply{Parcel: &p}
	}
	return failed(bus.Errorf(bus.CodeVersion, "node %s: its agent does not know %q; it may be older than the asker", s.name, req.Op))
}

// part takes in a part of a request, and with the last one carries it out.
func (a *Agent) part(s *site, ask parcelAsk) reply {
	whole, have, err := a.parcels.add(ask, time.Now())
	switch {
	case err != nil:
		return failed(err)
	case whole == nil:
		return reply{Parcel: &parcel{ID: ask.ID, Have: have, Total: ask.Total}}
	}
	var req request
	if err := wire.Unmarshal(whole, &req); err != nil || req.Op == opPart {
		return failed(bus.Errorf(bus.CodeMalformed, "node %s: a request that cannot be read: %w", s.name, err))
	}
	return a.answer(s, req)
}

func (a *Agent) ports(ask portsAsk) reply {
	if err := ask.Holder.check(); err != nil {
		return failed(err)
	}
	if a.isClosing() {
		return failed(errClosing)
	}
	ports, err := a.leases.take(ask.Holder, ask.N)
	if err != nil {
		return failed(err)
	}
	return reply{Host: a.cfg.Host, Ports: ports}
}

var errClosing = bus.Errorf(bus.CodeUnavailable, "the agent is ending and starts nothing more")
