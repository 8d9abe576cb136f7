package main

import (
	"runtime"
	"sync"
	"unsafe"
)

// align is where bodies begin, so that the tensors in them are aligned.
const align = 64

// memory is the bodies that both sides of the border use without a copy. They are pinned: they stay where they are, and
// alive, until they are handed over or released.
type memory struct {
	mu     sync.Mutex
	pinned map[uint64]*pinned // by number; by address for what was allocated
	next   uint64
	tidier *tidier
}

type pinned struct {
	pin  runtime.Pinner
	body []byte
}

// shared is the memory of all cores of the process. What is lent outlives the core that lent it: an array of the other
// side may lie in it; and Go ends the process when it finds something pinned that nobody remembers.
var shared = newMemory()

func newMemory() *memory { return &memory{pinned: map[uint64]*pinned{}, tidier: newTidier()} }

// alloc gives memory that the other side fills.
func (m *memory) alloc(n int) unsafe.Pointer {
	whole := make([]byte, n+align)
	off := int(-uintptr(unsafe.Pointer(unsafe.SliceData(whole))) & (align - 1))
	p := &pinned{body: whole[off : off+n]}
	at := unsafe.Pointer(unsafe.SliceData(whole[off:]))
	p.pin.Pin(at)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pinned[uint64(uintptr(at))] = p
	return at
}

// own is the n bytes at an address: those that were allocated there, handed over, or else a copy.
func (m *memory) own(at unsafe.Pointer, n int) []byte {
	if n == 0 {
		return nil
	}
	if b := m.handOver(uint64(uintptr(at)), n); b != nil {
		return b
	}
	return append([]byte(nil), unsafe.Slice((*byte)(at), n)...)
}

// handOver is the body that was allocated at an address, from now on Go's alone; nil: there is none.
func (m *memory) handOver(at uint64, n int) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.pinned[at]
	if p == nil || n > len(p.body) {
		return nil
	}
	delete(m.pinned, at)
	p.pin.Unpin()
	m.tidier.passedBy(len(p.body))
	return p.body[:n:n]
}

// lend gives the other side a body of ours, under a number that is no address.
func (m *memory) lend(body []byte) uint64 {
	p := &pinned{body: body}
	p.pin.Pin(unsafe.SliceData(body))
	m.mu.Lock()
	defer m.mu.Unlock()
	m.next++
	m.pinned[m.next] = p
	return m.next
}

// release ends what alloc or lend began.
func (m *memory) release(number uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p := m.pinned[number]; p != nil {
		delete(m.pinned, number)
		p.pin.Unpin()
		m.tidier.passedBy(len(p.body))
	}
}
