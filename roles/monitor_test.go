package roles_test

import (
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/roles"
	"troupe/roles/registry"
)

// The end of a driver and the periodic look of a head lead to one monitor of a detached role, also at the same moment: two would restart
// its workers in turns, without end.
func TestARoleHasOneMonitor(t *testing.T) {
	rt, err := roles.Open(t.Context(), roles.Config{Bus: bustest.Open(t, bus.Config{})})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rt.Close(context.Background())) })
	for i := range 20 {
		rec := registry.RoleRecord{
			Namespace: rt.Namespace(), Name: bus.NewID(), Incarnation: bus.NewID(), World: 1, Process: true, Detached: true,
			Policy: roles.RestartRank, State: registry.RoleReady,
		}
		var group sync.WaitGroup
		for range 8 {
			group.Go(func() { rt.MonitorRole(rec) })
		}
		group.Wait()
		require.Equal(t, i+1, rt.Holds())
	}
}
