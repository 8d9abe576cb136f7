package nodes

import (
	"net"
	"net/url"
	"strings"
)

const loopback = "127.0.0.1"

// hostToward is this machine's address on the route to the first reachable URL; loopback if there is none. Nothing is
// sent: the kernel chooses the source address.
func hostToward(urls []string) string {
	for _, text := range urls {
		if !strings.Contains(text, "://") {
			text = "nats://" + text
		}
		u, err := url.Parse(text)
		if err != nil || u.Hostname() == "" {
			continue
		}
		port := u.Port()
		if port == "" {
			port = "4222"
		}
		conn, err := net.Dial("udp", net.JoinHostPort(u.Hostname(), port))
		if err != nil {
			continue
		}
		host, _, err := net.SplitHostPort(conn.LocalAddr().String())
		_ = conn.Close() // nothing was sent
		if err == nil {
			return host
		}
	}
	return loopback
}
