package bustest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net"
	"os"
	"strconv"
	"testing"
	"time"

	"troupe/bus"
)

// Members are three embedded servers in this process that form a cluster, as three heads do. They end with the test.
type Members struct {
	t       testing.TB
	configs []bus.Config
	buses   []*bus.Bus // nil: stopped
}

// membersToken is the token of the servers of Members.
const membersToken = "members"

// StartMembers returns three members that have formed a cluster.
func StartMembers(t testing.TB) *Members {
	t.Helper()
	m := &Members{t: t, configs: make([]bus.Config, 3), buses: make([]*bus.Bus, 3)}
	certificate := selfSigned(t)
	routes := make([]string, len(m.configs))
	for i := range routes {
		routes[i] = net.JoinHostPort("127.0.0.1", strconv.Itoa(FreePort(t)))
	}
	for i := range m.configs {
		at := net.JoinHostPort("127.0.0.1", strconv.Itoa(FreePort(t)))
		m.configs[i] = bus.Config{Name: fmt.Sprintf("member-%d", i), Server: bus.ServerConfig{
			Listen: at, StoreDir: t.TempDir(), SyncAlways: true, Token: membersToken, MaxStore: 4 << 30,
			Cluster: &bus.ClusterConfig{Name: "test", Member: m.Name(i), Listen: routes[i], Routes: routes, Advertise: at, Certificate: certificate},
		}}
		m.Start(i)
	}
	t.Cleanup(func() {
		for i := range m.buses {
			m.Stop(i)
		}
	})
	m.AwaitFormed()
	return m
}

// Name is the name of a member.
func (m *Members) Name(i int) string { return string(rune('a' + i)) }

// Bus is the in-process connection of a member; nil while it is stopped.
func (m *Members) Bus(i int) *bus.Bus { return m.buses[i] }

// URLs are the addresses of all members.
func (m *Members) URLs() []string {
	urls := make([]string, len(m.configs))
	for i, c := range m.configs {
		urls[i] = "nats://" + c.Server.Listen
	}
	return urls
}

// ClientConfig is the configuration of a client of all members.
func (m *Members) ClientConfig(name string) bus.Config {
	return bus.Config{Name: name, URLs: m.URLs(), Token: membersToken}
}

// Config is a copy of the configuration of a member.
func (m *Members) Config(i int) bus.Config {
	cfg := m.configs[i]
	cluster := *cfg.Server.Cluster
	cfg.Server.Cluster = &cluster
	return cfg
}

// AwaitFormed waits until the members that run have a leader.
func (m *Members) AwaitFormed() {
	m.t.Helper()
	m.Await("the cluster has no leader", func() bool {
		for _, b := range m.buses {
			if b != nil && !b.Member().Formed() {
				return false
			}
		}
		return true
	})
}

// Await waits until ok returns true.
func (m *Members) Await(why string, ok func() bool) {
	m.t.Helper()
	for end := time.Now().Add(2 * time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			m.t.Fatalf("bustest: %s after two minutes", why)
		}
	}
}

// Leader is the number of the member that leads a stream.
func (m *Members) Leader(stream string) (leader int) {
	m.t.Helper()
	m.Await("no member leads stream "+stream, func() bool {
		for i, b := range m.buses {
			if b != nil && b.Member().Leads(stream) {
				leader = i
				return true
			}
		}
		return false
	})
	return leader
}

// Start starts a member that is stopped.
func (m *Members) Start(i int) {
	m.t.Helper()
	b, err := bus.Open(m.t.Context(), m.configs[i])
	if err != nil {
		m.t.Fatalf("bustest: member %d: %v", i, err)
	}
	m.buses[i] = b
}

// Stop ends a member, if it runs. Its store stays.
func (m *Members) Stop(i int) {
	if b := m.buses[i]; b != nil {
		m.buses[i] = nil
		_ = b.Close() // its connection may have ended before
	}
}

// Wipe removes the store of a member that is stopped.
func (m *Members) Wipe(i int) {
	m.t.Helper()
	if err := os.RemoveAll(m.configs[i].Server.StoreDir); err != nil {
		m.t.Fatal(err)
	}
}

// Replace makes a stopped member another one: a new name, and an empty store.
func (m *Members) Replace(i int, name string) {
	cluster := *m.configs[i].Server.Cluster
	cluster.Member = name
	m.configs[i].Server.Cluster, m.configs[i].Server.StoreDir = &cluster, m.t.TempDir()
}

func selfSigned(t testing.TB) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "members"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}
