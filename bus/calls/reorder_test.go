package calls_test

import (
	"slices"
	"testing"

	"troupe/bus/calls"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// TestReorderBufferKeepsTheOrder checks that calls that arrive in any order, repeatedly or never, are taken in order
// and once.
func TestReorderBufferKeepsTheOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s calls.ReorderBuffer[uint64]
		n := uint64(rapid.IntRange(1, 40).Draw(t, "calls"))
		var order, taken []uint64
		for i := uint64(1); i <= n; i++ {
			for range rapid.IntRange(1, 2).Draw(t, "copies") {
				order = append(order, i)
			}
		}
		order = rapid.Permutation(order).Draw(t, "arrivals")
		lost := uint64(rapid.IntRange(0, int(n)).Draw(t, "lost"))
		release := func() {
			for o, ok := s.Release(); ok; o, ok = s.Release() {
				taken = append(taken, o)
			}
		}
		for _, o := range order {
			if o == lost {
				continue
			}
			switch s.Take(o, o-1) {
			case calls.InOrder:
				taken = append(taken, o)
				release()
			case calls.TooEarly:
				require.True(t, s.Buffer(o, o-1, o))
			case calls.Passed:
				require.Contains(t, taken, o, "it was passed over")
			}
		}
		if after, upTo, open := s.Gap(); open {
			require.Equal(t, []uint64{lost - 1, lost}, []uint64{after, upTo})
			s.Skip(upTo, upTo) // what was sent again has not come
			release()
			require.Less(t, slices.Max(append(taken, 0)), lost)
			s.Skip(upTo, after)
			release()
		}
		var want []uint64
		for i := uint64(1); i <= n; i++ {
			if i != lost {
				want = append(want, i)
			}
		}
		require.Equal(t, want, taken)
		require.Empty(t, slices.Collect(s.Buffered))
	})
}

func TestStreamHoldsSoMany(t *testing.T) {
	var s calls.ReorderBuffer[int]
	for i := range 1024 {
		require.True(t, s.Buffer(uint64(i+10), uint64(i+9), i))
	}
	require.False(t, s.Buffer(1<<20, 1, 0))
	require.Len(t, slices.Collect(s.Buffered), 1024)
	s.Clear()
	require.Empty(t, slices.Collect(s.Buffered))
	require.Equal(t, calls.InOrder, s.Take(0, 99), "without a place there is no order")
}
