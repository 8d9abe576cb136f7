package bustest

import (
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"
)

// Memory is a values.Memory that detects misuse: an access to a freed body ends the program with a fault, and a body that
// is freed twice, or never, fails the test.
type Memory struct {
	t      testing.TB
	shared *SharedHost // nil: its bodies are not shared

	mu    sync.Mutex
	made  map[*byte][]byte
	freed map[*byte][]byte // their addresses are not reused
}

// NewMemory returns a Memory whose bodies must all be freed when the test ends.
func NewMemory(t testing.TB) *Memory {
	m := &Memory{t: t, made: map[*byte][]byte{}, freed: map[*byte][]byte{}}
	t.Cleanup(m.end)
	return m
}

// Make allocates a body with arbitrary content.
func (m *Memory) Make(n int) []byte {
	room, err := syscall.Mmap(-1, 0, n, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		return nil
	}
	room[n-1] = 0xff
	m.mu.Lock()
	defer m.mu.Unlock()
	m.made[&room[0]] = room
	return room
}

// Free makes the body inaccessible.
func (m *Memory) Free(body []byte) {
	if m.shared != nil {
		m.shared.remove(body)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	at := unsafe.SliceData(body)
	room := m.made[at]
	if room == nil {
		if m.freed[at] != nil {
			m.t.Errorf("bustest.Memory: a body of %d bytes is freed twice", len(body))
		}
		return
	}
	delete(m.made, at)
	m.freed[at] = room
	if err := syscall.Madvise(room, syscall.MADV_DONTNEED); err != nil {
		m.t.Errorf("bustest.Memory: %v", err)
	}
	if err := syscall.Mprotect(room, syscall.PROT_NONE); err != nil {
		m.t.Errorf("bustest.Memory: %v", err)
	}
}

// InUse counts the bodies that were made and not freed, Made those that were made.
func (m *Memory) InUse() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.made)
}

func (m *Memory) Made() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.made) + len(m.freed)
}

// end waits for bodies that are freed late: closing a bus does not wait for them.
func (m *Memory) end() {
	for range 100 {
		time.Sleep(50 * time.Millisecond)
		if m.InUse() == 0 {
			break
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if n := len(m.made); n > 0 {
		m.t.Errorf("bustest.Memory: %d bodies are not freed", n)
	}
	for _, all := range []map[*byte][]byte{m.made, m.freed} {
		for _, room := range all {
			if err := syscall.Munmap(room); err != nil {
				m.t.Errorf("bustest.Memory: %v", err)
			}
		}
	}
}
