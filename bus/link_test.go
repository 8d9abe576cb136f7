package bus_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
)

func TestConnections(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	faults := bustest.NewFaults(srv)
	b := bustest.Open(t, bus.Config{InProcess: faults, OnError: func(error) {}})
	require.True(t, b.Connected())
	ch, stop := b.Connections()
	defer stop()
	faults.Cut()
	await := func(up bool) {
		for got := range ch {
			if got == up {
				return
			}
		}
	}
	await(false)
	await(true)
	require.NoError(t, b.Flush(t.Context()))
}

// An attempt ends when the connection is made again, since what was sent before may be lost.
func TestAttemptEndsWithItsConnection(t *testing.T) {
	faults := bustest.NewFaults(bustest.StartServer(t, bustest.Options{Listen: true}))
	b := bustest.Open(t, bus.Config{InProcess: faults, OnError: func(error) {}})
	ctx, cancel := b.Attempt(t.Context(), time.Hour)
	defer cancel()
	require.NoError(t, ctx.Err())
	faults.Cut()
	<-ctx.Done()
	again, cancel := b.Attempt(t.Context(), time.Hour)
	require.NoError(t, again.Err())
	cancel()
	require.Error(t, again.Err())
}

// A server that hangs is given up, and each attempt to connect to it again lasts seconds. What is published meanwhile is
// refused at once: the publisher may hold Python's interpreter lock.
func TestPublishDoesNotWaitForAReconnect(t *testing.T) {
	faults := bustest.NewFaults(bustest.StartServer(t, bustest.Options{Listen: true}))
	b := bustest.Open(t, bus.Config{InProcess: faults, OnError: func(error) {}})
	faults.Freeze()
	faults.Cut()
	require.Eventually(t, func() bool { return !b.Connected() }, 2*time.Minute, time.Millisecond)
	require.Eventually(t, func() bool { return faults.Connections() == 1 }, 2*time.Minute, time.Millisecond, "an attempt is under way")
	fastest := time.Hour
	for range 10 {
		began := time.Now()
		require.ErrorIs(t, b.Publish("test.lost", nil), bus.ErrUnavailable)
		fastest = min(fastest, time.Since(began))
		require.False(t, b.Closed())
		require.Positive(t, b.MaxPayload())
	}
	require.Less(t, fastest, time.Second)
	faults.Thaw()
	require.Eventually(t, b.Connected, 2*time.Minute, time.Millisecond)
	require.NoError(t, b.Publish("test.found", nil))
	require.NoError(t, b.Flush(t.Context()))
}

func TestPublishOnAClosedBus(t *testing.T) {
	b := bustest.Open(t)
	require.NoError(t, b.Close())
	require.True(t, b.Closed())
	require.ErrorIs(t, b.Publish("test.lost", nil), bus.ErrClosed)
}
