package nodes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/nats-io/nuid"

	"troupe/bus"
	"troupe/gpu"
	"troupe/nodes/protocol"
)

// workersDir is the part of the run folder that has a folder for each worker: its assignment, and its own folder to run in
// if it was given none.
const workersDir = "workers"

// termGrace is how long a worker that has not ended by INT may take to end by TERM.
const termGrace = 2 * time.Second

// worker is one worker process, from the request to start it until it is forgotten:
//
//	starting ──► running ──► ended ──► gone (its whole tree) ──► forgotten
//	    └──────────────────────────────►  (it could not be started)
type worker struct {
	Start
	site   *site
	claim  claim
	launch Launch // without its workers
	marker string
	dir    string // in the run folder
	cgroup string // its control group, if it has one
	folder string // shipped, and to be given back; of start and then of supervise

	startedCh chan struct{} // closed when it runs, or will not
	endedCh   chan struct{} // closed when its process has ended, with exit set
	goneCh    chan struct{} // closed when nothing of it is left, or could not be killed

	// outMu guards what is printed.
	outMu sync.Mutex
	last  tail
	seq   uint64
	log   logFile

	// mu guards what follows.
	mu      sync.Mutex
	process process // once startedCh is closed without an error
	since   time.Time
	out     *capture
	err     *bus.Error // it was not started
	exit    *Exit
	left    []int // processes that could not be killed
	asked   bool  // somebody wants it to end
	why     string
	killAt  time.Time
	told    bool // its exit has been answered to who stopped it
	tellAt  time.Time
	telling time.Duration
}

func newWorker(s *site, l Launch, start Start, identity string) *worker {
	marker, cfg := identity+"."+nuid.Next(), &s.agent.cfg
	w := &worker{
		Start: start, site: s, launch: l, marker: marker, dir: filepath.Join(cfg.Dir, workersDir, marker),
		startedCh: make(chan struct{}), endedCh: make(chan struct{}), goneCh: make(chan struct{}),
	}
	w.log = logFile{path: logPath(cfg.LogDir, start.ID), most: cfg.LogFile, failedFunc: func(err error) { s.agent.logFailed(w, err) }}
	return w
}

// refused is a worker that is not started.
func (w *worker) refuse(err error) {
	e := bus.AsError(err)
	e.Node = w.site.name
	w.mu.Lock()
	w.err, w.since = e, time.Now()
	w.shedLocked()
	w.mu.Unlock()
	close(w.startedCh)
	close(w.endedCh)
	close(w.goneCh)
	wake(w.site.ranCh)
}

// start starts the process. It is called once, by the goroutine of the launch.
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
	asked := w.asked
	w.mu.Unlock()
	if asked {
		return bus.Errorf(bus.CodeCancelled, "worker %s was stopped before it was started", w.ID)
	}
	p, err := w.prepare()
	if err != nil {
		return err
	}
	out, err := newCapture(w.print, w.printed)
	if err != nil {
		return bus.Errorf(bus.CodeUnavailable, "worker %s: a pipe for its output: %w", w.ID, err)
	}
	p.stdout, p.stderr = out.stdout, out.stderr
	child, err := w.startIn(p)
	out.started()
	if err != nil {
		out.close()
		return startError(w, p, err)
	}
	w.mu.Lock()
	w.process, w.since, w.out = child, time.Now(), out
	w.mu.Unlock()
	w.site.agent.leases.using(w.ID.Address())
	w.site.agent.group.Go(bus.Guard(func() { w.supervise(child, out) }))
	return nil
}

// startIn starts the process in a control group of its own, or without one where that is not to be had.
func (w *worker) startIn(p program) (process, error) {
	path, folder := w.site.agent.cgroups.make(w.marker)
	if folder == nil {
		return w.site.agent.spawner.start(p)
	}
	defer func() { _ = folder.Close() }() // only a number
	grouped := p
	grouped.cgroup = int(folder.Fd())
	child, err := w.site.agent.spawner.start(grouped)
	if err == nil {
		w.cgroup = path
		return child, nil
	}
	removeCgroup(path)
	return w.site.agent.spawner.start(p) // the reason may be the group; if not, this says it
}

func startError(w *worker, p program, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return bus.Errorf(bus.CodeNotFound, "worker %s: start %s in %s: %w; it, or the interpreter in its first line, is not there", w.ID, p.path, p.dir, err)
	}
	return bus.Errorf(bus.CodeUnavailable, "worker %s: start %s in %s: %w", w.ID, p.path, p.dir, err)
}

// prepare makes the worker's folder, its assignment and its environment.
func (w *worker) prepare() (program, error) {
	cfg := &w.site.agent.cfg
	p := program{dir: w.launch.Program.Dir, cgroup: -1}
	if folder := w.launch.Program.Folder; folder != "" {
		path, err := w.site.agent.folders.take(folder)
		if err != nil {
			return p, fmt.Errorf("worker %s: node %s: %w", w.ID, w.site.name, err)
		}
		w.folder, p.dir = folder, path
	}
	if p.dir == "" {
		p.dir = filepath.Join(w.dir, "work")
		if err := os.MkdirAll(p.dir, 0o700); err != nil {
			return p, bus.Errorf(bus.CodeUnavailable, "worker %s: make its folder: %w", w.ID, err)
		}
	} else if info, err := os.Stat(p.dir); err != nil || !info.IsDir() {
		return p, bus.Errorf(bus.CodeNotFound, "worker %s: there is no folder %s on node %s", w.ID, p.dir, w.site.name)
	}
	path, err := w.assign()
	if err != nil {
		return p, bus.Errorf(bus.CodeUnavailable, "worker %s: write its assignment: %w", w.ID, err)
	}
	added, err := w.site.deviceVariables(w.Devices, w.launch.Program.Visible)
	if err != nil {
		return p, fmt.Errorf("worker %s: %w", w.ID, err)
	}
	added[MarkerEnv], added[AssignmentEnv] = w.marker, path
	if use := w.simUse(); use != "" {
		added[gpu.SimUseEnv] = use
	}
	if p.env, err = environment(os.Environ(), w.launch.Program.Env, w.Env, added); err != nil {
		return p, fmt.Errorf("worker %s: %w", w.ID, err)
	}
	p.argv = w.launch.Program.Command
	if len(p.argv) == 0 {
		p.argv = cfg.Program
	}
	if p.path, err = locate(p.argv[0], p.dir, p.env); err != nil {
		return p, fmt.Errorf("worker %s: node %s: %w", w.ID, w.site.name, err)
	}
	return p, nil
}

// simUse is what a worker with simulated devices is to claim of them.
func (w *worker) simUse() string {
	if _, sim := w.site.devices.(*gpu.Sim); !sim || len(w.Devices) == 0 || w.site.agent.cfg.SimClaims == "" {
		return ""
	}
	use := gpu.SimUse{Dir: w.site.agent.cfg.SimClaims, Key: w.claim.root(), Holder: fmt.Sprintf("%s (reservation %s)", w.ID, w.claim.Reservation)}
	for _, uuid := range w.Devices {
		use.Devices = append(use.Devices, gpu.SimShare{UUID: uuid, Milli: w.claim.Share})
	}
	return strings.TrimPrefix(use.Env(), gpu.SimUseEnv+"=")
}

// assign writes the assignment and says where it is.
func (w *worker) assign() (string, error) {
	access := w.site.agent.cfg.Access
	data, err := json.Marshal(Assigned{
		Node: w.site.name, Name: w.Name, URLs: access.URLs, TokenFile: access.TokenFile, CredsFile: access.CredsFile,
		CAFile: access.CAFile, Fingerprint: access.Fingerprint, Assignment: w.Assignment,
	})
	if err != nil {
		return "", err
	}
	path := filepath.Join(w.dir, "assignment.json")
	if err := os.MkdirAll(w.dir, 0o700); err != nil {
		return "", err
	}
	return path, WritePrivate(path, data)
}

// print takes a line of output, from the goroutine of its stream.
func (w *worker) print(stream Stream, text string) {
	w.outMu.Lock()
	defer w.outMu.Unlock()
	w.seq++
	w.last.add(text)
	l := Line{ID: w.ID, Name: w.Name, Node: w.site.name, Stream: stream, At: time.Now().UTC(), Seq: w.seq, Text: text}
	w.log.add(l)
	w.site.agent.shipper.add(l)
}

// printed writes the lines down, from the same goroutines.
func (w *worker) printed() {
	w.outMu.Lock()
	defer w.outMu.Unlock()
	w.log.flush()
}

// flush returns when what the worker has printed so far has been taken in.
func (w *worker) flush(ctx context.Context) error {
	w.mu.Lock()
	out := w.out
	w.mu.Unlock()
	if out == nil {
		return nil
	}
	return out.flush(ctx)
}

// supervise waits for the end of the process, tells of it at once, and then ends what is left of its tree.
func (w *worker) supervise(child process, out *capture) {
	end, err := child.await()
	if err != nil {
		w.site.agent.cfg.Logger.Error("nodes: a worker's end cannot be awaited", "worker", w.ID.String(), "pid", child.pid, "error", err)
		end = ending{code: -1}
	}
	out.died()
	w.ended(child, end)
	child.signalGroup(syscall.SIGKILL)
	left := w.site.agent.sweeper.sweep(w.marker, child.pid, w.cgroup)
	child.reap()
	removeCgroup(w.cgroup)
	out.close()
	w.outMu.Lock()
	w.log.close()
	w.outMu.Unlock()
	w.cleanUp()
	w.mu.Lock()
	w.left = left
	w.shedLocked()
	w.mu.Unlock()
	close(w.goneCh)
	wake(w.site.ranCh)
	w.site.agent.workerGone(w)
}

// shedLocked drops what only a worker that runs needs. A worker that has ended is remembered for minutes, with thousands of
// others: what its driver sent for it (environment, assignment) may be large, and its pipes and buffers are.
func (w *worker) shedLocked() {
	w.launch.Program, w.Env, w.Assignment, w.out = Program{}, nil, nil, nil
}

// cleanUp removes what was made for the worker, as much of it as there is.
func (w *worker) cleanUp() {
	if err := os.RemoveAll(w.dir); err != nil {
		w.site.agent.cfg.Logger.Warn("nodes: a worker's folder cannot be removed", "worker", w.ID.String(), "error", err)
	}
	if w.folder != "" {
		w.site.agent.folders.giveBack(w.folder)
	}
}

// ended records the exit and tells of it.
func (w *worker) ended(child process, end ending) {
	w.outMu.Lock()
	last := append([]string(nil), w.last.lines...)
	w.outMu.Unlock()
	oom := w.oomKilled(child.pid, end)
	w.mu.Lock()
	exit := Exit{
		ID: w.ID, Name: w.Name, Node: w.site.name, PID: child.pid, Devices: w.Devices, Code: end.code, Asked: w.asked && w.why == "", Why: w.why,
		OOM: oom, Last: last, At: time.Now().UTC(),
	}
	if end.code < 0 {
		exit.Signal = signalName(end.signal)
	}
	w.exit = &exit
	w.telling = time.Second
	w.tellAt = time.Now().Add(w.telling)
	w.mu.Unlock()
	w.site.agent.tell(exit)
	close(w.endedCh)
	if !exit.Asked {
		w.site.agent.emit(Event{
			Kind: protocol.EventWorkerExit, Namespace: w.ID.Namespace, Role: w.ID.Role, Rank: &w.ID.Rank, Node: w.site.name,
			Text: exit.Words(), Details: exit.AsError().Details,
		})
	}
}

// oomKilled reports whether the kernel says that it killed the process for want of memory. Nothing is guessed.
func (w *worker) oomKilled(pid int, end ending) bool {
	if end.signal != syscall.SIGKILL {
		return false
	}
	if oom, known := cgroupOOM(w.cgroup); known {
		return oom
	}
	return w.site.agent.kernel.killedForMemory(pid)
}

// started is the answer to whoever asked for it. It is called when startedCh is closed.
func (w *worker) started() Started {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := Started{ID: w.ID, PID: w.process.pid, Err: w.err}
	if w.exit != nil {
		s.Err = w.exit.AsError()
	}
	return s
}

// status is the worker as it is.
func (w *worker) status() Status {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := Status{ID: w.ID, Name: w.Name, Node: w.site.name, PID: w.process.pid, Devices: w.Devices, Reservation: w.launch.Reservation, Token: w.launch.Token}
	if w.exit != nil {
		e := *w.exit
		s.Exit, s.For = &e, e.At.Sub(w.since)
	} else if !w.since.IsZero() {
		s.For = time.Since(w.since)
	}
	return s
}

// stop begins to end the worker, within the grace and a little more. To ask again changes something only if it is to end
// sooner. why is empty if its driver wants it: whoever asks first is who ended it.
func (w *worker) stop(grace time.Duration, why string) {
	at := time.Now().Add(grace)
	w.mu.Lock()
	first := !w.asked
	sooner := first || at.Before(w.killAt)
	if first {
		w.why = why
	}
	if sooner {
		w.asked, w.killAt = true, at
	}
	w.mu.Unlock()
	if sooner {
		w.site.agent.group.Go(bus.Guard(func() { w.end(first, grace) }))
	}
}

// end sends the signals. A worker that is frozen gets them when it goes on, except for the last.
func (w *worker) end(first bool, grace time.Duration) {
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
	w.signal(child.signalGroup, syscall.SIGKILL) // supervise ends what has left the group
}

// signal sends a signal while the process is surely there, or reports that it has ended.
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

// stopped is the answer to who stopped it; it is called when goneCh is closed.
func (w *worker) stopped() (Exit, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.told = true
	switch {
	case len(w.left) > 0:
		return Exit{}, bus.Errorf(bus.CodeInternal, "processes %v of worker %s cannot be killed", w.left, w.ID)
	case w.exit == nil:
		return Exit{ID: w.ID, Name: w.Name, Node: w.site.name, Code: -1, Asked: true, Unknown: true, At: time.Now().UTC()}, nil
	}
	return *w.exit, nil
}

// running reports whether something of the worker may be there.
func (w *worker) running() bool {
	select {
	case <-w.goneCh:
		return false
	default:
		return true
	}
}

// is reports whether a process is the worker's own, the one that is awaited.
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
