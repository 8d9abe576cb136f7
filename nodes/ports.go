package nodes

import (
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"troupe/bus"
)

const (
	portsMost        = 1024            // ports of one holder
	portLow          = 15000           // ports are leased from here up to the ephemeral range
	portIdleTimeout  = 2 * time.Minute // how long a lease without a worker of its role lasts: before the first, or between restarts
	ephemeralDefault = 32768           // default start of the ephemeral range
)

// portLeases are the ports that are reserved for roles. A bound socket that does not listen reserves a port, so that a
// worker that sets SO_REUSEADDR can listen on it and no other process gets it.
type portLeases struct {
	mu       sync.Mutex
	leased   map[portHolder]*portLease
	released map[portHolder][]int // ports of stopped roles, which get them again
}

// portHolder is a rank of one incarnation of a role.
type portHolder struct {
	role bus.Address
	rank int
}

type portLease struct {
	ports []int
	fds   []int
	idle  time.Time // since when no worker of the role runs; zero: one does
}

// acquire leases n ports, and reuses those that the holder has.
func (l *portLeases) acquire(holder WorkerID, n int) ([]int, error) {
	if n < 1 || n > portsMost {
		return nil, bus.Errorf(bus.CodeInvalid, "%d ports for %s: request 1 to %d", n, holder, portsMost)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	key := portHolder{holder.Address(), holder.Rank}
	if l.leased == nil {
		l.leased, l.released = map[portHolder]*portLease{}, map[portHolder][]int{}
	}
	has := l.leased[key]
	if has == nil {
		has = &portLease{}
		l.leased[key] = has
		has.bind(l.released[key])
	}
	first, count := portLow, ephemeralLow()-portLow
	offset := rand.IntN(count)
	for i := 0; i < count && len(has.ports) < n; i++ {
		has.bind([]int{first + (offset+i)%count})
	}
	if len(has.ports) < n {
		return nil, bus.Errorf(bus.CodeBusy, "%d ports for %s: only %d of %d to %d are free", n, holder, len(has.ports), first, first+count-1)
	}
	return has.ports[:n:n], nil
}

// bind binds those of the ports that are free.
func (l *portLease) bind(ports []int) {
	for _, port := range ports {
		if fds, err := bindPort(port); err == nil {
			l.ports, l.fds = append(l.ports, port), append(l.fds, fds...)
		}
	}
}

// workerStarted notes that a worker of the role runs: released ports are bound again if they are free.
func (l *portLeases) workerStarted(role bus.Address) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for key, ports := range l.released {
		if key.role == role && l.leased[key] == nil {
			has := &portLease{}
			has.bind(ports)
			l.leased[key] = has
		}
	}
}

// release releases the ports of a role. Their numbers are remembered for a restart of the role.
func (l *portLeases) release(role bus.Address) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for key, has := range l.leased {
		if key.role == role {
			l.drop(key, has)
		}
	}
}

func (l *portLeases) releaseAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for key, has := range l.leased {
		l.drop(key, has)
	}
}

// drop is called with mu held.
func (l *portLeases) drop(key portHolder, has *portLease) {
	for _, fd := range has.fds {
		_ = syscall.Close(fd)
	}
	delete(l.leased, key)
	if len(l.released) >= portsMost {
		clear(l.released) // bounded memory
	}
	l.released[key] = has.ports
}

// expire releases ports whose role has had no worker for a while.
func (l *portLeases) expire(now time.Time, playing map[bus.Address]bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for key, has := range l.leased {
		switch {
		case playing[key.role]:
			has.idle = time.Time{}
		case has.idle.IsZero():
			has.idle = now
		case now.Sub(has.idle) > portIdleTimeout:
			l.drop(key, has)
		}
	}
}

// bindPort binds a port in both address families and then allows other sockets to bind it too. With the option set
// before binding, two agents could both bind the port.
func bindPort(port int) ([]int, error) {
	v4, err := bindSocket(syscall.AF_INET, &syscall.SockaddrInet4{Port: port})
	if err != nil {
		return nil, err
	}
	v6, err := bindSocket(syscall.AF_INET6, &syscall.SockaddrInet6{Port: port})
	switch err {
	case nil:
		return []int{v4, v6}, nil
	case syscall.EADDRINUSE:
		_ = syscall.Close(v4) // nothing was sent
		return nil, err
	}
	return []int{v4}, nil // no IPv6
}

func bindSocket(family int, at syscall.Sockaddr) (int, error) {
	fd, err := syscall.Socket(family, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if family == syscall.AF_INET6 {
		err = syscall.SetsockoptInt(fd, syscall.IPPROTO_IPV6, syscall.IPV6_V6ONLY, 1)
	}
	if err == nil {
		err = syscall.Bind(fd, at)
	}
	if err == nil {
		err = syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1)
	}
	if err != nil {
		_ = syscall.Close(fd)
		return -1, err
	}
	return fd, nil
}

// ephemeralLow is the first port of the ephemeral range.
func ephemeralLow() int {
	data, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if fields := strings.Fields(string(data)); err == nil && len(fields) == 2 {
		if low, err := strconv.Atoi(fields[0]); err == nil && low > portLow+portsMost {
			return low
		}
	}
	return ephemeralDefault
}
