package planner

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestFewest(t *testing.T) {
	for _, c := range []struct {
		sizes []int
		need  int
		want  []int
	}{
		{[]int{6, 6, 8, 8}, 12, []int{0, 1}}, // not 8 and 4 of 6: both large ones stay whole
		{[]int{5, 6, 8, 8}, 13, []int{0, 2}},
		{[]int{1, 2, 8}, 3, []int{2}},
		{[]int{1, 2, 8}, 9, []int{0, 2}},
		{[]int{1, 2}, 4, nil},
		{nil, 1, nil},
	} {
		require.Equal(t, c.want, fewest(c.sizes, c.need), "%v for %d", c.sizes, c.need)
	}
}

// No other choice has fewer, and none of the same number leaves less in its smallest members.
func TestFewestWastesNoNode(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sizes := rapid.SliceOfN(rapid.IntRange(1, 8), 0, 8).Draw(t, "sizes")
		slices.Sort(sizes)
		need := rapid.IntRange(1, 40).Draw(t, "need")
		chosen := fewest(sizes, need)

		fewestPossible := 0
		for set := range 1 << len(sizes) {
			n, sum := 0, 0
			for i, size := range sizes {
				if set&(1<<i) != 0 {
					n, sum = n+1, sum+size
				}
			}
			if sum >= need && (fewestPossible == 0 || n < fewestPossible) {
				fewestPossible = n
			}
		}
		require.Len(t, chosen, fewestPossible)
		sum := 0
		for _, i := range chosen {
			sum += sizes[i]
		}
		require.True(t, chosen == nil || sum >= need)
		require.True(t, slices.IsSorted(chosen))
	})
}

// Islands stay whole if possible.
func TestChooseKeepsIslandsWhole(t *testing.T) {
	devices := make([]Device, 8)
	for i := range devices {
		devices[i] = Device{Index: i, NUMA: i / 4, Island: i / 4}
	}
	l := newLayout(devices)
	pool := newBitset(8)
	for _, pos := range []int{1, 2, 3, 4, 5, 6, 7} { // three free in the first island, four in the second
		pool.set(pos, true)
	}
	for k, want := range map[int][]int{
		1: {1}, 2: {1, 2}, 3: {1, 2, 3}, // the broken island first
		4: {4, 5, 6, 7},
		5: {1, 2, 3, 4, 5},
	} {
		require.Equal(t, want, choose(nil, pool, k, l.levels(Island)), "%d devices", k)
	}
}
