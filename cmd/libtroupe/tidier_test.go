package main

import (
	"bytes"
	"os"
	"strconv"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// resident is the memory of this process, in MiB.
func resident(t *testing.T) int {
	data, err := os.ReadFile("/proc/self/statm")
	require.NoError(t, err)
	pages, err := strconv.Atoi(string(bytes.Fields(data)[1]))
	require.NoError(t, err)
	return pages * os.Getpagesize() >> 20
}

// Large bodies leave the process when nobody needs them, however many there were.
func TestLargeBodiesLeave(t *testing.T) {
	m, size, most := newMemory(), 64<<20, 0
	before := resident(t)
	for range 20 {
		at := m.alloc(size)
		for page, body := 0, unsafe.Slice((*byte)(at), size); page < size; page += 4096 {
			body[page] = 1
		}
		number := m.lend(m.own(at, size)) // it goes out, and comes back
		most = max(most, resident(t)-before)
		m.release(number)
		time.Sleep(20 * time.Millisecond) // a body of this size travels longer
	}
	t.Logf("%d MiB at most", most)
	require.Less(t, most, 5*64)
	require.Eventually(t, func() bool { return resident(t) < before+16 }, 5*tidyIdle, 50*time.Millisecond, "%d MiB were in use before", before)
	require.Eventually(t, func() bool {
		m.tidier.mu.Lock()
		defer m.tidier.mu.Unlock()
		return !m.tidier.awake
	}, 5*tidyIdle, 50*time.Millisecond, "it rests")
}
