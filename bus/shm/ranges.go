package shm

import (
	"cmp"
	"slices"
	"syscall"
)

// Range is some bytes of a body.
type Range struct{ Offset, Length int }

// wholePages are the pages of a region of that size that the ranges touch, by rising offset; neighbours are joined. Ranges outside the region
// are cut.
func wholePages(ranges []Range, size int) []Range {
	sorted := slices.Clone(ranges)
	slices.SortFunc(sorted, func(a, b Range) int { return cmp.Compare(a.Offset, b.Offset) })
	var pages []Range
	for _, r := range sorted {
		from := max(0, r.Offset) / pageSize * pageSize
		to := min(size, (max(0, r.Offset+r.Length)+pageSize-1)/pageSize*pageSize)
		if last := len(pages) - 1; last >= 0 && from <= pages[last].Offset+pages[last].Length {
			pages[last].Length = max(pages[last].Length, to-pages[last].Offset)
		} else if from < to {
			pages = append(pages, Range{from, to - from})
		}
	}
	return pages
}

// DropOutside gives the memory of a region of whole pages back to the system, except for the pages of some ranges.
func DropOutside(region []byte, keep []Range) {
	at := 0
	for _, p := range append(wholePages(keep, len(region)), Range{Offset: len(region)}) {
		if at < p.Offset {
			_ = syscall.Madvise(region[at:p.Offset], syscall.MADV_DONTNEED) // if it fails, the pages stay in use
		}
		at = p.Offset + p.Length
	}
}
