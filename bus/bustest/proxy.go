package bustest

import (
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// Proxy is a TCP address in front of a server, whose connections can be frozen or slowed. It ends with the test.
type Proxy struct {
	URL string

	to string

	mu    sync.Mutex // guards what follows
	gate  chan struct{}
	rate  int // bytes a second towards the client; zero: unlimited
	conns []net.Conn
}

// NewProxy listens in front of the server at a URL.
func NewProxy(t testing.TB, url string) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, to, _ := strings.Cut(url, "://")
	p := &Proxy{URL: "nats://" + l.Addr().String(), to: to}
	var group sync.WaitGroup
	group.Go(func() { p.accept(l, &group) })
	t.Cleanup(func() {
		_ = l.Close()
		p.Thaw()
		p.mu.Lock()
		for _, c := range p.conns {
			_ = c.Close()
		}
		p.mu.Unlock()
		group.Wait()
	})
	return p
}

func (p *Proxy) accept(l net.Listener, group *sync.WaitGroup) {
	for {
		near, err := l.Accept()
		if err != nil {
			return
		}
		far, err := net.Dial("tcp", p.to)
		if err != nil {
			_ = near.Close()
			continue
		}
		p.mu.Lock()
		p.conns = append(p.conns, near, far)
		p.mu.Unlock()
		group.Go(func() { p.copy(far, near, false) })
		group.Go(func() { p.copy(near, far, true) })
	}
}

// Freeze stops all bytes, as a server that is stopped does; new connections are accepted. Thaw lets them go on.
func (p *Proxy) Freeze() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.gate = make(chan struct{})
}

// Thaw ends Freeze.
func (p *Proxy) Thaw() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gate != nil {
		close(p.gate)
		p.gate = nil
	}
}

// Slow limits what clients are sent to so many bytes a second.
func (p *Proxy) Slow(rate int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rate = rate
}

func (p *Proxy) copy(to, from net.Conn, limited bool) {
	defer func() { _, _ = to.Close(), from.Close() }()
	buf := make([]byte, 8<<10)
	for {
		n, err := from.Read(buf)
		p.mu.Lock()
		gate, rate := p.gate, p.rate
		p.mu.Unlock()
		if gate != nil {
			<-gate
		}
		if limited && rate > 0 {
			time.Sleep(time.Duration(n) * time.Second / time.Duration(rate))
		}
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}
