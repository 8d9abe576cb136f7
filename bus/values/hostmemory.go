package values

import (
	"bytes"
	"sync"

	"troupe/bus"
	"troupe/bus/shm"
	"troupe/bus/wire"
)

// hostMemory is the shared memory of a host for receivers without a Memory, whose bodies lie in Go's heap: what another process of the host sends or
// has pulled is copied from there. It is opened when it is first needed.
type hostMemory struct {
	store *Store
	cfg   bus.SharedConfig

	mu     sync.Mutex // guards what follows
	tried  bool
	arena  *shm.Arena // nil: there is none
	reader *shm.Reader
}

var _ Sharing = (*hostMemory)(nil)

// open reports whether there is shared memory.
func (m *hostMemory) open() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.tried {
		m.tried = true
		cfg := shm.Config{Dir: m.cfg.Dir, GoFunc: bus.Go, Logger: m.store.session.Bus().Logger()}
		arena, err := shm.Open(cfg)
		if err != nil {
			cfg.Logger.Warn("bus: this process shares no memory with others of its host, which is slower; TROUPE_SHM=0 chooses that", "error", err)
			return false
		}
		m.arena, m.reader = arena, shm.NewReader(cfg)
	}
	return m.arena != nil
}

func (m *hostMemory) close() {
	m.mu.Lock()
	arena, reader := m.arena, m.reader
	m.tried, m.arena = true, nil
	m.mu.Unlock()
	if arena == nil {
		return
	}
	reader.Close()
	if _, err := arena.CloseUnused(); err != nil {
		m.store.session.Bus().Logger().Warn("bus: leave the directory of shared memory", "error", err)
	}
}

func (m *hostMemory) Make(n int) []byte           { return make([]byte, n) }
func (m *hostMemory) Free([]byte)                 {}
func (m *hostMemory) Locate([]byte) wire.Location { return wire.Location{} }

func (m *hostMemory) Attach(at wire.Location, n int64, done func(body []byte)) {
	if !m.open() {
		done(nil)
		return
	}
	m.reader.Attach(at, n, func(body []byte) { m.copied(body, done) })
}

func (m *hostMemory) Join(name string, n int64, waits func(), done func(f HostFetch, body []byte)) {
	if n < shm.LeastFetch || !m.open() {
		done(nil, nil)
		return
	}
	m.arena.Join(m.reader, name, n, waits, func(f *shm.Fetch, body []byte) {
		if f != nil {
			done(&copiedFetch{f, m}, nil)
			return
		}
		m.copied(body, func(body []byte) { done(nil, body) })
	})
}

// copied calls done with a copy of an attached body, which it releases.
func (m *hostMemory) copied(body []byte, done func(body []byte)) {
	if body == nil {
		done(nil)
		return
	}
	copying := m.store.session.Spawn(func() {
		own := bytes.Clone(body)
		m.reader.Release(body)
		done(own)
	})
	if !copying {
		m.reader.Release(body)
		done(nil)
	}
}

// copiedFetch is a HostFetch whose own body is a copy.
type copiedFetch struct {
	*shm.Fetch
	memory *hostMemory
}

func (f *copiedFetch) Whole(done func(body []byte)) {
	f.Fetch.Whole(func(body []byte) { f.memory.copied(body, done) })
}
