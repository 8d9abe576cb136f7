package shm

import (
	"encoding/binary"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pagemap is /proc/self/pagemap; nil where it cannot be read.
var pagemap = sync.OnceValue(func() *os.File {
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return nil
	}
	return f
})

// dropCopied gives up the pages of a private mapping that were copied because this process wrote to them, so that the next reading
// sees the file again. Pages that were only read stay mapped, which makes that reading twice as fast.
func dropCopied(region []byte) error {
	entries := pagemap()
	if entries == nil {
		return unix.Madvise(region, unix.MADV_DONTNEED)
	}
	if !scanRefused.Load() {
		if dropScanned(entries, region) == nil {
			return nil
		}
		scanRefused.Store(true)
	}
	return dropRead(entries, region)
}

// copyInPlace gives this process copies of its own of some pages of a private mapping, while other threads read and write them.
func copyInPlace(region []byte, pages []Range) error {
	for _, p := range pages {
		part := region[p.Offset : p.Offset+p.Length]
		err := unix.Madvise(part, unix.MADV_POPULATE_WRITE)
		if err == unix.EINVAL { // a kernel before 5.14
			writeEachPage(part)
			continue
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// writeEachPage has each page copied by a write that changes nothing, also beside other writers.
func writeEachPage(pages []byte) {
	for at := 0; at < len(pages); at += pageSize {
		atomic.AddInt32((*int32)(unsafe.Pointer(&pages[at])), 0)
	}
}

// isLocked reports whether this process has locked a private mapping, as mlockall does. It then has a copy of each page from that time on,
// and does not see what is written to the file. The first page is dropped to find out: that fails for locked ones.
func isLocked(region []byte) bool {
	return unix.Madvise(region[:pageSize], unix.MADV_DONTNEED) != nil
}

// scanRefused: PAGEMAP_SCAN does not work here. Kernels before 6.7 do not have it, and a sandbox may refuse it.
var scanRefused atomic.Bool

// The request PAGEMAP_SCAN of /proc/self/pagemap, and its categories of pages. It finds the pages of a category without an entry for each
// page: a region that was not touched takes microseconds.
const (
	scanRequest  = 0xc0606610
	scanFile     = 1 << 2 // of the file, not copied on write
	scanPresent  = 1 << 3
	scanSwapped  = 1 << 4
	scanMostRuns = 64 // found by one request
)

// scanArgument is struct pm_scan_arg.
type scanArgument struct {
	size, flags, start, end, walkEnd uint64
	runs                             unsafe.Pointer
	mostRuns, mostPages              uint64
	inverted, all, any, returned     uint64 // categories
}

// scanRun is struct page_region: the addresses of pages, and their categories.
type scanRun struct{ start, end, _ uint64 }

// dropScanned drops the copied pages that PAGEMAP_SCAN finds.
func dropScanned(entries *os.File, region []byte) error {
	var runs [scanMostRuns]scanRun
	base := uint64(addressOf(region))
	a := scanArgument{start: base, end: base + uint64(len(region)), runs: unsafe.Pointer(&runs), mostRuns: scanMostRuns,
		inverted: scanFile, all: scanFile, any: scanPresent | scanSwapped}
	a.size = uint64(unsafe.Sizeof(a))
	for a.start < a.end {
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, entries.Fd(), scanRequest, uintptr(unsafe.Pointer(&a)))
		if errno != 0 {
			return errno
		}
		if a.walkEnd <= a.start { // it would never end
			return unix.EINVAL
		}
		for _, r := range runs[:n] {
			if err := unix.Madvise(region[r.start-base:r.end-base], unix.MADV_DONTNEED); err != nil {
				return err
			}
		}
		a.start = a.walkEnd
	}
	return nil
}

// Bits of an entry of /proc/self/pagemap.
const (
	pagePresent = 1 << 63
	pageSwapped = 1 << 62
	pageFile    = 1 << 61 // of the file, not copied on write
)

const pagemapBatch = 4096 // entries that are read at once

// dropRead drops the copied pages by reading the entry of each page.
func dropRead(entries *os.File, region []byte) error {
	var buf [8 * pagemapBatch]byte
	first := int64(addressOf(region)) / int64(pageSize)
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
