package main

import (
	"sync"
	"syscall"
	"unsafe"

	"troupe/bus/values"
)

const headSize = int(unsafe.Sizeof(completionHead{}))

// kind is the kind of a completion.
type kind uint32

const (
	kindAnswer  kind = 1 // a rank's answer to the call with this token; last: and the call is over
	kindOver    kind = 2 // the call with this token is over; failed: the body is the error, if no answer has it; combined: the body is all answers
	kindResult  kind = 3 // the result of the request with this token; failed: the body is the error
	kindCall    kind = 4 // a call to this process's worker, to be answered under this token; the meta describes it
	kindCancel  kind = 5 // the call with this token was cancelled
	kindStopped kind = 6 // the worker has ended; failed: the body is the error
	kindValue   kind = 7 // the value of an argument of the call with this token, which follows; the meta has the reference, and those inside the value
	kindWanted  kind = 8 // the bytes of the lent value with this number are requested; see lent.go
	kindFreed   kind = 9 // the lent value with this number was freed
)

const (
	flagFailed   uint32 = 1  // the body is an error
	flagLast     uint32 = 2  // the last completion of this token
	flagCause    uint32 = 4  // this failure is why the call failed
	flagNone     uint32 = 8  // an acknowledgement without a value
	flagKept     uint32 = 64 // the answer stays with its worker; the meta has the reference, which is retained once for the receiver
	flagCombined uint32 = 16 // the body is the list of collected answers, in the order of the plan; none was reported before
	flagShared   uint32 = 32 // the body lies in shared memory: a page that is written to is copied then
)

type completion struct {
	kind  kind
	flags uint32
	token uint64
	rank  int
	meta  []byte
	body  []byte
}

// queue holds the completions that were not taken. Its descriptor is readable while there are some.
type queue struct {
	fd   int // to wait on
	wake int // to write to; the same for an eventfd

	mu         sync.Mutex // guards what follows
	entries    []completion
	from       int // index of the first entry that was not taken
	raised     bool
	suppressed int // number of threads that will take completions next
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
	if !q.raised && q.suppressed == 0 {
		q.raised = true
		raise(q.wake)
	}
}

// withoutWake runs do, which may add completions, and reports whether there are any. With takes set the calling thread
// takes them next, and the descriptor is not raised.
func (q *queue) withoutWake(takes bool, do func()) (more bool) {
	n := 0
	if takes {
		n = 1
	}
	q.suppressWakes(n)
	defer func() { more = q.suppressWakes(-n) }()
	do()
	return false
}

func (q *queue) suppressWakes(n int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.suppressed += n
	return q.from < len(q.entries)
}

// take moves completions into buf and returns their size.
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

func (c *completion) inline() bool { return len(c.body) <= values.MaxInline }

func (c *completion) size() int {
	n := headSize + pad(len(c.meta))
	if c.inline() {
		n += pad(len(c.body))
	}
	return n
}

func (c *completion) write(buf []byte, m *memory) {
	h := completionHead{Kind: uint32(c.kind), Flags: c.flags, Token: c.token, Rank: int32(c.rank), Meta: uint32(len(c.meta)), Body: uint64(len(c.body))}
	if c.inline() {
		copy(buf[headSize+pad(len(c.meta)):], c.body)
	} else {
		var shared bool
		if h.Address, h.Release, shared = m.lend(c.body); shared {
			h.Flags |= flagShared
		}
	}
	copy(buf, bytesOf(&h))
	copy(buf[headSize:], c.meta)
}

func pad(n int) int { return (n + 7) &^ 7 }

// one is the value written to an eventfd.
var one = []byte{1, 0, 0, 0, 0, 0, 0, 0}

// raise makes the descriptor readable. It does not block: the counter is 0 or 1, and a pipe has room for one.
func raise(fd int) { _, _ = syscall.Write(fd, one) }

func lower(fd int) {
	var buf [8]byte
	_, _ = syscall.Read(fd, buf[:])
}
