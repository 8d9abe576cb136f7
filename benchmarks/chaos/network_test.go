package chaos

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"unsafe"
)

// freeNet is the network of the namespaces that this process makes, 10.231.<n>.0/24. Nothing else is ever addressed. Tests of
// several processes on one machine have one each.
func freeNet() (netip.Prefix, error) {
	taken, err := net.InterfaceAddrs()
	for n := range 250 {
		at := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 231, byte(1 + (os.Getpid()+n)%250), 0}), 24)
		used := slices.ContainsFunc(taken, func(a net.Addr) bool {
			p, err := netip.ParsePrefix(a.String())
			return err == nil && p.Overlaps(at)
		})
		if err == nil && !used {
			return at, nil
		}
	}
	return netip.Prefix{}, errors.Join(errors.New("no network 10.231.n.0/24 is free"), err)
}

// Wire connects this machine and network namespaces, each by a TUN device. The harness itself carries every packet, so that it
// can lose some or all of them: that needs neither a firewall nor the kernel's netem, which not every kernel has.
type Wire struct {
	id    string
	net   netip.Prefix
	ports []*wirePort // 0 is this machine, the others are namespaces
	group sync.WaitGroup

	mu   sync.Mutex
	loss []float64 // of each port's packets, both ways, from 0 to 1
	rng  *rand.Rand
}

type wirePort struct {
	netns string // empty: this machine
	addr  netip.Addr
	tun   *os.File
}

// ErrNoNamespaces says what is missing for partitions and packet loss.
var ErrNoNamespaces = errors.New("partitions and packet loss need root, iproute2 (apt install iproute2) and /dev/net/tun")

// NewWire makes n namespaces.
func NewWire(n int, seed uint64) (*Wire, error) {
	if _, err := exec.LookPath("ip"); err != nil || os.Getuid() != 0 {
		return nil, ErrNoNamespaces
	}
	at, err := freeNet()
	if err != nil {
		return nil, err
	}
	w := &Wire{net: at, id: fmt.Sprintf("trp%d", os.Getpid()%100000), loss: make([]float64, n+1), rng: rand.New(rand.NewPCG(seed, 99))}
	for i := range n + 1 {
		if err := w.addPort(i); err != nil {
			return nil, errors.Join(ErrNoNamespaces, err, w.Close())
		}
	}
	for i := range w.ports {
		w.group.Go(func() { w.carry(i) })
	}
	return w, nil
}

// addPort makes a device, and for every port but the first a namespace around it.
func (w *Wire) addPort(i int) error {
	name := fmt.Sprintf("%s-%d", w.id, i)
	tun, err := openTUN(name)
	if err != nil {
		return err
	}
	p := &wirePort{tun: tun, addr: w.addrOf(i)}
	w.ports = append(w.ports, p)
	in := []string{"ip"}
	if i > 0 {
		if err := ip("netns", "add", name); err != nil {
			return err
		}
		p.netns = name
		if err := ip("link", "set", name, "netns", name); err != nil {
			return err
		}
		in = append(in, "-n", name)
		if err := ip("-n", name, "link", "set", "lo", "up"); err != nil {
			return err
		}
	}
	return errors.Join(ip(append(in[1:], "addr", "add", netip.PrefixFrom(p.addr, w.net.Bits()).String(), "dev", name)...),
		ip(append(in[1:], "link", "set", name, "up")...))
}

func (w *Wire) addrOf(i int) netip.Addr {
	a := w.net.Addr().As4()
	a[3] = byte(i + 1)
	return netip.AddrFrom4(a)
}

func ip(args ...string) error {
	out, err := exec.Command("ip", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// openTUN makes a device of that name, which goes with the file.
func openTUN(name string) (*os.File, error) {
	const tunSetIff, iffTun, iffNoPI = 0x400454ca, 0x1, 0x1000
	fd, err := syscall.Open("/dev/net/tun", syscall.O_RDWR|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/net/tun: %w", err)
	}
	var request [40]byte
	copy(request[:15], name)
	*(*uint16)(unsafe.Pointer(&request[16])) = iffTun | iffNoPI
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), tunSetIff, uintptr(unsafe.Pointer(&request[0]))); errno != 0 {
		_ = syscall.Close(fd)
		return nil, fmt.Errorf("device %s: %w", name, errno)
	}
	return os.NewFile(uintptr(fd), "tun "+name), nil // it is in the runtime's poller, so that Close ends a read
}

// Host is the address of this machine on the wire.
func (w *Wire) Host() string { return w.ports[0].addr.String() }

// Netns is the name of a namespace, from 0.
func (w *Wire) Netns(i int) string { return w.ports[i+1].netns }

// SetLoss loses this part of the packets from and to a namespace: 0 none, 1 all.
func (w *Wire) SetLoss(i int, part float64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.loss[i+1] = part
}

// carry brings the packets of one port to where they are addressed.
func (w *Wire) carry(from int) {
	buf := make([]byte, 1<<16)
	for {
		n, err := w.ports[from].tun.Read(buf)
		if err != nil {
			return // the wire is closed
		}
		if to := w.destination(buf[:n]); to >= 0 && to != from && !w.lost(from, to) {
			_, _ = w.ports[to].tun.Write(buf[:n]) // a full queue loses packets, as on any wire
		}
	}
}

// destination is the port that a packet is for; -1: none.
func (w *Wire) destination(packet []byte) int {
	if len(packet) < 20 || packet[0]>>4 != 4 {
		return -1
	}
	to := netip.AddrFrom4([4]byte(packet[16:20]))
	for i, p := range w.ports {
		if p.addr == to {
			return i
		}
	}
	return -1
}

func (w *Wire) lost(from, to int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	part := max(w.loss[from], w.loss[to])
	return part > 0 && w.rng.Float64() < part
}

// Close removes namespaces and devices.
func (w *Wire) Close() error {
	var errs []error
	for _, p := range w.ports {
		errs = append(errs, p.tun.Close())
	}
	w.group.Wait()
	for _, p := range w.ports {
		if p.netns != "" {
			errs = append(errs, ip("netns", "del", p.netns))
		}
	}
	return errors.Join(errs...)
}
