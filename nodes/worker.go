package nodes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"troupe/bus"
	"troupe/gpu"
	"troupe/nodes/capture"
	"troupe/nodes/proctree"
	"troupe/nodes/protocol"
)

// workersDir is the folder in the run folder with one folder per worker: its assignment, and its working folder if the
// launch sets none.
const workersDir = "workers"

// assignmentFile is the name of the assignment file in the folder of a worker or a spare.
const assignmentFile = "assignment.json"

// termGrace is the time between SIGTERM and SIGKILL.
const termGrace = 2 * time.Second

// worker is one worker process, from the launch until it is forgotten:
//
//	starting ──► running ──► ended ──► gone (its whole tree) ──► forgotten
//	    └──────────────────────────────►  (not started)
type worker struct {
	Start
	node   *localNode
	claim  claim
	launch Launch // without its workers
	marker string
	dir    string // in the run folder
	cgroup string // path of its control group; empty: none
	folder string // hash of its shipped folder, to be given back; owned by start, then by supervise

	siblings int // other workers that its launch starts with it; set before start

	stopCh    chan struct{} // closed when a stop is requested
	startedCh chan struct{} // closed when it runs, or failed to start
	endedCh   chan struct{} // closed when its process has exited, with exit set
	goneCh    chan struct{} // closed when its process tree is gone, or survives SIGKILL

	// outMu guards the output.
	outMu sync.Mutex
	last  tail
	// lastError is the last line on stderr that is not blank.
	lastError string
	seq       uint64
	log       logFile
	limit     lineLimit
	dying     []OutputItem // the last lines on stderr, for the driver

	feed      *outputFeed   // of the role's output to its driver; nil: none
	exitingCh chan struct{} // closed when its process has exited and its output is read to the end

	// mu guards what follows.
	mu             sync.Mutex
	process        process // set before startedCh is closed, unless err is
	since          time.Time
	out            *capture.Capture
	err            *bus.Error // why it was not started
	exit           *Exit
	survivors      []int // processes that survive SIGKILL
	stopping       bool  // a stop was requested
	why            string
	killAt         time.Time
	confirmed      bool // its exit was returned to a stop request
	publishAgainAt time.Time
	publishAgainIn time.Duration
}

func newWorker(s *localNode, l Launch, start Start, identity string) *worker {
	marker, cfg := identity+"."+bus.NewID(), &s.agent.cfg
	w := &worker{
		Start: start, node: s, launch: l, marker: marker, dir: s.agent.workerDir(marker), stopCh: make(chan struct{}),
		startedCh: make(chan struct{}), endedCh: make(chan struct{}), goneCh: make(chan struct{}), exitingCh: make(chan struct{}),
	}
	w.log = logFile{path: logPath(cfg.LogDir, start.ID), limit: cfg.LogFile, failedFunc: func(err error) { s.agent.logFailed(w, err) }}
	return w
}

// refuse ends a worker that is not started.
func (w *worker) refuse(err error) {
	e := bus.AsError(err)
	e.Node = w.node.name
	w.mu.Lock()
	w.err, w.since = e, time.Now()
	w.dropBuffersLocked()
	w.mu.Unlock()
	close(w.startedCh)
	close(w.endedCh)
	close(w.goneCh)
	wake(w.node.runningCh)
}

// start starts the process. The goroutine of the launch calls it once.
func (w *worker) start() {
	if err := w.spawn(); err != nil {
		w.cleanUp()
		w.refuse(err)
		return
	}
	close(w.startedCh)
}

func (w *worker) spawn() error {
	w.mu.Lock()
	asked := w.stopping
	w.mu.Unlock()
	if asked {
		return bus.Errorf(bus.CodeCancelled, "worker %s was stopped before it was started", w.ID)
	}
	p, err := w.prepare()
	if err != nil {
		return err
	}
	feed := w.node.agent.feeds.get(w.ID.Address(), w.launch)
	w.outMu.Lock()
	w.feed = feed
	w.outMu.Unlock()
	out, err := capture.New(w.node.agent.pipes, w.sink(Stdout), w.sink(Stderr), w.flushLog)
	if err != nil {
		return bus.Errorf(bus.CodeUnavailable, "worker %s: make a pipe for its output: %w", w.ID, err)
	}
	p.stdout, p.stderr = out.Stdout, out.Stderr
	child, err := w.startInCgroup(p)
	out.CloseWriteEnds()
	if err != nil {
		out.Close()
		if errors.Is(err, errStopped) {
			return bus.Errorf(bus.CodeCancelled, "worker %s was stopped before it was started", w.ID)
		}
		return startError(w, p, err)
	}
	w.mu.Lock()
	w.process, w.since, w.out = child, time.Now(), out
	w.mu.Unlock()
	w.node.agent.ports.workerStarted(w.ID.Address())
	if feed != nil {
		feed.join()
	}
	w.node.agent.spares.keep(w, p)
	w.node.agent.group.Go(bus.Guard(func() { w.supervise(child, out) }))
	return nil
}

// startInCgroup starts the process in a control group of its own, where the system permits it.
func (w *worker) startInCgroup(p processSpec) (process, error) {
	one := w.node.agent.spares.take(w)
	var server *forkServer
	if one == nil {
		var err error
		if server, err = w.forkServer(p); err != nil {
			return process{}, err
		}
	}
	path, folder := w.node.agent.cgroups.Make(w.marker)
	if folder == nil {
		return w.startProcess(one, server, p)
	}
	defer func() { _ = folder.Close() }()
	grouped := p
	grouped.cgroup = int(folder.Fd())
	child, err := w.startProcess(one, server, grouped)
	if err == nil {
		w.cgroup = path
		return child, nil
	}
	proctree.RemoveCgroup(path)
	return w.startProcess(nil, server, p) // without a group; if the group was not the cause, this returns the error
}

// forkServer is the fork server of the worker, which is ready; nil: the worker is started by its command. The only error is
// that the worker was stopped.
func (w *worker) forkServer(p processSpec) (*forkServer, error) {
	server := w.node.agent.forkServers.find(w, p)
	if server == nil {
		return nil, nil
	}
	select {
	case <-server.readyCh:
	case <-w.stopCh:
		return nil, errStopped
	}
	if server.err != nil {
		server.told.Do(func() { w.reportNoFork(server.err) })
		return nil, nil
	}
	return server, nil
}

// startProcess makes a spare the process, or forks it from the fork server, if there is one, or starts its command.
func (w *worker) startProcess(one *spare, server *forkServer, p processSpec) (process, error) {
	if one != nil {
		child, err := w.node.agent.spares.become(one, p)
		if err == nil {
			return child, nil
		}
		w.node.agent.cfg.Logger.Warn("nodes: a spare could not take a worker over, which is started instead", "worker", w.ID.String(), "error", err)
	}
	if server != nil {
		child, err := w.node.agent.forkServers.fork(server, p)
		if err == nil || p.cgroup >= 0 && errors.Is(err, errCannotFork) {
			return child, err
		}
		server.told.Do(func() { w.reportNoFork(err) })
	}
	return w.node.agent.spawner.start(p)
}

// reportNoFork says why the worker is not forked, in its output if its role asked for warm modules.
func (w *worker) reportNoFork(err error) {
	if len(w.launch.Program.Warm) == 0 {
		w.node.agent.cfg.Logger.Debug("nodes: a worker is started and not forked", "worker", w.ID.String(), "error", err)
		return
	}
	w.addLines(Stderr, []string{fmt.Sprintf("troupe: the worker is started without warm modules: %v", err)})
}

func startError(w *worker, p processSpec, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return bus.Errorf(bus.CodeNotFound, "worker %s: start %s in %s: %w; the program, or the interpreter in its first line, does not exist", w.ID, p.path, p.dir, err)
	}
	return bus.Errorf(bus.CodeUnavailable, "worker %s: start %s in %s: %w", w.ID, p.path, p.dir, err)
}

// prepare makes the worker's folder, assignment file and environment.
func (w *worker) prepare() (processSpec, error) {
	cfg := &w.node.agent.cfg
	p := processSpec{dir: w.launch.Program.Dir, cgroup: -1}
	if folder := w.launch.Program.Folder; folder != "" {
		path, err := w.node.agent.folders.Acquire(folder)
		if err != nil {
			return p, fmt.Errorf("worker %s: node %s: %w", w.ID, w.node.name, err)
		}
		w.folder, p.dir = folder, path
	}
	if p.dir == "" {
		p.dir = filepath.Join(w.dir, "work")
		if err := os.MkdirAll(p.dir, 0o700); err != nil {
			return p, bus.Errorf(bus.CodeUnavailable, "worker %s: make its folder: %w", w.ID, err)
		}
	} else if info, err := os.Stat(p.dir); err != nil || !info.IsDir() {
		return p, bus.Errorf(bus.CodeNotFound, "worker %s: folder %s does not exist on node %s", w.ID, p.dir, w.node.name)
	}
	path, err := w.writeAssignment()
	if err != nil {
		return p, bus.Errorf(bus.CodeUnavailable, "worker %s: write its assignment: %w", w.ID, err)
	}
	added, own := map[string]string{}, w.launch.Program.OwnVariables
	if !own {
		if added, err = w.node.deviceVariables(w.Devices, w.launch.Program.Visible); err != nil {
			return p, fmt.Errorf("worker %s: %w", w.ID, err)
		}
	}
	added[proctree.MarkerEnv], added[AssignmentEnv] = w.marker, path
	if use := w.simUse(); use != "" {
		added[gpu.SimUseEnv] = use
	}
	if p.env, err = environment(os.Environ(), w.launch.Program.Env, w.Env, added, own); err != nil {
		return p, fmt.Errorf("worker %s: %w", w.ID, err)
	}
	p.argv = w.launch.Program.Command
	if len(p.argv) == 0 {
		p.argv = cfg.Program
	}
	if p.path, err = locate(p.argv[0], p.dir, p.env); err != nil {
		return p, fmt.Errorf("worker %s: node %s: %w", w.ID, w.node.name, err)
	}
	return p, nil
}

// simUse is the claim of a worker on simulated devices.
func (w *worker) simUse() string {
	if _, sim := w.node.devices.(*gpu.Sim); !sim || len(w.Devices) == 0 || w.node.agent.cfg.SimClaims == "" {
		return ""
	}
	use := gpu.SimUse{Dir: w.node.agent.cfg.SimClaims, Key: w.claim.root(), Holder: fmt.Sprintf("%s (reservation %s)", w.ID, w.claim.Reservation)}
	for _, uuid := range w.Devices {
		use.Devices = append(use.Devices, gpu.SimShare{UUID: uuid, Milli: w.claim.Share})
	}
	return strings.TrimPrefix(use.Env(), gpu.SimUseEnv+"=")
}

// writeAssignment writes the assignment file and returns its path.
func (w *worker) writeAssignment() (string, error) {
	access := w.node.agent.cfg.Access
	file := AssignmentFile{
		Node: w.node.name, Name: w.Name, URLs: access.URLs, TokenFile: access.TokenFile, CredsFile: access.CredsFile,
		CAFile: access.CAFile, Fingerprint: access.Fingerprint, Assignment: w.Assignment,
	}
	credential := bus.Credential{Kind: bus.WorkerCredential, Namespace: w.ID.Namespace}
	if team := w.launch.Credential; team != "" {
		credential = bus.ForWorker(team, w.ID.Namespace)
	}
	switch {
	case w.Token != "":
		file.TokenFile, file.CredsFile, file.Token = "", "", w.Token
	case w.node.agent.cfg.ConfineWorkers || w.launch.Credential != "":
		var err error
		file.TokenFile, file.CredsFile = "", ""
		if file.Token, _, err = w.node.agent.cfg.Bus.IssueCredential(credential); err != nil {
			return "", err
		}
	}
	data, err := json.Marshal(file)
	if err != nil {
		return "", err
	}
	path := filepath.Join(w.dir, assignmentFile)
	if err := os.MkdirAll(w.dir, 0o700); err != nil {
		return "", err
	}
	return path, WritePrivate(path, data)
}

// sink takes what the worker prints on a stream.
func (w *worker) sink(stream OutputStream) capture.Sink {
	s := capture.Sink{Lines: func(lines []string) { w.addLines(stream, lines) }}
	if w.feed != nil && w.feed.mode == OutputRaw {
		s.Raw = func(p []byte) { w.addRaw(stream, p) }
	}
	return s
}

// addLines receives lines of output, from the goroutine of their pipe.
func (w *worker) addLines(stream OutputStream, texts []string) {
	w.outMu.Lock()
	defer w.outMu.Unlock()
	now, first := time.Now().UTC(), w.seq+1
	w.seq += uint64(len(texts))
	for _, text := range texts {
		w.last.add(text)
		if stream == Stderr && strings.TrimSpace(text) != "" {
			w.lastError = text
		}
	}
	w.log.add(now, w.ID.Rank, stream, texts)
	w.node.agent.uploader.add(w, stream, now, first, texts)
	if w.feed == nil || w.feed.mode == OutputRaw {
		return
	}
	rate := w.feed.lineRate()
	for i, text := range texts {
		w.feedLineLocked(stream, now, first+uint64(i), text, rate)
	}
}

// feedLineLocked sends a line to the driver, if its mode and the limit admit it.
func (w *worker) feedLineLocked(stream OutputStream, at time.Time, seq uint64, text string, rate float64) {
	item := OutputItem{Rank: w.ID.Rank, Gen: w.ID.Gen, Stream: stream, Seq: seq}
	if stream == Stderr {
		item.Data = []byte(text)
		w.dying = append(w.dying, item)
		w.dying = w.dying[max(0, len(w.dying)-dyingLines):]
	}
	if w.feed.mode == OutputNone || w.feed.mode == OutputErrors && stream != Stderr {
		return
	}
	ok, omitted := w.limit.admit(at, rate)
	if !ok {
		return
	}
	item.Data, item.LeftOut = []byte(text), omitted
	if !w.feed.add(item) {
		w.limit.omitted += omitted + 1
	}
}

// addRaw sends output to the driver as it is, and blocks while the driver has no room.
func (w *worker) addRaw(stream OutputStream, p []byte) {
	w.feed.addWaiting(OutputItem{Rank: w.ID.Rank, Gen: w.ID.Gen, Stream: stream, Data: slices.Clone(p)}, w.exitingCh)
}

// feedLeftOut tells the driver how many lines were left out.
func (w *worker) feedLeftOut() {
	w.outMu.Lock()
	defer w.outMu.Unlock()
	if w.feed == nil || w.limit.omitted == 0 {
		return
	}
	if w.feed.add(OutputItem{Rank: w.ID.Rank, Gen: w.ID.Gen, Stream: Stderr, LeftOut: w.limit.omitted}) {
		w.limit.omitted = 0
	}
}

// feedEnd sends the last lines of a worker that died to the driver, and the end of its output.
func (w *worker) feedEnd(died bool) {
	if w.feed == nil { // set before the process was started
		return
	}
	w.feedLeftOut()
	w.outMu.Lock()
	defer w.outMu.Unlock()
	if died {
		for _, item := range w.dying {
			item.Dying = true
			w.feed.addLast(item)
		}
	}
	w.dying = nil
	w.feed.addLast(OutputItem{Rank: w.ID.Rank, Gen: w.ID.Gen, Stream: Stdout, End: true})
	w.feed.leave()
}

// flushLog flushes the log file, from the same goroutines.
func (w *worker) flushLog() {
	w.outMu.Lock()
	defer w.outMu.Unlock()
	w.log.flush()
}

// flush returns when the agent has read what the worker has printed so far.
func (w *worker) flush(ctx context.Context) error {
	w.mu.Lock()
	out := w.out
	w.mu.Unlock()
	if out == nil {
		return nil
	}
	return out.Flush(ctx)
}

// supervise waits for the exit of the process, publishes it at once, and then kills the rest of its tree.
func (w *worker) supervise(child process, out *capture.Capture) {
	end, err := child.await()
	if err != nil {
		w.node.agent.cfg.Logger.Error("nodes: waiting for a worker process failed", "worker", w.ID.String(), "pid", child.pid, "error", err)
		end = exitStatus{code: -1}
	}
	close(w.exitingCh)
	out.ProcessExited()
	w.ended(child, end)
	child.signalGroup(syscall.SIGKILL)
	left := w.node.agent.treeKiller.Kill(w.marker, child.pid, w.cgroup)
	w.mu.Lock()
	since := w.since
	w.mu.Unlock()
	if err := removeSharedFiles(child.pid, since); err != nil {
		w.node.agent.cfg.Logger.Warn("nodes: removing files of shared memory that CUDA or torch left failed", "worker", w.ID.String(), "error", err)
	}
	child.reap()
	proctree.RemoveCgroup(w.cgroup)
	out.Close()
	w.outMu.Lock()
	w.log.close()
	w.outMu.Unlock()
	w.cleanUp()
	w.mu.Lock()
	w.survivors = left
	w.dropBuffersLocked()
	w.mu.Unlock()
	close(w.goneCh)
	wake(w.node.runningCh)
	w.node.agent.workerGone(w)
}

// dropBuffersLocked drops what only a running worker needs. Thousands of exited workers are remembered for minutes: their
// environment, assignment, pipes and buffers may be large.
func (w *worker) dropBuffersLocked() {
	w.launch.Program, w.Env, w.Assignment, w.Token, w.out = Program{}, nil, nil, "", nil
}

// cleanUp removes the worker's folders.
func (w *worker) cleanUp() {
	if err := os.RemoveAll(w.dir); err != nil {
		w.node.agent.cfg.Logger.Warn("nodes: removing a worker's folder failed", "worker", w.ID.String(), "error", err)
	}
	if w.folder != "" {
		w.node.agent.folders.Release(w.folder)
	}
}

// ended records the exit and publishes it.
func (w *worker) ended(child process, end exitStatus) {
	w.outMu.Lock()
	last, lastError := append([]string(nil), w.last.lines...), w.lastError
	w.outMu.Unlock()
	oom := w.oomKilled(child.pid, end)
	w.mu.Lock()
	exit := Exit{
		ID: w.ID, Name: w.Name, Node: w.node.name, PID: child.pid, Devices: w.Devices, Code: end.code, Asked: w.stopping && w.why == "", Why: w.why,
		OOM: oom, Last: last, LastError: lastError, At: time.Now().UTC(),
	}
	if end.code < 0 {
		exit.Signal = signalName(end.signal)
	}
	w.exit = &exit
	w.publishAgainIn = time.Second
	w.publishAgainAt = time.Now().Add(w.publishAgainIn)
	w.mu.Unlock()
	w.feedEnd(!exit.Asked)
	w.node.agent.publishExit(exit)
	if report := w.node.agent.cfg.ExitFunc; report != nil {
		report(w.ID)
	}
	close(w.endedCh)
	if !exit.Asked {
		w.node.agent.emit(Event{
			Kind: protocol.EventWorkerExit, Namespace: w.ID.Namespace, Role: w.ID.Role, Rank: &w.ID.Rank, Node: w.node.name,
			Text: exit.Describe(), Details: exit.AsError().Details,
		})
	}
}

// oomKilled reports whether the kernel says that the OOM killer killed the process.
func (w *worker) oomKilled(pid int, end exitStatus) bool {
	if end.signal != syscall.SIGKILL {
		return false
	}
	if oom, known := proctree.OOMKilled(w.cgroup); known {
		return oom
	}
	return w.node.agent.kernel.killedForMemory(pid)
}

// started is the outcome of the start. It is called after startedCh is closed.
func (w *worker) started() Started {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := Started{ID: w.ID, PID: w.process.pid, Err: w.err}
	if w.exit != nil {
		s.Err = w.exit.AsError()
	}
	return s
}

// status is the current state of the worker.
func (w *worker) status() Status {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := Status{ID: w.ID, Name: w.Name, Node: w.node.name, PID: w.process.pid, Devices: w.Devices, Reservation: w.launch.Reservation, Token: w.launch.Token}
	if w.exit != nil {
		e := *w.exit
		s.Exit, s.For = &e, e.At.Sub(w.since)
	} else if !w.since.IsZero() {
		s.For = time.Since(w.since)
	}
	return s
}

// stop starts to stop the worker. A repeated call only takes effect if its deadline is earlier. why is empty on request
// of the driver; the first call decides.
func (w *worker) stop(grace time.Duration, why string) {
	at := time.Now().Add(grace)
	w.mu.Lock()
	first := !w.stopping
	sooner := first || at.Before(w.killAt)
	if first {
		w.why = why
		close(w.stopCh)
	}
	if sooner {
		w.stopping, w.killAt = true, at
	}
	w.mu.Unlock()
	if sooner {
		w.node.agent.group.Go(bus.Guard(func() { w.signalUntilExit(first, grace) }))
	}
}

// signalUntilExit sends the signals. A frozen worker handles SIGINT and SIGTERM when it continues.
func (w *worker) signalUntilExit(first bool, grace time.Duration) {
	<-w.startedCh
	w.mu.Lock()
	child, failed := w.process, w.err != nil
	w.mu.Unlock()
	if failed {
		return
	}
	if grace > 0 {
		if first && !w.signal(child.signal, syscall.SIGINT) || w.endsWithin(grace) {
			return
		}
		if !w.signal(child.signalGroup, syscall.SIGTERM) || w.endsWithin(min(grace, termGrace)) {
			return
		}
	}
	w.signal(child.signalGroup, syscall.SIGKILL) // supervise kills processes that left the group
}

// signal sends a signal unless the process has exited, which it reports.
func (w *worker) signal(send func(syscall.Signal), s syscall.Signal) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.exit != nil {
		return false
	}
	send(s)
	return true
}

func (w *worker) endsWithin(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-w.endedCh:
		return true
	case <-t.C:
		return false
	}
}

// stopped is the answer to a stop request; it is called after goneCh is closed.
func (w *worker) stopped() (Exit, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.confirmed = true
	switch {
	case len(w.survivors) > 0:
		return Exit{}, bus.Errorf(bus.CodeInternal, "processes %v of worker %s survive SIGKILL", w.survivors, w.ID)
	case w.exit == nil:
		return Exit{ID: w.ID, Name: w.Name, Node: w.node.name, Code: -1, Asked: true, Unknown: true, At: time.Now().UTC()}, nil
	}
	return *w.exit, nil
}

// running reports whether processes of the worker may exist.
func (w *worker) running() bool {
	select {
	case <-w.goneCh:
		return false
	default:
		return true
	}
}

// is reports whether a process is the worker's own child process.
func (w *worker) is(pid int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.process.pid == pid
}

// signalName is "SIGKILL" rather than "killed".
func signalName(s syscall.Signal) string {
	for name, value := range signals {
		if value == s {
			return name
		}
	}
	return fmt.Sprintf("signal %d", int(s))
}

var signals = map[string]syscall.Signal{
	"SIGHUP": syscall.SIGHUP, "SIGINT": syscall.SIGINT, "SIGQUIT": syscall.SIGQUIT, "SIGILL": syscall.SIGILL, "SIGTRAP": syscall.SIGTRAP,
	"SIGABRT": syscall.SIGABRT, "SIGBUS": syscall.SIGBUS, "SIGFPE": syscall.SIGFPE, "SIGKILL": syscall.SIGKILL, "SIGUSR1": syscall.SIGUSR1,
	"SIGSEGV": syscall.SIGSEGV, "SIGUSR2": syscall.SIGUSR2, "SIGPIPE": syscall.SIGPIPE, "SIGALRM": syscall.SIGALRM, "SIGTERM": syscall.SIGTERM,
	"SIGXCPU": syscall.SIGXCPU, "SIGXFSZ": syscall.SIGXFSZ, "SIGSYS": syscall.SIGSYS,
}
