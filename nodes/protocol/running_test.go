package protocol

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// This must not happen: a node with very many workers cannot be heard any more, because its report is too long for a message; or
// a list that was cut is taken for all there is.
func TestLimitRunning(t *testing.T) {
	var all []RunningGrant
	for i := range maxRunning {
		all = append(all, RunningGrant{Reservation: fmt.Sprint("r", i), Token: 1, Namespace: "default"})
	}
	some, complete := LimitRunning(all)
	require.True(t, complete)
	require.Len(t, some, maxRunning, "the largest size that is advertised")
	some, complete = LimitRunning(append(all, RunningGrant{}))
	require.False(t, complete)
	require.Len(t, some, maxRunning)
	for i := range all {
		all[i].Reservation, all[i].Namespace, all[i].SharesWith = strings.Repeat("r", 64), strings.Repeat("n", 64), strings.Repeat("o", 64)
	}
	some, complete = LimitRunning(all)
	require.False(t, complete)
	require.Greater(t, len(some), 1000)
	some, complete = LimitRunning(nil)
	require.True(t, complete)
	require.Empty(t, some)
}
