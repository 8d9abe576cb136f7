package actors

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"troupe/bus"
)

func TestInvalidLanes(t *testing.T) {
	for words, l := range map[string]Lane{
		"lane name":               {Name: "", Limit: 1},
		"at least 1, not 0":       Concurrent(0),
		"at least 1, not -3":      {Name: "slow", Limit: -3},
		`lane "work" is built in`: {Name: "work", Limit: 2},
		"with limit 64, not 1":    {Name: "control", Limit: 1},
	} {
		require.ErrorContains(t, l.check(), words)
		require.ErrorIs(t, l.check(), bus.ErrInvalid)
	}
	for _, l := range []Lane{Serial, Control, Concurrent(8), {Name: "io", Limit: 2}} {
		require.NoError(t, l.check())
	}
}

// TestLaneStartsInOrderAndWithinItsLimit: calls start in order of arrival, at most Limit at a time, and only with their
// bodies.
func TestLaneStartsInOrderAndWithinItsLimit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 4).Draw(t, "limit")
		q := queue{lane: Concurrent(limit)}
		var all []*call
		started := 0
		for range rapid.IntRange(1, 100).Draw(t, "steps") {
			switch rapid.IntRange(0, 3).Draw(t, "step") {
			case 0:
				c := &call{bodyHere: rapid.Bool().Draw(t, "inline")}
				all = append(all, c)
				q.waiting.push(c)
			case 1:
				if c := q.next(); c != nil {
					if c != all[started] || !c.bodyHere {
						t.Fatal("it was not its turn")
					}
					started++
				} else if q.running < limit && started < len(all) && all[started].bodyHere {
					t.Fatal("it could have started")
				}
			case 2:
				if q.running > 0 {
					q.running--
				}
			case 3:
				if len(all) > 0 {
					all[rapid.IntRange(0, len(all)-1).Draw(t, "body")].bodyHere = true
				}
			}
			if q.running > limit {
				t.Fatalf("%d run, of %d", q.running, limit)
			}
		}
	})
}

// TestFIFOMatchesSlice compares the fifo with a slice.
func TestFIFOMatchesSlice(t *testing.T) {
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
	for i := range 10_000 { // the fifo is never empty
		f.push(i)
		if i >= 5 {
			require.Equal(t, i-5, f.pop())
		}
	}
	require.Less(t, cap(f.items), 64)
}
