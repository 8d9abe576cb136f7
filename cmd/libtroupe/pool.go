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
	poolMax = 256 << 20       // bytes kept for reuse; more is returned to the OS at once
	poolFor = 3 * time.Second // how long they are kept: new pages cost more than copying their bytes
	// minUnmapSize is the size from which a room's addresses are returned to the OS too.
	minUnmapSize = 1 << 20
)

// pool keeps freed rooms for a while.
type pool struct {
	mu      sync.Mutex
	kept    []spare          // oldest first
	bytes   int              // of kept
	empty   map[int][][]byte // by size: rooms with addresses and without memory
	keepFor time.Duration
	running bool // the goroutine that returns old rooms runs
}

// spare is an unused room.
type spare struct {
	room  []byte
	since time.Time
}

func newPool() *pool { return &pool{empty: map[int][][]byte{}, keepFor: poolFor} }

// roomFor is the room of a body: whole pages in few sizes, so that the next body of about this size fits.
func roomFor(n int) int {
	step := max(os.Getpagesize(), 1<<max(bits.Len(uint(n))-5, 0))
	return max(1, (n+step-1)/step) * step
}

// take returns a room of exactly that size with undefined content; nil: out of memory.
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

// again returns the most recently kept room, which is likeliest in the CPU caches, or one without memory.
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

// put frees a room.
func (p *pool) put(room []byte) {
	p.mu.Lock()
	p.kept = append(p.kept, spare{room, time.Now()})
	p.bytes += len(room)
	old := p.oldLocked(time.Time{})
	if !p.running && len(p.kept) > 0 {
		p.running = true
		spawn(p.run, func(error) {})
	}
	p.mu.Unlock()
	p.returnToOS(old)
}

// oldLocked removes the rooms kept since before that time, and those above poolMax.
func (p *pool) oldLocked(before time.Time) (old []spare) {
	n := 0
	for n < len(p.kept) && (p.bytes > poolMax || p.kept[n].since.Before(before)) {
		p.bytes -= len(p.kept[n].room)
		n++
	}
	old = slices.Clone(p.kept[:n])
	clear(p.kept[:n])
	p.kept = p.kept[n:]
	return old
}

// run returns old rooms to the OS until none are left.
func (p *pool) run() {
	for {
		time.Sleep(p.keepFor / 3)
		p.mu.Lock()
		old := p.oldLocked(time.Now().Add(-p.keepFor))
		p.running = len(p.kept) > 0
		awake := p.running
		p.mu.Unlock()
		p.returnToOS(old)
		if !awake {
			debug.FreeOSMemory() // the messages of the bodies were on Go's heap
			return
		}
	}
}

// returnToOS returns the memory of rooms. Addresses of small rooms are kept for reuse: each unmapped one may leave a
// gap, and a process is limited to 65,530 mappings.
func (p *pool) returnToOS(all []spare) {
	for _, s := range all {
		if len(s.room) >= minUnmapSize && syscall.Munmap(s.room) == nil {
			continue
		}
		_ = syscall.Madvise(s.room, syscall.MADV_DONTNEED) // if it fails, the pages stay in use
		p.mu.Lock()
		p.empty[len(s.room)] = append(p.empty[len(s.room)], s.room)
		p.mu.Unlock()
	}
}
