package main

import (
	"sync"
	"time"
	"unsafe"

	"troupe/bus"
	"troupe/bus/shm"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// align is the alignment of tensors. Memory is aligned to pages.
const align = 64

// memory holds bodies over values.MaxInline outside Go's heap, so that Go and Python use them in place and the garbage collector
// ignores them. Each has one owner, which frees it:
//
//	the other side ── alloc ──► filling ── handOver ──► Go: a call or an answer that is pulled ── Free, when it has been read ──► pool
//	                               └───── release ─────────────────────────────────────────────────────────────────────────────►
//	Go: an argument or answer on its way in ── Make ──► coming ── lend ──► the other side ── release, when nothing refers to it ──►
//	                                                      └───── Free, if nobody waits for it any more ────────────────────────►
//
// An array of the other side (allocArray) may be sent in place: handOver leaves it with that side, and it goes back when that side has
// released it and every body of it was freed.
type memory struct {
	pool   *pool
	shared *sharedMemory

	mu     sync.Mutex         // guards what follows
	blocks map[uintptr]*block // blocks in use, by address
	loans  map[uint64]*block  // lent blocks, by number
	last   uint64             // last number of a loan
}

// block is one body.
type block struct {
	room   []byte // of the pool: whole pages, more than the body takes; else the body
	away   bool   // Python owns it
	array  bool   // Python keeps it when it is handed over
	bodies int    // of an array: handed over and not freed
	// trimming: a goroutine gives a part of it back. released: the other side has released it meanwhile.
	trimming, released bool
	origin             origin
}

// origin says where the memory of a block goes back to.
type origin int

const (
	fromPool   origin = iota // private memory of this process
	fromArena                // shared memory of this process: a body that is sent
	fromReader               // shared memory of another process of this host, mapped privately
)

// shared is the memory of all cores of the process. A lent block may outlive the core that lent it, because a Python
// array may use it.
var shared = newMemory()

func newMemory() *memory {
	return &memory{pool: newPool(), shared: newSharedMemory(), blocks: map[uintptr]*block{}, loans: map[uint64]*block{}}
}

var _ values.Sharing = (*memory)(nil)

// Make returns room for an incoming body; nil: out of memory.
func (m *memory) Make(n int) []byte { return m.make(n, false) }

func (m *memory) make(n int, away bool) []byte {
	room := m.pool.take(roomFor(n))
	if room == nil {
		return nil
	}
	m.add(&block{room: room, away: away})
	return room[:n:n]
}

func (m *memory) add(b *block) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.blocks[address(b.room)] = b
}

// giveBack returns the memory of a block that was removed.
func (m *memory) giveBack(b *block) {
	switch b.origin {
	case fromArena:
		m.shared.free(b.room)
	case fromReader:
		m.shared.reader.Release(b.room)
	default:
		m.pool.put(b.room)
	}
}

// Locate is where other processes of this host find a body that is sent; zero: it is not shared.
func (m *memory) Locate(body []byte) wire.Location { return m.shared.locate(body) }

// Attach obtains a body of another process of this host in place.
func (m *memory) Attach(at wire.Location, n int64, done func(body []byte)) {
	m.shared.attach(at, n, func(body []byte) {
		if body != nil {
			m.add(&block{room: body, origin: fromReader})
		}
		done(body)
	})
}

// Join finds the process of this host that pulls a body for all; see values.Sharing.
func (m *memory) Join(name string, n int64, waits func(), done func(values.HostFetch, []byte)) {
	m.shared.join(name, n, waits, func(f *shm.Fetch, body []byte) {
		if body != nil {
			m.add(&block{room: body, origin: fromReader})
		}
		if f == nil {
			done(nil, body)
			return
		}
		done(&hostFetch{f, m}, nil)
	})
}

// hostFetch is a body that this process pulls for its host. Its own view of it is a block.
type hostFetch struct {
	*shm.Fetch
	memory *memory
}

func (f *hostFetch) Whole(done func(body []byte)) {
	f.Fetch.Whole(func(body []byte) {
		if body != nil {
			f.memory.add(&block{room: body, origin: fromReader})
		}
		done(body)
	})
}

// Free frees a body that Go owns. Bodies of other memory, or owned by Python, are left alone.
func (m *memory) Free(body []byte) {
	if b := m.remove(address(body), false); b != nil {
		m.giveBack(b)
	}
}

// remove removes the block at an address if it has the expected owner.
func (m *memory) remove(at uintptr, away bool) *block {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := m.blocks[at]
	switch {
	case b == nil:
		return nil
	case b.array && away:
		b.away = false
	case b.array:
		b.bodies = max(0, b.bodies-1)
	case b.away != away:
		return nil
	}
	if b.array && (b.away || b.bodies > 0) {
		return nil
	}
	delete(m.blocks, at)
	return b
}

// alloc returns memory for Python to fill, shared if possible; nil: out of memory.
func (m *memory) alloc(n int) unsafe.Pointer {
	if body := m.shared.alloc(n); body != nil {
		m.add(&block{room: body, away: true, origin: fromArena})
		return unsafe.Pointer(unsafe.SliceData(body))
	}
	return unsafe.Pointer(unsafe.SliceData(m.make(n, true)))
}

// allocArray is alloc for an array that Python goes on using when it is handed over, any number of times.
func (m *memory) allocArray(n int) unsafe.Pointer {
	at := m.alloc(n)
	m.mu.Lock()
	defer m.mu.Unlock()
	if b := m.blocks[uintptr(at)]; b != nil {
		b.array = true
	}
	return at
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
	if n <= values.MaxInline {
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
	body := b.room[:n:n]
	if b.array {
		b.bodies++
	} else {
		b.away = false
	}
	m.mu.Unlock()
	if n <= values.MaxInline {
		defer m.Free(body)
		return m.keep(body)
	}
	return body
}

// lend transfers a body of Go to Python, under a number that is not an address. A body of other memory is copied first. shared reports
// whether it lies in memory of another process.
func (m *memory) lend(body []byte) (at, number uint64, shared bool) {
	if !m.has(body) {
		body = m.keep(body)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	b := m.blocks[address(body)]
	b.away = true
	m.last++
	m.loans[m.last] = b
	return uint64(address(body)), m.last, b.origin == fromReader
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
	b := m.remove(at, true)
	if b == nil {
		return
	}
	m.mu.Lock()
	b.released = true
	trimming := b.trimming
	m.mu.Unlock()
	if !trimming {
		m.giveBack(b)
	}
}

const (
	trimAfter = time.Second     // a value of which little is kept may be on its way out as a whole
	trimAgain = 5 * time.Second // after a failure: a forked child reads the body, or memory is short
)

// trim gives back the memory of a lent body of which the other side uses only some ranges, if it still has them after a while. The arrays in
// these ranges stay where they are.
func (m *memory) trim(number uint64, used []shm.Range, after time.Duration) {
	time.AfterFunc(after, bus.Guard(func() {
		if !m.trimNow(number, used) {
			m.trim(number, used, trimAgain)
		}
	}))
}

// trimNow reports false if it has to be tried again.
func (m *memory) trimNow(number uint64, used []shm.Range) (done bool) {
	m.mu.Lock()
	b := m.loans[number]
	if b == nil {
		m.mu.Unlock()
		return true
	}
	b.trimming = true
	m.mu.Unlock()
	switch b.origin {
	case fromReader:
		done = m.shared.reader.Detach(b.room, used)
	case fromPool:
		shm.DropOutside(b.room, used)
		done = true
	default:
		done = true // this process sends it too
	}
	m.mu.Lock()
	b.trimming = false
	released := b.released
	m.mu.Unlock()
	if released {
		m.giveBack(b)
	}
	return done || released
}

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
