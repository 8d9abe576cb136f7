package main

import (
	"context"
	"runtime"
	"runtime/debug"
	runtimemetrics "runtime/metrics"
	"sync"
	"time"

	"troupe/internal/ab"
)

const (
	// ballastSize is never touched and takes no memory, but has the collector wait until there is as much garbage.
	ballastSize = 64 << 20
	heapLook    = 250 * time.Millisecond
	heapBusy    = 64 << 20         // bytes allocated between two looks while large bodies pass; creating roles allocates a quarter of that
	heapCalm    = 10 * time.Second // without that, until the memory of the garbage is given back
)

// tendHeap runs until it is stopped. A server that hands large bodies on makes garbage as fast as they come, and its own heap
// is small: without ballast the collector would run a hundred times a second. With it, garbage of ordinary work is kept as
// well, tens of megabytes that never go back to the system. So there is ballast only while large bodies pass.
func tendHeap(ctx context.Context) (stop func()) {
	if !ab.On(ab.HeapBallast) {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup
	group.Go(func() {
		var ballast []byte
		tick := time.NewTicker(heapLook)
		defer tick.Stop()
		last, busy := heapAllocated(), time.Now()
		for {
			select {
			case <-ctx.Done():
				runtime.KeepAlive(ballast)
				return
			case <-tick.C:
			}
			now := heapAllocated()
			switch {
			case now-last >= heapBusy:
				if busy = time.Now(); ballast == nil {
					ballast = make([]byte, ballastSize)
				}
			case ballast != nil && time.Since(busy) > heapCalm:
				ballast = nil
				debug.FreeOSMemory()
			}
			last = now
			runtime.KeepAlive(ballast)
		}
	})
	return func() { cancel(); group.Wait() }
}

// heapAllocated counts the bytes that this process has ever allocated on its heap.
func heapAllocated() uint64 {
	sample := []runtimemetrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	runtimemetrics.Read(sample)
	return sample[0].Value.Uint64()
}
