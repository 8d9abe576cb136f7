package main

// #include "copy.h"
import "C"

import (
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"troupe/bus"
)

const (
	copyPiece      = 256 << 10 // bytes that a goroutine copies at once: from 1 MiB on, copy writes past the caches, in twice the time
	copyGoroutines = 4         // more of them share the same memory bandwidth
	pastCaches     = 64 << 20  // from this size on, little of a copy stays in the caches until it is read
)

// copyLarge copies from into to, which have the same length, with several goroutines: one core does not use all of the memory's bandwidth.
// A copy that the caches cannot hold is written past them, in 0.6 to 0.8 of the time.
func copyLarge(to, from []byte) {
	pieces := int64(len(to)+copyPiece-1) / copyPiece
	copyOne := func(to, from []byte) { copy(to, from) }
	if len(to) >= pastCaches {
		copyOne = copyPastCaches
	}
	var next atomic.Int64
	work := func() {
		for i := next.Add(1) - 1; i < pieces; i = next.Add(1) - 1 {
			end := min(int(i+1)*copyPiece, len(to))
			copyOne(to[i*copyPiece:end], from[i*copyPiece:end])
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

// copyPastCaches copies a piece, which is not empty.
func copyPastCaches(to, from []byte) {
	C.copy_past_caches((*C.char)(unsafe.Pointer(&to[0])), (*C.char)(unsafe.Pointer(&from[0])), C.size_t(len(to)))
}
