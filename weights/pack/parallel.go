package pack

import (
	"runtime"
	"sync"
	"sync/atomic"

	"troupe/bus"
)

const (
	rangeBytes  = 256 << 10 // of a bucket, that one goroutine works on at once: it stays in the caches of a core
	maxRoutines = 4         // more of them share the same memory bandwidth
)

// adder is a sum that several goroutines add to.
type adder struct{ n atomic.Uint64 }

func (a *adder) add(n uint64)  { a.n.Add(n) }
func (a *adder) value() uint64 { return a.n.Load() }

// eachRange calls do for ranges of n bytes, from several goroutines.
func eachRange(n int64, do func(from, to int64)) {
	each((n+rangeBytes-1)/rangeBytes, func(i int64) { do(i*rangeBytes, min((i+1)*rangeBytes, n)) })
}

// each calls do for the numbers below n, from several goroutines, and returns after the last call.
func each(n int64, do func(i int64)) {
	var next atomic.Int64
	work := func() {
		for i := next.Add(1) - 1; i < n; i = next.Add(1) - 1 {
			do(i)
		}
	}
	var group sync.WaitGroup
	for range min(maxRoutines, int64(runtime.GOMAXPROCS(0)), n) - 1 {
		group.Go(bus.Guard(work))
	}
	work()
	group.Wait()
}
