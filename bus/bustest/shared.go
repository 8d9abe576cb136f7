package bustest

import (
	"math/rand/v2"
	"sync"
	"time"
	"unsafe"

	"troupe/bus/values"
	"troupe/bus/wire"
)

// SharedHost lets memories attach each other's bodies, as processes of one host do. An attached body is a copy, which its receiver
// must free. Some attachments fail, at once or late, and some succeed late.
type SharedHost struct {
	group sync.WaitGroup // attachments under way

	mu       sync.Mutex
	rng      *rand.Rand
	last     uint64
	located  map[uint64][]byte // by generation, until they are freed
	gens     map[*byte]uint64
	attached int
	fetches  map[string]*sharedFetch
	fetched  int
}

var _ values.Sharing = (*Memory)(nil)

// Share makes memories share their bodies.
func Share(rng *rand.Rand, all ...*Memory) *SharedHost {
	h := &SharedHost{rng: rand.New(rand.NewPCG(rng.Uint64(), 1)), located: map[uint64][]byte{}, gens: map[*byte]uint64{}, fetches: map[string]*sharedFetch{}}
	for _, m := range all {
		m.shared = h
		m.t.Cleanup(h.group.Wait)
	}
	return h
}

// Attached counts the attachments that succeeded.
func (h *SharedHost) Attached() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.attached
}

// Fetched counts the bodies that came from another memory's fetch.
func (h *SharedHost) Fetched() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.fetched
}

func (h *SharedHost) remove(body []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	at := unsafe.SliceData(body)
	delete(h.located, h.gens[at])
	delete(h.gens, at)
}

// Locate is values.Sharing. Every other body is not shared.
func (m *Memory) Locate(body []byte) wire.Location {
	h := m.shared
	if h == nil {
		return wire.Location{}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.rng.IntN(2) == 0 {
		return wire.Location{} // as if its receivers were on another host
	}
	h.last++
	h.located[h.last], h.gens[unsafe.SliceData(body)] = body, h.last
	return wire.Location{Owner: "00000000000000000000000000000000", Segment: 1, Gen: h.last}
}

// Attach is values.Sharing.
func (m *Memory) Attach(at wire.Location, n int64, done func(body []byte)) {
	h := m.shared
	if h == nil {
		done(nil)
		return
	}
	h.mu.Lock()
	fate, wait := h.rng.IntN(5), time.Duration(h.rng.IntN(300))*time.Millisecond
	h.mu.Unlock()
	switch fate {
	case 0:
		done(nil)
	case 1:
		h.group.Go(func() { time.Sleep(wait); done(nil) })
	case 2:
		h.group.Go(func() { time.Sleep(wait); done(m.copyOf(at, n)) })
	default:
		h.group.Go(func() { done(m.copyOf(at, n)) })
	}
}

// copyOf is the located body, unless its owner has freed it.
func (m *Memory) copyOf(at wire.Location, n int64) []byte {
	h := m.shared
	h.mu.Lock()
	defer h.mu.Unlock()
	source := h.located[at.Gen]
	if int64(len(source)) != n {
		return nil
	}
	body := m.Make(int(n))
	copy(body, source)
	h.attached++
	return body
}
