package shm

import (
	"testing"

	"pgregory.net/rapid"
)

// TestRunsNeverOverlap: ranges that are taken never overlap, and all of them given back is the whole again.
func TestRunsNeverOverlap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const size = 64
		free := runs{{0, size}}
		var owner [size]int
		taken := map[int]run{}
		for i := 1; i <= rapid.IntRange(1, 60).Draw(t, "steps"); i++ {
			if rapid.Bool().Draw(t, "take") {
				n := rapid.IntRange(1, 20).Draw(t, "n")
				at, ok := free.take(n)
				if !ok {
					continue
				}
				for k := at; k < at+n; k++ {
					if owner[k] != 0 {
						t.Fatalf("%d is taken twice", k)
					}
					owner[k] = i
				}
				taken[i] = run{at, n}
			} else {
				for id, r := range taken {
					free.put(r.offset, r.size)
					clear(owner[r.offset : r.offset+r.size])
					delete(taken, id)
					break
				}
			}
		}
		for _, r := range taken {
			free.put(r.offset, r.size)
		}
		if !free.whole(size) {
			t.Fatalf("%v is not the whole", free)
		}
	})
}
