package bus_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
)

const memberStream = "kept"

func createOnMembers(t *testing.T, b *bus.Bus) {
	t.Helper()
	_, err := b.OpenStream(t.Context(), jetstream.StreamConfig{Name: memberStream, Subjects: []string{"kept.>"}, MaxBytes: 1 << 20})
	require.NoError(t, err)
}

// put stores a message, through elections.
func put(t *testing.T, b *bus.Bus) {
	t.Helper()
	require.NoError(t, bus.Retry(t.Context(), bus.Backoff{}, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := b.JetStream().Publish(ctx, "kept.x", nil)
		return err
	}))
}

func stored(t *testing.T, b *bus.Bus) (n uint64) {
	t.Helper()
	require.NoError(t, bus.Retry(t.Context(), bus.Backoff{}, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		s, err := b.JetStream().Stream(ctx, memberStream)
		if err == nil {
			n = s.CachedInfo().State.Msgs
		}
		return err
	}))
	return n
}

// Three members have one store with three copies, which the loss, the return, an empty disk and the replacement of a member leave whole.
func TestMembersKeepOneStore(t *testing.T) {
	m := bustest.StartMembers(t)
	createOnMembers(t, m.Bus(0))
	put(t, m.Bus(0))
	require.Len(t, m.Bus(0).Member().Peers(), 2)
	require.EqualValues(t, 3, infoOf(t, m.Bus(1)).Config.Replicas)

	lost := m.Leader(memberStream)
	other := (lost + 1) % 3
	m.Stop(lost)
	put(t, m.Bus(other))
	m.Start(lost)
	current := func(i int) func() bool { return func() bool { return m.Bus(i).Member().Current(memberStream) } }
	m.Await("the member that returned has not caught up", current(lost))

	m.Stop(lost)
	put(t, m.Bus(other))
	m.Wipe(lost)
	m.Start(lost)
	m.Await("the member with an empty disk has not caught up", current(lost))
	m.Await("a message is missing", func() bool { return stored(t, m.Bus(other)) == 3 }) // a new leader counts what it has applied

	m.Stop(lost)
	m.Replace(lost, "d")
	m.Start(lost)
	require.NoError(t, bus.Retry(t.Context(), bus.Backoff{}, func() error { return m.Bus(other).Member().Remove(t.Context(), m.Name(lost)) }))
	require.NoError(t, m.Bus(m.Leader(memberStream)).Member().Remove(t.Context(), m.Name(lost)), "a repeat changes nothing")
	m.Await("the new member has no copy", current(lost))
	put(t, m.Bus(lost))
	m.Await("a message is missing", func() bool { return stored(t, m.Bus(lost)) == 4 }) // a new leader counts what it has applied
	require.NoError(t, m.Bus(m.Leader(memberStream)).Member().HandOver(memberStream))
	put(t, m.Bus(other))
}

// The store of a member is that of a server alone after LeaveCluster, also after a repeat and a crash in its midst.
func TestMemberLeavesItsCluster(t *testing.T) {
	m := bustest.StartMembers(t)
	createOnMembers(t, m.Bus(0))
	for range 5 {
		put(t, m.Bus(0))
	}
	m.Await("the member has not caught up", func() bool { return m.Bus(0).Member().Current(memberStream) && stored(t, m.Bus(0)) == 5 })
	for _, i := range []int{1, 2, 0} {
		m.Stop(i)
	}
	cfg := m.Config(0)
	cfg.Server.Cluster = nil
	require.NoError(t, bus.LeaveCluster(cfg.Server.StoreDir))
	sum := filepath.Join(bus.StreamsDir(cfg.Server.StoreDir), memberStream, "meta.sum")
	require.NoError(t, os.WriteFile(sum, []byte("0"), 0o600))
	require.NoError(t, bus.LeaveCluster(cfg.Server.StoreDir))
	for n := range uint64(2) {
		b, err := bus.Open(t.Context(), cfg)
		require.NoError(t, err)
		info := infoOf(t, b)
		require.Equal(t, 1, info.Config.Replicas)
		require.Equal(t, 5+n, info.State.Msgs)
		put(t, b)
		require.NoError(t, b.Close())
	}
}

func infoOf(t *testing.T, b *bus.Bus) *jetstream.StreamInfo {
	t.Helper()
	s, err := b.JetStream().Stream(t.Context(), memberStream)
	require.NoError(t, err)
	return s.CachedInfo()
}

// Only a peer with the certificate of the cluster may be a member.
func TestMembersRefuseAnotherCertificate(t *testing.T) {
	m, foreign := bustest.StartMembers(t), bustest.StartMembers(t)
	stranger := foreign.Config(0)
	stranger.Server.Cluster.Routes = m.Config(0).Server.Cluster.Routes
	foreign.Stop(0)
	b, err := bus.Open(t.Context(), stranger)
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	m.Await("the stranger's routes were not refused", func() bool { return b.Refused() > 0 || m.Bus(0).Refused() > 0 })
	require.Empty(t, b.Member().Peers())
	require.Len(t, m.Bus(0).Member().Peers(), 2)
}

// Clients of one member learn the addresses of the others.
func TestClientsLearnAllMembers(t *testing.T) {
	m := bustest.StartMembers(t)
	cfg := m.ClientConfig("client")
	cfg.URLs = cfg.URLs[:1]
	b, err := bus.Open(t.Context(), cfg)
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	require.NoError(t, b.Flush(t.Context()))
	m.Stop(0)
	m.Await("the client has not found another member", func() bool { return b.Connected() && b.Reconnects() > 0 })
}

func TestClusterConfigIsChecked(t *testing.T) {
	_, err := bus.Open(t.Context(), bus.Config{Server: bus.ServerConfig{Cluster: &bus.ClusterConfig{Member: "a b"}}})
	for _, want := range []string{"Name", "Member", "Listen", "Routes", "Certificate", "StoreDir"} {
		require.ErrorContains(t, err, want)
	}
}
