package pipeline

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// Every letter that was ended is so after its block was stored and read back, the floor rises through whole blocks, and no other
// letter is ended.
func TestEndings(t *testing.T) {
	const n = 3*endingBits + 100
	e, stored, want := newEndings(), map[uint64][]byte{}, map[uint64]bool{}
	for range n {
		e.next()
	}
	read := func() *endings {
		again := newEndings()
		again.head, again.floor = e.head, e.floor
		for block, text := range stored {
			again.load(block, text)
		}
		return again
	}
	for i, at := range rand.Perm(n - 1) { // the last one stays
		number := uint64(at + 1)
		e.end(number)
		want[number] = true
		if text := e.text(blockOf(number)); text != nil {
			stored[blockOf(number)] = text
		}
		if i%1000 == 0 || i == n-2 {
			again := read()
			for number := uint64(1); number <= n; number++ {
				require.Equal(t, want[number], again.ended(number), number)
			}
		}
	}
	require.EqualValues(t, 3*endingBits, e.floor)
	require.Len(t, e.blocks, 1)
	require.False(t, e.ended(n))
}
