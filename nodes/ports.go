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
	portsMost   = 1024            // ports of one holder
	portLow     = 15000           // ports are leased from here up to the ephemeral range
	portUnused  = 2 * time.Minute // how long a lease without a worker of its role lasts: before the first, or between restarts
	ephemeralLo = 32768           // default start of the ephemeral range
)

// leases are the ports that are reserved for roles. A bound socket that does not listen reserves a port, so that a
// worker that sets SO_REUSEADDR can listen on it and no other process gets it.
type leases struct {
	mu    sync.Mutex
	held  map[leaseKey]*lease
	spare map[leaseKey][]int // ports of stopped roles, which get them again
}

// leaseKey is a rank of one incarnation of a role.
type leaseKey struct {
	role bus.Address
	rank int
}

type lease struct {
	ports []int
	fds   []int
	idle  time.Time // since when no worker of the role runs; zero: one does
}

// take leases n ports, and reuses those that the holder has.
func (l *leases) take(holder WorkerID, n int) ([]int, error) {
	if n < 1 || n > portsMost {
		return nil, bus.Errorf(bus.CodeInvalid, "%d ports for %s: request 1 to %d", n, holder, portsMost)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	key := leaseKey{holder.Address(), holder.Rank}
	if l.held == nil {
		l.held, l.spare = map[leaseKey]*lease{}, map[leaseKey][]int{}
	}
	has := l.held[key]
	if has == nil {
		has = &lease{}
		l.held[key] = has
		has.hold(l.spare[key])
	}
	first, count := portLow, ephemeralLow()-portLow
	offset := rand.IntN(count)
	for i := 0; i < count && len(has.ports) < n; i++ {
		has.hold([]int{first + (offset+i)%count})
	}
	if len(has.ports) < n {
		return nil, bus.Errorf(bus.CodeBusy, "%d ports for %s: only %d of %d to %d are free", n, holder, len(has.ports), first, first+count-1)
	}
	return has.ports[:n:n], nil
}

// hold binds those of the ports that are free.
func (l *lease) hold(ports []int) {
	for _, port := range ports {
		if fds, err := holdPort(port); err == nil {
			l.ports, l.fds = append(l.ports, port), append(l.fds, fds...)
		}
	}
}

// using notes that a worker of the role runs: released ports are bound again if they are free.
func (l *leases) using(role bus.Address) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for key, ports := range l.spare {
		if key.role == role && l.held[key] == nil {
			has := &lease{}
			has.hold(ports)
			l.held[key] = has
		}
	}
}

// release releases the ports of a role. Their numbers are remembered for a restart of the role.
func (l *leases) release(role bus.Address) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for key, has := range l.held {
		if key.role == role {
			l.drop(key, has)
		}
	}
}

func (l *leases) releaseAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for key, has := range l.held {
		l.drop(key, has)
	}
}

// drop is called with mu held.
func (l *leases) drop(key leaseKey, has *lease) {
	for _, fd := range has.fds {
		_ = syscall.Close(fd)
	}
	delete(l.held, key)
	if len(l.spare) >= portsMost {
		clear(l.spare) // bounded memory
	}
	l.spare[key] = has.ports
}

// expire releases ports whose role has had no worker for a while.
func (l *leases) tidy(now time.Time, playing map[bus.Address]bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for key, has := range l.held {
		switch {
		case playing[key.role]:
			has.idle = time.Time{}
		case has.idle.IsZero():
			has.idle = now
		case now.Sub(has.idle) > portUnused:
			l.drop(key, has)
		}
	}
}

// holdPort binds a port in both address families and then allows other sockets to bind it too. With the option set
// before binding, two agents could both bind the port.
func holdPort(port int) ([]int, error) {
	v4, err := bound(syscall.AF_INET, &syscall.SockaddrInet4{Port: port})
	if err != nil {
		return nil, err
	}
	v6, err := bound(syscall.AF_INET6, &syscall.SockaddrInet6{Port: port})
	switch err {
	case nil:
		return []int{v4, v6}, nil
	case syscall.EADDRINUSE:
		_ = syscall.Close(v4) // nothing was sent
		return nil, err
	}
	return []int{v4}, nil // no IPv6
}

func bound(family int, at syscall.Sockaddr) (int, error) {
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
	return ephemeralLo
}
