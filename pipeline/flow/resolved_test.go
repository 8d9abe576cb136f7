package flow

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// Resolved dead letters are resolved after their blocks were stored and loaded, the floor rises over full blocks, and
// no other dead letter is resolved.
func TestResolvedLettersRoundTrip(t *testing.T) {
	const n = 3*resolvedBlockBits + 100
	e, stored, want := NewResolvedLetters(nil), map[uint64][]byte{}, map[uint64]bool{}
	for range n {
		e.nextNumber()
	}
	read := func() *ResolvedLetters {
		again := NewResolvedLetters(nil)
		again.head, again.floor = e.head, e.floor
		for block, text := range stored {
			again.LoadBlock(block, text)
		}
		return again
	}
	for i, at := range rand.Perm(n - 1) { // the last one stays unresolved
		number := uint64(at + 1)
		e.add(number)
		want[number] = true
		if text := e.encodeBlock(blockOf(number)); text != nil {
			stored[blockOf(number)] = text
		}
		if i%1000 == 0 || i == n-2 {
			again := read()
			for number := uint64(1); number <= n; number++ {
				require.Equal(t, want[number], again.contains(number), number)
			}
		}
	}
	require.EqualValues(t, 3*resolvedBlockBits, e.floor)
	require.Len(t, e.blocks, 1)
	require.False(t, e.contains(n))
}
