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
	portsMost   = 1024            // that one holder may lease
	portLow     = 15000           // ports are leased from here up to the ephemeral range
	portUnused  = 2 * time.Minute // how long a lease waits for a worker of its role: the first, or one that is restarted
	ephemeralLo = 32768           // where the system's own choice begins, if it does not say
)

// leases are the ports that are held for roles. A port is held by a socket that is bound and does not listen, so that a
// worker which sets SO_REUSEADDR can listen on it and nobody gets it by chance.
type leases struct {
	mu    sync.Mutex
	held  map[leaseKey]*lease
	spare map[leaseKey][]int // ports of roles that had stopped, for one that goes on
}

// leaseKey is a role's rank, of one incarnation.
type leaseKey struct {
	role bus.Address
	rank int
}

type lease struct {
	ports []int
	fds   []int
	idle  time.Time // since when none runs any more; zero: one does
}

// take leases n ports, or as many more as the holder has not.
func (l *leases) take(holder WorkerID, n int) ([]int, error) {
	if n < 1 || n > portsMost {
		return nil, bus.Errorf(bus.CodeInvalid, "%d ports for %s: give 1 to %d", n, holder, portsMost)
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

// using says that a worker of the role runs: ports that were returned are held again, if nobody has taken them.
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

// release returns the ports of a role. Their numbers are remembered for a while: a role that goes on keeps them.
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
		_ = syscall.Close(fd) // only a number
	}
	delete(l.held, key)
	if len(l.spare) >= portsMost {
		clear(l.spare) // long gone, most of them
	}
	l.spare[key] = has.ports
}

// tidy returns what was leased for workers that never came, or that have all ended and nobody has stopped.
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

// holdPort binds a port in both families and lets others who say so bind it too. That is allowed only after the binding:
// until then two agents could each believe that the port was theirs.
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
	return []int{v4}, nil // a machine without IPv6
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

// ephemeralLow is the lowest port that the system gives out by itself.
func ephemeralLow() int {
	data, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if fields := strings.Fields(string(data)); err == nil && len(fields) == 2 {
		if low, err := strconv.Atoi(fields[0]); err == nil && low > portLow+portsMost {
			return low
		}
	}
	return ephemeralLo
}
