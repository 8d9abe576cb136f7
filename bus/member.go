package bus

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// ClusterConfig makes the embedded server a member of a cluster of servers that have one store between them.
type ClusterConfig struct {
	// Name is the name of the cluster. Servers of another name are refused.
	Name string
	// Member is the name of this server in it. The store belongs to this name: a member with another store is another member.
	Member string
	// Listen is HOST:PORT for the routes of the other members.
	Listen string
	// Routes are HOST:PORT of the route listeners of all members, this one included. A new cluster forms when as many have met.
	Routes []string
	// Advertise is HOST:PORT at which clients reach this member; they learn it from the others.
	Advertise string
	// Certificate is what both ends of a route present, and the only one that they accept.
	Certificate tls.Certificate
}

// Between members. A route that hangs is cut after two pings, and before that what waits for it is bounded by the write deadline.
const (
	routePing     = time.Second
	routePingsOut = 1
	routeWrite    = 2 * time.Second
	systemUser    = "system"
	removeTimeout = 5 * time.Second

	// A member that ends in order tells its clients to go, and ends when all have, or after lameDuck.
	lameDuck      = 2 * time.Second
	lameDuckGrace = 200 * time.Millisecond
)

// apply adds the cluster to the options of a server.
func (c *ClusterConfig) apply(opts *server.Options, password string) error {
	host, port, err := splitListen(c.Listen)
	if err != nil {
		return err
	}
	routes, err := routeURLs(c.Routes)
	if err != nil {
		return err
	}
	opts.ServerName = c.Member
	opts.ClientAdvertise = c.Advertise
	opts.Routes = routes
	opts.LameDuckDuration, opts.LameDuckGracePeriod = lameDuck, lameDuckGrace
	opts.Cluster = server.ClusterOpts{
		Name: c.Name, Host: host, Port: port, TLSConfig: mutual(c.Certificate), TLSTimeout: 5,
		PingInterval: routePing, MaxPingsOut: routePingsOut, WriteDeadline: routeWrite,
	}
	// The removal of a member is a request in the system account, which nobody but this process can reach.
	system := server.NewAccount(server.DEFAULT_SYSTEM_ACCOUNT)
	opts.Accounts, opts.SystemAccount = []*server.Account{system}, system.Name
	opts.Users = []*server.User{{Username: systemUser, Password: password, Account: system}}
	return nil
}

func routeURLs(addresses []string) ([]*url.URL, error) {
	var routes []*url.URL
	for _, address := range addresses {
		if _, _, err := splitListen(address); err != nil {
			return nil, err
		}
		routes = append(routes, &url.URL{Scheme: "nats", Host: address})
	}
	return routes, nil
}

// mutual is the configuration of both ends of a route: each presents the certificate, and accepts no other one.
func mutual(own tls.Certificate) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{own}, ClientAuth: tls.RequireAnyClientCert,
		InsecureSkipVerify: true, //nolint:gosec // VerifyPeerCertificate is stricter
		VerifyPeerCertificate: func(raw [][]byte, _ [][]*x509.Certificate) error {
			if len(raw) > 0 && bytes.Equal(raw[0], own.Certificate[0]) {
				return nil
			}
			return Errorf(CodeRefused, "the peer does not have the certificate of this cluster")
		},
	}
}

// validate reports all mistakes at once, to bad.
func (c *ClusterConfig) validate(bad func(format string, args ...any)) {
	for _, f := range []struct{ name, value string }{{"Name", c.Name}, {"Member", c.Member}, {"Listen", c.Listen}} {
		if f.value == "" || strings.ContainsAny(f.value, " \t\n") {
			bad("bus.ClusterConfig: %s %q: must be a word", f.name, f.value)
		}
	}
	if len(c.Routes) < 2 {
		bad("bus.ClusterConfig: Routes %v: give those of all members", c.Routes)
	}
	if len(c.Certificate.Certificate) == 0 {
		bad("bus.ClusterConfig: Certificate is not set")
	}
}

// Member is the embedded server as a member of its cluster. Its methods are safe for concurrent use.
type Member struct {
	srv      *server.Server
	name     string
	password string // of the system account, in this process alone
}

// Member is the embedded server as a member of its cluster; nil if there is no cluster.
func (b *Bus) Member() *Member {
	if b.srv == nil {
		return nil
	}
	return b.srv.member
}

func newSystemPassword() (string, error) {
	random := make([]byte, 32)
	_, err := rand.Read(random)
	return hex.EncodeToString(random), err
}

// Name is the name of this member.
func (m *Member) Name() string { return m.name }

// Leads reports whether this server leads a stream, as far as it knows: a server that is cut off learns late that another one does.
func (m *Member) Leads(stream string) bool {
	return m.srv.JetStreamIsStreamLeader(server.DEFAULT_GLOBAL_ACCOUNT, stream)
}

// Current reports whether this server has all of a stream that its leader has acknowledged.
func (m *Member) Current(stream string) bool {
	return m.srv.JetStreamIsStreamCurrent(server.DEFAULT_GLOBAL_ACCOUNT, stream)
}

// HandOver makes another server lead a stream that this one leads.
func (m *Member) HandOver(stream string) error {
	if err := m.srv.JetStreamStepdownStream(server.DEFAULT_GLOBAL_ACCOUNT, stream); err != nil {
		return Errorf(CodeUnavailable, "hand over stream %s: %w", stream, err)
	}
	return nil
}

// Formed reports whether the cluster takes requests: it has a leader, and has seen all of its members, now or before they were lost. A cluster that
// began without one of them would create its streams with fewer replicas.
func (m *Member) Formed() bool {
	meta := m.meta()
	return m.srv.JetStreamIsCurrent() && meta.Leader != "" && len(meta.Peers)+1 >= meta.Size
}

// metaGroup is the raft group of the cluster's own state.
const metaGroup = "_meta_"

func (m *Member) meta() server.RaftzGroup {
	groups := m.srv.Raftz(&server.RaftzOptions{GroupFilter: metaGroup})
	if groups == nil {
		return server.RaftzGroup{}
	}
	for _, account := range *groups {
		return account[metaGroup]
	}
	return server.RaftzGroup{}
}

// Peer is another member as this one sees it.
type Peer struct {
	Name      string        `json:"name"`
	Address   string        `json:"address,omitempty"` // of its end of the route
	RoundTrip time.Duration `json:"round_trip_ns,omitempty"`
	Pending   int           `json:"pending,omitempty"` // bytes that wait to be sent to it
	Since     time.Time     `json:"since,omitzero"`    // of the route
}

// Peers are the members with a route to this one, by name.
func (m *Member) Peers() []Peer {
	routes, err := m.srv.Routez(nil)
	if err != nil {
		return nil
	}
	byName := map[string]Peer{}
	for _, r := range routes.Routes { // several between two servers
		p := byName[r.RemoteName]
		took, _ := time.ParseDuration(r.RTT) // empty before the first pong
		p.Name, p.Address = r.RemoteName, r.IP
		p.RoundTrip, p.Pending = max(p.RoundTrip, took), p.Pending+r.Pending
		if p.Since.IsZero() || r.Start.Before(p.Since) {
			p.Since = r.Start
		}
		byName[p.Name] = p
	}
	var peers []Peer
	for _, p := range byName {
		peers = append(peers, p)
	}
	slices.SortFunc(peers, func(a, b Peer) int { return strings.Compare(a.Name, b.Name) })
	return peers
}

// codeNotMember: the cluster has no server of this name.
const codeNotMember = 10044

// Remove takes a member out of the cluster for good: its replicas move to another one, and its name may come back after five minutes at
// the earliest. It must have ended. A repeat changes nothing.
func (m *Member) Remove(ctx context.Context, name string) error {
	nc, err := nats.Connect("", nats.InProcessServer(m.srv), nats.UserInfo(systemUser, m.password), nats.Name("troupe-member"))
	if err != nil {
		return Errorf(CodeUnavailable, "remove member %s: %w", name, err)
	}
	defer nc.Close()
	ctx, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	request, err := json.Marshal(server.JSApiMetaServerRemoveRequest{Server: name})
	if err != nil {
		return err
	}
	answer, err := nc.RequestWithContext(ctx, server.JSApiRemoveServer, request)
	if err != nil {
		return Errorf(CodeUnavailable, "remove member %s: no leader of the cluster answers: %w", name, err)
	}
	var got server.JSApiMetaServerRemoveResponse
	if err := json.Unmarshal(answer.Data, &got); err != nil {
		return err
	}
	if got.Error != nil && got.Error.ErrCode != codeNotMember {
		return fmt.Errorf("remove member %s: %w", name, got.Error)
	}
	return nil
}
