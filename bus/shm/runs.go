package shm

import "slices"

// runs is the free ranges of a slab, by rising offset; neighbours are always joined.
type runs []run

type run struct{ offset, size int }

// take cuts a range of that size out of the first run that is large enough.
func (f *runs) take(size int) (offset int, ok bool) {
	for i := range *f {
		r := &(*f)[i]
		if r.size < size {
			continue
		}
		offset = r.offset
		if r.size == size {
			*f = slices.Delete(*f, i, i+1)
		} else {
			r.offset, r.size = r.offset+size, r.size-size
		}
		return offset, true
	}
	return 0, false
}

// put gives a range back.
func (f *runs) put(offset, size int) {
	i, _ := slices.BinarySearchFunc(*f, offset, func(r run, offset int) int { return r.offset - offset })
	*f = slices.Insert(*f, i, run{offset, size})
	if i+1 < len(*f) && offset+size == (*f)[i+1].offset {
		(*f)[i].size += (*f)[i+1].size
		*f = slices.Delete(*f, i+1, i+2)
	}
	if i > 0 && (*f)[i-1].offset+(*f)[i-1].size == offset {
		(*f)[i-1].size += (*f)[i].size
		*f = slices.Delete(*f, i, i+1)
	}
}

// whole reports whether all of a slab of that size is free.
func (f runs) whole(size int) bool { return len(f) == 1 && f[0] == run{0, size} }
