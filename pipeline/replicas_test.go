package pipeline_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/pipeline"
)

// A log with three replicas survives the loss of its leader: the pipeline waits for the election and continues, with
// nothing lost or repeated, large bodies included.
func TestAServerOfAClusterDies(t *testing.T) {
	if testing.Short() {
		t.Skip("it needs the machine for itself under the race detector: the second command of make race runs it")
	}
	t.Parallel()
	servers := bustest.StartCluster(t)
	var urls []string
	for _, s := range servers {
		urls = append(urls, s.ClientURL())
	}
	connect := func() *bus.Bus { return bustest.Open(t, bus.Config{URLs: urls, OnError: func(error) {}}) }
	b := connect()
	spec := three(pass)
	spec.Replicas = 3
	for i := range spec.Streams {
		spec.Streams[i].Bytes = 64 << 20
	}
	var p *pipeline.Pipeline
	require.EventuallyWithT(t, func(c *assert.CollectT) { // peers may still be connecting
		var err error
		p, err = pipeline.Open(testContext(t), pipeline.Config{Bus: b}, spec)
		require.NoError(c, err)
	}, 3*time.Minute, 50*time.Millisecond)
	t.Cleanup(func() { require.NoError(t, p.Close(testContext(t))) })
	c, err := pipeline.Connect(connect(), "default", "p")
	require.NoError(t, err)
	const n = 400
	all := items(n)
	for i := range all {
		if i%20 == 0 {
			all[i].Body = bodyOf(i, 40<<10)
		}
	}
	putCh := make(chan error, 1)
	go func() {
		r := c.Producer()
		for i := 0; i < n; i += 10 {
			if err := r.Put(testContext(t), "a", all[i:i+10]...); err != nil {
				putCh <- err
				return
			}
		}
		putCh <- nil
	}()
	require.Eventually(t, func() bool { return status(t, p).Streams[3].In > 50 }, 2*time.Minute, time.Millisecond)
	s, err := b.JetStream().Stream(testContext(t), pipeline.Address{Namespace: "default", Name: "p"}.Stream())
	require.NoError(t, err)
	require.Equal(t, 3, s.CachedInfo().Config.Replicas)
	killed := false
	for i, srv := range servers {
		if s.CachedInfo().Cluster.Leader == fmt.Sprint(i) {
			srv.Shutdown()
			srv.WaitForShutdown()
			killed = true
		}
	}
	require.True(t, killed, "there is no leader %q", s.CachedInfo().Cluster.Leader)
	require.NoError(t, <-putCh)
	requireEachOnce(t, p, n)
}

// A single server has no three replicas, and Open fails at once.
func TestReplicasNeedACluster(t *testing.T) {
	t.Parallel()
	spec := three(pass)
	spec.Replicas = 3
	_, err := pipeline.Open(testContext(t), pipeline.Config{Bus: newBus(t)}, spec)
	require.ErrorContains(t, err, "replicas")
	spec.Replicas = 6
	require.ErrorContains(t, spec.Check(), "6 replicas; give 1 to 5")
}
