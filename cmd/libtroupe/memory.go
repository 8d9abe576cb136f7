package main

import (
	"sync"
	"unsafe"

	"troupe/bus"
)

// align is where tensors begin. Memory begins at a page.
const align = 64

// memory is the bodies over bus.MaxInline: outside Go's heap, so that both sides of the border use them where they are, and Go's
// collector has nothing to do with them. Each has one owner, who frees it:
//
//	the other side ── alloc ──► filling ── handOver ──► Go: a call or an answer that is pulled ── Free, when it has been read ──► pool
//	                               └───── release ─────────────────────────────────────────────────────────────────────────────►
//	Go: an argument or answer on its way in ── Make ──► coming ── lend ──► the other side ── release, when nothing refers to it ──►
//	                                                      └───── Free, if nobody waits for it any more ────────────────────────►
type memory struct {
	pool *pool

	mu     sync.Mutex         // guards what follows
	blocks map[uintptr]*block // all that are in use, by address
	loans  map[uint64]*block  // of those, the ones that are lent, by number
	last   uint64             // number of a loan
}

// block is one body.
type block struct {
	room []byte // whole pages, more than the body takes
	away bool   // the other side has it
}

// shared is the memory of all cores of the process. What is lent outlives the core that lent it: an array of the other side may
// lie in it.
var shared = newMemory()

func newMemory() *memory {
	return &memory{pool: newPool(), blocks: map[uintptr]*block{}, loans: map[uint64]*block{}}
}

var _ bus.Memory = (*memory)(nil)

// Make gives room for a body that comes in; nil: there is none.
func (m *memory) Make(n int) []byte { return m.make(n, false) }

func (m *memory) make(n int, away bool) []byte {
	room := m.pool.take(roomFor(n))
	if room == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.blocks[address(room)] = &block{room: room, away: away}
	return room[:n:n]
}

// Free takes back a body that Go has. One that is not of this memory, or that the other side has, is left alone.
func (m *memory) Free(body []byte) {
	if b := m.remove(address(body), false); b != nil {
		m.pool.put(b.room)
	}
}

// remove takes out the block at an address, if it is where it is thought to be.
func (m *memory) remove(at uintptr, away bool) *block {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := m.blocks[at]
	if b == nil || b.away != away {
		return nil
	}
	delete(m.blocks, at)
	return b
}

// alloc gives memory that the other side fills; nil: there is none.
func (m *memory) alloc(n int) unsafe.Pointer {
	return unsafe.Pointer(unsafe.SliceData(m.make(n, true)))
}

// own is the n bytes at an address as Go's own: those that were allocated there, handed over, or else a copy.
func (m *memory) own(at unsafe.Pointer, n int) []byte {
	if n == 0 {
		return nil
	}
	if body := m.handOver(uint64(uintptr(at)), n); body != nil {
		return body
	}
	return m.keep(unsafe.Slice((*byte)(at), n))
}

// room is for a body that is made here: on Go's heap, unless it is large.
func (m *memory) room(n int) []byte {
	if n <= bus.MaxInline {
		return make([]byte, n)
	}
	body := m.Make(n)
	if body == nil {
		panic(bus.Errorf(bus.CodeRefused, "there is no memory for a body of %d bytes", n))
	}
	return body
}

// keep is a copy of bytes that somebody else has.
func (m *memory) keep(bytes []byte) []byte {
	body := m.room(len(bytes))
	copy(body, bytes)
	return body
}

// handOver is the body that was allocated at an address, from now on Go's; nil: there is none. A small one is Go's like any other.
func (m *memory) handOver(at uint64, n int) []byte {
	m.mu.Lock()
	b := m.blocks[uintptr(at)]
	if b == nil || !b.away || n > len(b.room) {
		m.mu.Unlock()
		return nil
	}
	b.away = false
	m.mu.Unlock()
	body := b.room[:n:n]
	if n <= bus.MaxInline {
		defer m.Free(body)
		return m.keep(body)
	}
	return body
}

// lend gives the other side a body of Go's, under a number that is no address; one that is not of this memory is copied to it.
func (m *memory) lend(body []byte) (at, number uint64) {
	if !m.has(body) {
		body = m.keep(body)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	b := m.blocks[address(body)]
	b.away = true
	m.last++
	m.loans[m.last] = b
	return uint64(address(body)), m.last
}

func (m *memory) has(body []byte) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.blocks[address(body)] != nil
}

// release ends what alloc or lend began: by the address of the one, by the number of the other. Twice is harmless.
func (m *memory) release(number uint64) {
	m.mu.Lock()
	at := uintptr(number)
	if b := m.loans[number]; b != nil {
		delete(m.loans, number)
		at = address(b.room)
	}
	m.mu.Unlock()
	if b := m.remove(at, true); b != nil {
		m.pool.put(b.room)
	}
}

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
