package wire

import "math/bits"

// RankSet is a set of ranks, as a bitmap: 512 bytes for a world of 4,096. The zero value is empty.
type RankSet struct{ bits []byte }

// Ranks makes the set of the given ranks.
func Ranks(ranks ...int) RankSet {
	var s RankSet
	for _, r := range ranks {
		s.Add(r)
	}
	return s
}

// Add adds r, which must not be negative.
func (s *RankSet) Add(r int) {
	for r/8 >= len(s.bits) {
		s.bits = append(s.bits, 0)
	}
	s.bits[r/8] |= 1 << (r % 8)
}

// Remove removes r.
func (s *RankSet) Remove(r int) {
	if r >= 0 && r/8 < len(s.bits) {
		s.bits[r/8] &^= 1 << (r % 8)
	}
}

// Has reports whether r is in the set.
func (s RankSet) Has(r int) bool {
	return r >= 0 && r/8 < len(s.bits) && s.bits[r/8]&(1<<(r%8)) != 0
}

// Len counts the ranks in the set.
func (s RankSet) Len() int {
	n := 0
	for _, b := range s.bits {
		n += bits.OnesCount8(b)
	}
	return n
}

// List returns the ranks in rising order.
func (s RankSet) List() []int {
	out := make([]int, 0, s.Len())
	for i, b := range s.bits {
		for ; b != 0; b &= b - 1 {
			out = append(out, i*8+bits.TrailingZeros8(b))
		}
	}
	return out
}

// Clone returns an independent copy.
func (s RankSet) Clone() RankSet { return RankSet{bits: append([]byte(nil), s.bits...)} }
