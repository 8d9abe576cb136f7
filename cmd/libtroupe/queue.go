package main

import (
	"encoding/binary"
	"sync"
	"syscall"

	"troupe/bus"
)

// A completion as troupe_take writes it, little-endian, at multiples of 8 bytes:
//
//	 0 uint32 kind        8 uint64 token      24 uint64 length of the body
//	 4 uint32 flags      16 int32 rank        32 uint64 its address; 0: it follows the meta
//	                     20 uint32 meta       40 uint64 number for troupe_release; 0: none
//	48 the meta, so many bytes, and the body, each padded to a multiple of 8
const headSize = 48

// kind says what a completion is about.
type kind uint32

const (
	kindAnswer  kind = 1 // a rank's answer to the call with this token; last: and the call is over
	kindOver    kind = 2 // the call with this token is over; failed: the body is why, if no answer was; whole: it is all answers
	kindResult  kind = 3 // what was asked for with this token; failed: the body is the error
	kindCall    kind = 4 // a call for this process's worker, to be answered under this token; the meta says what
	kindCancel  kind = 5 // nobody waits for the call under this token any more
	kindStopped kind = 6 // the worker has ended; failed: the body is why
)

const (
	flagFailed uint32 = 1  // the body is an error
	flagLast   uint32 = 2  // nothing follows under this token
	flagCause  uint32 = 4  // this failure is why the call failed
	flagNone   uint32 = 8  // an acknowledgement alone, no value
	flagWhole  uint32 = 16 // the body is a list of the answers that count, in the order of the plan, and none was reported before
)

type completion struct {
	kind  kind
	flags uint32
	token uint64
	rank  int
	meta  []byte
	body  []byte
}

// queue is the completions that nobody has taken yet. Its descriptor is readable while there are some.
type queue struct {
	fd   int // to wait on
	wake int // to write to; the same for an eventfd

	mu      sync.Mutex // guards what follows
	entries []completion
	from    int // of entries, the first that has not been taken
	raised  bool
	hushed  int // so many threads will look at the queue in a moment
}

func (q *queue) push(all ...completion) {
	if len(all) == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.entries = append(q.entries, all...)
	q.raiseLocked()
}

func (q *queue) raiseLocked() {
	if !q.raised && q.hushed == 0 {
		q.raised = true
		raise(q.wake)
	}
}

// quietly does something that may well end in a completion, and reports whether there is something to take. If the thread that
// is here takes it at once, nobody is woken for it.
func (q *queue) quietly(takes bool, do func()) (more bool) {
	n := 0
	if takes {
		n = 1
	}
	q.hush(n)
	defer func() { more = q.hush(-n) }()
	do()
	return false
}

func (q *queue) hush(n int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.hushed += n
	return q.from < len(q.entries)
}

// take moves completions into buf and returns the bytes they take.
func (q *queue) take(buf []byte, m *memory) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := 0
	for q.from < len(q.entries) {
		e := &q.entries[q.from]
		size := e.size()
		if n+size > len(buf) {
			if n == 0 {
				return statusSmall
			}
			return n
		}
		e.write(buf[n:n+size], m)
		n += size
		*e = completion{}
		q.from++
	}
	q.entries, q.from = q.entries[:0], 0
	if cap(q.entries) > 1<<16 {
		q.entries = nil
	}
	if q.raised {
		q.raised = false
		lower(q.fd)
	}
	return n
}

func (c *completion) inline() bool { return len(c.body) <= bus.MaxInline }

func (c *completion) size() int {
	n := headSize + pad(len(c.meta))
	if c.inline() {
		n += pad(len(c.body))
	}
	return n
}

func (c *completion) write(buf []byte, m *memory) {
	var at, number uint64
	if c.inline() {
		copy(buf[headSize+pad(len(c.meta)):], c.body)
	} else {
		at, number = m.lend(c.body)
	}
	le := binary.LittleEndian
	le.PutUint32(buf[0:], uint32(c.kind))
	le.PutUint32(buf[4:], c.flags)
	le.PutUint64(buf[8:], c.token)
	le.PutUint32(buf[16:], uint32(int32(c.rank)))
	le.PutUint32(buf[20:], uint32(len(c.meta)))
	le.PutUint64(buf[24:], uint64(len(c.body)))
	le.PutUint64(buf[32:], at)
	le.PutUint64(buf[40:], number)
	copy(buf[headSize:], c.meta)
}

func pad(n int) int { return (n + 7) &^ 7 }

// one is what an eventfd is written.
var one = []byte{1, 0, 0, 0, 0, 0, 0, 0}

// raise makes the descriptor readable. It cannot block: the counter is 0 or 1, the pipe has room for one.
func raise(fd int) { _, _ = syscall.Write(fd, one) }

func lower(fd int) {
	var buf [8]byte
	_, _ = syscall.Read(fd, buf[:])
}
