package capture

import (
	"errors"
	"os"
	"sync"
	"syscall"

	"troupe/bus"
)

// Poller announces that pipes can be read, each once until it is armed again. The runtime's own poller would wake this process at every
// write of every other one, also while their readers rest to collect more.
type Poller struct {
	epoll *os.File
	group sync.WaitGroup

	// mu guards what follows.
	mu      sync.Mutex
	readers map[int32]*pipeReader // by descriptor
}

// NewPoller starts a poller, which runs until Close.
func NewPoller() (*Poller, error) {
	fd, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	if err := syscall.SetNonblock(fd, true); err != nil { // the runtime polls the instance as it polls a socket
		_ = syscall.Close(fd)
		return nil, os.NewSyscallError("fcntl", err)
	}
	p := &Poller{epoll: os.NewFile(uintptr(fd), "epoll"), readers: map[int32]*pipeReader{}}
	p.group.Go(bus.Guard(p.run))
	return p, nil
}

// run wakes the readers of pipes until Close.
func (p *Poller) run() {
	raw, err := p.epoll.SyscallConn()
	if err != nil {
		return // closed
	}
	events := make([]syscall.EpollEvent, 128)
	_ = raw.Read(func(fd uintptr) bool { // returns when the file is closed
		for {
			n, err := syscall.EpollWait(int(fd), events, 0)
			if errors.Is(err, syscall.EINTR) {
				continue
			}
			if n <= 0 {
				return false
			}
			p.announce(events[:n])
		}
	})
}

func (p *Poller) announce(events []syscall.EpollEvent) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range events {
		if r := p.readers[e.Fd]; r != nil {
			wake(r.readyCh)
		}
	}
}

// add registers a reader; arm must be called before its pipe is announced.
func (p *Poller) add(r *pipeReader) error {
	p.mu.Lock()
	p.readers[int32(r.fd)] = r
	p.mu.Unlock()
	err := p.control(syscall.EPOLL_CTL_ADD, r.fd, 0)
	if err != nil {
		p.remove(r)
	}
	return err
}

// arm announces the pipe once: now if it can be read, or as soon as it can.
func (p *Poller) arm(r *pipeReader) error {
	return p.control(syscall.EPOLL_CTL_MOD, r.fd, syscall.EPOLLIN)
}

func (p *Poller) control(op, fd int, events uint32) error {
	raw, err := p.epoll.SyscallConn()
	if err != nil {
		return err
	}
	event := syscall.EpollEvent{Events: events | syscall.EPOLLONESHOT, Fd: int32(fd)}
	if e := raw.Control(func(epoll uintptr) { err = syscall.EpollCtl(int(epoll), op, fd, &event) }); e != nil {
		return e
	}
	return os.NewSyscallError("epoll_ctl", err)
}

// remove forgets a reader, before its pipe is closed.
func (p *Poller) remove(r *pipeReader) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.readers, int32(r.fd))
}

// Close ends the announcements. Captures must have ended.
func (p *Poller) Close() {
	_ = p.epoll.Close()
	p.group.Wait()
}
