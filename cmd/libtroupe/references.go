package main

/*
#include <stdint.h>
*/
import "C"

import (
	"context"
	"unsafe"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/roles"
)

// Flags of troupe_put and troupe_get.
const (
	putFailed = 1 // the body is an error, as of troupe_answer
	getReady  = 1 // only whether the value is there
	getHere   = 2 // only if it lies in the shared memory of this host
)

// addReport registers a call to whose answers references can be made.
func (c *core) addReport(r *callReport) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reports[r.token] = r
}

func (c *core) removeReport(r *callReport) {
	if r.keep {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.reports, r.token)
	}
}

// promise is the number of a reference to the answer of a rank, with one use; 0: the answer has been reported.
func (r *callReport) promise(rank int) (uint64, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.done || r.reported[rank] {
		return 0, nil
	}
	if known, ok := r.promises[rank]; ok {
		r.refs.Retain(known)
		return known.ID, nil
	}
	ref, err := r.refs.Promise()
	if err != nil {
		return 0, err
	}
	if r.promises == nil {
		r.promises = map[int]wire.Reference{}
	}
	r.promises[rank] = ref
	return ref.ID, nil
}

func (c *core) references(runtime uint64) (*values.References, error) {
	rt, err := c.runtime(runtime)
	if err != nil {
		return nil, err
	}
	return rt.References(), nil
}

// referenceCounts are the counters of one runtime.
type referenceCounts struct {
	Owned int   `msgpack:"owned"`
	Held  int   `msgpack:"held"`
	Kept  int64 `msgpack:"kept"`
}

func (c *core) countReferences(_ context.Context, rt *roles.Runtime, _ runtimeRequest) (referenceCounts, error) {
	all := rt.References()
	return referenceCounts{Owned: all.Owned(), Held: all.Held(), Kept: all.Kept()}, nil
}

// handOverRequest gives the results that this process keeps to their callers, within the timeout.
type handOverRequest struct {
	ofRuntime
	within
}

func (c *core) handOver(ctx context.Context, rt *roles.Runtime, _ handOverRequest) error {
	rt.References().HandOver(ctx)
	return nil
}

// readReferences reads a list of references of the caller's memory.
func readReferences(list *C.char, n C.uint64_t) ([]wire.Reference, error) {
	if n == 0 {
		return nil, nil
	}
	return wire.ReadReferences(C.GoBytes(unsafe.Pointer(list), C.int(n)))
}

// troupe_put makes a value of this process and returns its number, or an error. The body is copied, unless it is in memory of
// troupe_alloc: then it is handed over, also if this fails. refs is the list of references inside the body. Flags of how: 1, the value is an error.
// The value has one use; troupe_count ends it. It may write a value to disk: call it without the interpreter lock if the value is large.
//
//export troupe_put
func troupe_put(runtime C.uint64_t, how C.int32_t, body *C.char, n C.uint64_t, refs *C.char, m C.uint64_t) (number C.int64_t) {
	defer guard64(&number)
	c, err := getCore()
	if err != nil {
		return C.int64_t(setError(statusInvalid, err))
	}
	own := c.memory.own(unsafe.Pointer(body), int(n))
	if err := c.checkUsable(); err != nil {
		values.FreeBody(c.memory, own)
		return C.int64_t(setError(statusPanic, err))
	}
	ref, err := c.put(uint64(runtime), how&putFailed != 0, own, refs, m)
	if err != nil {
		values.FreeBody(c.memory, own)
		if bus.CodeOf(err) == bus.CodeRefused {
			return C.int64_t(setError(statusRefused, err))
		}
		return C.int64_t(setError(statusInvalid, err))
	}
	return C.int64_t(ref.ID)
}

func (c *core) put(runtime uint64, failed bool, body []byte, refs *C.char, n C.uint64_t) (wire.Reference, error) {
	all, err := c.references(runtime)
	if err != nil {
		return wire.Reference{}, err
	}
	inside, err := readReferences(refs, n)
	if err != nil {
		return wire.Reference{}, err
	}
	if !failed {
		return all.Put(body, c.memory, inside)
	}
	e := &bus.Error{Rank: -1}
	if err := wire.Unmarshal(body, e); err != nil {
		return wire.Reference{}, err
	}
	values.FreeBody(c.memory, body)
	ref, err := all.Promise()
	if err == nil {
		all.Fail(ref, e)
	}
	return ref, err
}

// troupe_promise returns the number of a reference to the answer of a rank to a call that is not over, with one use; 0: the answer
// is in the queue, or was taken.
//
//export troupe_promise
func troupe_promise(token C.uint64_t, rank C.int32_t) (number C.int64_t) {
	defer guard64(&number)
	c, err := getCore()
	if err != nil {
		return C.int64_t(setError(statusInvalid, err))
	}
	c.mu.Lock()
	r := c.reports[uint64(token)]
	c.mu.Unlock()
	if r == nil {
		return 0
	}
	id, err := r.promise(int(rank))
	if err != nil {
		return C.int64_t(setError(statusInvalid, err))
	}
	return C.int64_t(id)
}

// troupe_count adds a use of a reference (change 1), or ends one (-1). owner is a session, as a string that ends with a zero byte.
// After the session has ended, nothing happens. It does not block.
//
//export troupe_count
func troupe_count(runtime C.uint64_t, owner *C.char, number C.uint64_t, change C.int32_t) (status C.int32_t) {
	defer guard(&status)
	c, err := getCore()
	if err != nil || c.checkUsable() != nil {
		return statusUnknown
	}
	all, err := c.references(uint64(runtime))
	if err != nil {
		return statusUnknown
	}
	ref := wire.Reference{Owner: C.GoString(owner), ID: uint64(number)}
	if change > 0 {
		all.Retain(ref)
	} else {
		all.Release(ref)
	}
	return statusOK
}

// troupe_place writes where the body of a value of this process lies to out, for troupe_get in another process, and returns the number of
// bytes; 0: unknown, or there is no room for it.
//
//export troupe_place
func troupe_place(runtime C.uint64_t, number C.uint64_t, out *C.char, room C.uint64_t) (n C.int64_t) {
	defer guard64(&n)
	c, err := getCore()
	if err != nil || c.checkUsable() != nil {
		return 0
	}
	rt, err := c.runtime(uint64(runtime))
	if err != nil {
		return 0
	}
	place := rt.References().Source(wire.Reference{Owner: rt.Session(), ID: uint64(number)})
	if place.Ref.Owner == "" {
		return 0
	}
	data, err := wire.Marshal(place)
	if err != nil || len(data) > int(room) {
		return 0
	}
	return C.int64_t(copy(unsafe.Slice((*byte)(unsafe.Pointer(out)), int(room)), data))
}

// troupe_get obtains the value of a reference. A completion of kind ANSWER with this token has it, with the references inside it as
// the meta, each retained once for the receiver. Flags of how: 1, without the value, as soon as it is there; 2, only a large answer that lies in the
// shared memory of this host, otherwise with an error. place is what troupe_place gave
// the sender of the reference, or empty. troupe_cancel ends the wait.
//
//export troupe_get
func troupe_get(token, runtime C.uint64_t, owner *C.char, number C.uint64_t, how C.int32_t, place *C.char, n C.uint64_t) (status C.int32_t) {
	defer guard(&status)
	c, err := getCore()
	if err != nil {
		return C.int32_t(setError(statusInvalid, err))
	}
	if err := c.checkUsable(); err != nil {
		return C.int32_t(setError(statusPanic, err))
	}
	all, err := c.references(uint64(runtime))
	if err != nil {
		return C.int32_t(setError(statusInvalid, err))
	}
	ref := wire.Reference{Owner: C.GoString(owner), ID: uint64(number)}
	var at values.BodySource
	if n > 0 {
		if err := wire.Unmarshal(C.GoBytes(unsafe.Pointer(place), C.int(n)), &at); err != nil {
			at = values.BodySource{} // of another version: the owner knows it
		}
	}
	c.get(uint64(token), all, ref, at, int32(how))
	return statusOK
}

func (c *core) get(token uint64, all *values.References, ref wire.Reference, at values.BodySource, how int32) {
	over := make(chan struct{}) // closed when the value was reported, before the cancellation may be registered
	report := func(out completion) {
		close(over)
		c.end(token)
		c.report(token, out)
	}
	done := func(v values.Value, err error) {
		out := completion{kind: kindAnswer, flags: flagLast, token: token, rank: -1, body: v.Body}
		switch {
		case err != nil:
			out.flags, out.body = flagLast|flagFailed, encodeError(err)
		case len(v.References) > 0:
			out.meta = wire.AppendReferences(nil, v.References)
		case len(v.Body) == 0:
			out.flags |= flagNone
		}
		report(out)
	}
	var cancel func()
	switch {
	case how&getReady != 0:
		cancel = all.Ready(ref, func(err error) { done(values.Value{}, err) })
	case how&getHere != 0:
		all.GetHere(ref, c.memory, done)
		return
	default:
		cancel = all.GetFrom(ref, at, c.memory, done)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-over:
	default:
		c.calls[token] = func() { c.cancelGet(token, cancel) }
	}
}

// cancelGet ends the wait for a value, and reports that.
func (c *core) cancelGet(token uint64, cancel func()) {
	cancel()
	c.mu.Lock()
	_, waiting := c.calls[token]
	delete(c.calls, token)
	c.mu.Unlock()
	if waiting {
		err := bus.Errorf(bus.CodeCancelled, "the wait for the value was cancelled")
		c.report(token, completion{kind: kindAnswer, flags: flagLast | flagFailed, token: token, rank: -1, body: encodeError(err)})
	}
}

// troupe_inside names the references inside the answer that troupe_answer is about to give to a call.
//
//export troupe_inside
func troupe_inside(call C.uint64_t, runtime C.uint64_t, refs *C.char, n C.uint64_t) (status C.int32_t) {
	defer guard(&status)
	c, err := getCore()
	if err != nil {
		return C.int32_t(setError(statusInvalid, err))
	}
	if c.checkUsable() != nil {
		return statusUnknown
	}
	all, err := c.references(uint64(runtime))
	if err != nil {
		return statusUnknown
	}
	list, err := readReferences(refs, n)
	if err != nil {
		return C.int32_t(setError(statusInvalid, err))
	}
	ctx := c.incoming.contextOf(uint64(call))
	if ctx == nil {
		return statusUnknown
	}
	all.Retain(list...)
	if !actors.SetReferences(ctx, values.RetainedReferences{By: all, List: list}) {
		all.Release(list...)
	}
	return statusOK
}
