package nodes

import (
	"os"
	"regexp"
	"strconv"
	"sync"
	"syscall"
)

// initialPIDs is the inode of the initial pid namespace: only there do pids in the kernel log match those of this
// process.
const initialPIDs = 0xEFFFFFFC

var killedLine = regexp.MustCompile(`[Oo]ut of memory: Killed process (\d+) `)

// kernelLog finds processes killed by the OOM killer in the kernel's log, where this process may read it.
type kernelLog struct {
	mu     sync.Mutex
	fd     int // -1: not readable
	killed map[int]bool
}

func openKernelLog() *kernelLog {
	l := &kernelLog{fd: -1, killed: map[int]bool{}}
	var ns syscall.Stat_t
	if err := syscall.Stat("/proc/self/ns/pid", &ns); err != nil || ns.Ino != initialPIDs {
		return l
	}
	fd, err := syscall.Open("/dev/kmsg", syscall.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return l
	}
	if _, err := syscall.Seek(fd, 0, 2); err != nil { // new records only
		_ = syscall.Close(fd)
		return l
	}
	l.fd = fd
	return l
}

func (l *kernelLog) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fd >= 0 {
		_ = syscall.Close(l.fd)
		l.fd = -1
	}
}

// killedForMemory reports whether the kernel log says so of a process that has just exited.
func (l *kernelLog) killedForMemory(pid int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	buf := make([]byte, os.Getpagesize()*2)
	for l.fd >= 0 {
		n, err := syscall.Read(l.fd, buf)
		if err == syscall.EPIPE || err == syscall.EINTR { // records were overwritten before they were read
			continue
		}
		if n <= 0 || err != nil {
			break
		}
		if m := killedLine.FindSubmatch(buf[:n]); m != nil {
			number, _ := strconv.Atoi(string(m[1])) // digits only
			l.killed[number] = true
		}
	}
	said := l.killed[pid]
	delete(l.killed, pid)
	if len(l.killed) > 1024 {
		clear(l.killed) // processes of other programs
	}
	return said
}
