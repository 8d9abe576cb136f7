package actors

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// TestFIFOIsAQueue compares it with a slice that is only ever appended to and cut.
func TestFIFOIsAQueue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var f fifo[*int]
		var want []*int
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			switch rapid.IntRange(0, 5).Draw(t, "step") {
			case 0, 1, 2:
				v := new(int)
				f.push(v)
				want = append(want, v)
			case 3, 4:
				if len(want) > 0 {
					if f.first() != want[0] || f.pop() != want[0] {
						t.Fatal("not the oldest")
					}
					want = want[1:]
				}
			case 5:
				drop := rapid.IntRange(0, 2).Draw(t, "drop")
				i := 0
				var kept []*int
				for j, v := range want {
					if j%3 != drop {
						kept = append(kept, v)
					}
				}
				f.remove(func(*int) bool { i++; return (i-1)%3 == drop })
				want = kept
			}
			if f.len() != len(want) || len(f.all()) != len(want) {
				t.Fatalf("%d items, not %d", f.len(), len(want))
			}
			for i, v := range f.all() {
				if v != want[i] {
					t.Fatal("another order")
				}
			}
		}
		spare := f.items[len(f.items):cap(f.items)]
		for _, v := range append(append([]*int{}, f.items[:f.head]...), spare...) {
			if v != nil {
				t.Fatal("an item that was taken is still held")
			}
		}
	})
}

func TestFIFOReusesItsMemory(t *testing.T) {
	var f fifo[int]
	for range 10_000 {
		f.push(1)
		f.push(2)
		require.Equal(t, 1, f.pop())
		require.Equal(t, 2, f.pop())
		f.push(3)
		f.push(4)
		require.Equal(t, 3, f.pop())
		require.Equal(t, 4, f.pop())
	}
	for i := range 10_000 { // never empty
		f.push(i)
		if i >= 5 {
			require.Equal(t, i-5, f.pop())
		}
	}
	require.Less(t, cap(f.items), 64)
}
