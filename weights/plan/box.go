package plan

import "slices"

// Box is a part of a tensor, in elements: the start in each dimension, followed by the size in each dimension.
type Box []int64

// NewBox is the box with these starts and sizes. A scalar has a box of one element.
func NewBox(start, size []int64) Box {
	if len(size) == 0 {
		return Box{0, 1}
	}
	return append(slices.Clone(Box(start)), size...)
}

func (b Box) dims() int         { return len(b) / 2 }
func (b Box) start(i int) int64 { return b[i] }
func (b Box) size(i int) int64  { return b[len(b)/2+i] }
func (b Box) end(i int) int64   { return b[i] + b[len(b)/2+i] }

// Sizes are the sizes of the box.
func (b Box) Sizes() []int64 { return b[len(b)/2:] }

// Elements is the number of elements in the box.
func (b Box) Elements() int64 {
	n := int64(1)
	for _, size := range b.Sizes() {
		n *= size
	}
	return n
}

// within reports whether the box is not malformed and lies in a tensor of this shape.
func (b Box) within(shape []int64) bool {
	if len(b) != 2*len(shape) {
		return false
	}
	for i, n := range shape {
		if b.start(i) < 0 || b.size(i) < 0 || b.start(i) > n-b.size(i) {
			return false
		}
	}
	return true
}

// intersect writes the common part of two boxes to into, which has room for it, and reports whether there is one.
func intersect(into, a, b Box) bool {
	d := a.dims()
	for i := range d {
		from, to := max(a[i], b[i]), min(a[i]+a[d+i], b[i]+b[d+i])
		if from >= to {
			return false
		}
		into[i], into[d+i] = from, to-from
	}
	return true
}

// subtract appends the parts of a outside of inner, which lies in a, to list. It changes a.
func subtract(list []int64, a, inner Box) []int64 {
	d := a.dims()
	for i := range d {
		if before := inner[i] - a[i]; before > 0 {
			at := len(list)
			list = append(list, a...)
			list[at+d+i] = before
			a[i], a[d+i] = inner[i], a[d+i]-before
		}
		if after := a.end(i) - inner.end(i); after > 0 {
			at := len(list)
			list = append(list, a...)
			list[at+i], list[at+d+i] = inner.end(i), after
			a[d+i] -= after
		}
	}
	return list
}

// Range is count elements of a tensor in row order from start on, as boxes in that order.
func Range(shape []int64, start, count int64) (out []Box) {
	row := int64(1) // elements of one step in the first dimension
	for _, n := range shape[min(1, len(shape)):] {
		row *= n
	}
	switch {
	case count <= 0:
		return nil
	case len(shape) <= 1:
		return []Box{{start, count}}
	}
	inner := func(at, from, n int64) {
		for _, b := range Range(shape[1:], from, n) {
			d := b.dims()
			whole := append(append(append(Box{at}, b[:d]...), 1), b[d:]...)
			out = append(out, whole)
		}
	}
	if from := start % row; from > 0 || count < row {
		n := min(count, row-from)
		inner(start/row, from, n)
		start, count = start+n, count-n
	}
	if rows := count / row; rows > 0 {
		b := append(make(Box, len(shape)), shape...)
		b[0], b[len(shape)] = start/row, rows
		out = append(out, b)
		start, count = start+rows*row, count-rows*row
	}
	if count > 0 {
		inner(start/row, 0, count)
	}
	return out
}
