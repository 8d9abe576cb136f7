package main

import (
	"context"
	"reflect"
	"slices"
	"unsafe"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/roles"
)

// The seam to Python is described here and beside each operation, once: python/troupe/_seam.py is made from these types, the constants
// of this package and the signatures of its exported functions, by `go test ./cmd/libtroupe -run TestSeam -update`.

// Records of fixed size cross the seam as they lie in memory, because both sides are one process: integers in the byte order of the
// machine, without padding. What follows a record is named beside it.
type (
	// completionHead is followed by the meta and the body, each padded to a multiple of 8. A body at an address does not follow.
	completionHead struct {
		Kind, Flags      uint32
		Token            uint64
		Rank             int32
		Meta             uint32 // length
		Body             uint64 // length
		Address, Release uint64 // of a body that does not follow: where it lies, and its number for troupe_release; else 0
	}
	// callHead is followed by the method, the object, the arguments that are references (wire.AppendReferences), the references inside
	// arguments of a replayed method, a callPart for each part of the plan, the bodies without an address, and a callScope.
	callHead struct {
		Flags, Parts                 uint32
		Timeout                      int64  // microseconds; 0: none
		Plan, Need                   uint32 // need: number of successful answers that are enough; 0: all
		Method, Object, Args, Inside uint32 // lengths
	}
	// callPart is the body of a part. Without an address, the body is in the call.
	callPart struct{ Length, Address uint64 }
	// callScope is where Python makes a call or begins a span; it may be missing. The W3C traceparent that becomes the parent follows;
	// if it is empty, the parent is that of the span, or of the served call.
	callScope struct{ Served, Span uint64 }
	// callMeta is what a call that Python serves is about. The texts follow in the order of their lengths, the trace after all others.
	callMeta struct {
		Sequence, Deadline              uint64 // microseconds since 1970 by the clock of this machine; 0: none
		Trace, Flags                    uint32
		Session, Method, Object, Caller uint32 // lengths, as the trace
	}
	// stageHead is followed by a callMeta whose method is the stage, and at a multiple of 64 by the items, a list of maps. With the flag
	// stageCancelled nothing follows: the work of this number is cancelled.
	stageHead struct {
		Number      uint64
		Meta, Flags uint32
	}
	// outputHead is a record in the pipe of the workers' output, and is followed by the text.
	outputHead struct{ Kind, Length uint32 }
	// wantedMeta is the meta of completions about lent values.
	wantedMeta struct{ Runtime uint64 }
)

// readRecord reads a record, and returns what follows it.
func readRecord[T any](b []byte) (r T, rest []byte, ok bool) {
	size := int(unsafe.Sizeof(r))
	if len(b) < size {
		return r, nil, false
	}
	copy(bytesOf(&r), b)
	return r, b[size:], true
}

func appendRecord[T any](b []byte, r T) []byte { return append(b, bytesOf(&r)...) }

func bytesOf[T any](r *T) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(r)), unsafe.Sizeof(*r)) }

// operation is what troupe_ask does under a name: it decodes a request of its own type, finds what that is about, and answers.
type operation struct {
	request    reflect.Type
	do         func(ctx context.Context, c *core, request []byte) (any, error)
	afterPanic bool // it may run after a panic in the core: in the background, where the caller decides how long to wait
}

// about is a request that says what it is about; the request embeds one of the types below.
type about[T any] interface{ find(c *core) (T, error) }

// limited is a request with a timeout.
type limited interface {
	bound(ctx context.Context) (context.Context, context.CancelFunc)
}

// asks is an operation with a result.
func asks[T any, Q about[T], R any](do func(*core, context.Context, T, Q) (R, error)) operation {
	t := reflect.TypeFor[Q]()
	empty := !slices.ContainsFunc(reflect.VisibleFields(t), func(f reflect.StructField) bool { return !f.Anonymous })
	return operation{request: t, do: func(ctx context.Context, c *core, request []byte) (any, error) {
		var q Q
		if !empty {
			if err := wire.UnmarshalWith(request, &q, wire.UnmarshalOptions{Strict: true}); err != nil {
				return nil, err
			}
		}
		on, err := q.find(c)
		if err != nil {
			return nil, err
		}
		if l, ok := any(q).(limited); ok {
			var cancel context.CancelFunc
			ctx, cancel = l.bound(ctx)
			defer cancel()
		}
		return do(c, ctx, on, q)
	}}
}

// always lets an operation run after a panic in the core too.
func (o operation) always() operation {
	o.afterPanic = true
	return o
}

// does is an operation without a result.
func does[T any, Q about[T]](do func(*core, context.Context, T, Q) error) operation {
	return asks(func(c *core, ctx context.Context, on T, q Q) (any, error) { return nil, do(c, ctx, on, q) })
}

type (
	ofProcess struct{}
	ofRuntime struct {
		Runtime uint64 `msgpack:"runtime"`
	}
	ofCluster struct {
		Cluster uint64 `msgpack:"cluster"`
	}
	// ofAnyCluster is of operations that may come after the end of the cluster.
	ofAnyCluster struct{ ofCluster }
	// within is the timeout of a request, in seconds.
	within struct {
		Timeout *float64 `msgpack:"timeout,omitempty"`
	}
)

func (ofProcess) find(c *core) (*core, error) { return c, nil }

func (q ofRuntime) find(c *core) (*roles.Runtime, error) { return c.runtime(q.Runtime) }

func (q ofCluster) find(c *core) (*cluster, error) { return c.cluster(q.Cluster) }

// find is nil if the cluster has ended.
func (q ofAnyCluster) find(c *core) (*cluster, error) {
	cl, err := c.cluster(q.Cluster)
	if err != nil {
		return nil, nil
	}
	return cl, nil
}

func (w within) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	if w.Timeout == nil {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, seconds(*w.Timeout))
}

// answer executes a request.
func (c *core) answer(ctx context.Context, op string, request []byte) (any, error) {
	do, ok := ops[op]
	if err := c.checkUsable(); err != nil && !do.afterPanic {
		return nil, err
	}
	if !ok {
		return nil, bus.Errorf(bus.CodeInvalid, "unknown op %q", op)
	}
	return do.do(ctx, c, request)
}
