package main

/*
#include <stdint.h>
*/
import "C"

import (
	"unsafe"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// Lent values are tensors on a device of this process. A thread of Python reads the queue of lent values, which exists once it has been
// asked for: it holds the tensors until they are freed, and copies their bytes for processes that do not reach the device.

// troupe_lent returns the descriptor that is readable while troupe_take_lent has completions.
//
//export troupe_lent
func troupe_lent() (fd C.int32_t) {
	defer guard(&fd)
	c, err := getCore()
	if err != nil {
		return C.int32_t(setError(statusInvalid, err))
	}
	if err := c.checkUsable(); err != nil {
		return C.int32_t(setError(statusPanic, err))
	}
	made, err := c.openQueue(&c.lent)
	if err != nil {
		return C.int32_t(setError(statusInvalid, err))
	}
	return C.int32_t(made)
}

// troupe_take_lent is troupe_take for the queue of lent values: kinds 8 (the bytes of the value are requested; troupe_fill follows) and
// 9 (it was freed). The token is the value's number, the meta a wantedMeta.
//
//export troupe_take_lent
func troupe_take_lent(buf *C.char, room C.uint64_t) (n C.int64_t) {
	defer guard64(&n)
	c, err := getCore()
	if err != nil {
		return C.int64_t(setError(statusInvalid, err))
	}
	q := c.lent.Load()
	if q == nil {
		return 0
	}
	return C.int64_t(q.take(unsafe.Slice((*byte)(unsafe.Pointer(buf)), int(room)), c.memory))
}

// troupe_lend makes a lent value with one use and returns its number, or an error. troupe_lent has been called.
//
//export troupe_lend
func troupe_lend(runtime C.uint64_t) (number C.int64_t) {
	defer guard64(&number)
	c, err := getCore()
	if err != nil {
		return C.int64_t(setError(statusInvalid, err))
	}
	if err := c.checkUsable(); err != nil {
		return C.int64_t(setError(statusPanic, err))
	}
	ref, err := c.lend(uint64(runtime))
	if err != nil {
		return C.int64_t(setError(statusInvalid, err))
	}
	return C.int64_t(ref.ID)
}

func (c *core) lend(runtime uint64) (wire.Reference, error) {
	all, err := c.references(runtime)
	if err != nil {
		return wire.Reference{}, err
	}
	q := c.lent.Load()
	if q == nil {
		return wire.Reference{}, bus.Errorf(bus.CodeInvalid, "the queue of lent values is not open")
	}
	meta := appendRecord(nil, wantedMeta{runtime})
	tell := func(k kind) func(uint64) {
		return func(number uint64) { q.push(completion{kind: k, token: number, meta: meta}) }
	}
	return all.Lend(values.Lending{WantedFunc: tell(kindWanted), FreedFunc: tell(kindFreed)})
}

// troupe_fill gives a lent value that was wanted its bytes, in memory of troupe_alloc, or with 1 in how an error as of troupe_answer. The
// memory is the core's from now on, whatever is returned.
//
//export troupe_fill
func troupe_fill(runtime, number C.uint64_t, how C.int32_t, body *C.char, n C.uint64_t) (status C.int32_t) {
	defer guard(&status)
	c, err := getCore()
	if err != nil {
		return C.int32_t(setError(statusInvalid, err))
	}
	if err := c.checkUsable(); err != nil {
		return C.int32_t(setError(statusPanic, err))
	}
	own := c.memory.own(unsafe.Pointer(body), int(n))
	all, err := c.references(uint64(runtime))
	if err != nil {
		values.FreeBody(c.memory, own)
		return statusUnknown
	}
	if how&putFailed != 0 {
		e := &bus.Error{Rank: -1}
		if err := wire.Unmarshal(own, e); err != nil {
			e = bus.Errorf(bus.CodeInternal, "malformed error of a device: %w", err)
		}
		values.FreeBody(c.memory, own)
		all.Fill(uint64(number), nil, nil, e)
		return statusOK
	}
	if !all.Fill(uint64(number), own, c.memory, nil) {
		values.FreeBody(c.memory, own)
		return statusUnknown
	}
	return statusOK
}

// troupe_count_device counts the bytes of a tensor for the metrics: lent by this process, or, with 1 in taken, received from the device of
// another process. It does not block.
//
//export troupe_count_device
func troupe_count_device(runtime C.uint64_t, taken C.int32_t, n C.uint64_t) (status C.int32_t) {
	defer guard(&status)
	c, err := getCore()
	if err != nil {
		return C.int32_t(setError(statusInvalid, err))
	}
	all, err := c.references(uint64(runtime))
	switch {
	case err != nil:
		return statusUnknown
	case taken != 0:
		all.CountTaken(int64(n))
	default:
		all.CountLent(int64(n))
	}
	return statusOK
}
