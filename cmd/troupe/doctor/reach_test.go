package doctor_test

import (
	"errors"
	"fmt"
	"net"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/cmd/troupe/doctor"
)

// silentPort is a port whose packets are dropped, as by a firewall: the queue of a socket that accepts nothing is full.
func silentPort(t *testing.T) int {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, syscall.Close(fd)) })
	require.NoError(t, syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	require.NoError(t, syscall.Listen(fd, 0))
	at, err := syscall.Getsockname(fd)
	require.NoError(t, err)
	port := at.(*syscall.SockaddrInet4).Port
	first, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, first.Close()) })
	return port
}

// A port that times out names the firewall; one that refuses, a wrong name, and one that answers have other remedies.
func TestUnreachableServers(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, listener.Close()) })
	open := listener.Addr().(*net.TCPAddr).Port
	silent := silentPort(t)
	for name, test := range map[string]struct{ url, code, text, next string }{
		"firewall": {fmt.Sprintf("tls://ann:secret@127.0.0.1:%d", silent), "nats_port_blocked", "a firewall drops the packets", fmt.Sprintf("allow TCP port %d", silent)},
		"refused":  {"127.0.0.1:1", "nats_unreachable", "nothing listens on its port 1", "troupe up"},
		"name":     {"nats://no-such-host.invalid:4222", "nats_unreachable", "cannot be resolved", "getent hosts"},
		"answers":  {fmt.Sprintf("nats://127.0.0.1:%d", open), "nats_unreachable", "answers, and no connection", "token"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := doctor.Unreachable(doctor.Dial(t.Context(), test.url), errors.New("no servers"))
			require.Equal(t, test.code, f.Code, "%+v", f)
			require.Contains(t, f.Text, test.text)
			require.Contains(t, f.Next, test.next)
			require.NotContains(t, fmt.Sprint(f), "secret")
			require.Contains(t, f.Evidence, "no servers")
		})
	}
	for _, refused := range []error{syscall.EHOSTUNREACH, syscall.ENETUNREACH} {
		f := doctor.Unreachable(doctor.Reach{URL: "nats://h:1", Host: "h", Port: "1", Err: &net.OpError{Op: "dial", Err: refused}}, nil)
		require.Equal(t, "nats_port_blocked", f.Code)
		require.Contains(t, f.Text, "firewall")
	}
}

// A server of a cluster that is not reached is a warning while another one is connected.
func TestServerOfAClusterThatIsNotReached(t *testing.T) {
	facts := healthy()
	facts.Servers = []doctor.Reach{{URL: "nats://a:4222"}, {URL: "nats://b:4222", Host: "b", Port: "4222", Err: syscall.ECONNREFUSED}}
	found := doctor.Judge(facts)
	require.Len(t, found, 1)
	require.Equal(t, doctor.Warning, found[0].Severity)
	require.Equal(t, "NATS nats://b:4222", found[0].Subject)
}
