package roles_test

import (
	"context"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/placement"
	"troupe/roles"
)

// This must not happen: a call fails or gets the rows of ranks of two sizes because its role is resized, whichever handle it is made on.
func TestResizeUnderCalls(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	c := create(t, tr.driver(t, roles.Config{}), workerSpec("infer", 2, placement.Wholes(0)))
	other := attach(t, tr.driver(t, roles.Config{}), "infer")
	initialize(t, c, "seven")
	ctx, cancel := context.WithCancel(patient(t))
	var group sync.WaitGroup
	for _, handle := range []*roles.Cluster{c, c, other, other} {
		group.Go(func() {
			for made := 0; ctx.Err() == nil || made == 0; made++ {
				rows, err := roles.Call[[]int](patient(t), handle, "double", []int{1, 2, 3, 4})
				if err != nil || !slices.Equal(rows, []int{2, 4, 6, 8}) {
					t.Errorf("double: %v %v", rows, err)
					return
				}
				for _, said := range initialized(t, handle) {
					if said != "1 seven 5" {
						t.Errorf("a rank was not initialised, or twice: %q", said)
						return
					}
				}
			}
		})
	}
	for _, replicas := range []int{4, 1, 3} {
		require.NoError(t, c.Resize(patient(t), replicas))
		require.Equal(t, replicas, c.WorldSize())
	}
	cancel()
	group.Wait()
	require.Len(t, rolesOf(t, tr.driver(t, roles.Config{}))["infer"].Placements, 3)
}
