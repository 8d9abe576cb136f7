package flow

import (
	"math/bits"
	"time"
)

// histogram counts durations in buckets an eighth of a power of two wide, from one microsecond.
type histogram struct {
	counts [41 * 8]uint64
	total  uint64
}

func bucketOf(us uint64) int {
	if us < 8 {
		return int(us)
	}
	exp := bits.Len64(us) - 4 // us>>exp is 8 to 15
	return min(8+exp*8+int(us>>exp)-8, 41*8-1)
}

// bucketFloor is the smallest duration of a bucket, in microseconds.
func bucketFloor(b int) uint64 {
	if b < 16 {
		return uint64(b)
	}
	return uint64(8+b%8) << (b/8 - 1)
}

func (h *histogram) add(d time.Duration) {
	h.counts[bucketOf(uint64(max(0, d.Microseconds())))]++
	h.total++
}

// quantile is the duration that a fraction q of all did not exceed, accurate to an eighth.
func (h *histogram) quantile(q float64) time.Duration {
	want := uint64(q*float64(h.total) + 0.5)
	var seen uint64
	for b, n := range h.counts {
		if seen += n; n > 0 && seen >= want {
			return time.Duration(bucketFloor(b)) * time.Microsecond
		}
	}
	return 0
}
