package nodes

import (
	"os"
	"regexp"
	"strconv"
	"sync"
	"syscall"
)

// initialPIDs is the number of the first namespace of processes: only there are the kernel's numbers ours.
const initialPIDs = 0xEFFFFFFC

var killedLine = regexp.MustCompile(`[Oo]ut of memory: Killed process (\d+) `)

// kernelLog reads from the kernel's log which processes it has killed for want of memory, where we may read it.
type kernelLog struct {
	mu     sync.Mutex
	fd     int // -1 if it cannot be read
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
	if _, err := syscall.Seek(fd, 0, 2); err != nil { // from now on
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
		_ = syscall.Close(l.fd) // it was only read
		l.fd = -1
	}
}

// killedForMemory reports whether the kernel says so of a process that has just ended.
func (l *kernelLog) killedForMemory(pid int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	buf := make([]byte, os.Getpagesize()*2)
	for l.fd >= 0 {
		n, err := syscall.Read(l.fd, buf)
		if err == syscall.EPIPE || err == syscall.EINTR { // some were overwritten before we could read them
			continue
		}
		if n <= 0 || err != nil {
			break
		}
		if m := killedLine.FindSubmatch(buf[:n]); m != nil {
			number, _ := strconv.Atoi(string(m[1])) // digits
			l.killed[number] = true
		}
	}
	said := l.killed[pid]
	delete(l.killed, pid)
	if len(l.killed) > 1024 {
		clear(l.killed) // not ours
	}
	return said
}
