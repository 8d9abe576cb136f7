package actors

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLifecycle compares every transition with the diagram.
func TestLifecycle(t *testing.T) {
	all := []State{Created, Initialising, Ready, Stopping, Stopped, Failed}
	for from, to := range map[State][]State{
		Created:      {Initialising, Stopping, Failed},
		Initialising: {Ready, Stopping, Failed},
		Ready:        {Stopping, Failed},
		Stopping:     {Stopped, Failed},
		Stopped:      nil,
		Failed:       nil,
	} {
		for _, s := range all {
			err := from.next(s)
			require.Equal(t, slices.Contains(to, s), err == nil, "%s to %s", from, s)
			if err != nil {
				require.ErrorContains(t, err, "a worker that is "+string(from)+" cannot become "+string(s))
			}
		}
		require.Equal(t, to == nil, from.Over(), "%s", from)
	}
}
