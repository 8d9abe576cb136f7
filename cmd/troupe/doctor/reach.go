package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"syscall"
	"time"

	"troupe/bus"
)

const (
	dialWait    = 3 * time.Second
	defaultPort = "4222" // of NATS
)

// Reach is whether the port of a server can be reached.
type Reach struct {
	URL  string // without its password
	Host string
	Port string
	Err  error // nil: something listens
}

// Dial tries to reach the port of a server.
func Dial(ctx context.Context, server string) Reach {
	r := Reach{URL: bus.Redact(server)}
	if !strings.Contains(server, "://") {
		server = "nats://" + server
	}
	u, err := url.Parse(server)
	if err != nil {
		r.Err = errors.New("its URL cannot be parsed")
		return r
	}
	if r.Host, r.Port = u.Hostname(), u.Port(); r.Port == "" {
		r.Port = defaultPort
	}
	r.Err = dial(ctx, net.JoinHostPort(r.Host, r.Port))
	return r
}

// DialData tries to reach an address of a data port.
func DialData(ctx context.Context, address string) Reach {
	host, port, _ := net.SplitHostPort(address) // the dial refuses what is no address
	return Reach{URL: address, Host: host, Port: port, Err: dial(ctx, address)}
}

func dial(ctx context.Context, address string) error {
	ctx, cancel := context.WithTimeout(ctx, dialWait)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err == nil {
		_ = conn.Close() // nothing was sent
	}
	return err
}

// NoHead is the finding where no server is known.
func NoHead(err error) Finding {
	return Finding{Severity: Failure, Code: "nats_unreachable", Subject: "head", Text: "no head is known on this machine", Evidence: []string{err.Error()}, Next: "troupe up, or TROUPE_URL: docs/cli.md, \"Which head\""}
}

// Unreachable is the finding of a server to which no connection could be opened, for the reason opening; it tells a firewall, a server
// that does not run, a wrong name and refused credentials apart.
func Unreachable(r Reach, opening error) Finding {
	f := Finding{Severity: Failure, Code: "nats_unreachable", Subject: "NATS " + r.URL, Evidence: []string{}}
	for _, err := range []error{r.Err, opening} {
		if err != nil {
			f.Evidence = append(f.Evidence, err.Error())
		}
	}
	start := fmt.Sprintf("troupe up, or systemctl status troupe-head on %s", r.Host)
	firewall := fmt.Sprintf("allow TCP port %s from this machine in the firewall of %s (nft list ruleset, ufw status, its security group), or start the machine", r.Port, r.Host)
	var timeout net.Error
	var name *net.DNSError
	switch {
	case r.Err == nil:
		f.Text, f.Next = fmt.Sprintf("port %s of %s answers, and no connection to NATS could be opened", r.Port, r.Host), "check the URL, the token and the certificate: docs/cli.md, \"Which head\""
	case errors.As(r.Err, &name):
		f.Text, f.Next = fmt.Sprintf("the name %s cannot be resolved", r.Host), "getent hosts "+r.Host
	case errors.As(r.Err, &timeout) && timeout.Timeout():
		f.Code = "nats_port_blocked"
		f.Text, f.Next = fmt.Sprintf("nothing answers on port %s of %s: a firewall drops the packets, or the machine is off", r.Port, r.Host), firewall
	case errors.Is(r.Err, syscall.EHOSTUNREACH), errors.Is(r.Err, syscall.ENETUNREACH), errors.Is(r.Err, syscall.EACCES), errors.Is(r.Err, syscall.EPERM):
		f.Code = "nats_port_blocked"
		f.Text, f.Next = fmt.Sprintf("%s cannot be reached: a firewall refuses the packets, or there is no route", r.Host), firewall
	case errors.Is(r.Err, syscall.ECONNREFUSED):
		f.Text, f.Next = fmt.Sprintf("%s answers, and nothing listens on its port %s", r.Host, r.Port), start
	default:
		f.Text, f.Next = "the server cannot be reached", start
	}
	return f
}
