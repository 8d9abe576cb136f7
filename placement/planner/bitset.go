package planner

import "math/bits"

// bitset is a set of device positions on one node. Positions ascend by NUMA node and index, so the lowest bits are the
// devices that come first in rank order.
type bitset []uint64

func newBitset(n int) bitset { return make(bitset, (n+63)/64) }

func (b bitset) has(pos int) bool { return b[pos>>6]&(1<<(pos&63)) != 0 }

func (b bitset) set(pos int, in bool) {
	if in {
		b[pos>>6] |= 1 << (pos & 63)
	} else {
		b[pos>>6] &^= 1 << (pos & 63)
	}
}

// countIn returns the number of positions in both b and mask.
func (b bitset) countIn(mask bitset) int {
	n := 0
	for i, word := range b {
		n += bits.OnesCount64(word & mask[i])
	}
	return n
}

// and returns the intersection of b and mask as a new set.
func (b bitset) and(mask bitset) bitset {
	both := make(bitset, len(b))
	for i, word := range b {
		both[i] = word & mask[i]
	}
	return both
}

// appendLowest appends the lowest k positions of b to dst.
func (b bitset) appendLowest(dst []int, k int) []int {
	for i, word := range b {
		for ; word != 0 && k > 0; k-- {
			dst = append(dst, i<<6+bits.TrailingZeros64(word))
			word &= word - 1
		}
	}
	return dst
}
