package shm

import (
	"errors"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"troupe/bus/wire"
)

// Reader uses bodies of other processes' arenas in place. It is safe for concurrent use.
//
//	Attach ──► claimed ── granted ──► attached ── Release ──► released, when no forked child can read it
//	              └── refused, no answer within ClaimLimit, no such owner, a segment that fails its checks ──► done(nil)
//
// An owner at its limit asks for detachment: the reader copies the region in place, page by page, and tells the owner that it is released,
// while this process goes on using it.
//
// What it attaches is mapped privately: this process may write to it, and no other process sees that.
type Reader struct {
	cfg Config

	mu        sync.Mutex // guards what follows
	owners    map[string]*owner
	attached  map[uintptr]*loan // by address
	lastClaim uint64
	sweeping  bool // a goroutine ends claims that are too old
	closed    bool
	detaches  int // goroutines that detach, or wait for that

	detachMu sync.Mutex // one region is copied at a time
}

// ownerState is how far the link to an owner has come.
type ownerState int

const (
	ownerDialing ownerState = iota // claims wait
	ownerUp                        // claims are sent
	ownerDown                      // it cannot be reached, or has ended: claims are refused at once
)

// owner is another process's arena, as this process knows it.
type owner struct {
	id       string
	state    ownerState
	since    time.Time // of state
	link     *link     // when up
	claims   map[uint64]*claim
	mappings map[uint64]*mapping
}

// claim is a region that was asked for.
type claim struct {
	location wire.Location
	length   int
	at       time.Time
	limit    time.Duration // for the answer
	moves    func() bool   // whether the owner has made progress, and the limit begins anew; nil: there is none to make
	done     func(body []byte)
}

// mapping is a segment of an owner in this process. It stays mapped until its owner says that it has ended.
type mapping struct {
	mem    []byte           // nil: the descriptor failed its checks
	loans  map[uint64]*loan // by offset
	ended  bool             // the owner, or the segment
	locked bool             // this process was found to lock its memory, and has said so
}

// loan is a region that this process uses.
type loan struct {
	owner     *owner
	id        uint64 // of the segment
	mapping   *mapping
	offset    uint64
	size      int // whole pages
	gen       uint64
	children  int  // forked processes that may read it
	released  bool // by this process
	detaching bool // a goroutine copies it in place; the end of that does what a release has to do
	detached  bool // all of its pages are private, and the owner knows that it is not read any more
	stuck     bool // it has private pages that cannot be dropped: the region never returns to its owner
}

const (
	dialLimit    = time.Second
	sweepEvery   = 250 * time.Millisecond
	downFor      = 30 * time.Second // an owner that cannot be reached is not dialled again for so long
	mostDetaches = 1024             // requests to detach that wait; others are ignored
	mostOwners   = 4096             // owners that are down are forgotten when there are more
)

// NewReader makes the reader of this process.
func NewReader(cfg Config) *Reader {
	return &Reader{cfg: cfg.withDefaults(), owners: map[string]*owner{}, attached: map[uintptr]*loan{}}
}

// Attach asks for the body of n bytes at a location, and calls done once with it, or with nil if it must come another way: at once, or
// later from another goroutine. done must not block. The body is the caller's until Release.
func (r *Reader) Attach(at wire.Location, n int64, done func(body []byte)) {
	r.attachWithin(at, n, r.cfg.ClaimLimit, nil, done)
}

// attachFetched is Attach of a body that its owner fetches: it waits while moves reports progress.
func (r *Reader) attachFetched(at wire.Location, n int64, moves func() bool, done func(body []byte)) {
	r.attachWithin(at, n, r.cfg.FetchLimit, moves, done)
}

func (r *Reader) attachWithin(at wire.Location, n int64, limit time.Duration, moves func() bool, done func(body []byte)) {
	if !validID(at.Owner) || n <= 0 || n > segmentMost || at.Offset%uint64(pageSize) != 0 {
		done(nil)
		return
	}
	c := &claim{location: at, length: int(n), at: time.Now(), limit: limit, moves: moves, done: done}
	r.mu.Lock()
	o := r.ownerLocked(at.Owner)
	if o == nil || o.state == ownerDown {
		r.mu.Unlock()
		done(nil)
		return
	}
	r.lastClaim++
	id := r.lastClaim
	o.claims[id] = c
	if !r.sweeping {
		r.sweeping = true
		r.cfg.start(r.sweep)
	}
	link := o.link
	r.mu.Unlock()
	if link != nil {
		link.send(c.message(id))
	}
}

func (c *claim) message(id uint64) message {
	at := c.location
	return message{kind: kindClaim, claim: id, segment: at.Segment, offset: at.Offset, length: uint64(c.length), gen: at.Gen}
}

// ownerLocked is the owner of that name, dialled if it is new; nil: the reader is closed.
func (r *Reader) ownerLocked(id string) *owner {
	if r.closed {
		return nil
	}
	o := r.owners[id]
	if o != nil && (o.state != ownerDown || time.Since(o.since) < downFor) {
		return o
	}
	if len(r.owners) >= mostOwners {
		for name, old := range r.owners {
			if old.state == ownerDown {
				delete(r.owners, name)
			}
		}
	}
	o = &owner{id: id, state: ownerDialing, since: time.Now(), claims: map[uint64]*claim{}, mappings: map[uint64]*mapping{}}
	r.owners[id] = o
	r.cfg.start(func() { r.run(o) })
	return o
}

// run connects to an owner and takes its answers until the link ends.
func (r *Reader) run(o *owner) {
	l, err := r.dial(o.id)
	if err != nil {
		r.down(o)
		return
	}
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		l.close()
		r.down(o)
		return
	}
	o.state, o.since, o.link = ownerUp, time.Now(), l
	waiting := make([]message, 0, len(o.claims))
	for id, c := range o.claims {
		waiting = append(waiting, c.message(id))
	}
	r.mu.Unlock()
	for _, m := range waiting {
		l.send(m)
	}
	for {
		m, fd, err := l.receive()
		if err == nil {
			err = r.received(o, m, fd)
		}
		if err != nil {
			l.close()
			r.down(o)
			return
		}
	}
}

func (r *Reader) dial(id string) (*link, error) {
	if err := checkPrivate(r.cfg.Dir); err != nil {
		return nil, err
	}
	dialer := net.Dialer{Timeout: dialLimit}
	conn, err := dialer.Dial("unixpacket", filepath.Join(r.cfg.Dir, id))
	if err != nil {
		return nil, err
	}
	l, err := newLink(conn.(*net.UnixConn), r.cfg.start)
	if err != nil {
		_ = conn.Close() // it was never used
	}
	return l, err
}

// down refuses the claims of an owner that cannot be reached, and unmaps what no array lies in.
func (r *Reader) down(o *owner) {
	r.mu.Lock()
	o.state, o.since, o.link = ownerDown, time.Now(), nil
	claims := o.claims
	o.claims = map[uint64]*claim{}
	for id := range o.mappings {
		r.endLocked(o, id)
	}
	r.mu.Unlock()
	for _, c := range claims {
		c.done(nil)
	}
}

// endLocked unmaps a segment that has ended, now or with its last loan.
func (r *Reader) endLocked(o *owner, id uint64) {
	m := o.mappings[id]
	if m == nil {
		return
	}
	m.ended = true
	delete(o.mappings, id)
	m.unmapIfUnused()
}

func (m *mapping) unmapIfUnused() {
	if m.ended && len(m.loans) == 0 && m.mem != nil {
		_ = unix.Munmap(m.mem) // it fails only for what is not mapped
		m.mem = nil
	}
}

var errMessage = errors.New("a message that an arena does not send")

func (r *Reader) received(o *owner, m message, fd int) error {
	switch {
	case m.kind == kindGranted:
		return r.granted(o, m, fd)
	case fd >= 0:
		_ = unix.Close(fd) // nothing else comes with one
		return errMessage
	case m.kind == kindRefused:
		if c := r.take(o, m.claim); c != nil {
			c.done(nil)
		}
		return nil
	case m.kind == kindGone:
		r.mu.Lock()
		r.endLocked(o, m.segment)
		r.mu.Unlock()
		return nil
	case m.kind == kindDetach:
		r.mu.Lock()
		start := r.detaches < mostDetaches
		if start {
			r.detaches++
		}
		r.mu.Unlock()
		if start {
			r.cfg.start(func() { r.detach(o, m) })
		}
		return nil
	}
	return errMessage
}

func (r *Reader) take(o *owner, id uint64) *claim {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := o.claims[id]
	delete(o.claims, id)
	return c
}

// granted attaches a region. What came too late, or fails its checks, is released at once.
func (r *Reader) granted(o *owner, m message, fd int) error {
	if fd >= 0 {
		mem, err := mapReceived(fd)
		if err != nil {
			r.cfg.Logger.Warn("shm: a segment is refused; its bodies travel over the bus", "error", err)
		}
		r.mu.Lock()
		if o.mappings[m.segment] != nil { // it has one already
			r.mu.Unlock()
			_ = unix.Munmap(mem)
			return errMessage
		}
		o.mappings[m.segment] = &mapping{mem: mem, loans: map[uint64]*loan{}}
		r.mu.Unlock()
	}
	c := r.take(o, m.claim)
	body := r.attach(o, c, m)
	if body == nil {
		r.release(o, m.segment, m.offset, m.gen)
	}
	if c != nil {
		c.done(body)
	}
	return nil
}

// attach is the body of a claim, if what was granted is what was claimed and lies within the mapped file.
func (r *Reader) attach(o *owner, c *claim, m message) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	at := o.mappings[m.segment]
	if c == nil || at == nil || r.closed || (wire.Location{Owner: o.id, Segment: m.segment, Offset: m.offset, Gen: m.gen}) != c.location {
		return nil
	}
	size := (c.length + pageSize - 1) / pageSize * pageSize
	if m.offset > uint64(len(at.mem)) || uint64(size) > uint64(len(at.mem))-m.offset || at.overlaps(m.offset, size) {
		return nil
	}
	l := &loan{owner: o, id: m.segment, mapping: at, offset: m.offset, size: size, gen: m.gen}
	if isLocked(l.bytes()) {
		if !at.locked {
			at.locked = true
			r.cfg.Logger.Warn("shm: this process locks its memory (mlockall), so large bodies come to it over the bus, which is slower")
		}
		return nil
	}
	at.loans[m.offset] = l
	body := at.mem[m.offset : m.offset+uint64(c.length) : m.offset+uint64(c.length)]
	r.attached[addressOf(body)] = l
	return body
}

// overlaps reports whether some of a range is in use: by a body whose release the owner has not waited for.
func (m *mapping) overlaps(offset uint64, size int) bool {
	for at, l := range m.loans {
		if offset < at+uint64(l.size) && at < offset+uint64(size) {
			return true
		}
	}
	return false
}

// Release ends this process's use of a body. It reports false if the body is not one that was attached. It does not block.
func (r *Reader) Release(body []byte) bool {
	at := addressOf(body)
	r.mu.Lock()
	l := r.attached[at]
	if l == nil || l.released {
		r.mu.Unlock()
		return false
	}
	l.released = true
	delete(r.attached, at)
	detaching := l.detaching
	r.mu.Unlock()
	if !detaching {
		r.drop(l)
	}
	return true
}

// drop gives up the pages of a released region that this process has for itself, and returns the region.
func (r *Reader) drop(l *loan) {
	if err := dropCopied(l.bytes()); err != nil { // the loan keeps it mapped
		r.cfg.Logger.Warn("shm: pages that were copied cannot be dropped, so their region is not used again; does this process lock its memory?", "error", err)
		r.mu.Lock()
		l.stuck = true
		r.mu.Unlock()
	}
	r.returnUnread(l)
}

func (l *loan) bytes() []byte { return l.mapping.mem[l.offset : l.offset+uint64(l.size)] }

// detach answers an owner's request to copy a region in place. It does nothing if that is not possible, or memory is short.
func (r *Reader) detach(o *owner, m message) {
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.detaches--
	}()
	r.detachMu.Lock()
	defer r.detachMu.Unlock()
	if underPressure() {
		return
	}
	r.mu.Lock()
	var l *loan
	if at := o.mappings[m.segment]; at != nil {
		l = at.loans[m.offset]
	}
	r.mu.Unlock()
	if l != nil && l.gen == m.gen {
		r.detachLoan(l, []Range{{0, l.size}})
	}
}

// Detach copies the parts of a body that this process still reads, in place, and returns the region to its owner; the bytes outside keep are
// undefined from then on. It reports false if the body cannot be detached now. The caller does not release the body meanwhile.
func (r *Reader) Detach(body []byte, keep []Range) bool {
	r.detachMu.Lock()
	defer r.detachMu.Unlock()
	r.mu.Lock()
	l := r.attached[addressOf(body)]
	r.mu.Unlock()
	if l == nil || !r.detachLoan(l, wholePages(keep, l.size)) {
		return false
	}
	DropOutside(l.bytes(), keep)
	return true
}

// detachLoan copies some pages of a region in place, and tells its owner that the region is released; false: a forked child reads the region, or
// the system has no memory. The region may be detached already. The caller holds detachMu.
func (r *Reader) detachLoan(l *loan, pages []Range) bool {
	r.mu.Lock()
	if l.released || l.detached || l.children > 0 {
		defer r.mu.Unlock()
		return l.detached
	}
	l.detaching = true
	r.mu.Unlock()
	err := copyInPlace(l.bytes(), pages)
	r.mu.Lock()
	l.detaching = false
	released := l.released
	if l.detached = err == nil && !released && l.children == 0; l.detached { // a child that is made from now on has these pages too
		link := l.owner.link
		if l.owner.mappings[l.id] == l.mapping {
			r.endLocked(l.owner, l.id) // the owner's next body may lie at the same place: it needs another mapping
		}
		r.mu.Unlock()
		if link != nil {
			link.send(message{kind: kindUnmapped, segment: l.id})
			link.send(message{kind: kindReleased, segment: l.id, offset: l.offset, gen: l.gen})
		}
		return true
	}
	r.mu.Unlock()
	if released { // meanwhile
		r.drop(l)
	}
	return false
}

// returnUnread ends a loan, and tells the owner that its region is not read any more, if neither this process nor a child of it can.
func (r *Reader) returnUnread(l *loan) {
	r.mu.Lock()
	if !l.released || l.children > 0 || l.detaching || l.stuck || l.mapping.loans[l.offset] != l {
		r.mu.Unlock()
		return
	}
	delete(l.mapping.loans, l.offset)
	l.mapping.unmapIfUnused()
	r.mu.Unlock()
	if !l.detached {
		r.release(l.owner, l.id, l.offset, l.gen)
	}
}

func (r *Reader) release(o *owner, segment, offset, gen uint64) {
	r.mu.Lock()
	link := o.link
	r.mu.Unlock()
	if link != nil {
		link.send(message{kind: kindReleased, segment: segment, offset: offset, gen: gen})
	}
}

// Forking notes that a child process is about to be made by fork: it can read what is attached now. ended must be called when the child
// has ended, or has executed another program; nil: nothing is attached.
func (r *Reader) Forking() (ended func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.attached) == 0 {
		return nil
	}
	all := slices.Collect(maps.Values(r.attached))
	for _, l := range all {
		l.children++
	}
	return sync.OnceFunc(func() {
		for _, l := range all {
			r.mu.Lock()
			l.children--
			r.mu.Unlock()
			r.returnUnread(l)
		}
	})
}

// Attached counts the bodies that this process uses.
func (r *Reader) Attached() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.attached)
}

// sweep ends claims that no answer came to, until there are none.
func (r *Reader) sweep() {
	for {
		time.Sleep(sweepEvery)
		r.mu.Lock()
		var late []*claim
		left := 0
		for _, o := range r.owners {
			for id, c := range o.claims {
				if c.moves != nil && c.moves() {
					c.at = time.Now()
				}
				if time.Since(c.at) < c.limit {
					left++
					continue
				}
				delete(o.claims, id)
				late = append(late, c)
			}
		}
		r.sweeping = left > 0
		r.mu.Unlock()
		for _, c := range late {
			c.done(nil)
		}
		if left == 0 {
			return
		}
	}
}

// Close ends the links. Bodies that are attached stay where they are; their owners never rewrite them.
func (r *Reader) Close() {
	r.mu.Lock()
	r.closed = true
	var links []*link
	for _, o := range r.owners {
		if o.link != nil {
			links = append(links, o.link)
		}
	}
	r.mu.Unlock()
	for _, l := range links {
		l.close()
	}
}
