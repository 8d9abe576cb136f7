package shm

import (
	"cmp"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"troupe/bus/memlimit"
	"troupe/bus/wire"
)

// Arena is the shared memory of a process that sends. It is safe for concurrent use.
//
// A region is rewritten only after every reader has released it:
//
//	free ── Alloc ──► in use by this process ── Free, no reader ──────────────────────────────► free
//	                    │ claim, by a reader          ▲
//	                    ▼                             │ last release
//	                  in use and lent ── Free ──► lent to readers ── a reader's link ends ──► abandoned
//
// A reader whose link ends without a release may still have a process that reads: stopped, or forked. Its segment is abandoned: it gets
// no body any more, and its memory is the system's when the last process has unmapped it.
type Arena struct {
	cfg      Config
	dir      *directory
	listener *net.UnixListener
	closedCh chan struct{}

	mu       sync.Mutex // guards what follows
	closed   bool
	bytes    int64 // of all segments
	last     uint64
	segments map[uint64]*segment
	regions  map[uintptr]*region // in use or lent, by address
	slabs    []*segment
	idle     []*segment // segments for one body that have none, longest idle first
	readers  map[*arenaLink]struct{}
	trimming bool // a goroutine gives idle segments back
}

// segment is one memfd.
type segment struct {
	id        uint64
	mem       []byte
	fd        int
	free      runs // of a slab
	slab      bool
	regions   map[uint64]*region // by offset
	abandoned bool
	idleSince time.Time // when it had no region
}

// region is the place of one body.
type region struct {
	segment *segment
	offset  int
	size    int // whole pages
	length  int // of the body
	gen     uint64
	inUse   bool // by this process: a claim is granted
	readers map[*arenaLink]struct{}
	asked   time.Time // when its readers were asked to detach

	fetch   *Fetch // this process fetches the body for its host
	filling bool   // the body is not whole: claims wait
	holds   int    // users of the room beside the fetch
	waiting []waitingClaim
}

// waitingClaim is a claim on a body that is not whole.
type waitingClaim struct {
	link    *arenaLink
	message message
}

// arenaLink is the link of one reader.
type arenaLink struct {
	*link
	// guarded by the arena's mutex
	lent  map[*region]struct{}
	bytes int64               // of lent
	has   map[uint64]struct{} // segments whose descriptor was sent
}

const (
	trimEvery   = 5 * time.Second
	detachEvery = 5 * time.Second // a reader that has not detached a region by then is asked again
	mostWaiting = 4096            // claims that wait for one body; others are refused
)

// Open makes the arena of this process. The error says what a person can do; without an arena bodies travel over the bus.
func Open(cfg Config) (*Arena, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	dir, err := openDirectory(cfg.Dir)
	if err != nil {
		return nil, err
	}
	listener, err := dir.listen()
	if err != nil {
		_ = dir.close() // the first error is returned
		return nil, err
	}
	dir.sweep()
	a := &Arena{cfg: cfg, dir: dir, listener: listener, closedCh: make(chan struct{}), segments: map[uint64]*segment{}, regions: map[uintptr]*region{}, readers: map[*arenaLink]struct{}{}}
	cfg.start(a.accept)
	return a, nil
}

// ID is the name of the arena in locations.
func (a *Arena) ID() string { return a.dir.id }

// Close ends the arena: no region is lent any more, and its socket is removed. Readers keep what they have. No body of it may be in use.
func (a *Arena) Close() error {
	_, err := a.close(true)
	return err
}

// CloseUnused is Close if no body of the arena is in use by this process; it reports whether the arena is closed.
func (a *Arena) CloseUnused() (closed bool, err error) { return a.close(false) }

func (a *Arena) close(always bool) (closed bool, err error) {
	a.mu.Lock()
	used := slices.ContainsFunc(slices.Collect(maps.Values(a.regions)), func(r *region) bool { return r.inUse && (r.fetch == nil || r.filling) || r.holds > 0 })
	if a.closed || used && !always {
		a.mu.Unlock()
		return a.closed, nil
	}
	a.closed = true
	close(a.closedCh)
	for _, s := range a.segments {
		a.destroyLocked(s)
	}
	links := a.readers
	var fetches []*Fetch
	for _, r := range a.regions {
		if r.fetch != nil {
			fetches = append(fetches, r.fetch)
		}
	}
	a.readers = map[*arenaLink]struct{}{}
	a.regions = map[uintptr]*region{}
	a.mu.Unlock()
	for _, f := range fetches {
		f.End()
	}
	for l := range links {
		l.close()
	}
	_ = a.listener.Close() // there is nothing left to lose
	return true, a.dir.close()
}

// Alloc gives room for a body, with anything in it; nil: a limit is reached, or the system has no memory.
func (a *Arena) Alloc(n int) []byte {
	if n <= 0 {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	size := roomFor(n)
	s, offset := a.findLocked(size)
	if s == nil {
		return nil
	}
	r := &region{segment: s, offset: offset, size: size, length: n, gen: rand.Uint64(), inUse: true}
	s.regions[uint64(offset)] = r
	a.regions[addressOf(s.mem[offset:])] = r
	return s.mem[offset : offset+n : offset+n]
}

// findLocked is a free place of that size, warm if there is one.
func (a *Arena) findLocked(size int) (*segment, int) {
	switch {
	case a.closed:
		return nil, 0
	case size <= slabMost:
		for _, s := range a.slabs {
			if offset, ok := s.free.take(size); ok {
				return s, offset
			}
		}
		s := a.createLocked(slabSize)
		if s == nil {
			return nil, 0
		}
		s.slab, s.free = true, runs{{0, slabSize}}
		a.slabs = append(a.slabs, s)
		offset, _ := s.free.take(size)
		return s, offset
	}
	for i, s := range slices.Backward(a.idle) {
		if len(s.mem) == size {
			a.idle = slices.Delete(a.idle, i, i+1)
			return s, 0
		}
	}
	return a.createLocked(size), 0
}

// createLocked makes a segment within the limits. Idle segments of other sizes make room for it.
func (a *Arena) createLocked(size int) *segment {
	for a.bytes+int64(size) > a.cfg.Limit && len(a.idle) > 0 {
		a.destroyLocked(a.idle[0])
	}
	if a.bytes+int64(size) > a.cfg.Limit {
		a.detachLocked(nil, size)
		return nil
	}
	if err := a.dir.reserve(a.bytes+int64(size), a.cfg.HostLimit); err != nil {
		a.detachLocked(nil, size)
		return nil
	}
	mem, fd, err := createSegment(size)
	if err != nil {
		_ = a.dir.set(a.bytes) // too much is reserved until the next segment
		return nil
	}
	a.last++
	a.bytes += int64(size)
	s := &segment{id: a.last, mem: mem, fd: fd, regions: map[uint64]*region{}}
	a.segments[s.id] = s
	return s
}

// destroyLocked ends a segment for this process. Readers that still have it mapped keep its memory.
func (a *Arena) destroyLocked(s *segment) {
	if a.segments[s.id] != s {
		return
	}
	delete(a.segments, s.id)
	a.idle = without(a.idle, s)
	a.slabs = without(a.slabs, s)
	for l := range a.readers {
		if _, has := l.has[s.id]; has {
			delete(l.has, s.id)
			l.send(message{kind: kindGone, segment: s.id})
		}
	}
	if len(s.regions) == 0 && !s.abandoned {
		_ = unix.Madvise(s.mem, unix.MADV_REMOVE) // readers that detached a part of it have it mapped; if it fails, their mappings keep the memory
	}
	_ = unix.Munmap(s.mem) // these two fail only for what is not mapped or open
	_ = unix.Close(s.fd)
	a.bytes -= int64(len(s.mem))
	_ = a.dir.set(a.bytes) // too much is reserved until the next segment
}

// detachLocked asks readers, or one reader, to detach regions of together that size, the largest first: later bodies can then be shared.
// The body that finds the limit reached travels over the bus.
func (a *Arena) detachLocked(only *arenaLink, size int) {
	var lent []*region
	now := time.Now()
	for _, r := range a.regions {
		if only == nil && r.inUse && (r.fetch == nil || r.filling) || now.Sub(r.asked) < detachEvery || only != nil && !has(r.readers, only) {
			continue
		}
		lent = append(lent, r)
	}
	slices.SortFunc(lent, func(x, y *region) int { return cmp.Compare(y.size, x.size) })
	for _, r := range lent {
		if size <= 0 {
			return
		}
		size -= r.size
		r.asked = now
		for l := range r.readers {
			if only == nil || l == only {
				l.send(message{kind: kindDetach, segment: r.segment.id, offset: uint64(r.offset), gen: r.gen})
			}
		}
	}
}

func without(all []*segment, s *segment) []*segment {
	return slices.DeleteFunc(all, func(other *segment) bool { return other == s })
}

// Locate says where a body of this arena lies; zero: it is not of this arena.
func (a *Arena) Locate(body []byte) wire.Location {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := a.regions[addressOf(body)]
	if r == nil || !r.inUse {
		return wire.Location{}
	}
	return wire.Location{Owner: a.dir.id, Segment: r.segment.id, Offset: uint64(r.offset), Gen: r.gen}
}

// Free ends this process's use of a body: no reader can claim it any more, and its region is used again when the last reader has released
// it. It reports false if the body is not of this arena.
func (a *Arena) Free(body []byte) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := a.regions[addressOf(body)]
	if r == nil || !r.inUse {
		return false
	}
	r.inUse = false
	a.settleLocked(r)
	return true
}

// settleLocked makes a region free if neither this process nor a reader uses it.
func (a *Arena) settleLocked(r *region) {
	if r.inUse || r.holds > 0 || len(r.readers) > 0 {
		return
	}
	s := r.segment
	delete(s.regions, uint64(r.offset))
	delete(a.regions, addressOf(s.mem[r.offset:]))
	if s.slab {
		s.free.put(r.offset, r.size)
	}
	if len(s.regions) > 0 {
		return
	}
	s.idleSince = time.Now()
	switch {
	case s.abandoned || a.closed:
		a.destroyLocked(s)
		return
	case !s.slab:
		a.idle = append(a.idle, s)
	}
	if !a.trimming {
		a.trimming = true
		a.cfg.start(a.trim)
	}
}

// trim gives back segments that have been idle for long, and all idle ones while the host is short of memory.
func (a *Arena) trim() {
	for {
		select {
		case <-time.After(min(trimEvery, a.cfg.Keep)):
		case <-a.closedCh:
			return
		}
		if !a.trimOnce(time.Now()) {
			return
		}
	}
}

func (a *Arena) trimOnce(now time.Time) (more bool) {
	pressed := underPressure()
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range slices.Concat(a.idle, a.slabs) {
		if len(s.regions) > 0 {
			continue
		}
		if more = true; pressed || now.Sub(s.idleSince) >= a.cfg.Keep {
			a.destroyLocked(s)
		}
	}
	a.trimming = more && !a.closed
	return a.trimming
}

// underPressure reports whether less than a sixteenth of the host's memory is available.
func underPressure() bool {
	total, available := memlimit.Info("MemTotal"), memlimit.Info("MemAvailable")
	return total > 0 && available > 0 && available < total/16
}

// Stats is what an arena has at the moment.
type Stats struct {
	Segments int   // memfds
	Bytes    int64 // of the segments
	InUse    int   // regions that this process uses
	Lent     int   // regions that readers hold
	Readers  int   // links
}

// Stats counts.
func (a *Arena) Stats() Stats {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := Stats{Segments: len(a.segments), Bytes: a.bytes, Readers: len(a.readers)}
	for _, r := range a.regions {
		if r.inUse {
			s.InUse++
		}
		if len(r.readers) > 0 {
			s.Lent++
		}
	}
	return s
}

// accept serves readers until the arena is closed.
func (a *Arena) accept() {
	for {
		conn, err := a.listener.AcceptUnix()
		if err != nil {
			a.mu.Lock()
			closed := a.closed
			a.mu.Unlock()
			if closed {
				return
			}
			a.cfg.Logger.Warn("shm: a reader cannot be accepted", "error", err)
			time.Sleep(100 * time.Millisecond) // out of descriptors, for instance
			continue
		}
		l, err := newLink(conn, a.cfg.start)
		if err != nil {
			a.cfg.Logger.Warn("shm: a reader is refused", "error", err)
			_ = conn.Close() // it was never used
			continue
		}
		a.cfg.start(func() { a.serve(&arenaLink{link: l, lent: map[*region]struct{}{}, has: map[uint64]struct{}{}}) })
	}
}

// serve answers one reader until its link ends.
func (a *Arena) serve(l *arenaLink) {
	a.mu.Lock()
	if a.closed {
		a.mu.Unlock()
		l.close()
		return
	}
	a.readers[l] = struct{}{}
	a.mu.Unlock()
	defer a.ended(l)
	for {
		m, fd, err := l.receive()
		if err != nil {
			return
		}
		if fd >= 0 { // a reader has none to give
			_ = unix.Close(fd)
			return
		}
		switch m.kind {
		case kindClaim:
			if err := a.claimed(l, m); err != nil {
				return
			}
		case kindReleased:
			a.released(l, m)
		case kindUnmapped:
			a.mu.Lock()
			delete(l.has, m.segment)
			a.mu.Unlock()
		default:
			return // a later version would have said so in its messages
		}
	}
}

// claimed lends a region, if it still has the body that the reader means.
func (a *Arena) claimed(l *arenaLink, m message) error {
	a.mu.Lock()
	r := a.regionLocked(m)
	if r != nil && r.filling && len(r.waiting) < mostWaiting {
		r.waiting = append(r.waiting, waitingClaim{l, m})
		a.mu.Unlock()
		return nil
	}
	full := r != nil && l.bytes+int64(r.size) > a.cfg.ReaderLimit
	if full {
		a.detachLocked(l, r.size)
	}
	if r == nil || full || !r.inUse || r.filling || !has(a.readers, l) || m.length > uint64(r.length) || has(l.lent, r) {
		a.mu.Unlock()
		m.kind = kindRefused
		l.send(m)
		return nil
	}
	if r.readers == nil {
		r.readers = map[*arenaLink]struct{}{}
	}
	r.readers[l] = struct{}{}
	l.lent[r] = struct{}{}
	l.bytes += int64(r.size)
	known := has(l.has, r.segment.id)
	l.has[r.segment.id] = struct{}{}
	m.kind = kindGranted
	if known {
		a.mu.Unlock()
		l.send(m)
		return nil
	}
	fd, err := unix.FcntlInt(uintptr(r.segment.fd), unix.F_DUPFD_CLOEXEC, 0) // Close may end the segment meanwhile
	a.mu.Unlock()
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }() // nothing was written to it
	return l.sendWith(m, fd)
}

func has[K comparable](set map[K]struct{}, k K) bool {
	_, ok := set[k]
	return ok
}

func (a *Arena) regionLocked(m message) *region {
	s := a.segments[m.segment]
	if s == nil {
		return nil
	}
	r := s.regions[m.offset]
	if r == nil || r.gen != m.gen {
		return nil
	}
	return r
}

func (a *Arena) released(l *arenaLink, m message) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if r := a.regionLocked(m); r != nil && has(l.lent, r) {
		a.returnLocked(l, r)
		a.settleLocked(r)
	}
}

func (a *Arena) returnLocked(l *arenaLink, r *region) {
	delete(l.lent, r)
	l.bytes -= int64(r.size)
	delete(r.readers, l)
}

// ended notes that a reader's link is over. What it had not released is never rewritten.
func (a *Arena) ended(l *arenaLink) {
	l.close()
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.readers, l)
	for r := range l.lent {
		a.abandonLocked(r.segment)
		a.returnLocked(l, r)
		a.settleLocked(r)
	}
}

func (a *Arena) abandonLocked(s *segment) {
	s.abandoned = true
	a.slabs = without(a.slabs, s)
}

func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
