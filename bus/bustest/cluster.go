package bustest

import (
	"net"
	"net/url"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// StartCluster returns three servers with JetStream that have found each other, named 0 to 2. They end with the test.
func StartCluster(t testing.TB) []*server.Server {
	t.Helper()
	var routes []*url.URL
	var ports []int
	for range 3 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatalf("bustest: %v", err)
		}
		routes = append(routes, &url.URL{Scheme: "nats", Host: l.Addr().String()})
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
		_ = l.Close() // the server takes the port at once
	}
	servers := make([]*server.Server, 3)
	for i, port := range ports {
		srv, err := server.NewServer(&server.Options{
			ServerName: strconv.Itoa(i), Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true, JetStream: true, StoreDir: t.TempDir(), Routes: routes,
			JetStreamMaxStore: 4 << 30, Cluster: server.ClusterOpts{Name: "c", Host: "127.0.0.1", Port: port},
		})
		if err != nil {
			t.Fatalf("bustest: %v", err)
		}
		srv.Start()
		t.Cleanup(func() { srv.Shutdown(); srv.WaitForShutdown() })
		servers[i] = srv
	}
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if slices.ContainsFunc(servers, func(s *server.Server) bool { return len(s.JetStreamClusterPeers()) == 3 && s.JetStreamIsLeader() }) {
			return servers
		}
		if time.Now().After(end) {
			t.Fatal("bustest: three servers have not found each other within 30 s")
		}
	}
}
