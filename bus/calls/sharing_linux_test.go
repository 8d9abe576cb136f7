package calls_test

import (
	"log/slog"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/shm"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// sharedMemory is the shared memory of one process: bodies of Make lie in its arena, attached ones in that of another process.
type sharedMemory struct {
	arena  *shm.Arena
	reader *shm.Reader
}

func newSharedMemory(t *testing.T, dir string) *sharedMemory {
	cfg := shm.Config{Dir: dir, Logger: slog.New(slog.DiscardHandler)}
	arena, err := shm.Open(cfg)
	require.NoError(t, err)
	m := &sharedMemory{arena: arena, reader: shm.NewReader(cfg)}
	t.Cleanup(func() {
		m.reader.Close()
		require.NoError(t, m.arena.Close())
	})
	return m
}

func (m *sharedMemory) Make(n int) []byte { return m.arena.Alloc(n) }

func (m *sharedMemory) Free(body []byte) {
	if !m.arena.Free(body) {
		m.reader.Release(body)
	}
}

func (m *sharedMemory) Locate(body []byte) wire.Location { return m.arena.Locate(body) }

func (m *sharedMemory) Attach(at wire.Location, n int64, done func([]byte)) {
	m.reader.Attach(at, n, done)
}

func (m *sharedMemory) Join(name string, n int64, waits func(), done func(values.HostFetch, []byte)) {
	m.arena.Join(m.reader, name, n, waits, func(f *shm.Fetch, body []byte) {
		if f == nil {
			done(nil, body)
			return
		}
		done(f, nil)
	})
}

// TestSharedBodiesAreGivenUpOnTheirWay cancels calls, or lets them time out, at random points while their bodies are claimed in shared
// memory. Afterwards neither side uses or lends a region.
func TestSharedBodiesAreGivenUpOnTheirWay(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "shm") // its path is short enough for sockets
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	callers, workers := newSharedMemory(t, dir), newSharedMemory(t, dir)
	th := emptyTestbed(t)
	th.startMemoryWorkers(workers)
	const size = 300 << 10
	call := func(timeout time.Duration) calls.Call {
		body := callers.Make(size)
		clear(body) // zeros make the worker answer at once
		return calls.Call{
			To: th.to, Method: "echo", World: th.world, Memory: callers, Timeout: timeout,
			Parts: []calls.Part{{Scope: calls.Everyone(), Ranks: []int{0, 1, 2, 3}, Body: body, DoneFunc: func() { callers.Free(body) }}},
			OverFunc: func(g *calls.Gather) {
				for _, a := range g.Arrived() {
					values.FreeBody(callers, a.Body)
				}
			},
		}
	}
	good(t, scatter(t, th.ep, call(0)))
	began := time.Now()
	good(t, scatter(t, th.ep, call(0)))
	whole := time.Since(began)
	for i := range repeats(200, 2000) {
		if i%2 == 0 {
			g := scatter(t, th.ep, call(0))
			time.Sleep(rand.N(whole))
			g.Cancel()
		} else {
			<-scatter(t, th.ep, call(max(rand.N(whole), time.Microsecond))).Done()
		}
	}
	good(t, scatter(t, th.ep, call(0)))
	unused := func(m *sharedMemory) bool {
		s := m.arena.Stats()
		return s.InUse == 0 && s.Lent == 0 && m.reader.Attached() == 0
	}
	require.Eventually(t, func() bool { return unused(callers) && unused(workers) }, 2*time.Minute, 10*time.Millisecond)
	require.Positive(t, callers.arena.Stats().Readers, "bodies were claimed")
	require.Positive(t, workers.arena.Stats().Readers)
}

// TestAProcessReadsItsOwnValueInPlace checks that the owner of a value attaches it instead of copying it, that what a receiver writes is its
// own, and that a copy is made where the value is attached already.
func TestAProcessReadsItsOwnValueInPlace(t *testing.T) {
	dir, err := os.MkdirTemp("", "shm") // its path is short enough for sockets
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	memory := newSharedMemory(t, dir)
	owner := endpoint(t, bustest.Open(t))
	const size = 300 << 10
	body := memory.Make(size)
	copy(body, pattern(size, 1))
	ref, err := owner.References().Put(body, memory, nil)
	require.NoError(t, err)

	first, err := value(t, owner, ref, memory)
	require.NoError(t, err)
	require.Equal(t, 1, memory.reader.Attached())
	require.Equal(t, checksum(pattern(size, 1)), checksum(first.Body))
	clear(first.Body)
	second, err := value(t, owner, ref, memory)
	require.NoError(t, err)
	require.Equal(t, checksum(pattern(size, 1)), checksum(second.Body))
	require.Equal(t, 1, memory.reader.Attached(), "the second one is a copy")

	owner.References().Release(ref)
	require.Equal(t, checksum(make([]byte, size)), checksum(first.Body), "it outlives the value")
	values.FreeBody(memory, first.Body)
	values.FreeBody(memory, second.Body)
	until(t, func() bool {
		s := memory.arena.Stats()
		return s.InUse == 0 && s.Lent == 0 && memory.reader.Attached() == 0
	})
	require.Zero(t, owner.References().Owned())
}
