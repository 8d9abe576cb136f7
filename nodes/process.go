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

// program is a process to be started: everything it gets from us.
type program struct {
	path   string
	argv   []string
	dir    string
	env    []string
	stdout *os.File // write ends of our pipes
	stderr *os.File
	cgroup int // a folder's descriptor; -1 for none
}

// process is a child of ours.
type process struct {
	pid int
	fd  *os.File // a pidfd in the runtime's poller; nil on a kernel without
}

// ending is how a process ended.
type ending struct {
	code   int // -1 if a signal did it
	signal syscall.Signal
}

// spawner starts processes from one thread that does not end before the spawner does: a child dies with the thread that
// forked it, and threads of the Go runtime come and go.
type spawner struct {
	askCh  chan spawnAsk
	doneCh chan struct{}
}

type spawnAsk struct {
	program program
	replyCh chan spawned // holds one
}

type spawned struct {
	process process
	err     error
}

func newSpawner() *spawner {
	s := &spawner{askCh: make(chan spawnAsk), doneCh: make(chan struct{})}
	bus.Go(func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread() // the thread goes on: other goroutines may have started processes on it that would end with it
		defer close(s.doneCh)
		for ask := range s.askCh {
			p, err := ask.program.start()
			ask.replyCh <- spawned{p, err}
		}
	})
	return s
}

// start starts a process. It waits for the program to be loaded, which on a hung file system lasts.
func (s *spawner) start(p program) (process, error) {
	replyCh := make(chan spawned, 1)
	s.askCh <- spawnAsk{p, replyCh}
	got := <-replyCh
	return got.process, got.err
}

// close ends the loop. The agent calls it when all workers have ended.
func (s *spawner) close() {
	close(s.askCh)
	<-s.doneCh
}

func (p program) start() (process, error) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		return process{}, err
	}
	defer func() { _ = null.Close() }() // it was only read
	pidfd := -1
	attr := &syscall.ProcAttr{
		Dir: p.dir, Env: p.env, Files: []uintptr{null.Fd(), p.stdout.Fd(), p.stderr.Fd()},
		Sys: &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL, PidFD: &pidfd},
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

// The parts of waitid that the standard library does not offer.
const (
	idPID    = 1
	exited   = 4         // WEXITED
	noHang   = 1         // WNOHANG
	noReap   = 0x1000000 // WNOWAIT
	cldExit  = 1         // CLD_EXITED
	infoSize = 128
)

// await blocks until the process has ended and says how. It leaves it unreaped: its number, and that of its group, stay
// its own until reap.
func (p process) await() (ending, error) {
	if p.fd != nil {
		if raw, err := p.fd.SyscallConn(); err == nil {
			var end ending
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
	end, _, err := p.peek(0) // it keeps a thread
	return end, err
}

// peek asks how the process ended, without reaping it.
func (p process) peek(flags int) (end ending, ok bool, err error) {
	var info [infoSize]byte
	for {
		_, _, errno := syscall.Syscall6(syscall.SYS_WAITID, idPID, uintptr(p.pid), uintptr(unsafe.Pointer(&info)), uintptr(exited|noReap|flags), 0, 0)
		if errno == syscall.EINTR {
			continue
		}
		if errno != 0 {
			return ending{}, false, errno
		}
		break
	}
	field := func(i int) int32 { return *(*int32)(unsafe.Pointer(&info[i])) }
	if field(0) == 0 { // si_signo: nothing yet
		return ending{}, false, nil
	}
	code, status := field(8), field(24) // si_code, si_status
	if code == cldExit {
		return ending{code: int(status)}, true, nil
	}
	return ending{code: -1, signal: syscall.Signal(status)}, true, nil
}

// reap takes the process out of the system's table, and lets go of it.
func (p process) reap() {
	for {
		var status syscall.WaitStatus
		if _, err := syscall.Wait4(p.pid, &status, 0, nil); !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if p.fd != nil {
		_ = p.fd.Close() // only a number
	}
}

// signal sends a signal to the process, which has not been reaped.
func (p process) signal(s syscall.Signal) { _ = syscall.Kill(p.pid, s) } // it may have ended

// signalGroup sends a signal to those of its process group that are left. Not after reap.
func (p process) signalGroup(s syscall.Signal) { _ = syscall.Kill(-p.pid, s) }

// reapAdopted reaps what others left to us until stopCh is closed: processes whose parents, our children, have ended. own
// reports whether a process is a child of ours that somebody awaits.
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
				break // the next round finds what lies behind a child that is about to be reaped
			}
			var status syscall.WaitStatus
			if _, err := syscall.Wait4(pid, &status, syscall.WNOHANG, nil); err != nil {
				break
			}
		}
	}
}

// adopt makes this process the parent of what its children leave.
func adopt() error {
	const prSetChildSubreaper = 36
	if _, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, prSetChildSubreaper, 1, 0); errno != 0 {
		return errno
	}
	return nil
}
