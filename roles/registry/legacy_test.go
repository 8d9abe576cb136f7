package registry_test

import (
	"encoding/json"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus/bustest"
	"troupe/bus/kv"
	"troupe/bus/stream"
	"troupe/dispatch"
	"troupe/roles/registry"
)

// The records of an earlier version's buckets are moved to the registry once: a bucket that a crash restores does not
// restore its roles.
func TestNamespacesOfAnEarlierVersion(t *testing.T) {
	ctx, b := t.Context(), bustest.Open(t)
	mesh, err := dispatch.Mesh{}.Resolve(1)
	require.NoError(t, err)
	rec := registry.RoleRecord{
		Namespace: "run", Name: "kept", Incarnation: "i", Class: "c", World: 1, Mesh: mesh, Detached: true, State: registry.RoleFailed,
		Cause: "an old cause", Since: time.Now(), Owner: "gone", By: "driver", Lease: time.Second,
	}
	value, err := json.Marshal(rec)
	require.NoError(t, err)
	write := func() {
		old, err := kv.Open(ctx, b, kv.Config{Bucket: "troupe_ns_run"})
		require.NoError(t, err)
		_, err = old.Put(ctx, "role.kept", value)
		require.NoError(t, err)
		_, err = old.Put(ctx, "driver.gone", nil)
		require.NoError(t, err)
	}
	gone := func() {
		t.Helper()
		names, err := stream.Names(ctx, b, "KV_troupe_ns_")
		require.NoError(t, err)
		require.Empty(t, names)
	}
	write()
	require.NoError(t, registry.AdoptNamespaces(ctx, b, slog.Default()))
	gone()
	reg, err := registry.Open(ctx, b, "run")
	require.NoError(t, err)
	all, err := reg.List(ctx)
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.Equal(t, "an old cause", all[0].Cause)
	require.NoError(t, reg.Remove(ctx, all[0]))

	write()
	require.NoError(t, registry.AdoptNamespaces(ctx, b, slog.Default()))
	all, err = reg.List(ctx)
	require.NoError(t, err)
	require.Empty(t, all)
	gone()
}
