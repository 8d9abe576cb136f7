package shm

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"troupe/bus/wire"
)

// A body that several processes of a host need comes to the host once: one of them, the fetcher, writes it to its arena, and the others
// attach it there. They find each other by a file <name>.fetch of the directory, which the fetcher locks while it lives:
//
//	 0 16 bytes  arena of the fetcher        32 uint64 generation
//	16 uint64    segment                     40 uint64 length of the body
//	24 uint64    offset                      48 uint64 changes while the fetch makes progress
//
// The lock ends with the fetcher, and the next process that needs the body takes it. A process that finds the file locked claims the
// region, and its claim is answered when the body is whole. A fetcher that makes no progress is not waited for.
const (
	fetchSuffix = ".fetch"
	recordSize  = 56
	progressAt  = 48

	fetchKeep = 2 * time.Second        // a whole body stays for processes that need it later, after the last use of it
	joinEvery = 5 * time.Millisecond   // looks at a file whose lock is taken and that does not say yet where the body will be
	holdEvery = 250 * time.Millisecond // looks at the users of a whole body
	joinTries = 4                      // fetchers that ended before the body was whole
)

// Fetch is a body that this process fetches for its host. Its user writes the body to Room, calls Moved now and then, and ends it with Whole
// or End.
type Fetch struct {
	arena  *Arena
	reader *Reader
	file   *os.File // locked
	path   string
	room   []byte

	mu        sync.Mutex // guards what follows
	progress  uint64
	whole     bool
	attaching bool // by this process
	ended     bool
}

// Join finds the process of the host that fetches the body of that name. It calls done once, before it returns or later from another
// goroutine: with a Fetch, if it is this process; with the body, attached by the reader, if another process has fetched it; or with
// neither: then this process must take the body another way. waits, if set, is called before, when another process is found to fetch the
// body. Both must not block.
func (a *Arena) Join(r *Reader, name string, n int64, waits func(), done func(f *Fetch, body []byte)) {
	j := &join{arena: a, reader: r, path: a.dir.file(name) + fetchSuffix, length: n, waits: waits, done: done}
	if !validID(name) || n < LeastFetch {
		done(nil, nil)
		return
	}
	a.cfg.start(j.find)
}

// join is one process's search for the fetcher of a body.
type join struct {
	arena  *Arena
	reader *Reader
	path   string
	length int64
	waits  func()
	done   func(*Fetch, []byte)
	tries  int
	failed wire.Location // the fetcher that was waited for in vain
}

// find becomes the fetcher, or waits for it.
func (j *join) find() {
	for end := time.Now().Add(j.arena.cfg.FetchLimit / 2); time.Now().Before(end) && j.tries < joinTries; time.Sleep(joinEvery) {
		f, err := os.OpenFile(j.path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			break
		}
		if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			if sameFile(f, j.path) {
				j.fetch(f)
				return
			}
			_ = f.Close() // the fetcher has ended and removed it
			continue
		}
		at, length, progress := readRecord(f)
		if at.IsZero() || at == j.failed || length != j.length {
			_ = f.Close() // nothing was written to it
			continue
		}
		j.wait(f, at, progress)
		return
	}
	j.done(nil, nil)
}

// fetch makes this process the fetcher, if it has room.
func (j *join) fetch(file *os.File) {
	f := &Fetch{arena: j.arena, reader: j.reader, file: file, path: j.path}
	if file.Truncate(0) == nil && j.arena.startFetch(f, int(j.length)) {
		if _, err := file.WriteAt(appendRecord(nil, j.arena.Locate(f.room), j.length), 0); err == nil {
			j.done(f, nil)
			return
		}
	}
	f.End()
	j.done(nil, nil)
}

// wait claims the body that another process fetches.
func (j *join) wait(file *os.File, at wire.Location, progress uint64) {
	if j.waits != nil {
		j.waits()
		j.waits = nil
	}
	moves := func() bool {
		_, _, now := readRecord(file)
		moved := now != progress
		progress = now
		return moved
	}
	j.reader.attachFetched(at, j.length, moves, func(body []byte) {
		_ = file.Close() // nothing was written to it
		if body != nil {
			j.done(nil, body)
			return
		}
		j.tries++
		j.failed = at
		j.arena.cfg.start(j.find)
	})
}

func appendRecord(b []byte, at wire.Location, length int64) []byte {
	id, _ := hex.DecodeString(at.Owner) // it is one of newID
	b = append(b, id...)
	for _, v := range [...]uint64{at.Segment, at.Offset, at.Gen, uint64(length), 1} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

// readRecord is what a fetcher has written; zero: nothing yet.
func readRecord(f *os.File) (at wire.Location, length int64, progress uint64) {
	var b [recordSize]byte
	if _, err := f.ReadAt(b[:], 0); err != nil || bytes.Equal(b[:idSize], make([]byte, idSize)) {
		return wire.Location{}, 0, 0
	}
	number := func(at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }
	at = wire.Location{Owner: hex.EncodeToString(b[:idSize]), Segment: number(16), Offset: number(24), Gen: number(32)}
	return at, int64(number(40)), number(progressAt)
}

// sameFile reports whether the path still names the open file.
func sameFile(f *os.File, path string) bool {
	mine, err1 := f.Stat()
	there, err2 := os.Stat(path)
	return err1 == nil && err2 == nil && os.SameFile(mine, there)
}

// Room is where the body is written.
func (f *Fetch) Room() []byte { return f.room }

// Moved tells the processes that wait that the fetch goes on.
func (f *Fetch) Moved() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended || f.whole {
		return
	}
	f.progress++
	_, _ = f.file.WriteAt(binary.LittleEndian.AppendUint64(nil, f.progress+1), progressAt) // without it they fetch the body themselves
}

// Whole tells that the body is whole: the processes that wait get it, and done is called once with this process's own view of it, which is private and
// released like one of Attach; nil: there is none, and Room has the body until done returns. The body stays for others as long as a process
// uses it, and a moment longer.
func (f *Fetch) Whole(done func(body []byte)) {
	f.mu.Lock()
	f.whole, f.attaching = true, true
	f.mu.Unlock()
	at := f.arena.Locate(f.room)
	f.arena.fetched(f)
	f.reader.Attach(at, int64(len(f.room)), func(body []byte) {
		done(body)
		f.mu.Lock()
		f.attaching = false
		f.mu.Unlock()
	})
}

// End ends a fetch: another process may begin it anew, and no process can claim the body any more. It may be called more than once.
func (f *Fetch) End() {
	f.mu.Lock()
	ended := f.ended
	f.ended = true
	f.mu.Unlock()
	if ended {
		return
	}
	if sameFile(f.file, f.path) {
		_ = os.Remove(f.path) // a file that is left is used by the next fetcher
	}
	_ = f.file.Close() // and with it the lock
	f.arena.endFetch(f)
}

// Hold keeps what is in Room, also after End, until release is called, once; nil: the fetch has ended.
func (f *Fetch) Hold() (release func()) {
	a := f.arena
	a.mu.Lock()
	defer a.mu.Unlock()
	r := a.regions[addressOf(f.room)]
	if r == nil || r.fetch != f {
		return nil
	}
	r.holds++
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		r.holds--
		if !a.closed {
			a.settleLocked(r)
		}
	}
}

// startFetch allocates the room of a fetch; false: there is none.
func (a *Arena) startFetch(f *Fetch, n int) bool {
	if f.room = a.Alloc(n); f.room == nil {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if r := a.regions[addressOf(f.room)]; r != nil {
		r.fetch, r.filling = f, true
		return true
	}
	return false
}

// fetched answers the claims that wait for a body which is whole now, and keeps it for others.
func (a *Arena) fetched(f *Fetch) {
	a.mu.Lock()
	r := a.regions[addressOf(f.room)]
	if r == nil {
		a.mu.Unlock()
		return
	}
	waiting := r.waiting
	r.filling, r.waiting = false, nil
	a.mu.Unlock()
	for _, c := range waiting {
		a.cfg.start(func() { // a link may wait for its peer
			if a.claimed(c.link, c.message) != nil {
				c.link.close()
			}
		})
	}
	a.cfg.start(func() { a.hold(f) })
}

// hold ends a fetch when no process has used its body for a while.
func (a *Arena) hold(f *Fetch) {
	for used := time.Now(); ; {
		select {
		case <-time.After(holdEvery):
		case <-a.closedCh:
			return
		}
		a.mu.Lock()
		r := a.regions[addressOf(f.room)]
		lent := r != nil && len(r.readers) > 0
		a.mu.Unlock()
		f.mu.Lock()
		ended := f.ended
		if lent || f.attaching {
			used = time.Now()
		}
		f.mu.Unlock()
		if ended || time.Since(used) >= fetchKeep {
			f.End()
			return
		}
	}
}

// endFetch frees the room of a fetch, and refuses the claims that wait for it.
func (a *Arena) endFetch(f *Fetch) {
	a.mu.Lock()
	var waiting []waitingClaim
	if r := a.regions[addressOf(f.room)]; f.room != nil && r != nil && r.fetch == f {
		waiting = r.waiting
		r.filling, r.waiting, r.fetch, r.inUse = false, nil, nil, false
		a.settleLocked(r)
	}
	a.mu.Unlock()
	for _, c := range waiting {
		c.message.kind = kindRefused
		c.link.send(c.message)
	}
}

// removeFetch removes the file of a fetch whose process is dead.
func (d *directory) removeFetch(name string) {
	f, err := os.OpenFile(d.file(name), os.O_RDWR, 0)
	if err != nil {
		return
	}
	defer func() { _ = f.Close() }() // nothing was written to it
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil && sameFile(f, f.Name()) {
		if err := os.Remove(f.Name()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return // the next sweep tries again
		}
	}
}
