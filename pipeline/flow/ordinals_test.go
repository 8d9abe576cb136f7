package flow

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// The set agrees with a map, in any order of additions, and has no more ranges than gaps.
func TestOrdinalSet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var o OrdinalSet
		in := map[uint64]bool{}
		for _, n := range rapid.SliceOf(rapid.Uint64Range(1, 60)).Draw(t, "added") {
			require.Equal(t, !in[n], o.Add(n))
			in[n] = true
		}
		gaps := 0
		for n := uint64(1); n <= 61; n++ {
			require.Equal(t, in[n], o.Contains(n), "%d in %+v", n, o)
			if in[n] && !in[n-1] && n > 1 {
				gaps++
			}
		}
		require.Len(t, o.Ranges, gaps)
		require.Equal(t, uint64(len(in)), o.Floor+o.countAbove())
		require.True(t, slices.IsSortedFunc(o.Ranges, func(a, b [2]uint64) int { return int(a[0]) - int(b[0]) }))
	})
}
