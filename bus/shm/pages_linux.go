package shm

import (
	"encoding/binary"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Bits of an entry of /proc/self/pagemap.
const (
	pagePresent = 1 << 63
	pageSwapped = 1 << 62
	pageFile    = 1 << 61 // of the file, not copied on write
)

// pagemap is /proc/self/pagemap; nil where it cannot be read.
var pagemap = sync.OnceValue(func() *os.File {
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return nil
	}
	return f
})

const pagemapBatch = 4096 // entries that are read at once

// dropCopied gives up the pages of a private mapping that were copied because this process wrote to them, so that the next reading
// sees the file again. Pages that were only read stay mapped, which makes that reading twice as fast.
func dropCopied(region []byte) error {
	entries := pagemap()
	if entries == nil {
		return unix.Madvise(region, unix.MADV_DONTNEED)
	}
	var buf [8 * pagemapBatch]byte
	first := int64(uintptr(unsafe.Pointer(unsafe.SliceData(region)))) / int64(pageSize)
	pages := len(region) / pageSize
	for at := 0; at < pages; at += pagemapBatch {
		n := min(pagemapBatch, pages-at)
		if _, err := entries.ReadAt(buf[:8*n], 8*(first+int64(at))); err != nil {
			return unix.Madvise(region, unix.MADV_DONTNEED)
		}
		if err := dropRuns(region[at*pageSize:(at+n)*pageSize], buf[:8*n]); err != nil {
			return err
		}
	}
	return nil
}

// dropRuns drops each run of copied pages; entries has one entry a page.
func dropRuns(region, entries []byte) error {
	from := -1
	pages := len(region) / pageSize
	for i := 0; i <= pages; i++ {
		copied := i < pages && isCopied(binary.NativeEndian.Uint64(entries[8*i:]))
		switch {
		case copied && from < 0:
			from = i
		case !copied && from >= 0:
			if err := unix.Madvise(region[from*pageSize:i*pageSize], unix.MADV_DONTNEED); err != nil {
				return err
			}
			from = -1
		}
	}
	return nil
}

func isCopied(entry uint64) bool {
	return entry&(pagePresent|pageSwapped) != 0 && entry&pageFile == 0
}
