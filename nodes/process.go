package nodes

import (
	"errors"
	"os"
	"runtime"
	"syscall"
	"time"
	"unsafe"

	"troupe/bus"
)

// processSpec is everything that a new process gets.
type processSpec struct {
	path   string
	argv   []string
	dir    string
	env    []string
	stdout *os.File // write ends of pipes
	stderr *os.File
	cgroup int // descriptor of its control group; -1: none

	control *os.File // descriptor 3 of a fork server; nil: none
}

// process is a child process.
type process struct {
	pid int
	fd  *os.File // a pidfd in the runtime's poller; nil where the kernel has none
}

// exitStatus is the exit status of a process.
type exitStatus struct {
	code   int // -1: killed by signal
	signal syscall.Signal
}

// spawner forks from one thread that lives as long as the spawner: Pdeathsig kills a child when the thread that forked
// it ends, and threads of the Go runtime come and go.
type spawner struct {
	requestCh chan spawnRequest
	doneCh    chan struct{}
}

type spawnRequest struct {
	program processSpec
	replyCh chan spawnResult // holds one
}

type spawnResult struct {
	process process
	err     error
}

func newSpawner() *spawner {
	s := &spawner{requestCh: make(chan spawnRequest), doneCh: make(chan struct{})}
	bus.Go(func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread() // the thread must not end: processes forked on it by other goroutines would be killed
		defer close(s.doneCh)
		for ask := range s.requestCh {
			p, err := ask.program.start()
			ask.replyCh <- spawnResult{p, err}
		}
	})
	return s
}

// start forks and waits for exec, which blocks on a hung file system.
func (s *spawner) start(p processSpec) (process, error) {
	replyCh := make(chan spawnResult, 1)
	s.requestCh <- spawnRequest{p, replyCh}
	got := <-replyCh
	return got.process, got.err
}

// close ends the thread. The agent calls it when all workers have exited.
func (s *spawner) close() {
	close(s.requestCh)
	<-s.doneCh
}

func (p processSpec) start() (process, error) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		return process{}, err
	}
	defer func() { _ = null.Close() }()
	pidfd := -1
	attr := &syscall.ProcAttr{
		Dir: p.dir, Env: p.env, Files: []uintptr{null.Fd(), p.stdout.Fd(), p.stderr.Fd()},
		Sys: &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL, PidFD: &pidfd},
	}
	if p.control != nil {
		attr.Files = append(attr.Files, p.control.Fd())
	}
	if p.cgroup >= 0 {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, p.cgroup
	}
	pid, err := syscall.ForkExec(p.path, p.argv, attr)
	if err != nil {
		return process{}, err
	}
	child := process{pid: pid}
	if pidfd >= 0 && syscall.SetNonblock(pidfd, true) == nil {
		child.fd = os.NewFile(uintptr(pidfd), "pidfd")
	}
	return child, nil
}

// Parts of waitid that the standard library lacks.
const (
	idPID    = 1
	exited   = 4         // WEXITED
	noHang   = 1         // WNOHANG
	noReap   = 0x1000000 // WNOWAIT
	cldExit  = 1         // CLD_EXITED
	infoSize = 128
)

// await blocks until the process has exited. The process stays a zombie, so that its pid and process group are not
// reused before reap.
func (p process) await() (exitStatus, error) {
	if p.fd != nil {
		if raw, err := p.fd.SyscallConn(); err == nil {
			var end exitStatus
			var ok bool
			var failure error
			err = raw.Read(func(uintptr) bool {
				end, ok, failure = p.peek(noHang)
				return ok || failure != nil
			})
			if err == nil {
				return end, failure
			}
		}
	}
	end, _, err := p.peek(0) // blocks a thread
	return end, err
}

// peek reads the exit status without reaping; ok is false while the process runs.
func (p process) peek(flags int) (end exitStatus, ok bool, err error) {
	var info [infoSize]byte
	for {
		_, _, errno := syscall.Syscall6(syscall.SYS_WAITID, idPID, uintptr(p.pid), uintptr(unsafe.Pointer(&info)), uintptr(exited|noReap|flags), 0, 0)
		if errno == syscall.EINTR {
			continue
		}
		if errno != 0 {
			return exitStatus{}, false, errno
		}
		break
	}
	field := func(i int) int32 { return *(*int32)(unsafe.Pointer(&info[i])) }
	if field(0) == 0 { // si_signo: still running
		return exitStatus{}, false, nil
	}
	code, status := field(8), field(24) // si_code, si_status
	if code == cldExit {
		return exitStatus{code: int(status)}, true, nil
	}
	return exitStatus{code: -1, signal: syscall.Signal(status)}, true, nil
}

// reap removes the zombie and closes the pidfd.
func (p process) reap() {
	for {
		var status syscall.WaitStatus
		if _, err := syscall.Wait4(p.pid, &status, 0, nil); !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if p.fd != nil {
		_ = p.fd.Close()
	}
}

// signal sends a signal to the process, which must not be reaped.
func (p process) signal(s syscall.Signal) { _ = syscall.Kill(p.pid, s) } // the process may have exited

// signalGroup sends a signal to the process group. Not after reap.
func (p process) signalGroup(s syscall.Signal) { _ = syscall.Kill(-p.pid, s) }

// reapAdopted reaps orphaned processes, whose parents were children of this process, until stopCh is closed. own
// reports whether a process is a child that another goroutine awaits.
func reapAdopted(own func(pid int) bool, every time.Duration, stopCh <-chan struct{}) {
	for tick := time.NewTicker(every); ; {
		select {
		case <-stopCh:
			tick.Stop()
			return
		case <-tick.C:
		}
		for {
			var info [infoSize]byte
			_, _, errno := syscall.Syscall6(syscall.SYS_WAITID, 0, 0, uintptr(unsafe.Pointer(&info)), uintptr(exited|noReap|noHang), 0, 0)
			pid := int(*(*int32)(unsafe.Pointer(&info[16]))) // si_pid
			if errno != 0 || pid == 0 || own(pid) {
				break // the next round finds processes behind a child that is about to be reaped
			}
			var status syscall.WaitStatus
			if _, err := syscall.Wait4(pid, &status, syscall.WNOHANG, nil); err != nil {
				break
			}
		}
	}
}

// becomeSubreaper makes this process the subreaper of its descendants.
func becomeSubreaper() error {
	const prSetChildSubreaper = 36
	if _, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, prSetChildSubreaper, 1, 0); errno != 0 {
		return errno
	}
	return nil
}
