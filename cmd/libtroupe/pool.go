package main

import (
	"math/bits"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"syscall"
	"time"
)

const (
	poolMost = 256 << 20       // bytes that are kept for the next body; more goes back to the system at once
	poolFor  = 3 * time.Second // and so long: pages cost more to take anew than the bytes in them
	// unmapFrom is from which size on the addresses of a room go back as well.
	unmapFrom = 1 << 20
)

// pool is the room of bodies that were freed, kept for a while.
type pool struct {
	mu    sync.Mutex
	kept  []spare          // oldest first
	bytes int              // of kept
	empty map[int][][]byte // by size: rooms that have addresses and no memory
	awake bool             // it looks for what has been kept for long enough
}

// spare is room that nobody uses.
type spare struct {
	room  []byte
	since time.Time
}

func newPool() *pool { return &pool{empty: map[int][][]byte{}} }

// roomFor is how much is taken for a body: whole pages, and few sizes, so that the next body of about this size fits.
func roomFor(n int) int {
	step := max(os.Getpagesize(), 1<<max(bits.Len(uint(n))-5, 0))
	return max(1, (n+step-1)/step) * step
}

// take gives room of exactly that size, with anything in it; nil: there is none.
func (p *pool) take(size int) []byte {
	if room := p.again(size); room != nil {
		return room
	}
	room, err := syscall.Mmap(-1, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		return nil
	}
	return room
}

// again is room that was kept, the latest, which is the likeliest to be in the processor's caches; or else one without memory.
func (p *pool) again(size int) []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := len(p.kept) - 1; i >= 0; i-- {
		if room := p.kept[i].room; len(room) == size {
			p.kept = slices.Delete(p.kept, i, i+1)
			p.bytes -= size
			return room
		}
	}
	if n := len(p.empty[size]); n > 0 {
		room := p.empty[size][n-1]
		p.empty[size] = p.empty[size][:n-1]
		return room
	}
	return nil
}

// put takes room back.
func (p *pool) put(room []byte) {
	p.mu.Lock()
	p.kept = append(p.kept, spare{room, time.Now()})
	p.bytes += len(room)
	old := p.oldLocked(time.Time{})
	if !p.awake && len(p.kept) > 0 {
		p.awake = true
		spawn(p.run, func(error) {})
	}
	p.mu.Unlock()
	p.giveBack(old)
}

// oldLocked takes out what has been kept since before that time, and what is too much.
func (p *pool) oldLocked(before time.Time) (old []spare) {
	n := 0
	for n < len(p.kept) && (p.bytes > poolMost || p.kept[n].since.Before(before)) {
		p.bytes -= len(p.kept[n].room)
		n++
	}
	old = slices.Clone(p.kept[:n])
	clear(p.kept[:n])
	p.kept = p.kept[n:]
	return old
}

// run gives back what has been kept for long enough, until nothing is.
func (p *pool) run() {
	for {
		time.Sleep(poolFor / 3)
		p.mu.Lock()
		old := p.oldLocked(time.Now().Add(-poolFor))
		p.awake = len(p.kept) > 0
		awake := p.awake
		p.mu.Unlock()
		p.giveBack(old)
		if !awake {
			debug.FreeOSMemory() // the messages that the bodies came in were on Go's heap
			return
		}
	}
}

// giveBack gives the memory of rooms back to the system. The addresses of small ones are kept, for the next of their size: each that went
// could leave a gap, and the system keeps account of 65,530 in a process, Go's own among them.
func (p *pool) giveBack(all []spare) {
	for _, s := range all {
		if len(s.room) >= unmapFrom && syscall.Munmap(s.room) == nil {
			continue
		}
		_ = syscall.Madvise(s.room, syscall.MADV_DONTNEED) // where it does nothing, they stay in use
		p.mu.Lock()
		p.empty[len(s.room)] = append(p.empty[len(s.room)], s.room)
		p.mu.Unlock()
	}
}
