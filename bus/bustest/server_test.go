package bustest

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"troupe/bus"
)

func TestRestartKeepsStoreAndPort(t *testing.T) {
	srv := StartServer(t, Options{Listen: true})
	inside := Open(t, bus.Config{InProcess: NewFaults(srv)})
	bucket, err := inside.JetStream().CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "b"})
	require.NoError(t, err)
	_, err = bucket.PutString(t.Context(), "k", "v")
	require.NoError(t, err)
	outside := Open(t, bus.Config{URLs: []string{srv.URL()}})

	Reconnected(t, inside.Conn(), func() {
		Reconnected(t, outside.Conn(), func() {
			srv.Stop()
			_, err := bus.Open(t.Context(), bus.Config{InProcess: srv})
			require.ErrorIs(t, err, bus.ErrUnavailable)
			srv.Restart()
		})
	})
	for _, b := range []*bus.Bus{inside, outside} {
		bucket, err := b.JetStream().KeyValue(t.Context(), "b")
		require.NoError(t, err)
		e, err := bucket.Get(t.Context(), "k")
		require.NoError(t, err)
		require.Equal(t, "v", string(e.Value()))
	}
}

// recorder is a testing.TB whose failure does not fail this test.
type recorder struct {
	testing.TB
	failures chan string
}

func (r recorder) Errorf(format string, args ...any) { r.failures <- fmt.Sprintf(format, args...) }

func TestAsynchronousErrorsFailTheTest(t *testing.T) {
	provoke := func(b *bus.Bus) {
		sub, err := b.Conn().SubscribeSync("s")
		require.NoError(t, err)
		require.NoError(t, sub.SetPendingLimits(1, 1))
		for range 3 {
			require.NoError(t, b.Conn().Publish("s", []byte("too much")))
		}
		require.NoError(t, b.Conn().Flush())
	}
	r := recorder{t, make(chan string, 8)}
	provoke(Open(r))
	require.Contains(t, <-r.failures, nats.ErrSlowConsumer.Error())

	told := make(chan error, 8)
	provoke(Open(t, bus.Config{OnError: func(err error) { told <- err }}))
	require.True(t, errors.Is(<-told, nats.ErrSlowConsumer))
}

func TestExternal(t *testing.T) {
	var url string
	t.Run("answers", func(t *testing.T) {
		url = External(t)
		for _, cfg := range []bus.Config{{URLs: []string{url}}, {InProcess: NewFaults(Dial(url))}} {
			b := Open(t, cfg)
			require.EqualValues(t, 1<<20, b.Conn().MaxPayload())
			_, err := b.JetStream().AccountInfo(t.Context())
			require.NoError(t, err)
		}
	})
	_, err := net.DialTimeout("tcp", strings.TrimPrefix(url, "nats://"), time.Second)
	require.Error(t, err, "the server is gone with its test")
}
