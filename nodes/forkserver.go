package nodes

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"troupe/bus"
	"troupe/nodes/capture"
	"troupe/nodes/proctree"
)

// ForkServerArg, as the only argument after Program.Command, makes a program that supports Program.Fork a fork server: it
// reads one JSON message from the socket at descriptor 3 ({"modules": […], "path": […]}), answers {} or {"unfit": "why"}, and
// then forks one worker for each message with the descriptors of a channel, stdout, stderr and, if there is one, the control
// group. The worker is a child of the agent (CLONE_PARENT). It writes {"pid": n} to its channel, and reads its environment and
// folder from there, up to the end of file.
const ForkServerArg = "--fork-server"

const (
	forkServersMost = 8                // of one agent
	forkTimeout     = 20 * time.Second // for one fork
	warmTimeout     = 2 * time.Minute  // for the imports of a fork server
	warmOutput      = 2 * time.Second  // for the last lines that the imports print
	unfitFor        = time.Minute      // how long a program whose fork server failed is started without one
	knownMost       = 256              // programs that are remembered
	environmentRoom = 4 << 10          // bytes for a worker's own variables in the memory that /proc/PID/environ shows
)

// lateVariables differ between the workers of one fork server, which does not have them itself.
var lateVariables = slices.Concat(reservedVariables, deviceNames, []string{
	"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "CLUSTER_NAME", "WORKER_NAME",
})

// forkServers is the fork servers of an agent, one for each program with its environment and folder.
type forkServers struct {
	agent *Agent
	idle  time.Duration

	// mu guards what follows.
	mu     sync.Mutex
	closed bool
	usable map[string]*forkServer // by key
	all    map[*forkServer]bool   // until they are reaped
	known  map[string]knownProgram
}

// knownProgram is a program for which a worker was started without a fork server.
type knownProgram struct {
	at    time.Time
	unfit bool // its fork server failed
}

// forkServer is one process that forks workers.
type forkServer struct {
	key       string
	marker    string
	dir       string        // of its own; empty: none
	folder    string        // hash of its shipped folder, to be given back
	startedCh chan struct{} // closed when process is set, or the start failed
	readyCh   chan struct{} // closed when workers can be forked, or err is set
	goneCh    chan struct{} // closed when its process is reaped

	process process // set before startedCh is closed, unless err is
	conn    *net.UnixConn
	err     error // set before readyCh is closed
	told    sync.Once

	// mu guards what follows, and writes to conn.
	mu     sync.Mutex
	reaped bool
	usedAt time.Time
}

func newForkServers(a *Agent, idle time.Duration) *forkServers {
	return &forkServers{agent: a, idle: idle, usable: map[string]*forkServer{}, all: map[*forkServer]bool{}, known: map[string]knownProgram{}}
}

// find returns the fork server for a worker, which may not be ready yet; nil: the worker is started by its command. One is
// started if the program has modules to import, or for the second worker of a program: it takes about as long as one worker.
func (f *forkServers) find(w *worker, p processSpec) *forkServer {
	program := w.launch.Program
	if !program.Fork && len(program.Warm) == 0 {
		return nil
	}
	for name := range w.Env {
		if !slices.Contains(lateVariables, name) {
			return nil // its environment must be set before the interpreter starts, and no other worker has the same
		}
	}
	env := slices.DeleteFunc(slices.Clone(p.env), func(entry string) bool {
		name, _, _ := strings.Cut(entry, "=")
		return slices.Contains(lateVariables, name)
	})
	key, now := forkKey(p, program, env), time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	if s := f.usable[key]; s != nil {
		s.touch(now)
		return s
	}
	known, ok := f.known[key]
	if f.closed || known.unfit && now.Sub(known.at) < unfitFor {
		return nil
	}
	if f.rememberLocked(key, knownProgram{at: now}); len(program.Warm) == 0 && !ok && w.siblings == 0 {
		return nil
	}
	f.makeRoomLocked()
	s := &forkServer{
		key: key, marker: f.agent.identity + "." + bus.NewID(), startedCh: make(chan struct{}), readyCh: make(chan struct{}), goneCh: make(chan struct{}), usedAt: now,
	}
	f.usable[key], f.all[s] = s, true
	f.agent.group.Go(bus.Guard(func() { f.run(s, w, p, env) }))
	return s
}

// forkKey is the same for workers that can be forked from one process.
func forkKey(p processSpec, program Program, env []string) string {
	data, _ := json.Marshal([]any{p.path, p.argv, program.Dir, program.Folder, env, program.Warm, program.WarmPath}) // only texts
	sum := sha256.Sum256(data)
	return string(sum[:])
}

func (f *forkServers) rememberLocked(key string, k knownProgram) {
	if f.known[key] = k; len(f.known) <= knownMost {
		return
	}
	oldest := key
	for key, k := range f.known {
		if k.at.Before(f.known[oldest].at) {
			oldest = key
		}
	}
	delete(f.known, oldest)
}

// makeRoomLocked ends the fork server that was not used for longest, if there are many.
func (f *forkServers) makeRoomLocked() {
	if len(f.usable) < forkServersMost {
		return
	}
	var oldest *forkServer
	for _, s := range f.usable {
		if oldest == nil || s.lastUse().Before(oldest.lastUse()) {
			oldest = s
		}
	}
	f.endLocked(oldest)
}

// endLocked ends a fork server; its workers continue.
func (f *forkServers) endLocked(s *forkServer) {
	if f.usable[s.key] == s {
		delete(f.usable, s.key)
	}
	f.agent.group.Go(bus.Guard(s.kill))
}

// maintain ends fork servers that have not been used for long.
func (f *forkServers) maintain(now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.usable {
		if closed(s.readyCh) && now.Sub(s.lastUse()) > f.idle {
			f.endLocked(s)
		}
	}
}

// close ends all fork servers and waits until they are reaped.
func (f *forkServers) close() {
	f.mu.Lock()
	f.closed = true
	var all []*forkServer
	for s := range f.all {
		all = append(all, s)
		f.endLocked(s)
	}
	f.mu.Unlock()
	late := time.After(killTimeout)
	for _, s := range all {
		select {
		case <-s.goneCh:
		case <-late:
			f.agent.cfg.Logger.Error("nodes: a fork server survives SIGKILL", "pid", s.process.pid)
		}
	}
}

// awaits reports whether a process is a fork server, or may be one that is being started.
func (f *forkServers) awaits(pid int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for s := range f.all {
		if !closed(s.startedCh) || s.process.pid == pid {
			return true
		}
	}
	return false
}

// run runs a fork server from start to end. Until it is ready its output is that of w, which waits for it.
func (f *forkServers) run(s *forkServer, w *worker, p processSpec, env []string) {
	out, err := f.start(s, w, p, env)
	close(s.startedCh)
	if err == nil {
		err = s.load(w.launch.Program)
		ctx, cancel := context.WithTimeout(context.Background(), warmOutput)
		_ = out.Flush(ctx) // best effort: the lines come before those of the worker
		cancel()
		if err != nil {
			s.kill()
		}
	}
	s.err = err
	s.touch(time.Now())
	f.mu.Lock()
	if err != nil {
		delete(f.usable, s.key)
		f.rememberLocked(s.key, knownProgram{at: time.Now(), unfit: true})
	}
	f.mu.Unlock()
	close(s.readyCh)
	if s.process.pid != 0 {
		f.supervise(s, out)
	}
	if s.folder != "" {
		f.agent.folders.Release(s.folder)
	}
	if s.dir != "" {
		_ = os.RemoveAll(s.dir) // the next agent of this folder tries again
	}
	f.mu.Lock()
	if f.usable[s.key] == s {
		delete(f.usable, s.key)
	}
	delete(f.all, s)
	f.mu.Unlock()
	close(s.goneCh)
}

// start starts the process.
func (f *forkServers) start(s *forkServer, w *worker, p processSpec, env []string) (*capture.Capture, error) {
	switch program := w.launch.Program; {
	case program.Folder != "":
		if _, err := f.agent.folders.Acquire(program.Folder); err != nil {
			return nil, err
		}
		s.folder = program.Folder
	case program.Dir == "":
		s.dir = f.agent.workerDir(s.marker)
		if err := os.MkdirAll(s.dir, 0o700); err != nil {
			return nil, err
		}
		p.dir = s.dir
	}
	conn, theirs, err := socketPair(syscall.SOCK_SEQPACKET)
	if err != nil {
		return nil, err
	}
	defer func() { _ = theirs.Close() }()
	out, err := capture.New(f.agent.pipes, s.sink(w, Stdout), s.sink(w, Stderr), func() {})
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	p.argv = append(slices.Clone(p.argv), ForkServerArg)
	p.env = append(slices.Clone(env), proctree.MarkerEnv+"="+s.marker, "TROUPE_FORK_ROOM="+strings.Repeat("x", environmentRoom))
	p.stdout, p.stderr, p.control, p.cgroup = out.Stdout, out.Stderr, theirs, -1
	child, err := f.agent.spawner.start(p)
	out.CloseWriteEnds()
	if err != nil {
		_ = conn.Close()
		out.Close()
		return nil, err
	}
	s.process, s.conn = child, conn
	return out, nil
}

// sink takes what the imports print as output of the worker that waits for them.
func (s *forkServer) sink(w *worker, stream OutputStream) capture.Sink {
	of := w.sink(stream)
	waits := func() bool { return !closed(s.readyCh) && !closed(w.endedCh) }
	sink := capture.Sink{Lines: func(lines []string) {
		if waits() {
			of.Lines(lines)
		}
	}}
	if of.Raw != nil {
		sink.Raw = func(p []byte) {
			if waits() {
				of.Raw(p)
			}
		}
	}
	return sink
}

// load has the modules imported.
func (s *forkServer) load(program Program) error {
	data, err := json.Marshal(map[string][]string{"modules": program.Warm, "path": program.WarmPath})
	if err != nil {
		return err
	}
	if err := s.conn.SetDeadline(time.Now().Add(warmTimeout)); err != nil {
		return err
	}
	if _, err := s.conn.Write(data); err != nil {
		return fmt.Errorf("the fork server ended: %w", err)
	}
	buf := make([]byte, 64<<10)
	n, err := s.conn.Read(buf)
	if err != nil || n == 0 {
		return fmt.Errorf("the fork server ended, or took longer than %v: %w", warmTimeout, err)
	}
	var answer struct{ Unfit string }
	if err := json.Unmarshal(buf[:n], &answer); err != nil {
		return err
	}
	if answer.Unfit != "" {
		return errors.New(answer.Unfit)
	}
	return nil
}

// supervise waits for the end of the process, and kills what its imports have started.
func (f *forkServers) supervise(s *forkServer, out *capture.Capture) {
	_, err := s.process.await()
	if err != nil {
		f.agent.cfg.Logger.Error("nodes: waiting for a fork server failed", "pid", s.process.pid, "error", err)
	}
	f.mu.Lock()
	if f.usable[s.key] == s {
		delete(f.usable, s.key)
	}
	f.mu.Unlock()
	s.process.signalGroup(syscall.SIGKILL)
	if left := f.agent.treeKiller.Kill(s.marker, s.process.pid, ""); len(left) > 0 {
		f.agent.cfg.Logger.Error("nodes: processes of a fork server survive SIGKILL", "pids", left)
	}
	s.mu.Lock()
	_ = s.conn.Close()
	s.process.reap()
	s.reaped = true
	s.mu.Unlock()
	out.Close()
}

// kill kills the process. Its workers continue.
func (s *forkServer) kill() {
	<-s.startedCh // exec has a result
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process.pid != 0 && !s.reaped {
		s.process.signalGroup(syscall.SIGKILL)
	}
}

func (s *forkServer) touch(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.usedAt = now
}

func (s *forkServer) lastUse() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.usedAt
}

// fork starts a worker from a server that is ready. After an error it can be started by its command, or after errCannotFork
// without its control group.
func (f *forkServers) fork(s *forkServer, p processSpec) (process, error) {
	s.touch(time.Now())
	channel, theirs, err := socketPair(syscall.SOCK_STREAM)
	if err != nil {
		return process{}, err
	}
	err = s.send(p, theirs)
	_ = theirs.Close()
	if err != nil {
		_ = channel.Close()
		return process{}, err
	}
	_ = channel.SetDeadline(time.Now().Add(forkTimeout)) // fails only on a closed connection, as the next line does
	pid, err := readPID(channel)
	if err != nil {
		if p.cgroup < 0 || !errors.Is(err, errCannotFork) {
			f.failed(s, err)
		}
		bus.Go(func() { reapLate(channel) })
		return process{}, err
	}
	defer func() { _ = channel.Close() }() // the worker reads up to here
	data, err := json.Marshal(map[string]any{"env": lateOf(p.env), "dir": p.dir})
	if err == nil {
		_, err = channel.Write(data)
	}
	if err != nil {
		_ = syscall.Kill(pid, syscall.SIGKILL) // its end is seen as that of any worker
	}
	return openProcess(pid), nil
}

// failed ends a fork server after an error.
func (f *forkServers) failed(s *forkServer, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.endLocked(s); errors.Is(err, errCannotFork) {
		f.rememberLocked(s.key, knownProgram{at: time.Now(), unfit: true})
	}
}

var (
	errStopped    = errors.New("the worker was stopped before it was started")
	errCannotFork = errors.New("the fork failed")
)

// send sends the descriptors of a worker.
func (s *forkServer) send(p processSpec, channel *os.File) error {
	fds := []int{int(channel.Fd()), int(p.stdout.Fd()), int(p.stderr.Fd())}
	if p.cgroup >= 0 {
		fds = append(fds, p.cgroup)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.conn.SetDeadline(time.Now().Add(forkTimeout)) // fails only on a closed connection, as the next line does
	_, _, err := s.conn.WriteMsgUnix([]byte{1}, syscall.UnixRights(fds...), nil)
	return err
}

// readPID reads the pid of a new worker from its channel.
func readPID(channel *net.UnixConn) (int, error) {
	line, err := bufio.NewReader(channel).ReadBytes('\n')
	if err != nil {
		return 0, fmt.Errorf("the fork server ended: %w", err)
	}
	var answer struct {
		PID   int
		Stale string
		Error string
	}
	switch err := json.Unmarshal(line, &answer); {
	case err != nil:
		return 0, err
	case answer.Error != "":
		return 0, fmt.Errorf("%w: %s", errCannotFork, answer.Error)
	case answer.Stale != "":
		return 0, fmt.Errorf("%s has changed since the fork server read it", answer.Stale)
	}
	return answer.PID, nil
}

// reapLate reaps a worker that comes after the agent has given it up: it finds its channel closed for writing, and exits.
func reapLate(channel *net.UnixConn) {
	defer func() { _ = channel.Close() }()
	_ = channel.CloseWrite()
	_ = channel.SetDeadline(time.Now().Add(forkTimeout))
	if pid, err := readPID(channel); err == nil {
		process{pid: pid}.reap()
	}
}

// openProcess is a child process that another process has forked.
func openProcess(pid int) process {
	const pidfdOpen = 434 // on all architectures
	child := process{pid: pid}
	if fd, _, errno := syscall.Syscall(pidfdOpen, uintptr(pid), 0, 0); errno == 0 {
		syscall.CloseOnExec(int(fd))
		if syscall.SetNonblock(int(fd), true) == nil {
			child.fd = os.NewFile(fd, "pidfd")
		}
	}
	return child
}

// lateOf is the part of an environment that the fork server does not have.
func lateOf(env []string) map[string]string {
	out := map[string]string{}
	for _, entry := range env {
		if name, value, _ := strings.Cut(entry, "="); slices.Contains(lateVariables, name) {
			out[name] = value
		}
	}
	return out
}

// socketPair makes a connection between this process and one that gets the file.
func socketPair(kind int) (*net.UnixConn, *os.File, error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, kind|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "fork"), os.NewFile(uintptr(fds[1]), "fork")
	conn, err := net.FileConn(ours)
	_ = ours.Close() // conn has a duplicate
	if err != nil {
		_ = theirs.Close()
		return nil, nil, err
	}
	return conn.(*net.UnixConn), theirs, nil
}
