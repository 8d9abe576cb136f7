package gpu

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Harm forbidden: a node with very many workers cannot be heard any more, because its report is too long for a message; or
// a list that was cut is taken for all there is.
func TestLimitRunning(t *testing.T) {
	var all []Running
	for i := range runningMost {
		all = append(all, Running{Reservation: fmt.Sprint("r", i), Token: 1, Namespace: "default"})
	}
	some, complete := LimitRunning(all)
	require.True(t, complete)
	require.Len(t, some, runningMost, "the largest size that is advertised")
	some, complete = LimitRunning(append(all, Running{}))
	require.False(t, complete)
	require.Len(t, some, runningMost)
	for i := range all {
		all[i].Reservation, all[i].Namespace, all[i].Over = strings.Repeat("r", 64), strings.Repeat("n", 64), strings.Repeat("o", 64)
	}
	some, complete = LimitRunning(all)
	require.False(t, complete)
	require.Greater(t, len(some), 1000)
	some, complete = LimitRunning(nil)
	require.True(t, complete)
	require.Empty(t, some)
}
