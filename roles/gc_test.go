package roles_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus/bustest"
	"troupe/bus/kv"
	"troupe/roles"
	"troupe/roles/registry"
)

// GC ends the role of a dead driver, and neither the role of a living driver, nor a detached role, nor one that the record of another namespace names.
func TestGCEndsRolesOfDeadDriversOnly(t *testing.T) {
	type idle struct{}
	class := actors.NewClass("idle", func(context.Context, actors.Setup) (*idle, error) { return &idle{}, nil })
	b := bustest.Open(t)
	rt, err := roles.Open(t.Context(), roles.Config{Bus: b, Namespace: "run", Lease: time.Second, Classes: []*actors.Class{class.Class}})
	require.NoError(t, err)
	defer func() { require.NoError(t, rt.Close(context.Background())) }()
	_, err = rt.Create(t.Context(), roles.Spec{Name: "mine", Class: "idle", World: 1})
	require.NoError(t, err)
	orphans, err := registry.OrphanNamespaces(t.Context(), b)
	require.NoError(t, err)
	require.Empty(t, orphans)

	bucket, err := kv.Open(t.Context(), b, kv.Config{Bucket: "troupe_registry"})
	require.NoError(t, err)
	all, err := rt.Roles(t.Context())
	require.NoError(t, err)
	rec := all[0]
	rec.Name, rec.Owner = "left", "ended"
	for _, detached := range []bool{true, false} {
		rec.Detached = detached
		data, err := json.Marshal(rec)
		require.NoError(t, err)
		_, err = bucket.Put(t.Context(), "run.role.left", data)
		require.NoError(t, err)
		orphans, err = registry.OrphanNamespaces(t.Context(), b)
		require.NoError(t, err)
		require.Equal(t, detached, len(orphans) == 0)
	}
	require.Equal(t, []string{"run"}, orphans)
	stranger := all[0]
	stranger.Owner = "ended"
	data, err := json.Marshal(stranger)
	require.NoError(t, err)
	_, err = bucket.Put(t.Context(), "evil.role.mine", data) // says that it is a role of another namespace
	require.NoError(t, err)

	stop := roles.GC{Bus: b, Logger: slog.New(slog.DiscardHandler), Interval: 20 * time.Millisecond}.Start(t.Context())
	require.Eventually(t, func() bool {
		all, err := rt.Roles(t.Context())
		return err == nil && len(all) == 1
	}, 2*time.Minute, 20*time.Millisecond)
	stop()
	all, err = rt.Roles(t.Context())
	require.NoError(t, err)
	require.Equal(t, "mine", all[0].Name)
}
