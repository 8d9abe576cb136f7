package calls

import (
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// source is the calling side: pending calls, and answers to reports of gaps.
type source struct {
	chain orderChain
	calls []sourced // in order; over ones stay, marked
}

type sourced struct {
	place callOrder
	ranks []int
	over  map[int]bool // given up for that rank
}

// packet is a call or a skip in flight to one rank.
type packet struct {
	order, prev uint64
	skip        bool
}

// TestOrderHoldsWhateverIsLost drives orderChain and ReorderBuffer over a connection that drops, duplicates and
// reorders: no rank takes a call early, twice or out of order, no pending call is passed over, and after the faults end
// all are taken.
func TestOrderHoldsWhateverIsLost(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const world = 3
		var src source
		var streams [world]ReorderBuffer[uint64]
		var taken [world][]uint64
		lines := [world][]packet{}
		var order uint64

		take := func(rank int, order uint64) { taken[rank] = append(taken[rank], order) }
		arrive := func(rank int, p packet) {
			s := &streams[rank]
			switch {
			case p.skip:
				s.Skip(p.order, p.prev)
			default:
				switch s.Take(p.order, p.prev) {
				case InOrder:
					take(rank, p.order)
				case TooEarly:
					s.Buffer(p.order, p.prev, p.order)
				}
			}
			for o, ok := s.Release(); ok; o, ok = s.Release() {
				take(rank, o)
			}
		}
		report := func(rank int) { // what missing does
			after, upTo, open := streams[rank].Gap()
			if !open {
				return
			}
			for _, c := range src.calls {
				if c.place.order > after && c.place.order <= upTo && slices.Contains(c.ranks, rank) && !c.over[rank] && !slices.Contains(taken[rank], c.place.order) {
					lines[rank] = append(lines[rank], packet{order: c.place.order, prev: after})
					after = c.place.order
				}
			}
			lines[rank] = append(lines[rank], packet{order: upTo, prev: after, skip: true})
		}
		pick := func(t *rapid.T) (rank, i int, ok bool) {
			rank = rapid.IntRange(0, world-1).Draw(t, "rank")
			if len(lines[rank]) == 0 {
				return rank, 0, false
			}
			return rank, rapid.IntRange(0, len(lines[rank])-1).Draw(t, "which"), true
		}
		t.Repeat(map[string]func(*rapid.T){
			"call": func(t *rapid.T) {
				ranks := rapid.SampledFrom([][]int{{0, 1, 2}, {0, 1, 2}, {0}, {1}, {2}, {0, 2}, {1, 2}}).Draw(t, "ranks")
				order += uint64(rapid.IntRange(1, 3).Draw(t, "step")) // other roles take places too
				p := src.chain.next(order, ranks, world)
				src.calls = append(src.calls, sourced{place: p, ranks: ranks, over: map[int]bool{}})
				for _, r := range ranks {
					lines[r] = append(lines[r], packet{order: p.order, prev: p.prevFor(r)})
				}
			},
			"deliver": func(t *rapid.T) {
				if rank, i, ok := pick(t); ok {
					p := lines[rank][i]
					lines[rank] = slices.Delete(lines[rank], i, i+1)
					arrive(rank, p)
				}
			},
			"double": func(t *rapid.T) {
				if rank, i, ok := pick(t); ok {
					lines[rank] = append(lines[rank], lines[rank][i])
				}
			},
			"lose": func(t *rapid.T) {
				if rank, i, ok := pick(t); ok {
					lines[rank] = slices.Delete(lines[rank], i, i+1)
				}
			},
			"report": func(t *rapid.T) { report(rapid.IntRange(0, world-1).Draw(t, "rank")) },
			"give up": func(t *rapid.T) {
				if len(src.calls) > 0 {
					c := src.calls[rapid.IntRange(0, len(src.calls)-1).Draw(t, "call")]
					for _, r := range c.ranks {
						c.over[r] = true
					}
				}
			},
			"": func(t *rapid.T) {
				for rank := range world {
					require.True(t, slices.IsSorted(taken[rank]) && len(slices.Compact(slices.Clone(taken[rank]))) == len(taken[rank]), "rank %d: %v", rank, taken[rank])
					for _, c := range src.calls {
						waiting := slices.Contains(c.ranks, rank) && !c.over[rank] && !slices.Contains(taken[rank], c.place.order)
						require.False(t, waiting && streams[rank].last >= c.place.order, "rank %d has passed by call %d", rank, c.place.order)
					}
				}
			},
		})
		for range 100 { // the line is good now; what was never delivered is asked about and sent again
			for rank := range world {
				for _, c := range src.calls {
					if slices.Contains(c.ranks, rank) && !c.over[rank] && !slices.Contains(taken[rank], c.place.order) {
						lines[rank] = append(lines[rank], packet{order: c.place.order, prev: c.place.prevFor(rank)})
					}
				}
				report(rank)
				for _, p := range lines[rank] {
					arrive(rank, p)
				}
				lines[rank] = nil
			}
		}
		for _, c := range src.calls {
			for _, r := range c.ranks {
				require.True(t, c.over[r] || slices.Contains(taken[r], c.place.order), "call %d never reached rank %d", c.place.order, r)
			}
		}
	})
}

func TestOrderChain(t *testing.T) {
	var c orderChain
	require.Equal(t, callOrder{order: 1}, c.next(1, []int{0, 1, 2}, 3))
	require.Equal(t, callOrder{order: 2, prev: 1}, c.next(2, []int{1}, 3))
	require.Equal(t, callOrder{order: 5, prev: 2}, c.next(5, []int{1}, 3))
	p := c.next(6, []int{0, 1}, 3)
	require.Equal(t, []uint64{1, 5, 1}, []uint64{p.prevFor(0), p.prevFor(1), p.prevFor(2)})
	p = c.next(7, []int{0, 1, 2}, 3)
	require.Equal(t, []uint64{6, 6, 1}, []uint64{p.prevFor(0), p.prevFor(1), p.prevFor(2)})
}

// The size of a slot is bounded, because every rank of every call has one.
func TestSlotSize(t *testing.T) {
	require.LessOrEqual(t, unsafe.Sizeof(slot{}), uintptr(96))
}
