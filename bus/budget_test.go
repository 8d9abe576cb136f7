package bus

import (
	"runtime"
	"testing"
	"weak"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// TestBudgetIsNeverOverdrawn checks that reservations are granted in order, never exceed the budget, and are all
// returned.
func TestBudgetIsNeverOverdrawn(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const total = 100
		b := NewBudget(total)
		var waiting, granted []*Admission
		var asked, given []int
		out := int64(0)
		settle := func(n int) func() { return func() { given = append(given, n) } }
		move := func() { // collects the granted reservations
			for len(waiting) > 0 && len(given) > 0 && containsOrder(given, asked[0]) {
				granted, waiting, asked = append(granted, waiting[0]), waiting[1:], asked[1:]
				out += granted[len(granted)-1].n
			}
		}
		next := 0
		t.Repeat(map[string]func(*rapid.T){
			"acquire": func(t *rapid.T) {
				next++
				asked = append(asked, next)
				waiting = append(waiting, b.Acquire(rapid.Int64Range(0, 150).Draw(t, "n"), settle(next)))
				move()
			},
			"release": func(t *rapid.T) {
				if len(granted) > 0 {
					i := rapid.IntRange(0, len(granted)-1).Draw(t, "which")
					out -= granted[i].n
					b.Release(granted[i])
					granted = append(granted[:i], granted[i+1:]...)
					move()
				}
			},
			"cancel": func(t *rapid.T) {
				if len(waiting) > 0 {
					i := rapid.IntRange(0, len(waiting)-1).Draw(t, "which")
					require.True(t, b.Cancel(waiting[i]))
					waiting, asked = append(waiting[:i], waiting[i+1:]...), append(asked[:i], asked[i+1:]...)
					move()
				}
			},
			"": func(t *rapid.T) {
				require.LessOrEqual(t, out, int64(total))
				require.Equal(t, total-out, b.free)
				require.IsIncreasing(t, append([]int{0}, given...), "in the order of asking")
				if len(waiting) > 0 {
					require.Greater(t, waiting[0].n, b.free, "the first who waits does not fit")
				}
			},
		})
		for _, a := range granted {
			require.False(t, b.Cancel(a), "granted is granted")
		}
	})
}

func containsOrder(given []int, n int) bool {
	for _, g := range given {
		if g == n {
			return true
		}
	}
	return false
}

func TestGrantMayRelease(t *testing.T) {
	b := NewBudget(10)
	var order []int
	first := b.Acquire(10, func() { order = append(order, 1) })
	for i := 2; i < 100; i++ {
		var a *Admission
		a = b.Acquire(10, func() {
			order = append(order, i)
			b.Release(a) // while it is being given
		})
	}
	b.Release(first)
	require.Len(t, order, 99)
	require.IsIncreasing(t, order)
	require.EqualValues(t, 10, b.free)
}

// A released reservation keeps no reference to its owner, which is a whole body.
func TestBudgetForgets(t *testing.T) {
	b := NewBudget(10)
	var had []weak.Pointer[[1 << 20]byte]
	hold := func() *Admission {
		body := new([1 << 20]byte)
		had = append(had, weak.Make(body))
		return b.Acquire(10, func() { body[0] = 1 })
	}
	first, second, third := hold(), hold(), hold()
	require.True(t, b.Cancel(second))
	b.Release(first)
	b.Release(third)
	runtime.GC()
	for i, body := range had {
		require.True(t, body.Value() == nil, "body %d is kept", i)
	}
	runtime.KeepAlive(b)
}
