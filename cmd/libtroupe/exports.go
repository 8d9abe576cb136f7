package main

/*
#include <stdint.h>
#include <stdlib.h>
*/
import "C"

import (
	"errors"
	"unsafe"

	"troupe/bus/shm"
)

// Status codes of functions that return no count.
const (
	statusMore    = 1 // completions are available
	statusOK      = 0
	statusPanic   = -1 // a panic; troupe_error has the stack
	statusUnknown = -2 // unknown cluster, plan, call or buffer
	statusInvalid = -3 // malformed request; troupe_error has the reason
	statusSmall   = -4 // the buffer is too small for one completion
	statusRefused = -5 // a limit is reached; troupe_error has the figures
	statusResized = -6 // the role has another size than the plan
)

// Flags of troupe_answer.
const (
	answerFailed = 1
	answerMore   = 2
	answerTakes  = 4
	answerSends  = 8
)

func main() {} // required by the build mode

// troupe_version returns the version of this library, a string that lives as long as the process.
//
//export troupe_version
func troupe_version() *C.char { return cVersion }

// troupe_init starts the core and returns the file descriptor that is readable while completions are available. The
// library owns the descriptor; the caller only waits on it. Later calls return the same one.
//
//export troupe_init
func troupe_init() (fd C.int32_t) {
	defer guard(&fd)
	c, err := getCore()
	if err != nil {
		return C.int32_t(setError(statusInvalid, err))
	}
	return C.int32_t(c.queue.fd)
}

// troupe_ask starts a request that may take long: the name of an operation, which ends with a zero byte, and its request in msgpack (see
// ops). A completion of kind RESULT with this token answers it. troupe_cancel cancels it.
//
//export troupe_ask
func troupe_ask(token C.uint64_t, op, request *C.char, n C.uint64_t) (status C.int32_t) {
	defer guard(&status)
	c, err := getCore()
	if err != nil {
		return C.int32_t(setError(statusInvalid, err))
	}
	c.ask(uint64(token), C.GoString(op), C.GoBytes(unsafe.Pointer(request), C.int(n)))
	return statusOK
}

// troupe_plan returns what a mode sends to which ranks of a cluster: request is JSON, {"mode": …, "unsplit": bool} or
// {"ranks": […]} or {"pieces": [[…], …], "collect": […]}, with the size that the caller knows, "world". The plan is written to out as JSON if it fits in room, with a
// number for troupe_call that is valid as long as the cluster; the return value is its length, or an error.
//
//export troupe_plan
func troupe_plan(cluster C.uint64_t, request *C.char, n C.uint64_t, out *C.char, room C.uint64_t) (length C.int64_t) {
	defer guard64(&length)
	c, err := getCore()
	if err != nil {
		return C.int64_t(setError(statusInvalid, err))
	}
	if err := c.checkUsable(); err != nil {
		return C.int64_t(setError(statusPanic, err))
	}
	text, err := c.plan(uint64(cluster), C.GoBytes(unsafe.Pointer(request), C.int(n)))
	if err != nil {
		return C.int64_t(setError(statusOf(err), err))
	}
	if len(text) <= int(room) {
		copy(unsafe.Slice((*byte)(unsafe.Pointer(out)), int(room)), text)
	}
	return C.int64_t(len(text))
}

// troupe_call makes a call on a cluster: see callHead for the blob. Bodies in the blob are copied; those in memory of
// troupe_alloc are handed over. Completions with this token follow, the last of them OVER or flagged as last.
//
//export troupe_call
func troupe_call(token, cluster C.uint64_t, blob *C.char, n C.uint64_t) (status C.int32_t) {
	defer guard(&status)
	c, err := getCore()
	if err != nil {
		return C.int32_t(setError(statusInvalid, err))
	}
	if err := c.checkUsable(); err != nil {
		return C.int32_t(setError(statusPanic, err))
	}
	if err := c.call(uint64(token), uint64(cluster), C.GoBytes(unsafe.Pointer(blob), C.int(n))); err != nil {
		return C.int32_t(setError(statusOf(err), err))
	}
	return statusOK
}

// statusOf is the status of a request that was refused.
func statusOf(err error) int {
	if errors.Is(err, errResized) {
		return statusResized
	}
	return statusInvalid
}

// troupe_world returns the number of ranks of a cluster's role, as far as this process knows, or statusUnknown.
//
//export troupe_world
func troupe_world(cluster C.uint64_t) (n C.int32_t) {
	defer guard(&n)
	c, err := getCore()
	if err != nil || c.checkUsable() != nil {
		return statusUnknown
	}
	cl, err := c.cluster(uint64(cluster))
	if err != nil {
		return statusUnknown
	}
	return C.int32_t(cl.WorldSize())
}

// troupe_cancel cancels a call or a request. Its completion follows; if it is over, nothing happens.
//
//export troupe_cancel
func troupe_cancel(token C.uint64_t) (status C.int32_t) {
	defer guard(&status)
	if c, err := getCore(); err == nil {
		c.cancel(uint64(token))
	}
	return statusOK
}

// troupe_take moves completions into buf, as many as fit, and returns their size in bytes; 0: there are none, and
// delayed messages are sent, because the caller is about to wait. When none are left, the descriptor is no longer
// readable. See completionHead for the format. Bodies over 64 KiB are not copied: the completion has their address and a
// number for troupe_release; the caller may write to them until then.
//
//export troupe_take
func troupe_take(buf *C.char, room C.uint64_t) (n C.int64_t) {
	defer guard64(&n)
	c, err := getCore()
	if err != nil {
		return C.int64_t(setError(statusInvalid, err))
	}
	taken := c.queue.take(unsafe.Slice((*byte)(unsafe.Pointer(buf)), int(room)), c.memory)
	if taken == 0 {
		c.outbox.push()
	}
	return C.int64_t(taken)
}

// troupe_side creates the side queue, if there is none, and returns its descriptor, which is readable while it has completions
// (see side.go). The library owns the descriptor; the caller only waits on it.
//
//export troupe_side
func troupe_side() (fd C.int32_t) {
	defer guard(&fd)
	c, err := getCore()
	if err != nil {
		return C.int32_t(setError(statusInvalid, err))
	}
	side, err := c.openQueue(&c.side)
	if err != nil {
		return C.int32_t(setError(statusInvalid, err))
	}
	return C.int32_t(side)
}

// troupe_take_side is troupe_take for the side queue.
//
//export troupe_take_side
func troupe_take_side(buf *C.char, room C.uint64_t) (n C.int64_t) {
	defer guard64(&n)
	c, err := getCore()
	if err != nil {
		return C.int64_t(setError(statusInvalid, err))
	}
	q := c.side.Load()
	if q == nil {
		return 0
	}
	return C.int64_t(q.take(unsafe.Slice((*byte)(unsafe.Pointer(buf)), int(room)), c.memory))
}

// troupe_push sends delayed messages: for callers that do not wait with troupe_take.
//
//export troupe_push
func troupe_push() (status C.int32_t) {
	defer guard(&status)
	c, err := getCore()
	if err != nil {
		return C.int32_t(setError(statusInvalid, err))
	}
	c.outbox.push()
	return statusOK
}

// troupe_answer answers a call that troupe_take has returned. Flags of how: 1, it failed, and the body is a msgpack map
// {code, message, stack, app, details}; 2, more answers follow at once, and this one may be delayed until then; 4, the
// caller takes completions next if there are any, which the return value 1 says, and needs no wake-up for them; 8, the
// answer is sent at once, also if the caller would leave it with its worker. The body is copied, unless it is in memory of troupe_alloc: then it is handed over. The worker's next call may be in the
// queue on return. Status unknown: the call is over.
//
//export troupe_answer
func troupe_answer(call C.uint64_t, how C.int32_t, body *C.char, n C.uint64_t) (status C.int32_t) {
	defer guard(&status)
	c, err := getCore()
	if err != nil {
		return C.int32_t(setError(statusInvalid, err))
	}
	if c.checkUsable() != nil {
		return statusUnknown // the answer cannot be sent
	}
	known, more, takes := false, false, how&answerTakes != 0
	c.outbox.together(func() bool {
		more = c.queue.withoutWake(takes, func() {
			known = c.incoming.answer(uint64(call), int32(how), c.memory.own(unsafe.Pointer(body), int(n)))
		})
		return !more && how&answerMore == 0
	})
	switch {
	case more && takes:
		return statusMore
	case !known:
		return statusUnknown
	}
	return statusOK
}

// troupe_cancelled returns whether a call that troupe_take has returned should end: 0 no, 1 it was cancelled or the
// worker is stopping, 2 its deadline has passed, or unknown when it is over.
//
//export troupe_cancelled
func troupe_cancelled(call C.uint64_t) (status C.int32_t) {
	defer guard(&status)
	c, err := getCore()
	if err != nil {
		return C.int32_t(setError(statusInvalid, err))
	}
	if c.checkUsable() != nil {
		return 1
	}
	return C.int32_t(c.incoming.cancelled(uint64(call)))
}

// troupe_alloc returns n bytes for a body, aligned to 64, to be handed over by troupe_call or troupe_answer, or freed
// by troupe_release(address). NULL: out of memory.
//
//export troupe_alloc
func troupe_alloc(n C.uint64_t) (at unsafe.Pointer) {
	defer guardPointer(&at)
	c, err := getCore()
	if err != nil {
		return nil
	}
	return c.memory.alloc(int(n))
}

// troupe_empty is troupe_alloc for memory that the caller keeps when it is handed over by troupe_answer, until troupe_release(address). The
// caller must not write to it after it was handed over.
//
//export troupe_empty
func troupe_empty(n C.uint64_t) (at unsafe.Pointer) {
	defer guardPointer(&at)
	c, err := getCore()
	if err != nil {
		return nil
	}
	return c.memory.allocArray(int(n))
}

// troupe_copy copies n bytes between memory that does not overlap, on several threads. It blocks: the caller holds no lock that the
// copy does not need.
//
//export troupe_copy
func troupe_copy(to, from unsafe.Pointer, n C.uint64_t) (status C.int32_t) {
	defer guard(&status)
	copyLarge(unsafe.Slice((*byte)(to), int(n)), unsafe.Slice((*byte)(from), int(n)))
	return statusOK
}

// troupe_release frees memory: of troupe_alloc by its address, of troupe_take by the number in the completion.
//
//export troupe_release
func troupe_release(buffer C.uint64_t) (status C.int32_t) {
	defer guard(&status)
	if c, err := getCore(); err == nil {
		c.memory.release(uint64(buffer))
	}
	return statusOK
}

// troupe_trim says that only some ranges of a body of troupe_take, by its number, are used from now on; the memory of the rest is given back
// later. ranges has n pairs of an offset in the body and a length. It does not block.
//
//export troupe_trim
func troupe_trim(buffer C.uint64_t, ranges *C.uint64_t, n C.uint64_t) (status C.int32_t) {
	defer guard(&status)
	c, err := getCore()
	if err != nil {
		return statusUnknown
	}
	used := make([]shm.Range, n)
	for i, pair := range unsafe.Slice((*[2]uint64)(unsafe.Pointer(ranges)), int(n)) {
		used[i] = shm.Range{Offset: int(pair[0]), Length: int(pair[1])}
	}
	c.memory.trim(uint64(buffer), used, trimAfter)
	return statusOK
}

// troupe_forking is called before the process forks. It returns a number for troupe_forked; 0: the child can read no memory of another
// process, and troupe_forked need not be called.
//
//export troupe_forking
func troupe_forking() (number C.uint64_t) {
	defer func() {
		if p := recover(); p != nil {
			_ = notePanic(p) // it is kept for troupe_error
			number = 0
		}
	}()
	c, err := getCore()
	if err != nil {
		return 0
	}
	return C.uint64_t(c.memory.shared.forking())
}

// troupe_forked is called after the process has forked, in the parent alone. fd is the end for reading of a pipe whose other end the child
// has, closed when it executes another program; it is the library's from now on.
//
//export troupe_forked
func troupe_forked(number C.uint64_t, fd C.int32_t) (status C.int32_t) {
	defer guard(&status)
	if c, err := getCore(); err == nil {
		c.memory.shared.forked(uint64(number), int(fd))
	}
	return statusOK
}

// troupe_output returns the end for reading of the pipe with the workers' output (see output.go), which one thread reads. The library
// owns the descriptor.
//
//export troupe_output
func troupe_output() (fd C.int32_t) {
	defer guard(&fd)
	c, err := getCore()
	if err != nil {
		return C.int32_t(setError(statusInvalid, err))
	}
	read, err := c.output.open()
	if err != nil {
		return C.int32_t(setError(statusInvalid, err))
	}
	return C.int32_t(read)
}

// troupe_error copies the text of the last error on any thread, and returns its length.
//
//export troupe_error
func troupe_error(buf *C.char, room C.uint64_t) C.int64_t {
	text := lastError()
	return C.int64_t(copy(unsafe.Slice((*byte)(unsafe.Pointer(buf)), int(room)), text))
}
