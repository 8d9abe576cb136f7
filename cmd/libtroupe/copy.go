package main

import (
	"runtime"
	"sync"
	"sync/atomic"

	"troupe/bus"
)

const (
	copyPiece      = 256 << 10 // bytes that a goroutine copies at once: from 1 MiB on, copy writes past the caches, in twice the time
	copyGoroutines = 4         // more of them share the same memory bandwidth
)

// copyLarge copies from into to, which have the same length, with several goroutines: one core does not use all of the memory's bandwidth.
func copyLarge(to, from []byte) {
	pieces := int64(len(to)+copyPiece-1) / copyPiece
	var next atomic.Int64
	work := func() {
		for i := next.Add(1) - 1; i < pieces; i = next.Add(1) - 1 {
			end := min(int(i+1)*copyPiece, len(to))
			copy(to[i*copyPiece:end], from[i*copyPiece:end])
		}
	}
	var group sync.WaitGroup
	for range min(int64(copyGoroutines), int64(runtime.GOMAXPROCS(0)), pieces) - 1 {
		group.Add(1)
		bus.Go(func() {
			defer group.Done()
			work()
		})
	}
	work()
	group.Wait()
}
