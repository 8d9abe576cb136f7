package shm

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestCopiedPagesAreDropped: each way finds exactly the pages that were written, whether the others were read or not.
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
	ways := map[string]func(*os.File, []byte) error{"scan": dropScanned, "read": dropRead}
	for name, drop := range ways {
		t.Run(name, func(t *testing.T) {
			err := drop(pagemap(), region)
			if name == "scan" && (err == unix.ENOTTY || err == unix.EINVAL) {
				t.Skip("kernels before 6.7 have no PAGEMAP_SCAN")
			}
			require.NoError(t, err)
			for i := range pages {
				if i%2 == 0 { // more runs than one request finds
					region[i*pageSize] = 2
				}
			}
			file[pageSize] = 3 // a page that was only mapped, if at all, shows the file
			require.NoError(t, drop(pagemap(), region))
			for i := range pages {
				want := byte(1)
				if i == 1 {
					want = 3
				}
				require.Equal(t, want, region[i*pageSize], "page %d", i)
			}
		})
	}
}
