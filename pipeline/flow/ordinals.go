package flow

import "slices"

// OrdinalSet is a set of numbers from 1 that fills up from below: a floor, up to which all are in, and ranges above it.
// It says which items of a lane are completed in a few bytes, however many there were.
type OrdinalSet struct {
	Floor  uint64      `json:"floor"`            // all up to here
	Ranges [][2]uint64 `json:"ranges,omitempty"` // both ends included, sorted, with gaps between them
}

func (o *OrdinalSet) Contains(n uint64) bool {
	if n <= o.Floor {
		return true
	}
	i := o.search(n)
	return i < len(o.Ranges) && o.Ranges[i][0] <= n
}

// search is the index of the first range that ends at n or later.
func (o *OrdinalSet) search(n uint64) int {
	i, _ := slices.BinarySearchFunc(o.Ranges, n, func(r [2]uint64, n uint64) int {
		switch {
		case r[1] < n:
			return -1
		case r[1] > n:
			return 1
		}
		return 0
	})
	return i
}

// Add adds a number; it reports false when n was in the set.
func (o *OrdinalSet) Add(n uint64) bool {
	if n == o.Floor+1 {
		o.Floor = n
		o.absorb()
		return true
	}
	if o.Contains(n) {
		return false
	}
	i := o.search(n)
	joinsPrev, joinsNext := i > 0 && o.Ranges[i-1][1]+1 == n, i < len(o.Ranges) && o.Ranges[i][0] == n+1
	switch {
	case joinsPrev && joinsNext:
		o.Ranges[i-1][1] = o.Ranges[i][1]
		o.Ranges = slices.Delete(o.Ranges, i, i+1)
	case joinsPrev:
		o.Ranges[i-1][1] = n
	case joinsNext:
		o.Ranges[i][0] = n
	default:
		o.Ranges = slices.Insert(o.Ranges, i, [2]uint64{n, n})
	}
	return true
}

// absorb raises the floor over the range that begins right above it.
func (o *OrdinalSet) absorb() {
	for len(o.Ranges) > 0 && o.Ranges[0][0] == o.Floor+1 {
		o.Floor = o.Ranges[0][1]
		o.Ranges = slices.Delete(o.Ranges, 0, 1)
	}
}

// countAbove is how many numbers above the floor are in the set.
func (o *OrdinalSet) countAbove() uint64 {
	var n uint64
	for _, r := range o.Ranges {
		n += r[1] - r[0] + 1
	}
	return n
}

// Clone copies the set.
func (o *OrdinalSet) Clone() OrdinalSet {
	return OrdinalSet{Floor: o.Floor, Ranges: slices.Clone(o.Ranges)}
}
