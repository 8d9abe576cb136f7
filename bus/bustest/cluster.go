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
	for range 3 {
		servers := startServers(t, []int{FreePort(t), FreePort(t), FreePort(t)})
		if slices.ContainsFunc(servers, func(s *server.Server) bool { return !s.ReadyForConnections(20 * time.Second) }) {
			for _, s := range servers { // another process was given one of the ports meanwhile, and a server says nothing of it
				s.Shutdown()
			}
			continue
		}
		for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			if slices.ContainsFunc(servers, func(s *server.Server) bool { return len(s.JetStreamClusterPeers()) == 3 && s.JetStreamIsLeader() }) {
				return servers
			}
		}
		t.Fatal("bustest: three servers have not found each other within 30 s")
	}
	t.Fatal("bustest: three servers were not ready for connections within 5 s, three times")
	return nil
}

// startServers starts a server of a cluster for each of the ports, at which they find each other.
func startServers(t testing.TB, ports []int) []*server.Server {
	t.Helper()
	var routes []*url.URL
	for _, port := range ports {
		routes = append(routes, &url.URL{Scheme: "nats", Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(port))})
	}
	var servers []*server.Server
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
		servers = append(servers, srv)
	}
	return servers
}
