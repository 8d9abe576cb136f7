package bus_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/kv"
)

// A cluster of three servers keeps three replicas of the ledger, so that no single disk holds it alone.
func TestBucketsHaveTheReplicasThatAClusterOffers(t *testing.T) {
	t.Parallel()
	servers := bustest.StartCluster(t)
	b := bustest.Open(t, bus.Config{InProcess: servers[0], OnError: func(error) {}})
	open := func(name string, replicas int) (bucket *kv.Bucket) {
		require.Eventually(t, func() bool { // the last peers may still be on their way
			var err error
			bucket, err = kv.Open(t.Context(), b, kv.Config{Bucket: name, Replicas: replicas})
			return err == nil && (replicas > 0 || bucket.Replicas() == 3)
		}, 2*time.Minute, 100*time.Millisecond)
		return bucket
	}
	require.Equal(t, 1, open("old", 1).Replicas(), "as an earlier version made it")
	revision, err := open("old", 1).Put(t.Context(), "k", []byte("v"))
	require.NoError(t, err)
	bucket := open("old", bus.AllReplicas)
	require.Equal(t, 3, bucket.Replicas(), "an existing bucket is raised")
	e, err := bucket.Get(t.Context(), "k")
	require.NoError(t, err)
	require.Equal(t, revision, e.Revision)
	require.Equal(t, 3, open("new", 0).Replicas())
	require.Equal(t, 1, open("one", 1).Replicas(), "who wants one gets one")

	leader := ""
	require.Eventually(t, func() bool {
		s, err := b.JetStream().Stream(t.Context(), "KV_old")
		if err != nil {
			return false
		}
		info := s.CachedInfo().Cluster
		leader = info.Leader
		for _, r := range info.Replicas {
			if !r.Current {
				return false
			}
		}
		return len(info.Replicas) == 2
	}, 2*time.Minute, 100*time.Millisecond)
	var victim *server.Server
	for _, srv := range servers[1:] { // we are connected to the first
		if srv.Name() == leader || victim == nil {
			victim = srv
		}
	}
	victim.Shutdown()
	require.Eventually(t, func() bool { e, err := bucket.Get(t.Context(), "k"); return err == nil && e.Revision == revision }, 2*time.Minute, 100*time.Millisecond, "it outlives a server")
}
