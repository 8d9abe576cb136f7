package main

import (
	"bytes"
	"encoding/binary"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"
	"unsafe"

	"troupe/bus/values"

	"github.com/stretchr/testify/require"
)

const large = values.MaxInline + 1

// resident is the resident memory of this process, in MiB.
func resident(t *testing.T) int {
	data, err := os.ReadFile("/proc/self/statm")
	require.NoError(t, err)
	pages, err := strconv.Atoi(string(bytes.Fields(data)[1]))
	require.NoError(t, err)
	return pages * os.Getpagesize() >> 20
}

// inUse counts the blocks in use.
func (m *memory) inUse() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.blocks)
}

// size is the number of kept bytes.
func (p *pool) size() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.bytes
}

func TestLargeBodiesAreLent(t *testing.T) {
	for name, where := range map[string]func(*memory) []byte{
		"as they are": func(m *memory) []byte { return m.Make(large) },
		"as a copy":   func(*memory) []byte { return make([]byte, large) },
	} {
		q, m := newQueue(t), testMemory(t)
		body := where(m)
		copy(body, "abc")
		q.push(completion{kind: kindAnswer, token: 1, body: body})
		buf := make([]byte, 256)
		require.Equal(t, headSize, q.take(buf, m))
		le := binary.LittleEndian
		at, number := le.Uint64(buf[32:]), le.Uint64(buf[40:])
		require.Equal(t, m.has(body), at == uint64(address(body)), name)
		loanAnswer := m.blocks[uintptr(at)].room
		require.Equal(t, "abc", string(loanAnswer[:3]))
		m.Free(loanAnswer)
		require.Equal(t, 1, m.inUse(), "what the other side has is not freed")
		m.release(number)
		require.Zero(t, m.inUse())
		m.release(number) // a second release has no effect
	}
}

func TestMemoryIsHandedOver(t *testing.T) {
	m := testMemory(t)
	at := m.alloc(2 * large)
	require.Zero(t, uintptr(at)%align)
	copy(unsafe.Slice((*byte)(at), large), "abc")
	got := m.own(at, large)
	require.Equal(t, "abc", string(got[:3]))
	require.Same(t, (*byte)(at), &got[0], "no copy")
	require.Nil(t, m.handOver(uint64(uintptr(at)), 1), "it is Go's already")
	m.release(uint64(uintptr(at)))
	require.Equal(t, 1, m.inUse(), "nor can it be given back")
	m.Free(got)
	require.Zero(t, m.inUse())
	m.Free(got) // a second release has no effect

	at = m.alloc(1000)
	copy(unsafe.Slice((*byte)(at), 1000), "small")
	require.Equal(t, "small", string(m.own(at, 5)))
	require.Zero(t, m.inUse(), "it is on Go's heap")

	other := bytes.Repeat([]byte("x"), large)
	got = m.own(unsafe.Pointer(&other[0]), len(other))
	other[0] = 'X'
	require.Equal(t, "xx", string(got[:2]), "a copy")
	require.True(t, m.has(got))
	m.Free(got)

	short := uint64(uintptr(m.alloc(10)))
	require.Nil(t, m.handOver(short, 1<<20), "more than there is")
	m.release(short)
	require.Zero(t, m.inUse())
}

func TestOutOfMemory(t *testing.T) {
	m := testMemory(t)
	require.Nil(t, m.Make(1<<60))
	require.Nil(t, m.alloc(1<<60))
	require.Zero(t, m.inUse())
}

func TestRoomIsReused(t *testing.T) {
	p := newPool()
	p.keepFor = 100 * time.Millisecond
	for n := range 40 {
		size := roomFor(1 << n)
		require.GreaterOrEqual(t, size, 1<<n)
		require.LessOrEqual(t, size, max(1<<n+1<<n/8, os.Getpagesize()))
		require.Zero(t, size%os.Getpagesize())
	}
	require.Equal(t, roomFor(64<<20+100), roomFor(64<<20+5000))
	room := p.take(roomFor(large))
	p.put(room)
	again := p.take(roomFor(large + 1))
	require.Same(t, &room[0], &again[0])
	p.put(again)
	require.Eventually(t, func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return !p.running && len(p.kept) == 0 && p.bytes == 0
	}, 5*poolFor, 50*time.Millisecond, "it goes back to the system")
}

func TestPoolIsBounded(t *testing.T) {
	p := newPool()
	for range 3 {
		var rooms [][]byte
		for range 10 {
			rooms = append(rooms, p.take(poolMax/4))
		}
		for _, room := range rooms {
			p.put(room)
			require.LessOrEqual(t, p.size(), poolMax)
		}
	}
	p.put(p.take(2 * poolMax))
	require.LessOrEqual(t, p.size(), poolMax)
}

// TestFewMappings: the number of a process's mappings is limited; above it Go's heap could not grow.
func TestFewMappings(t *testing.T) {
	p, size := newPool(), roomFor(large)
	p.keepFor = 300 * time.Millisecond
	rooms := make([][]byte, 150_000)
	for i := range rooms {
		rooms[i] = p.take(size)
		require.NotNil(t, rooms[i], "%d", i)
	}
	before := resident(t)
	for i := 0; i < len(rooms); i += 2 {
		rooms[i][0] = 1
		p.put(rooms[i])
	}
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	require.Less(t, bytes.Count(maps, []byte("\n")), 5000)
	require.Eventually(t, func() bool { return p.size() == 0 && resident(t) < before+32 }, 5*poolFor, 50*time.Millisecond)
	again := p.take(size)
	require.Zero(t, again[0])
	require.True(t, slices.ContainsFunc(rooms, func(room []byte) bool { return &room[0] == &again[0] }), "they are used again")
}

// TestLargeBodiesAreReturnedToTheOS: memory of large bodies does not accumulate.
func TestLargeBodiesAreReturnedToTheOS(t *testing.T) {
	t.Setenv(shmKeepVariable, "1")
	m, size, most := testMemory(t), 64<<20, 0
	m.pool.keepFor = 300 * time.Millisecond
	before := resident(t)
	for range 20 {
		at := m.alloc(size)
		for page, body := 0, unsafe.Slice((*byte)(at), size); page < size; page += 4096 {
			body[page] = 1
		}
		_, number, _ := m.lend(m.own(at, size)) // to Python and back
		most = max(most, resident(t)-before)
		m.release(number)
	}
	t.Logf("%d MiB at most", most)
	require.Less(t, most, 64+16, "the same pages")
	require.Eventually(t, func() bool { return resident(t) < before+16 }, 5*poolFor, 50*time.Millisecond, "%d MiB were in use before", before)
}

// testMemory is a memory with a directory of its own for shared segments, closed when the test ends.
func testMemory(t testing.TB) *memory {
	dir, err := os.MkdirTemp("", "shm") // its path is short enough for sockets
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	m := newMemory()
	m.shared.cfg.Dir = dir
	t.Cleanup(func() {
		if arena := m.shared.opened(); arena != nil {
			require.NoError(t, arena.Close())
		}
	})
	return m
}

// TestAnArrayIsFreedWithItsLastUse: an array that is sent in place goes back when Python has released it and every body of it was freed, in
// any order.
func TestAnArrayIsFreedWithItsLastUse(t *testing.T) {
	for _, pythonFirst := range []bool{true, false} {
		m := testMemory(t)
		at := m.allocArray(large)
		first, second := m.own(at, large), m.own(at, large)
		require.Equal(t, address(first), uintptr(at), "no copy")
		require.False(t, m.Locate(first).IsZero())
		m.Free(first)
		if pythonFirst {
			m.release(uint64(uintptr(at)))
			m.release(uint64(uintptr(at)))
			require.Equal(t, 1, m.inUse())
			m.Free(second)
		} else {
			m.Free(second)
			m.Free(second)
			require.Equal(t, 1, m.inUse())
			m.release(uint64(uintptr(at)))
		}
		require.Zero(t, m.inUse())
		require.Zero(t, m.shared.opened().Stats().InUse)
	}
}
