package pipeline_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/pipeline"
)

// The items of a claim go back when its holder has no subscription any more, long before the claim expires. A holder
// whose connection was interrupted briefly keeps them.
func TestClaimsOfADeadProcessReturn(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	p := open(t, bustest.Open(t, bus.Config{InProcess: srv}), oneStage(pipeline.StageSpec{Func: pass}))
	require.NoError(t, p.Put(testContext(t), "in", items(2)...))
	require.Eventually(t, func() bool { return status(t, p).Streams[1].Items == 2 }, 2*time.Minute, time.Millisecond)
	lend := func(b *bus.Bus) *pipeline.Claim {
		c, err := pipeline.Connect(b, "default", "p")
		require.NoError(t, err)
		loan, err := c.Claim(testContext(t), "out", 1)
		require.NoError(t, err)
		return loan
	}
	alive := bustest.Open(t, bus.Config{URLs: []string{srv.URL()}})
	held := lend(alive)
	require.Equal(t, "i0", held.Items[0].ID)
	dying := bustest.Open(t, bus.Config{URLs: []string{srv.URL()}})
	lost := lend(dying)
	require.Equal(t, "i1", lost.Items[0].ID)
	dying.Conn().Close() // as the kernel does for a killed process
	began := time.Now()
	var again *pipeline.Claim
	require.Eventually(t, func() bool { again = lend(alive); return again != nil }, 2*time.Minute, 10*time.Millisecond)
	require.Less(t, time.Since(began), 25*time.Second, "sooner than after the loss of a host")
	require.Equal(t, "i1", again.Items[0].ID)

	srv.Restart()
	require.Eventually(t, alive.Conn().IsConnected, 2*time.Minute, time.Millisecond)
	time.Sleep(6 * time.Second) // longer than holderTimeout
	require.NoError(t, held.Ack(testContext(t)))
	require.NoError(t, again.Ack(testContext(t)))
	require.Error(t, lost.Nak(testContext(t)), "the claim has ended")
}
