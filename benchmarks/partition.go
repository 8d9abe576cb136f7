package benchmarks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"time"

	"troupe/bus"
	"troupe/placement"
	"troupe/roles"
)

// partitionFor is the duration of a partition: longer than the node's lease, so that its grants have ended.
const partitionFor = 20 * time.Second

// tcpProxy forwards connections to a server. While it is cut, it closes all connections, so that the processes behind it run on
// unreachable, as in a network partition.
type tcpProxy struct {
	server   string
	listener net.Listener
	group    sync.WaitGroup

	mu    sync.Mutex // guards what follows
	isCut bool
	conns map[net.Conn]bool
}

// newTCPProxy forwards to the server of a nats:// URL.
func newTCPProxy(url string) (*tcpProxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &tcpProxy{server: url[strings.LastIndex(url, "/")+1:], listener: l, conns: map[net.Conn]bool{}}
	p.group.Go(p.serve)
	return p, nil
}

// URL is the address of the proxy.
func (p *tcpProxy) URL() string { return "nats://" + p.listener.Addr().String() }

func (p *tcpProxy) serve() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return // the listener is closed
		}
		p.group.Go(func() { p.forward(client) })
	}
}

// forward copies both ways until one side ends.
func (p *tcpProxy) forward(client net.Conn) {
	defer func() { _ = client.Close() }() // may be closed already
	if !p.enter(client) {
		return
	}
	defer p.leave(client)
	server, err := net.DialTimeout("tcp", p.server, 5*time.Second)
	if err != nil {
		return
	}
	defer func() { _ = server.Close() }()
	if !p.enter(server) {
		return
	}
	defer p.leave(server)
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{client, server}, {server, client}} {
		both.Go(func() {
			_, _ = io.Copy(way[0], way[1]) // an error also ends the connection
			_ = way[0].Close()
			_ = way[1].Close()
		})
	}
	both.Wait()
}

// enter registers a connection; it reports false while the proxy is cut.
func (p *tcpProxy) enter(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.isCut {
		p.conns[c] = true
	}
	return !p.isCut
}

func (p *tcpProxy) leave(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}

// cut closes all connections; with on, it refuses new ones until it is called without on.
func (p *tcpProxy) cut(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.isCut = on
	for c := range p.conns {
		_ = c.Close()
	}
}

// Close ends the proxy and its connections.
func (p *tcpProxy) Close() error {
	err := p.listener.Close()
	p.cut(true)
	p.group.Wait()
	return err
}

// partitions cuts a node off for longer than its lease while its workers run, and measures the time from the end of the
// partition until all its devices are granted again.
func (f *faults) partitions(ctx context.Context) error {
	var all []time.Duration
	for i := range f.Each {
		took, err := f.onePartition(ctx, fmt.Sprint("partitioned-", i))
		if err != nil {
			return err
		}
		all = append(all, took)
	}
	return f.times("node_partitioned", all, nil)
}

func (f *faults) onePartition(ctx context.Context, name string) (took time.Duration, err error) {
	proxy, err := newTCPProxy(f.head.ready.URL)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, proxy.Close()) }()
	agent, err := f.head.JoinAt(proxy.URL(), name, "sim:1x4")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, agent.Kill()) }()
	c, err := retry(ctx, func() (*roles.Cluster, error) { return f.rt.Create(ctx, f.spec(name, name, 4, 1)) })
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, c.Destroy(ctx)) }()
	pids, err := roles.CallEach[int](ctx, c, "pid")
	if err != nil {
		return 0, err
	}
	b, err := bus.Open(ctx, f.head.BusConfig())
	if err != nil {
		return 0, err
	}
	defer func() { _ = b.Close() }() // fails only if the server is gone
	client, err := placement.NewClient(b, "bench")
	if err != nil {
		return 0, err
	}
	defer client.Close()

	proxy.cut(true)
	if err := pause(ctx, partitionFor); err != nil {
		return 0, err
	}
	for _, pid := range pids {
		if syscall.Kill(pid, 0) != nil {
			return 0, fmt.Errorf("worker process %d has not outlived the partition", pid)
		}
	}
	begun := time.Now()
	proxy.cut(false)
	waiting, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	r, err := client.Reserve(waiting, placement.Request{AwaitNodes: true, Bundles: placement.Repeat(4, placement.Bundle{Node: name, Devices: placement.Whole})})
	took = time.Since(begun)
	if err != nil {
		return 0, err
	}
	for _, pid := range pids {
		if syscall.Kill(pid, 0) == nil {
			return 0, fmt.Errorf("worker process %d computes on devices that were granted to another", pid)
		}
	}
	return took, client.Release(ctx, r.ID, r.Token)
}
