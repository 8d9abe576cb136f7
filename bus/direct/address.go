package direct

import (
	"net"
	"strconv"

	"troupe/bus"
)

// announced are the addresses that receivers try: the given ones, with the listener's port where they have none, or the listener's own, or those of
// all interfaces.
func announced(given []string, listener *net.TCPAddr) ([]string, error) {
	port := strconv.Itoa(listener.Port)
	if len(given) > mostAddress {
		return nil, bus.Errorf(bus.CodeInvalid, "%d addresses of the data port; at most %d can be announced (--data-address)", len(given), mostAddress)
	}
	var out []string
	for _, address := range given {
		if host, own, err := net.SplitHostPort(address); err == nil && host != "" && own != "" {
			out = append(out, address)
		} else {
			out = append(out, net.JoinHostPort(address, port))
		}
	}
	if len(out) > 0 {
		return out, nil
	}
	if !listener.IP.IsUnspecified() {
		return []string{net.JoinHostPort(listener.IP.String(), port)}, nil
	}
	interfaces, err := net.InterfaceAddrs()
	if err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "the addresses of this machine: %w; name them with --data-address", err)
	}
	for _, a := range interfaces {
		if ip, ok := a.(*net.IPNet); ok && ip.IP.IsGlobalUnicast() && len(out) < mostAddress {
			out = append(out, net.JoinHostPort(ip.IP.String(), port))
		}
	}
	if len(out) == 0 {
		out = append(out, net.JoinHostPort("127.0.0.1", port))
	}
	return out, nil
}
