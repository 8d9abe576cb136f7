package direct

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"troupe/bus"
	"troupe/bus/shm"
)

// The data port of a node is found by the processes that share memory, in the folder of that memory, which is private to their user:
//
//	direct.json  the Issuer of the server, with its key; mode 0600
//	direct.lock  locked while the server lives
const (
	issuerName = "direct.json"
	lockName   = "direct.lock"

	lockEvery = time.Second
)

// Announce writes down where the processes of the folder find the server, and returns when ctx ends. While another server is there, it waits.
func (s *Server) Announce(ctx context.Context, dir string) error {
	lock, err := os.OpenFile(filepath.Join(dir, lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }() // nothing was written to it; and with it the lock
	for syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
		if bus.Sleep(ctx, lockEvery) != nil {
			return nil
		}
	}
	data, err := json.Marshal(&s.Issuer)
	if err != nil {
		return err
	}
	path := filepath.Join(dir, issuerName)
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return err
	}
	if err := os.Rename(path+".new", path); err != nil {
		return err
	}
	<-ctx.Done()
	return os.Remove(path)
}

// AddressesOf are where other machines reach the data port of the node that lives; none: there is no such port.
func AddressesOf(dir string) []string {
	if found := Find(dir, ""); found != nil {
		return found.Addresses
	}
	return nil
}

// Find is the data port of the node, if one lives that other machines reach where this process is at that address; nil: there is none.
func Find(dir, host string) *Issuer {
	lock, err := os.Open(filepath.Join(dir, lockName))
	if err != nil {
		return nil
	}
	defer func() { _ = lock.Close() }() // nothing was written to it
	if !errors.Is(syscall.Flock(int(lock.Fd()), syscall.LOCK_SH|syscall.LOCK_NB), syscall.EWOULDBLOCK) {
		return nil
	}
	data, err := os.ReadFile(filepath.Join(dir, issuerName))
	issuer := &Issuer{}
	if err != nil || json.Unmarshal(data, issuer) != nil || len(issuer.Key) != keySize {
		return nil
	}
	if !isLoopback(host) && allLoopback(issuer.Addresses) {
		return nil
	}
	return issuer
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func allLoopback(addresses []string) bool {
	for _, a := range addresses {
		if host, _, err := net.SplitHostPort(a); err != nil || !isLoopback(host) {
			return false
		}
	}
	return true
}

// Regions are the bodies in the shared memory of a host, for the OpenFunc of its node's server. It is safe for concurrent use.
type Regions struct {
	reader *shm.Reader

	mu   sync.Mutex // guards what follows
	open map[Body]*region
}

// region is a body that is being served. The mutex of Regions guards it.
//
//	claimed ── answered ──► there, or not ── last use ends ──► ending ── returned ──► (a new region)
type region struct {
	body    []byte        // nil: it is not there
	readyCh chan struct{} // closed when the memory has answered
	ready   bool
	uses    int
	ending  bool          // it is being returned: a claim before that would be refused
	endedCh chan struct{} // closed when it has been returned
}

// NewRegions reads the memory that the processes of a folder share.
func NewRegions(cfg shm.Config) *Regions {
	return &Regions{reader: shm.NewReader(cfg), open: map[Body]*region{}}
}

// Open claims a body. It waits for the memory's answer.
func (r *Regions) Open(ctx context.Context, b Body) (Found, func()) {
	if b.Location.IsZero() {
		return Found{}, nil
	}
	g := r.use(ctx, b)
	if g == nil {
		return Found{}, nil
	}
	select {
	case <-g.readyCh:
	case <-ctx.Done():
	}
	r.mu.Lock()
	body := g.body
	r.mu.Unlock()
	if body == nil {
		r.leave(b, g)
		return Found{}, nil
	}
	return Found{Bytes: body}, func() { r.leave(b, g) }
}

// use adds a use of a region, which is claimed with the first one; nil: ctx has ended.
func (r *Regions) use(ctx context.Context, b Body) *region {
	for {
		r.mu.Lock()
		g := r.open[b]
		if g == nil {
			g = &region{readyCh: make(chan struct{}), endedCh: make(chan struct{}), uses: 1}
			r.open[b] = g
			r.mu.Unlock()
			r.reader.Attach(b.Location, b.Length, func(body []byte) { r.answered(b, g, body) })
			return g
		}
		if !g.ending {
			g.uses++
			r.mu.Unlock()
			return g
		}
		r.mu.Unlock()
		select {
		case <-g.endedCh:
		case <-ctx.Done():
			return nil
		}
	}
}

func (r *Regions) answered(b Body, g *region, body []byte) {
	r.mu.Lock()
	g.body, g.ready = body, true
	close(g.readyCh)
	r.mu.Unlock()
	r.endUnused(b, g)
}

func (r *Regions) leave(b Body, g *region) {
	r.mu.Lock()
	g.uses--
	r.mu.Unlock()
	r.endUnused(b, g)
}

// endUnused returns a region that no transfer uses.
func (r *Regions) endUnused(b Body, g *region) {
	r.mu.Lock()
	ends := g.uses == 0 && g.ready && !g.ending
	g.ending = g.ending || ends
	r.mu.Unlock()
	if !ends {
		return
	}
	if g.body != nil {
		r.reader.Release(g.body)
	}
	r.mu.Lock()
	delete(r.open, b)
	r.mu.Unlock()
	close(g.endedCh)
}

// Close ends the links to the processes of the host.
func (r *Regions) Close() { r.reader.Close() }
