package actors

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestCallStats(t *testing.T) {
	var s callStats
	s.add("step", 50*time.Microsecond, false)
	s.add("step", 2*time.Second, true)
	s.add("save", 2000*time.Second, false)
	got := s.report(false)
	require.Len(t, got, 2)
	require.Equal(t, MethodStats{Method: "step", Calls: 2, Errors: 1, Seconds: got[0].Seconds, Buckets: [37]uint64{0: 1, 22: 1}}, got[0])
	require.InDelta(t, 2.00005, got[0].Seconds, 1e-9)
	require.EqualValues(t, 1, got[1].Buckets[36], "longer than every bound")
	require.Empty(t, s.report(false), "nothing has changed")
	require.Len(t, s.report(true), 2)
	for i := range 1000 {
		s.add(fmt.Sprint("method", i), time.Millisecond, false)
	}
	all := s.report(true)
	require.Len(t, all, maxMethods+1, "the number of counters is bounded")
	require.Equal(t, otherMethods, all[maxMethods].Method)
	require.EqualValues(t, 1003, s.done)
}

// A run time is known to a factor of two or better: an estimate within a bucket is not further off than the bucket is wide.
func TestLatencyBoundsAreClose(t *testing.T) {
	for i := 1; i < len(LatencyBounds); i++ {
		require.Greater(t, LatencyBounds[i], LatencyBounds[i-1])
		require.LessOrEqual(t, LatencyBounds[i]/LatencyBounds[i-1], 2.0)
	}
	require.LessOrEqual(t, LatencyBounds[0], 0.0001)
	require.GreaterOrEqual(t, LatencyBounds[len(LatencyBounds)-1], 1000.0)
}
