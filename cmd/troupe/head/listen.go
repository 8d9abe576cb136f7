package head

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"syscall"

	"troupe/cmd/troupe/cli"
	"troupe/nodes"
)

const defaultListen = "127.0.0.1:7422"

// listenAddress is the address that a head listens on.
type listenAddress struct {
	text     string // HOST:PORT
	port     int
	loopback bool // not reachable from other machines
}

func parseListen(text string) (listenAddress, error) {
	host, portText, err := net.SplitHostPort(text)
	if err != nil {
		return listenAddress{}, cli.Usagef("--listen %q: give HOST:PORT, as in %s", text, defaultListen)
	}
	port, err := strconv.ParseUint(portText, 10, 16)
	if err != nil {
		return listenAddress{}, cli.Usagef("--listen %q: the port must be a number from 0 to 65535", text)
	}
	ip := net.ParseIP(host)
	return listenAddress{text: text, port: int(port), loopback: host == "localhost" || ip != nil && ip.IsLoopback()}, nil
}

// checkFree is an error if the port cannot be opened. The error names the holder if that is a head of the same user.
func (a listenAddress) checkFree(env func(string) string) error {
	l, err := net.Listen("tcp", a.text)
	if err == nil {
		return l.Close()
	}
	var dns *net.DNSError
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("port %d is taken on %s%s; choose another with --listen HOST:PORT", a.port, a.text, a.holder(env))
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("no permission to listen on port %d (%s): ports under 1024 are reserved for root; choose another with --listen HOST:PORT", a.port, a.text)
	case errors.Is(err, syscall.EADDRNOTAVAIL), errors.As(err, &dns):
		return fmt.Errorf("--listen %s: this machine has no such address", a.text)
	}
	return fmt.Errorf("--listen %s: %w", a.text, err)
}

func (a listenAddress) holder(env func(string) string) string {
	h, err := cli.ReadHead(env)
	if _, port, splitErr := net.SplitHostPort(nodes.HostPort(h.URL)); err != nil || splitErr != nil || port != strconv.Itoa(a.port) || !h.Running() {
		return ""
	}
	return fmt.Sprintf(" by your own head (pid %d), which other commands find without --url", h.PID)
}
