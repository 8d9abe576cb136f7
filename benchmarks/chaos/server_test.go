package chaos

import (
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"os"
	"strconv"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// serverEnv makes this program one nats-server of a cluster; its value is a serverSpec.
const serverEnv = "TROUPE_CHAOS_SERVER"

// serverSpec is one server of an external NATS cluster.
type serverSpec struct {
	Name   string   `json:"name"`
	Host   string   `json:"host"`
	Port   int      `json:"port"`
	Route  int      `json:"route"` // port for the other servers
	Routes []string `json:"routes"`
	Store  string   `json:"store"`
}

// ServeIfAsked comes first in TestMain. In a process that a Cluster started as a NATS server it serves until it is killed;
// elsewhere it does nothing.
func ServeIfAsked() {
	text := os.Getenv(serverEnv)
	if text == "" {
		return
	}
	fmt.Fprintln(os.Stderr, "chaos: nats-server:", serve(text))
	os.Exit(1)
}

// serve syncs every write, as the head's own server does.
func serve(text string) error {
	var spec serverSpec
	if err := json.Unmarshal([]byte(text), &spec); err != nil {
		return err
	}
	opts := &server.Options{
		ServerName: spec.Name, Host: spec.Host, Port: spec.Port, NoSigs: true, JetStream: true, StoreDir: spec.Store, SyncAlways: true,
		JetStreamMaxStore: 16 << 30, JetStreamMaxMemory: 256 << 20, Cluster: server.ClusterOpts{Name: "chaos", Host: spec.Host, Port: spec.Route},
	}
	for _, route := range spec.Routes {
		u, err := url.Parse(route)
		if err != nil {
			return err
		}
		opts.Routes = append(opts.Routes, u)
	}
	srv, err := server.NewServer(opts)
	if err != nil {
		return err
	}
	srv.ConfigureLogger()
	srv.Start()
	if !srv.ReadyForConnections(20 * time.Second) {
		return fmt.Errorf("server %s is not ready after 20 s", spec.Name)
	}
	fmt.Println(srv.ClientURL())
	srv.WaitForShutdown()
	return nil
}

// serverSpecs are n servers on a host that know each other. Their ports were free a moment ago.
func serverSpecs(n int, host, dir string) ([]serverSpec, error) {
	specs := make([]serverSpec, n)
	var routes []string
	for i := range specs {
		port, err := freePort(host)
		if err != nil {
			return nil, err
		}
		route, err := freePort(host)
		if err != nil {
			return nil, err
		}
		specs[i] = serverSpec{Name: "nats" + strconv.Itoa(i), Host: host, Port: port, Route: route, Store: fmt.Sprintf("%s/nats%d", dir, i)}
		routes = append(routes, "nats://"+net.JoinHostPort(host, strconv.Itoa(route)))
	}
	for i := range specs {
		specs[i].Routes = routes
	}
	return specs, nil
}

// freePort finds a port below the range that outgoing connections are given: one of those could take a server's port while
// the server is down.
func freePort(host string) (int, error) {
	for range 200 {
		port := 20000 + int(time.Now().UnixNano()/1000+portOffset.Add(7))%12000
		l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err != nil {
			continue
		}
		_ = l.Close() // the server takes it at once
		return port, nil
	}
	return 0, fmt.Errorf("no free port on %s between 20000 and 32000", host)
}
