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
