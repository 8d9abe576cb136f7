package bustest

import (
	"time"

	"troupe/bus/values"
)

// sharedFetch is a body that one memory of a SharedHost fetches for the others. The mutex of the host guards it.
type sharedFetch struct {
	memory  *Memory
	name    string
	room    []byte
	waiting []*joiner
}

// joiner waits for a fetch.
type joiner struct {
	memory *Memory
	n      int64
	done   func(values.HostFetch, []byte)
}

// Join is values.Sharing. Some joins fail, at once or late, and some end before the body is whole.
func (m *Memory) Join(name string, n int64, waits func(), done func(values.HostFetch, []byte)) {
	h := m.shared
	if h == nil {
		done(nil, nil)
		return
	}
	h.mu.Lock()
	fate, wait := h.rng.IntN(5), time.Duration(h.rng.IntN(300))*time.Millisecond
	h.mu.Unlock()
	j := &joiner{memory: m, n: n, done: done}
	switch fate {
	case 0:
		done(nil, nil)
	case 1:
		h.group.Go(func() { time.Sleep(wait); done(nil, nil) })
	case 2:
		h.group.Go(func() { time.Sleep(wait); h.join(name, j, waits) })
	default:
		h.group.Go(func() { h.join(name, j, waits) })
	}
}

func (h *SharedHost) join(name string, j *joiner, waits func()) {
	h.mu.Lock()
	if f := h.fetches[name]; f != nil {
		f.waiting = append(f.waiting, j)
		impatience := time.Duration(h.rng.IntN(2000)) * time.Millisecond
		h.mu.Unlock()
		waits()
		time.Sleep(impatience)
		if h.leave(f, j) {
			j.done(nil, nil)
		}
		return
	}
	f := h.startLocked(name, j)
	h.mu.Unlock()
	j.done(f, nil)
}

func (h *SharedHost) startLocked(name string, j *joiner) *sharedFetch {
	f := &sharedFetch{memory: j.memory, name: name, room: j.memory.Make(int(j.n))}
	h.fetches[name] = f
	return f
}

// leave ends the wait of a joiner, if it was not answered.
func (h *SharedHost) leave(f *sharedFetch, j *joiner) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, other := range f.waiting {
		if other == j {
			f.waiting = append(f.waiting[:i], f.waiting[i+1:]...)
			return true
		}
	}
	return false
}

func (f *sharedFetch) Room() []byte { return f.room }
func (f *sharedFetch) Moved()       {}

// Hold is values.HostFetch: nothing is passed on.
func (f *sharedFetch) Hold() func() { return nil }

// Whole is values.HostFetch. Some views are late, and some fail.
func (f *sharedFetch) Whole(done func(body []byte)) {
	h := f.memory.shared
	h.mu.Lock()
	fate, wait := h.rng.IntN(3), time.Duration(h.rng.IntN(300))*time.Millisecond
	waiting := f.waiting
	f.waiting = nil
	delete(h.fetches, f.name)
	h.fetched += len(waiting)
	h.mu.Unlock()
	for _, j := range waiting {
		body := j.memory.Make(len(f.room))
		copy(body, f.room)
		j.done(nil, body)
	}
	h.group.Go(func() {
		if fate == 0 {
			time.Sleep(wait)
		}
		if fate == 1 {
			done(nil)
		} else {
			body := f.memory.Make(len(f.room))
			copy(body, f.room)
			done(body)
		}
		f.memory.Free(f.room)
	})
}

// End is values.HostFetch. The next joiner begins anew.
func (f *sharedFetch) End() {
	h := f.memory.shared
	h.mu.Lock()
	waiting := f.waiting
	f.waiting = nil
	delete(h.fetches, f.name)
	var next *sharedFetch
	if len(waiting) > 0 {
		next = h.startLocked(f.name, waiting[0])
	}
	h.mu.Unlock()
	f.memory.Free(f.room)
	for i, j := range waiting {
		if i == 0 {
			j.done(next, nil)
		} else {
			h.group.Go(func() { h.join(f.name, j, func() {}) })
		}
	}
}
