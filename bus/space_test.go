package bus_test

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/kv"
)

// Harm forbidden: a disk that was full for a while leaves a server that takes no writes until it is started anew, and
// clients that wait for answers which do not come.
func TestFullDisk(t *testing.T) {
	dir := bustest.SmallDisk(t, 8<<20)
	if dir == "" {
		return
	}
	quiet := slog.New(slog.DiscardHandler)
	head, err := bus.Open(t.Context(), bus.Config{Logger: quiet, Server: bus.ServerConfig{Listen: "127.0.0.1:0", StoreDir: dir, SyncAlways: true, Token: "secret"}})
	require.NoError(t, err)
	defer func() { require.NoError(t, head.Close()) }()
	b, err := bus.Open(t.Context(), bus.Config{Logger: quiet, URLs: []string{head.URL()}, Token: "secret"})
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	bucket, err := kv.Open(t.Context(), b, kv.Config{Bucket: "full", MaxBytes: 4 << 20})
	require.NoError(t, err)
	leases, err := kv.Open(t.Context(), b, kv.Config{Bucket: "leases", MaxBytes: 1 << 20, Leases: true})
	require.NoError(t, err)
	_, err = b.JetStream().CreateStream(t.Context(), jetstream.StreamConfig{Name: "lines", Subjects: []string{"lines.>"}})
	require.NoError(t, err)
	before, err := bucket.Put(t.Context(), "kept", []byte("value"))
	require.NoError(t, err)
	watching, endWatch := context.WithCancel(t.Context())
	defer endWatch()
	events, err := bucket.Watch(watching, "late")
	require.NoError(t, err)

	free := bustest.FillDisk(t, dir)
	var full error
	for i := 0; full == nil; i++ { // what is still in the blocks of the file system may be written
		_, full = bucket.Put(t.Context(), "k"+strconv.Itoa(i), make([]byte, 4096))
	}
	for _, write := range map[string]func(context.Context) error{
		"put": func(ctx context.Context) error { _, err := bucket.Put(ctx, "a", []byte("b")); return err },
		"batch": func(ctx context.Context) error {
			_, err := bucket.Apply(ctx, []kv.Op{kv.OpPut("x", nil), kv.OpPut("y", nil)})
			return err
		},
		"lease": func(ctx context.Context) error { _, err := leases.Lease(ctx, "l", nil, time.Second); return err },
		"publish": func(ctx context.Context) error {
			_, err := b.JetStream().Publish(ctx, "lines.a", []byte("b"))
			return bus.Errorf(bus.CodeUnavailable, "publish: %w", err)
		},
		"open": func(ctx context.Context) error {
			_, err := kv.Open(ctx, b, kv.Config{Bucket: "another"})
			return err
		},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		began := time.Now()
		err := write(ctx)
		cancel()
		require.ErrorIs(t, err, bus.ErrNoSpace)
		require.ErrorContains(t, err, "no space left in the head's store")
		require.Equal(t, bus.CodeNoSpace, bus.AsError(err).Code, "the code crosses the wire")
		require.Less(t, time.Since(began), 2*time.Second, "refused at once, rather than after a timeout: %v", err)
	}
	usage, ok := head.Store()
	require.True(t, ok)
	require.True(t, usage.Full)
	_, why := head.StoreErr()
	require.ErrorIs(t, why, bus.ErrNoSpace)

	free()
	for { // until the store is writable again, which is waited for by its channel
		changed, err := head.StoreErr()
		if err == nil {
			break
		}
		select {
		case <-changed:
		case <-time.After(20 * time.Second):
			require.Fail(t, "the store does not come back by itself", "%v", err)
		}
	}
	e, err := bucket.Get(t.Context(), "kept")
	require.NoError(t, err)
	require.Equal(t, before, e.Revision, "nothing that was acknowledged is lost")
	_, err = bucket.Put(t.Context(), "late", []byte("b"))
	require.NoError(t, err)
	for ev := range events {
		if ev.Kind == kv.EventPut && ev.Key == "late" {
			break // the watch goes on as well
		}
	}
	_, err = b.JetStream().Publish(t.Context(), "lines.a", []byte("b"))
	require.NoError(t, err)
	_, err = bucket.Apply(t.Context(), []kv.Op{kv.OpPut("x", nil), kv.OpPut("y", nil)})
	require.NoError(t, err)
	usage, _ = head.Store()
	require.False(t, usage.Full)
	require.Positive(t, usage.Used)
}

// A store whose limit is reached refuses with the same code: the remedy is the same.
func TestStoreLimit(t *testing.T) {
	b, err := bus.Open(t.Context(), bus.Config{Logger: slog.New(slog.DiscardHandler), Server: bus.ServerConfig{MaxStore: 8 << 20}})
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	_, err = kv.Open(t.Context(), b, kv.Config{Bucket: "large", MaxBytes: 16 << 20})
	require.ErrorIs(t, err, bus.ErrNoSpace)
	require.ErrorContains(t, err, "--store-limit")
	_, err = b.JetStream().CreateStream(t.Context(), jetstream.StreamConfig{Name: "lines", Subjects: []string{"lines.>"}})
	require.NoError(t, err)
	for err == nil {
		_, err = b.JetStream().Publish(t.Context(), "lines.a", make([]byte, 256<<10))
	}
	require.ErrorIs(t, bus.Errorf(bus.CodeUnavailable, "publish: %w", err), bus.ErrNoSpace)
	require.False(t, errors.Is(bus.Errorf(bus.CodeRefused, "other"), bus.ErrNoSpace))
	usage, ok := b.Store()
	require.True(t, ok)
	require.Equal(t, int64(8<<20), usage.Limit)
	require.Greater(t, usage.Used, int64(7<<20))
}
