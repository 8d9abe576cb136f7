package values_test

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// server answers each request with its bytes, twice.
func server(t *testing.T, b *bus.Bus, x *values.Exchange) {
	sub, err := b.Subscribe("twice", func(m *bus.Msg) {
		bus.Go(func() {
			data, err := x.Read(t.Context(), m)
			if err == nil {
				err = x.Respond(m, append(data, data...))
			}
			if err != nil && t.Context().Err() == nil {
				t.Error(err)
			}
		})
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, sub.Unsubscribe()) })
	require.NoError(t, b.Flush(t.Context()))
}

func TestExchangeOfAnySize(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{})
	client, far := bustest.Open(t, bus.Config{InProcess: srv}), bustest.Open(t, bus.Config{InProcess: srv})
	server(t, far, values.NewExchange(far, bus.NodesNamespace))
	x := values.NewExchange(client, bus.NodesNamespace)
	for _, n := range []int{0, 1, 500 << 10, 1 << 20, 9 << 20} {
		data := bytes.Repeat([]byte("0123456789"), n/10)
		got, err := x.Request(t.Context(), "twice", data, time.Minute)
		require.NoError(t, err)
		require.True(t, bytes.Equal(got, append(data, data...)), "%d bytes", n)
	}
	store, err := x.Store()
	require.NoError(t, err)
	require.Zero(t, store.Uploads())
}

// A requester that goes away leaves nothing in the memory of the process that has answered, and meanwhile that is bounded.
func TestAnswersThatAreNotPulledExpire(t *testing.T) {
	bustest.VirtualTime(t, func(t *testing.T) {
		b := bustest.Open(t)
		x := values.NewExchange(b, "test")
		answer := make([]byte, 16<<20)
		busy := 0
		sub, err := b.Subscribe("long", func(m *bus.Msg) {
			if err := x.Respond(m, answer); err != nil {
				require.ErrorIs(t, err, bus.ErrBusy)
				busy++
				require.NoError(t, b.Respond(m, nil))
			}
		})
		require.NoError(t, err)
		for range 20 { // more than 256 MiB
			_, err := b.Request(t.Context(), "long", nil)
			require.NoError(t, err)
		}
		require.NoError(t, sub.Unsubscribe())
		store, err := x.Store()
		require.NoError(t, err)
		require.Equal(t, 16, store.Uploads())
		require.Equal(t, 4, busy)
		time.Sleep(31 * time.Second)
		require.Zero(t, store.Uploads())
	})
}

func TestPullEndsWithItsContext(t *testing.T) {
	b := bustest.Open(t)
	store, err := values.Open(b, "test")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	go cancel()
	_, err = store.Pull(ctx, wire.BodyRef{Owner: "NOSUCHSESSION", ID: 99, Len: 1 << 20})
	require.ErrorIs(t, err, bus.ErrCancelled)
}
