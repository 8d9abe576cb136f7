package main

import (
	"sync"
	"unsafe"

	"troupe/bus"
)

// align is the alignment of tensors. Memory is aligned to pages.
const align = 64

// memory holds bodies over bus.MaxInline outside Go's heap, so that Go and Python use them in place and the garbage collector
// ignores them. Each has one owner, which frees it:
//
//	the other side ── alloc ──► filling ── handOver ──► Go: a call or an answer that is pulled ── Free, when it has been read ──► pool
//	                               └───── release ─────────────────────────────────────────────────────────────────────────────►
//	Go: an argument or answer on its way in ── Make ──► coming ── lend ──► the other side ── release, when nothing refers to it ──►
//	                                                      └───── Free, if nobody waits for it any more ────────────────────────►
type memory struct {
	pool *pool

	mu     sync.Mutex         // guards what follows
	blocks map[uintptr]*block // blocks in use, by address
	loans  map[uint64]*block  // lent blocks, by number
	last   uint64             // last number of a loan
}

// block is one body.
type block struct {
	room []byte // whole pages, at least as large as the body
	away bool   // Python owns it
}

// shared is the memory of all cores of the process. A lent block may outlive the core that lent it, because a Python
// array may use it.
var shared = newMemory()

func newMemory() *memory {
	return &memory{pool: newPool(), blocks: map[uintptr]*block{}, loans: map[uint64]*block{}}
}

var _ bus.Memory = (*memory)(nil)

// Make returns room for an incoming body; nil: out of memory.
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

// Free frees a body that Go owns. Bodies of other memory, or owned by Python, are left alone.
func (m *memory) Free(body []byte) {
	if b := m.remove(address(body), false); b != nil {
		m.pool.put(b.room)
	}
}

// remove removes the block at an address if it has the expected owner.
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

// alloc returns memory for Python to fill; nil: out of memory.
func (m *memory) alloc(n int) unsafe.Pointer {
	return unsafe.Pointer(unsafe.SliceData(m.make(n, true)))
}

// own returns the n bytes at an address as Go's own: allocated memory is handed over, other memory is copied.
func (m *memory) own(at unsafe.Pointer, n int) []byte {
	if n == 0 {
		return nil
	}
	if body := m.handOver(uint64(uintptr(at)), n); body != nil {
		return body
	}
	return m.keep(unsafe.Slice((*byte)(at), n))
}

// room returns memory for a body that Go makes: on Go's heap, unless it is large.
func (m *memory) room(n int) []byte {
	if n <= bus.MaxInline {
		return make([]byte, n)
	}
	body := m.Make(n)
	if body == nil {
		panic(bus.Errorf(bus.CodeRefused, "out of memory for a body of %d bytes", n))
	}
	return body
}

// keep returns a copy.
func (m *memory) keep(bytes []byte) []byte {
	body := m.room(len(bytes))
	copy(body, bytes)
	return body
}

// handOver transfers the body allocated at an address to Go; nil: there is none. A small body is moved to Go's heap.
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

// lend transfers a body of Go to Python, under a number that is not an address. A body of other memory is copied first.
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

// release frees a block of alloc, by address, or of lend, by number. A second release has no effect.
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
