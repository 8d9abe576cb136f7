package bus_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/kv"
)

// A stream whose configuration is damaged is restored, not created again over its messages.
func TestDamagedConfigurationLosesNoKey(t *testing.T) {
	t.Parallel()
	for _, damage := range []string{"meta.inf", "meta.sum"} {
		t.Run(damage, func(t *testing.T) {
			t.Parallel()
			store := t.TempDir()
			dir := filepath.Join(store, "jetstream", "$G", "streams", "KV_test")
			cfg := bus.Config{Server: bus.ServerConfig{StoreDir: store, SyncAlways: true}}
			b, err := bus.Open(t.Context(), cfg)
			require.NoError(t, err)
			revision, err := openBucket(t, b).Put(t.Context(), "k", []byte("v"))
			require.NoError(t, err)
			require.Eventually(t, func() bool { _, err := os.Stat(filepath.Join(store, "meta", "KV_test", "meta.sum")); return err == nil }, 2*time.Minute, 20*time.Millisecond)
			require.NoError(t, b.Close())
			require.NoError(t, os.Truncate(filepath.Join(dir, damage), 0))

			e, err := openBucket(t, bustest.Open(t, cfg)).Get(t.Context(), "k")
			require.NoError(t, err)
			require.Equal(t, "v", string(e.Value))
			require.Equal(t, revision, e.Revision)
		})
	}
}

// A stream without a copy of its configuration is moved aside with its messages.
func TestDamagedStreamIsKept(t *testing.T) {
	t.Parallel()
	store := t.TempDir()
	dir := filepath.Join(store, "jetstream", "$G", "streams", "KV_test")
	cfg := bus.Config{Server: bus.ServerConfig{StoreDir: store}}
	b, err := bus.Open(context.Background(), cfg)
	require.NoError(t, err)
	_, err = openBucket(t, b).Put(t.Context(), "k", []byte("v"))
	require.NoError(t, err)
	require.NoError(t, b.Close())
	require.NoError(t, os.RemoveAll(filepath.Join(store, "meta")))
	require.NoError(t, os.Truncate(filepath.Join(dir, "meta.inf"), 0))
	_, err = openBucket(t, bustest.Open(t, cfg)).Get(t.Context(), "k")
	require.ErrorIs(t, err, bus.ErrNotFound)
	kept, err := filepath.Glob(filepath.Join(store, "damaged", "KV_test.*", "msgs", "*.blk"))
	require.NoError(t, err)
	require.NotEmpty(t, kept)
}

// openBucket opens the bucket "test" on b.
func openBucket(t *testing.T, b *bus.Bus) *kv.Bucket {
	t.Helper()
	bucket, err := kv.Open(t.Context(), b, kv.Config{Bucket: "test"})
	require.NoError(t, err)
	return bucket
}
