package nodes

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"troupe/bus"
	"troupe/nodes/capture"
	"troupe/nodes/proctree"
)

// SpareEnv names, instead of AssignmentEnv, the file with the assignment of another worker of the role. The process is a spare: it does
// what it can do before it knows its own rank, writes a line to the socket at descriptor 3, and then reads one byte with the
// descriptors of stdout and stderr, and {"env": {…}, "dir": …} up to the end of file; with that it continues as the worker that
// AssignmentEnv names. An end of file before is its end. See AwaitTakeover.
const SpareEnv = "TROUPE_SPARE"

const (
	sparesIdle     = 30 * time.Second // how long the spares of a role remain after its last worker has died
	spareFailures  = 3                // spares of a role that end before they are ready, one after the other
	spareTextLimit = 2000             // bytes of output that are reported then
)

// spares is the spare processes of an agent: started in advance, so that a lost worker has a new process at once.
//
//	started ──► ready ──► taken: it is the process of a worker
//	   └──────────┴─────► ended: another is started
type spares struct {
	agent *Agent

	// mu guards what follows.
	mu     sync.Mutex
	closed bool
	pools  map[bus.Address]*sparePool
	all    map[*spare]bool // until they are reaped or taken
}

// sparePool is the spares of one role.
type sparePool struct {
	role       bus.Address
	want       int
	key        string // of the program
	program    Program
	process    processSpec // of the last worker that was started, without what only that worker has
	assignment []byte      // content of its assignment file
	members    []*spare
	failures   int
	lonelyAt   time.Time // when the role's last worker here has ended; zero: it has workers
}

// spare is one spare process.
type spare struct {
	marker  string
	dir     string
	folder  string // hash of its shipped folder, to be given back
	process process
	conn    *net.UnixConn
	out     *capture.Capture
	goneCh  chan struct{} // closed when it is reaped or taken

	// spares.mu guards what follows.
	ready bool
	taken bool
	text  string // the last of what it has printed
}

func newSpares(a *Agent) *spares {
	return &spares{agent: a, pools: map[bus.Address]*sparePool{}, all: map[*spare]bool{}}
}

// keep keeps as many spares for the role of a worker as its launch wants. The worker has been started.
func (s *spares) keep(w *worker, p processSpec) {
	if w.launch.Spares == 0 {
		return
	}
	for name := range w.Env {
		if !slices.Contains(lateVariables, name) {
			return // ranks have environments of their own, which must be set before the imports
		}
	}
	assignment, err := os.ReadFile(filepath.Join(w.dir, assignmentFile))
	if err != nil {
		return // the worker has ended
	}
	p.env = slices.DeleteFunc(slices.Clone(p.env), func(entry string) bool {
		name, _, _ := strings.Cut(entry, "=")
		return slices.Contains(lateVariables, name)
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	role, key := w.ID.Address(), forkKey(p, w.launch.Program, p.env)
	pool := s.pools[role]
	if pool != nil && pool.key != key {
		s.endLocked(pool)
		pool = nil
	}
	if pool == nil {
		pool = &sparePool{role: role, key: key}
		s.pools[role] = pool
	}
	pool.want, pool.program, pool.process, pool.assignment, pool.lonelyAt = w.launch.Spares, w.launch.Program, p, assignment, time.Time{}
	s.fillLocked(pool)
}

// fillLocked starts the spares that are missing.
func (s *spares) fillLocked(pool *sparePool) {
	for !s.closed && s.pools[pool.role] == pool && pool.failures < spareFailures && len(pool.members) < pool.want {
		one := &spare{marker: s.agent.identity + "." + bus.NewID(), goneCh: make(chan struct{})}
		one.dir = s.agent.workerDir(one.marker)
		pool.members, s.all[one] = append(pool.members, one), true
		s.agent.group.Go(bus.Guard(func() { s.run(pool, one) }))
	}
}

// run runs a spare until it is taken or ends.
func (s *spares) run(pool *sparePool, one *spare) {
	err := s.start(pool, one)
	if err == nil {
		err = s.await(pool, one)
	}
	s.mu.Lock()
	taken := one.taken
	pool.members = slices.DeleteFunc(pool.members, func(o *spare) bool { return o == one })
	s.mu.Unlock()
	if !taken {
		if one.process.pid != 0 {
			s.reap(one)
		}
		if one.conn != nil {
			_ = one.conn.Close()
		}
		s.release(one)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, one)
	close(one.goneCh)
	if taken || s.closed || s.pools[pool.role] != pool {
		return
	}
	if !one.ready {
		pool.failures++
	}
	if pool.failures == spareFailures {
		s.agent.cfg.Logger.Warn("nodes: the role has no spares, because they end before they are ready", "role", pool.role.Role, "error", err, "output", one.text)
	}
	s.fillLocked(pool)
}

// start starts the process.
func (s *spares) start(pool *sparePool, one *spare) error {
	s.mu.Lock()
	p, program, assignment := pool.process, pool.program, pool.assignment
	s.mu.Unlock()
	if err := os.MkdirAll(one.dir, 0o700); err != nil {
		return err
	}
	switch {
	case program.Folder != "":
		path, err := s.agent.folders.Acquire(program.Folder)
		if err != nil {
			return err
		}
		one.folder, p.dir = program.Folder, path
	case program.Dir == "":
		p.dir = one.dir
	}
	path := filepath.Join(one.dir, assignmentFile)
	if err := WritePrivate(path, assignment); err != nil {
		return err
	}
	conn, theirs, err := socketPair(syscall.SOCK_STREAM)
	if err != nil {
		return err
	}
	defer func() { _ = theirs.Close() }()
	sink := capture.Sink{Lines: func(lines []string) {
		s.mu.Lock()
		defer s.mu.Unlock()
		one.text += strings.Join(lines, "\n") + "\n"
		one.text = one.text[max(0, len(one.text)-spareTextLimit):]
	}}
	out, err := capture.New(s.agent.pipes, sink, sink, func() {})
	if err != nil {
		_ = conn.Close()
		return err
	}
	p.env = append(slices.Clone(p.env), proctree.MarkerEnv+"="+one.marker, SpareEnv+"="+path)
	p.stdout, p.stderr, p.control, p.cgroup = out.Stdout, out.Stderr, theirs, -1
	child, err := s.agent.spawner.start(p)
	out.CloseWriteEnds()
	if err != nil {
		_ = conn.Close()
		out.Close()
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	one.process, one.conn, one.out = child, conn, out
	if s.closed || s.pools[pool.role] != pool { // it was ended meanwhile
		child.signalGroup(syscall.SIGKILL)
	}
	return nil
}

// await returns when the spare has ended or was taken.
func (s *spares) await(pool *sparePool, one *spare) error {
	_ = one.conn.SetReadDeadline(time.Now().Add(warmTimeout)) // fails only on a closed connection, as the next line does
	lines := bufio.NewReader(one.conn)
	if _, err := lines.ReadString('\n'); err != nil {
		return fmt.Errorf("the spare ended, or took longer than %v: %w", warmTimeout, err)
	}
	s.mu.Lock()
	one.ready, pool.failures = true, 0
	_ = one.conn.SetReadDeadline(time.Time{})
	s.mu.Unlock()
	_, err := lines.ReadByte() // the end of the spare, or the deadline that take sets
	return err
}

// reap ends a spare, with the processes that it has started.
func (s *spares) reap(one *spare) {
	one.process.signalGroup(syscall.SIGKILL)
	if _, err := one.process.await(); err != nil {
		s.agent.cfg.Logger.Error("nodes: waiting for a spare failed", "pid", one.process.pid, "error", err)
	}
	if left := s.agent.treeKiller.Kill(one.marker, one.process.pid, ""); len(left) > 0 {
		s.agent.cfg.Logger.Error("nodes: processes of a spare survive SIGKILL", "pids", left)
	}
	one.process.reap()
	one.out.Close()
}

// release gives back what a spare needs before it is a worker.
func (s *spares) release(one *spare) {
	if one.folder != "" {
		s.agent.folders.Release(one.folder)
	}
	_ = os.RemoveAll(one.dir) // the next agent of this folder tries again
}

// take takes a ready spare for a worker; nil: there is none, or the worker's program is another.
func (s *spares) take(w *worker) *spare {
	s.mu.Lock()
	defer s.mu.Unlock()
	pool := s.pools[w.ID.Address()]
	if pool == nil {
		return nil
	}
	for i, one := range pool.members {
		if _, ended, err := one.process.peekIfStarted(); !one.ready || ended || err != nil {
			continue
		}
		one.taken = true
		pool.members = slices.Delete(pool.members, i, i+1)
		return one
	}
	return nil
}

// peekIfStarted is peek without waiting, for a process that may not have been started.
func (p process) peekIfStarted() (exitStatus, bool, error) {
	if p.pid == 0 {
		return exitStatus{}, false, nil
	}
	return p.peek(noHang)
}

// become makes a taken spare the process of a worker. After an error the worker is started by its command.
func (s *spares) become(one *spare, p processSpec) (process, error) {
	err := one.handOver(p)
	_ = one.conn.Close() // the worker reads up to here; and await returns
	<-one.goneCh
	if err != nil {
		s.reap(one)
	} else {
		one.out.Close() // its output is the worker's now
	}
	s.release(one)
	return one.process, err
}

// handOver sends a spare what it needs to be a worker.
func (one *spare) handOver(p processSpec) error {
	if p.cgroup >= 0 { // best effort: what the worker's group is for also holds without it
		_ = os.WriteFile(fmt.Sprintf("/proc/self/fd/%d/cgroup.procs", p.cgroup), fmt.Appendf(nil, "%d", one.process.pid), 0)
	}
	env := map[string]string{}
	for _, entry := range p.env {
		name, value, _ := strings.Cut(entry, "=")
		env[name] = value
	}
	data, err := json.Marshal(takeover{Env: env, Dir: p.dir})
	if err != nil {
		return err
	}
	_ = one.conn.SetWriteDeadline(time.Now().Add(forkTimeout)) // fails only on a closed connection, as the next line does
	if _, _, err := one.conn.WriteMsgUnix([]byte{1}, syscall.UnixRights(int(p.stdout.Fd()), int(p.stderr.Fd())), nil); err != nil {
		return err
	}
	_, err = one.conn.Write(data)
	return err
}

// takeover is the message with which a spare becomes a worker.
type takeover struct {
	Env map[string]string `json:"env"`
	Dir string            `json:"dir"`
}

// endLocked ends the spares of a role.
func (s *spares) endLocked(pool *sparePool) {
	delete(s.pools, pool.role)
	for _, one := range pool.members {
		if one.process.pid != 0 && !one.taken {
			one.process.signalGroup(syscall.SIGKILL) // not reaped: it is a member until then
		}
	}
}

// workerGone is told of the end of a role's last worker here. A role that was stopped in order needs no spares.
func (s *spares) workerGone(role bus.Address, asked bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch pool := s.pools[role]; {
	case pool == nil:
	case asked:
		s.endLocked(pool)
	case pool.lonelyAt.IsZero():
		pool.lonelyAt = time.Now()
	}
}

// maintain ends the spares of roles that have had no worker here for long.
func (s *spares) maintain(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for role, pool := range s.pools {
		switch {
		case s.agent.hosts(role):
			pool.lonelyAt = time.Time{}
		case !pool.lonelyAt.IsZero() && now.Sub(pool.lonelyAt) > sparesIdle:
			s.endLocked(pool)
		}
	}
}

// awaits reports whether a process is a spare, or may be one that is being started.
func (s *spares) awaits(pid int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for one := range s.all {
		if one.process.pid == 0 || one.process.pid == pid {
			return true
		}
	}
	return false
}

// close ends all spares and waits until they are reaped.
func (s *spares) close() {
	s.mu.Lock()
	s.closed = true
	for _, pool := range s.pools {
		s.endLocked(pool)
	}
	var all []*spare
	for one := range s.all {
		all = append(all, one)
	}
	s.mu.Unlock()
	late := time.After(killTimeout)
	for _, one := range all {
		select {
		case <-one.goneCh:
		case <-late:
			s.agent.cfg.Logger.Error("nodes: a spare survives SIGKILL", "pid", one.process.pid)
		}
	}
}

// AwaitTakeover makes a process that was started as a spare a worker: it returns when the process has the environment, the folder and
// the output of that worker. Otherwise it does nothing. A program calls it before it reads AssignmentEnv.
func AwaitTakeover() error {
	if os.Getenv(SpareEnv) == "" {
		return nil
	}
	const control = 3
	syscall.CloseOnExec(control)
	file := os.NewFile(control, "spare")
	conn, err := net.FileConn(file)
	_ = file.Close() // conn has a duplicate
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	unix, ok := conn.(*net.UnixConn)
	if !ok {
		return errors.New("descriptor 3 of a spare is no socket")
	}
	if _, err := unix.Write([]byte("ready\n")); err != nil {
		return err
	}
	rights := make([]byte, syscall.CmsgSpace(2*4))
	n, extra, _, _, err := unix.ReadMsgUnix(make([]byte, 1), rights)
	if err != nil || n == 0 {
		return errors.New("the agent does not need the spare any more")
	}
	var message takeover
	if err := json.NewDecoder(unix).Decode(&message); err != nil {
		return err
	}
	messages, err := syscall.ParseSocketControlMessage(rights[:extra])
	if err != nil || len(messages) != 1 {
		return fmt.Errorf("the takeover of a spare has no descriptors: %w", err)
	}
	fds, err := syscall.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 2 {
		return fmt.Errorf("the takeover of a spare has %d descriptors: %w", len(fds), err)
	}
	for i, fd := range fds {
		if err := syscall.Dup3(fd, i+1, 0); err != nil {
			return err
		}
		_ = syscall.Close(fd)
	}
	os.Clearenv()
	for name, value := range message.Env {
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	return os.Chdir(message.Dir)
}
