package shm

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestCopiedPagesAreDropped: exactly the pages that were written are dropped, by PAGEMAP_SCAN where the kernel has it, and by the entries of all
// pages. In the first round of each, the other pages are not mapped; in the second, they were read.
func TestCopiedPagesAreDropped(t *testing.T) {
	const pages = 3 * scanMostRuns
	file, fd, err := createSegment(pages * pageSize)
	require.NoError(t, err)
	for i := range file {
		file[i] = 1
	}
	region, err := mapReceived(fd)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(file)); require.NoError(t, unix.Munmap(region)) })
	t.Cleanup(func() { scanRefused.Store(false) })
	for _, refused := range []bool{false, true} {
		scanRefused.Store(refused)
		require.NoError(t, unix.Madvise(region, unix.MADV_DONTNEED))
		for round := range byte(2) {
			for i := 0; i < pages; i += 2 { // more runs than one request finds
				region[i*pageSize] = 100
			}
			file[pageSize] = round // a page that was not written to shows the file
			require.NoError(t, dropCopied(region))
			for i := range pages {
				want := byte(1)
				if i == 1 {
					want = round
				}
				require.Equal(t, want, region[i*pageSize], "page %d", i)
			}
		}
	}
}

// TestPagesAreCopiedInPlace: the copies do not show what the owner writes later, also where the kernel has no request for that.
func TestPagesAreCopiedInPlace(t *testing.T) {
	const pages = 6
	for name, copyPages := range map[string]func(region []byte) error{
		"by the kernel": func(region []byte) error {
			return copyInPlace(region, []Range{{0, pageSize}, {2 * pageSize, 2 * pageSize}})
		},
		"by writing": func(region []byte) error {
			writeEachPage(region[:pageSize])
			writeEachPage(region[2*pageSize : 4*pageSize])
			return nil
		},
	} {
		file, fd, err := createSegment(pages * pageSize)
		require.NoError(t, err)
		region, err := mapReceived(fd)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, unix.Munmap(file)); require.NoError(t, unix.Munmap(region)) })
		for i := range file {
			file[i] = 1
		}
		require.NoError(t, copyPages(region))
		for i := range file {
			file[i] = 2
		}
		for page, want := range []byte{1, 2, 1, 1, 2, 2} {
			require.Equal(t, want, region[page*pageSize+7], "%s, page %d", name, page)
		}
	}
}
